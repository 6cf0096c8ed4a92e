"""Check that FlexAttention programs run after changing one import."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

import attnkit
from attnkit import create_block_mask, flex_attention

S, BLOCK = 128, 32


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def inputs(length: int = S) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, length, 16, generator=random)
    key, value = (torch.randn(1, 4, S, 16, generator=random) for _ in range(2))
    return query, key, value


def test_names() -> None:
    assert [name for name in flex.__all__ if not hasattr(attnkit, name)] == []


@pytest.mark.parametrize(
    "name", ["flex_attention", "create_block_mask", "create_mask", "and_masks", "or_masks"]
)
def test_arguments_and_defaults(name: str) -> None:
    theirs = inspect.signature(getattr(flex, name)).parameters
    ours = inspect.signature(getattr(attnkit, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for argument, parameter in theirs.items():
        default = ours[argument].default
        assert (default[0] if argument == "BLOCK_SIZE" else default) == parameter.default
        assert ours[argument].kind == parameter.kind


def test_options_of_block_masks_change_nothing() -> None:
    plain = create_block_mask(causal, None, None, S, S, "cpu", BLOCK)
    tuned = create_block_mask(
        *(causal, None, None, S, S, "cpu", BLOCK),
        separate_full_blocks=False,
        compute_dq_write_order=True,
        dq_kv_order=False,
    )
    assert torch.equal(plain.to_dense(), tuned.to_dense())
    assert attnkit.create_mask(causal, None, None, 5, 5, None).device.type == "cpu"


def test_dense_masks_of_scores() -> None:
    mod = lambda s, b, h, q, kv: torch.where(q >= kv + h, s - kv, -torch.inf)
    theirs = flex.create_mask(mod, 1, 2, 30, 20, device="cpu")
    assert torch.equal(attnkit.create_mask(mod, 1, 2, 30, 20), theirs)
    assert torch.equal(attnkit.create_mask(mod, None, 2, 30, 20)[:, 0], theirs[:, 0])


def test_decoding_with_rows_of_a_block_mask() -> None:
    query, key, value = inputs()
    whole = create_block_mask(causal, None, None, S, S, BLOCK_SIZE=BLOCK)
    expected = flex_attention(query, key, value, block_mask=whole)
    for position in (0, 31, 32, 100, 127):
        row = whole[:, :, torch.tensor([position // BLOCK])]
        row.mask_mod = lambda b, h, q, kv, at=position: whole.mask_mod(b, h, q + at, kv)
        row.seq_lengths = (1, S)
        found = flex_attention(query[:, :, position : position + 1], key, value, block_mask=row)
        torch.testing.assert_close(found, expected[:, :, position : position + 1])


def test_a_block_mask_of_other_lengths() -> None:
    query, key, value = inputs(70)
    ours = create_block_mask(causal, None, None, S, S, BLOCK_SIZE=BLOCK)._adjust(70, S)
    theirs = flex.create_block_mask(causal, None, None, S, S, "cpu", BLOCK)._adjust(70, S)
    assert ours.shape == theirs.shape
    found = flex_attention(query, key, value, block_mask=ours)
    torch.testing.assert_close(found, flex_attention(query, key, value, block_mask=theirs))


def test_block_masks_of_lists() -> None:
    counts = torch.tensor([[[1, 2, 1, 2]]], dtype=torch.int32)
    lists = torch.tensor(
        [[[[0, 0, 0, 0], [1, 0, 0, 0], [3, 0, 0, 0], [0, 2, 0, 0]]]], dtype=torch.int32
    )
    made = attnkit.BlockMask.from_kv_blocks(counts, lists, None, None, BLOCK_SIZE=BLOCK)
    assert isinstance(made, flex.BlockMask)
    query, key, value = inputs()
    kept = made.to_dense().bool().repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)
    scores = (query @ key.mT / 4).masked_fill(~kept, -torch.inf)
    found = flex_attention(query, key, value, block_mask=made)
    torch.testing.assert_close(found, scores.softmax(-1) @ value)


@pytest.mark.parametrize("name", ["kv_num_blocks", "kv_indices", "as_tuple", "to_string"])
def test_what_a_block_mask_lacks_is_said(name: str) -> None:
    mask = create_block_mask(causal, None, None, S, S)
    with pytest.raises(AttributeError, match=rf"no '{name}'.*to_flex\(\)"):
        getattr(mask, name)
    assert hasattr(mask.to_flex(), name)
