"""Masks equal those of transformers' own evaluation, position by position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip(
    "transformers", "5", reason="needs transformers 5: pip install 'attnkit[transformers]'"
)

from transformers import masking_utils as hf

from attnkit import UnsupportedError, clear_caches, create_mask, intervals
from attnkit.integrations.transformers.forms import (
    CAUSAL,
    Chunks,
    Form,
    Geometry,
    Groups,
    PackedSequences,
    Padding,
    RemappedPositions,
    Table,
)
from attnkit.integrations.transformers.layer_mask import LayerMask
from attnkit.integrations.transformers.mask_function import attention_mask
from attnkit.integrations.transformers.read_mask import _readers, read_function

CPU = torch.device("cpu")
BATCH = 2
TOKENS = 40  # positions of tables; no example has more


def _every_third(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q + kv + b) % 3 == 0


def _table(draw: Callable[..., Any], low: int, high: int) -> Tensor:
    rows = st.lists(st.integers(low, high), min_size=TOKENS, max_size=TOKENS)
    return torch.tensor([draw(rows) for _ in range(BATCH)])


@st.composite
def functions(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Draw a mask_function as transformers composes it."""
    size = draw(st.integers(1, 9))
    starts = torch.tensor(draw(st.lists(st.integers(0, 5), min_size=BATCH, max_size=BATCH)))
    function = draw(
        st.sampled_from(
            [
                hf.causal_mask_function,
                hf.bidirectional_mask_function,
                hf.sliding_window_causal_mask_function(size),
                hf.sliding_window_bidirectional_mask_function(size),
                hf.chunked_causal_mask_function(size, starts),
            ]
        )
    )
    if draw(st.booleans()):
        function = hf.or_masks(function, hf.blockwise_overlay(_table(draw, -1, 1)))
    if draw(st.integers(0, 3)) == 0:
        function = hf.and_masks(function, _every_third)
    return function  # type: ignore[no-any-return]


@st.composite
def paddings(draw: Callable[..., Any]) -> Tensor | None:
    """Draw a padding mask: none, on a side, or with holes."""
    kind = draw(st.sampled_from(["none", "left", "right", "holes"]))
    if kind == "none":
        return None
    if kind == "holes":
        return _table(draw, 0, 1).bool()
    width = st.integers(0, TOKENS)
    mask = torch.ones(BATCH, draw(st.integers(1, TOKENS)), dtype=torch.bool)
    for row in mask:
        n = draw(width)
        row[slice(None, n) if kind == "left" else slice(max(len(row) - n, 0), None)] = False
    return mask


def _dense(mask: LayerMask) -> Tensor:
    """Return what attention with this mask keeps, bool [B, 1, Sq, Skv]."""
    batch, _, q_len, kv_len = mask.shape
    kept = torch.zeros(batch, 1, q_len, kv_len, dtype=torch.bool)
    inner = mask.on(CPU)
    part = (
        torch.ones((), dtype=torch.bool)
        if inner is None
        else create_mask(inner, batch, 1, q_len, mask.stop - mask.start)
    )
    kept[..., mask.start : mask.stop] = part
    return kept


@given(
    functions(),
    paddings(),
    st.integers(1, 6),
    st.integers(1, 20),
    st.integers(0, 20),
    st.integers(0, 20),
    st.booleans(),
)
def test_masks(
    function: Callable[..., Any],
    padding: Tensor | None,
    q_len: int,
    kv_len: int,
    q_start: int,
    kv_start: int,
    in_tensor: bool,
) -> None:
    call = {
        "batch_size": BATCH,
        "q_length": q_len,
        "kv_length": kv_len,
        "q_offset": torch.tensor(q_start) if in_tensor else q_start,
        "kv_offset": kv_start,
        "mask_function": function,
        "attention_mask": padding,
    }
    ours = attention_mask(**call)
    expected = hf.sdpa_mask(**call, allow_is_causal_skip=False).expand(-1, 1, -1, -1)
    assert ours.shape == expected.shape
    assert torch.equal(_dense(ours), expected)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), functions())
def test_masks_of_packed_sequences(lengths: list[int], function: Callable[..., Any]) -> None:
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    sequences = hf.find_packed_sequence_indices(positions)
    sequences = torch.zeros_like(positions) if sequences is None else sequences
    packed = hf.packed_sequence_compatibility_function(
        function, positions.expand(BATCH, -1), sequences.expand(BATCH, -1)
    )
    size = sum(lengths)
    call = {
        "batch_size": BATCH,
        "q_length": size,
        "kv_length": size,
        "mask_function": packed,
    }
    expected = hf.sdpa_mask(**call, allow_is_causal_skip=False).expand(-1, 1, -1, -1)
    assert torch.equal(_dense(attention_mask(**call)), expected)


