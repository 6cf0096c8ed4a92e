"""Check BlockMask: FlexAttention's interface, lazy classification, and updates after an edit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as flex

from attnkit import BlockMask, create_block_mask, create_mask, flex_attention, masks
from attnkit.errors import DeviceError, OptionError, ShapeError
from attnkit.sparsity import classify
from attnkit.sparsity.block_runs import BlockRuns

TABLE = torch.arange(200) // 30


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def document(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (TABLE[q] == TABLE[kv])


def per_head(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q - kv).abs() <= 20 * h + b


@pytest.mark.parametrize("mask", [causal, document, per_head])
def test_against_pytorch(mask: Any) -> None:
    sizes = (2, 3) if mask is per_head else (None, None)
    theirs = flex.create_block_mask(mask, *sizes, 192, 128, device="cpu", BLOCK_SIZE=32)
    ours = create_block_mask(mask, *sizes, 192, 128, BLOCK_SIZE=32)
    assert ours.shape == theirs.shape
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert ours.seq_lengths == theirs.seq_lengths
    assert ours.numel() == theirs.numel()
    assert torch.equal(ours.to_dense().expand(theirs.to_dense().shape), theirs.to_dense())
    assert ours.sparsity() == pytest.approx(theirs.sparsity())
    again = ours.to_flex()
    assert torch.equal(again.to_dense().expand(theirs.to_dense().shape), theirs.to_dense())
    dense = create_mask(mask, *sizes, 192, 128)
    expected = flex.create_mask(mask, *sizes, 192, 128, device="cpu")
    assert torch.equal(dense, expected.expand(dense.shape))


@given(st.integers(1, 200), st.integers(1, 200), st.tuples(st.integers(1, 70), st.integers(1, 70)))
def test_tiles_are_those_of_the_dense_mask(q_len: int, kv_len: int, block: tuple[int, int]) -> None:
    ours = create_block_mask(document, None, None, q_len, kv_len, BLOCK_SIZE=block)
    dense = create_mask(document, None, None, q_len, kv_len)[0, 0]
    states = ours.runs.states()[0, 0]
    for i in range(states.shape[0]):
        for j in range(states.shape[1]):
            rows = slice(i * block[0], (i + 1) * block[0])
            tile = dense[rows, j * block[1] : (j + 1) * block[1]]
            assert int(states[i, j]) == int(tile.any()) + int(tile.all())


def test_built_once_and_again_after_an_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[BlockRuns] = []
    original = classify.classify

    def counted(*arguments: Any, **options: Any) -> BlockRuns:
        built.append(original(*arguments, **options))
        return built[-1]

    monkeypatch.setattr(classify, "classify", counted)
    table = torch.arange(200) // 30
    mask = create_block_mask(lambda b, h, q, kv: table[q] == table[kv], None, None, 200, 200)
    assert built == []  # nothing is built before it is needed
    first = mask.runs
    assert mask.runs is first
    table[50:] += 5
    assert mask.runs is not first
    assert len(built) == 2
    assert mask.to("cpu").runs is mask.runs


def test_inference_tensors_have_no_version_but_are_watched() -> None:
    with torch.inference_mode():
        table = torch.arange(200) // 100
        mask = create_block_mask(
            lambda b, h, q, kv: table[q] == table[kv], None, None, 200, 200, BLOCK_SIZE=50
        )
        before = mask.to_dense()
        table.zero_()
        assert not torch.equal(mask.to_dense(), before)


def test_a_device_is_named_as_by_its_tensors() -> None:
    tables = torch.zeros(64, dtype=torch.int32, device="cpu:0")
    mask = create_block_mask(
        lambda b, h, q, kv: tables[q] == tables[kv], None, None, 64, 64, device="cpu:0"
    )
    assert mask.device == tables.device == mask.to("cpu:0").device
    assert mask.runs.counts() == (0, 0, 1)
    x = torch.randn(1, 1, 64, 8, device="cpu:0")
    assert torch.equal(flex_attention(x, x, x, block_mask=mask), flex_attention(x, x, x))


def test_the_device_is_that_of_the_captured_tensors() -> None:
    limit = torch.tensor(3)  # a number on the CPU
    table = torch.zeros(64, dtype=torch.int32, device="meta")
    mask = create_block_mask(
        lambda b, h, q, kv: (q > limit) & (table[q] == table[kv]), None, None, 64, 64
    )
    assert mask.device == torch.device("meta")
    assert create_block_mask(lambda b, h, q, kv: q > limit, None, None, 64, 64).device.type == "cpu"


def test_repr() -> None:
    text = repr(create_block_mask(causal, None, None, 256, 256))
    assert "shape=(1, 1, 256, 256)" in text
    assert "sparsity=25.0%" in text


def test_tables_may_have_any_strides() -> None:
    random = torch.Generator().manual_seed(0)
    whole = torch.rand(40, 60, generator=random) > 0.9
    for table in (whole[:30, :50], whole.t()[:30, :40], whole[::2, ::2][:20, :30]):
        sizes = tuple(table.shape)
        mask = lambda b, h, q, kv, table=table: table[q, kv]
        found = create_block_mask(mask, None, None, *sizes, device="cpu", BLOCK_SIZE=10).to_dense()
        expected = table.contiguous().view(-1, 10, sizes[1] // 10, 10)
        assert torch.equal(found[0, 0] > 0, expected.any(3).any(1))


def test_a_copy_shares_what_it_is_copied_with() -> None:
    mask = create_block_mask(masks.causal(), None, None, 8, 8, device="cpu")
    blocks, rule = copy.deepcopy([mask, mask.mask_mod])
    assert blocks is not mask
    assert blocks.mask_mod is rule
    assert rule is not mask.mask_mod


@pytest.mark.parametrize("name", ["batch", "heads", "q_len", "kv_len"])
def test_a_size_is_named(name: str) -> None:
    sizes = {"batch": 1, "heads": 1, "q_len": 8, "kv_len": 8} | {name: -3}
    with pytest.raises(OptionError, match=f"^{name} must be a positive int, got -3"):
        BlockMask(causal, **sizes, block=(8, 8), device="cpu")


def test_a_trace_names_the_function_that_reads_another_device() -> None:
    table = torch.zeros(64, dtype=torch.int32, device="meta")
    mask = lambda b, h, q, kv: table[q] == table[kv]
    with pytest.raises(DeviceError, match=r"^mask_mod reads the tensor 'table' on meta"):
        create_block_mask(mask, None, None, 64, 64, device="cpu")


def test_the_advice_for_other_lengths() -> None:
    """Tensors of another layout are recognized if both lengths are where the heads belong."""
    mask = create_block_mask(causal, None, None, 6, 3)
    for sizes, transposed in (((6, 3), True), ((6, 2), False), ((9, 3), False)):
        query, key = (torch.zeros(1, size, 2, 8) for size in sizes)
        with pytest.raises(ShapeError, match="query length 6 and kv length 3, got ") as caught:
            flex_attention(query, key, key, block_mask=mask, enable_gqa=True)
        assert ("; the tensors seem to be" in str(caught.value)) == transposed
        assert ("; build it for these lengths" in str(caught.value)) != transposed


def test_a_compiled_call_leaves_sizes_to_the_call_that_uses_the_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    assert create_block_mask(per_head, 0, 3, 8, 8).shape[:2] == (0, 3)
    assert create_block_mask(per_head, 2, 0, 8, 8).shape[:2] == (2, 0)
    assert create_block_mask(per_head, None, None, 8, 8).shape[:2] == (1, 1)