_LEFT = torch.ones(BATCH, TOKENS, dtype=torch.bool)
_LEFT[0, :9] = False
_PLACES = torch.cat([torch.arange(n) for n in (16, 4, 20)])[None].expand(BATCH, -1)
_WINDOW = hf.sliding_window_causal_mask_function(6)
_CHUNKS = hf.chunked_causal_mask_function(6, torch.tensor([9, 0]))
_PACKED = hf.packed_sequence_compatibility_function(
    _WINDOW, _PLACES, hf.find_packed_sequence_indices(_PLACES)
)


@pytest.mark.parametrize(
    ("function", "padding"),
    [
        (hf.causal_mask_function, _LEFT),
        (hf.causal_mask_function, _LEFT.flip(1)),
        (hf.sliding_window_bidirectional_mask_function(4), _LEFT),
        (_WINDOW, _LEFT),
        (_CHUNKS, _LEFT),
        (_PACKED, None),
    ],
    ids=["left", "right", "encoder", "window", "chunks", "packed"],
)
def test_rows_of_standard_masks_are_intervals(
    function: Callable[..., Any], padding: Tensor | None
) -> None:
    """Kernels test a score by two comparisons then, instead of evaluating the mask."""
    mask = attention_mask(BATCH, TOKENS, TOKENS, mask_function=function, attention_mask=padding)
    inner = mask.on(CPU)
    assert inner is not None
    assert intervals(inner, TOKENS, mask.stop - mask.start, BATCH) is not None


def _decode(function: Callable[..., Any], length: int, **options: Any) -> LayerMask:
    """Return the mask of one new token after `length` tokens."""
    return attention_mask(BATCH, 1, length + 1, q_offset=length, mask_function=function, **options)


def test_decoding_needs_no_mask() -> None:
    starts = torch.zeros(BATCH, dtype=torch.int64)
    for function, first in (
        (hf.causal_mask_function, 0),
        (hf.sliding_window_causal_mask_function(4), 17),
        (hf.chunked_causal_mask_function(8, starts), 16),
    ):
        mask = _decode(function, 20, attention_mask=torch.ones(BATCH, 21))
        assert mask.on(CPU) is None
        assert (mask.start, mask.stop) == (first, 21)
    static = attention_mask(BATCH, 1, 64, q_offset=torch.tensor(20))
    assert static.on(CPU) is None
    assert (static.start, static.stop) == (0, 21)


def test_padding_is_the_same_mask_at_every_step() -> None:
    clear_caches()
    padding = torch.ones(BATCH, 32, dtype=torch.bool)
    padding[0, :3] = False
    steps = [
        _decode(hf.causal_mask_function, n, attention_mask=padding[:, : n + 1]).on(CPU)
        for n in (20, 21, 22)
    ]
    assert steps[0] is not None
    assert steps[0] is steps[1] is steps[2]


def test_an_offset_in_a_tensor_is_copied() -> None:
    offset = torch.tensor(3)
    mask = attention_mask(1, 2, 8, q_offset=offset)
    offset.add_(2)  # as a static cache does when the first layer runs
    assert torch.equal(_dense(mask), hf.sdpa_mask(1, 2, 8, q_offset=3, allow_is_causal_skip=False))


def test_tables_are_copied() -> None:
    padding = torch.tensor([[True, False, True, True]])
    mask = attention_mask(1, 4, 4, attention_mask=padding)
    expected = _dense(mask).clone()
    padding.fill_(True)
    assert torch.equal(_dense(mask), expected)


def test_a_mask_has_no_parts() -> None:
    mask = attention_mask(1, 4, 4)
    assert mask.contiguous() is mask.to("cpu") is mask
    assert "shape=(1, 1, 4, 4)" in repr(mask)
    with pytest.raises(UnsupportedError, match=r'selects a part .* attn_implementation="sdpa"'):
        mask[:, :, -1:]


IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2]] * BATCH)


@pytest.mark.parametrize(
    "form",
    [
        Padding((1, 0), (8, 7)),
        Chunks(4, (0, 1)),
        Table(IDS == 1),
        Groups(IDS),
        PackedSequences(IDS),
        RemappedPositions(CAUSAL, IDS),
    ],
    ids=lambda form: type(form).__name__,
)
def test_masks_move_to_the_device_of_a_layer(form: Form) -> None:
    """Layers on a second device read the tables of the mask on the first, which is an error."""
    mask = LayerMask(form, Geometry(BATCH, 8, 8, 0, 0, CPU))
    for device in ("meta", "cpu"):
        moved = mask.on(torch.device(device))
        assert moved is not None
        assert create_mask(moved, BATCH, 1, 8, 8, device=device).device.type == device


def test_versions_that_lack_a_mask_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers 5.17 does not remap positions; the functions that it has are read."""
    monkeypatch.delattr(hf, "remap_positions_for_packed_sequence")
    monkeypatch.delattr(hf, "blockwise_overlay")
    _readers.cache_clear()
    try:
        assert read_function(hf.causal_mask_function) == CAUSAL
        assert read_function(hf.or_masks(hf.causal_mask_function)) != CAUSAL
    finally:
        _readers.cache_clear()
