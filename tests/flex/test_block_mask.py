"""Check that attnkit.flex.BlockMask has the fields, methods and meaning of PyTorch's class."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as theirs
from torch.utils import _pytree as pytree

import attnkit
from attnkit import flex, masks
from attnkit.flex import BlockMask, create_block_mask

EXAMPLES = {n: e for n, e in masks.examples(40).items() if "/" not in n}
LISTS = [n for n in theirs.BlockMask.__annotations__ if n not in ("mask_mod", "seq_lengths")]


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def pair(*arguments: Any, **options: Any) -> tuple[BlockMask, Any]:
    """Build a mask with attnkit's function and with PyTorch's."""
    both = [m.create_block_mask(*arguments, device="cpu", **options) for m in (flex, theirs)]
    return both[0], both[1]


def same(some: Any, other: Any) -> bool:
    if isinstance(some, Tensor) and isinstance(other, Tensor):
        kinds = [(t.dtype, t.stride()) for t in (some, other)]
        return torch.equal(some, other) and kinds[0] == kinds[1]
    return bool(some == other)


def check(ours: BlockMask, expected: Any) -> None:
    assert type(ours) is BlockMask
    assert isinstance(ours, theirs.BlockMask)
    different = [n for n in LISTS if not same(getattr(ours, n), getattr(expected, n))]
    assert not different
    assert ours.shape == expected.shape
    assert ours.ndim == len(expected.shape)
    assert ours.seq_lengths == expected.seq_lengths
    assert ours.numel() == expected.numel()
    assert ours.sparsity() == pytest.approx(expected.sparsity())
    assert torch.equal(ours.to_dense(), expected.to_dense())
    assert (repr(ours), str(ours)) == (repr(expected), str(expected))
    assert ours.to_string(grid_size=2) == expected.to_string(grid_size=2)
    for flatten in (True, False):
        tuples = [m.as_tuple(flatten) for m in (ours, expected)]
        assert len(tuples[0]) == len(tuples[1])
        assert all(same(a, b) for a, b in zip(*tuples, strict=True))
    assert ours.contiguous() is ours


def reference(query: Tensor, key: Tensor, mask: Any) -> Tensor:
    """Compute attention of what PyTorch's mask says: its eager function ignores the lists."""
    kept = theirs.create_mask(mask.mask_mod, query.shape[0], 1, query.shape[2], key.shape[2], "cpu")
    blocks = states(mask)
    for axis, size in ((2, mask.BLOCK_SIZE[0]), (3, mask.BLOCK_SIZE[1])):
        blocks = blocks.repeat_interleave(size, dim=axis)
    blocks = blocks[:, :, : query.shape[2], : key.shape[2]]
    scores = (query @ key.mT) / query.shape[-1] ** 0.5
    scores = scores.masked_fill(~((blocks == 2) | ((blocks == 1) & kept)), -torch.inf)
    return scores.softmax(-1).nan_to_num() @ key


def states(mask: Any) -> Tensor:
    """Return the grid of blocks: 1 partial, 2 full."""
    either = mask.to_dense()
    if mask.full_kv_num_blocks is None:
        return either
    partial = theirs.BlockMask.from_kv_blocks(mask.kv_num_blocks, mask.kv_indices).to_dense()
    return either * 2 - partial


@pytest.mark.parametrize("name", EXAMPLES)
def test_fields_of_the_masks_of_the_library(name: str) -> None:
    e = EXAMPLES[name]
    check(*pair(e.mask, e.batch, e.heads, e.q_len, e.kv_len, BLOCK_SIZE=8))


@pytest.mark.parametrize(
    "options",
    [
        {"BLOCK_SIZE": (16, 32)},
        {"separate_full_blocks": False, "BLOCK_SIZE": 32},
        {"compute_dq_write_order": True, "BLOCK_SIZE": 32},
        {"compute_dq_write_order": True, "dq_kv_order": False, "BLOCK_SIZE": 32},
        {},
    ],
)
@pytest.mark.parametrize("lengths", [(128, 128), (100, 77)])
def test_fields_with_other_options(lengths: tuple[int, int], options: dict[str, Any]) -> None:
    check(*pair(causal, 2, 3, *lengths, **options))


@pytest.mark.skipif("dq_kv_order" not in LISTS, reason="torch before 2.13 has no such field")
def test_order_of_blocks_in_dq() -> None:
    """Fields have no name that PyTorch's class has for a method, such as `_dq_kv_order`."""
    options = {"compute_dq_write_order": True, "dq_kv_order": True, "BLOCK_SIZE": 32}
    ours, expected = pair(causal, 2, 2, 128, 128, **options)
    for found, theirs_ in (
        (ours, expected),
        (ours[0], expected[0]),
        (ours[:, 1]._adjust(64, 64), expected[:, 1]._adjust(64, 64)),
        (ours.to("cpu"), expected.to("cpu")),
    ):
        assert found._dq_kv_order() is theirs_._dq_kv_order() is True
        assert torch.equal(found.dq_write_order, theirs_.dq_write_order)
    order = torch.tensor([[[1, 0]]], dtype=torch.int32)
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    columns = torch.tensor([[[[0, 0], [0, 1]]]], dtype=torch.int32)
    made = flex.BlockMask.from_kv_blocks(
        counts, columns, dq_write_order=torch.zeros_like(columns), dq_kv_order=order
    )
    assert made._dq_kv_order() is order


SELECTIONS = (0, -1, slice(1, 3), (1, 1), (slice(0, 2), 1), (2, slice(None), torch.tensor([1, 0])))


@pytest.mark.parametrize("index", SELECTIONS)
def test_selections(index: Any) -> None:
    """`[1]` of a mask that does not read the batch was empty, without a word."""
    ours, expected = pair(causal, 4, 2, 96, 96, BLOCK_SIZE=32)
    check(ours[index], expected[index])
    with pytest.raises(attnkit.BoundsError, match="index 4 is out of range"):
        ours[4]
    query = torch.randn(ours[index].shape[0], ours[index].shape[1], 96, 16)
    with pytest.raises(RuntimeError, match=r"selected by an index.*whole\.mask_mod") as error:
        flex.flex_attention(query, query, query, block_mask=ours[index])
    assert isinstance(error.value, attnkit.AttnkitError)
    with pytest.raises(RuntimeError):
        theirs.flex_attention(query, query, query, block_mask=expected[index])


def test_rows_of_a_mask_for_decoding() -> None:
    query, key = torch.randn(1, 2, 96, 16), torch.randn(1, 2, 96, 16)
    whole = create_block_mask(causal, 1, 1, 96, 96, device="cpu", BLOCK_SIZE=32)
    row = whole[:, :, torch.tensor([2])]
    row.mask_mod = lambda b, h, q, kv: whole.mask_mod(b, h, q + 70, kv)
    with pytest.raises(attnkit.ShapeError, match="assign the seq_lengths of the selection"):
        flex.flex_attention(query[:, :, 70:71], key, key, block_mask=row)
    row.seq_lengths = (1, 96)
    found = flex.flex_attention(query[:, :, 70:71], key, key, block_mask=row)
    expected = flex.flex_attention(query, key, key, block_mask=whole)
    torch.testing.assert_close(found, expected[:, :, 70:71])


def test_other_lengths_and_devices() -> None:
    ours, expected = pair(causal, 2, 1, 128, 128, BLOCK_SIZE=32)
    for lengths in ((64, 96), (50, 128)):
        cropped = [m._adjust(*lengths) for m in (ours, expected)]
        assert cropped[0].shape == cropped[1].shape
        assert torch.equal(*(m.to_dense() for m in cropped))
    check(ours.to("cpu"), expected.to("cpu"))
    listed = BlockMask._from_lists(expected)
    check(listed._adjust(64, 96), expected._adjust(64, 96))
    check(listed.to("cpu"), expected.to("cpu"))
    assert ours.to("meta")._formula is not None


def test_masks_of_lists() -> None:
    _, expected = pair(causal, 2, 1, 128, 96, BLOCK_SIZE=32)
    lists = [expected.kv_num_blocks, expected.kv_indices]
    lists += [expected.full_kv_num_blocks, expected.full_kv_indices]
    check(BlockMask.from_kv_blocks(*lists, 32, causal, (128, 96)), expected)
    made = BlockMask.from_kv_blocks(*lists[:2], BLOCK_SIZE=32)
    other = theirs.BlockMask.from_kv_blocks(*lists[:2], BLOCK_SIZE=32)
    assert made.seq_lengths == other.seq_lengths
    query, key = torch.randn(2, 2, 128, 16), torch.randn(2, 2, 96, 16)
    found = flex.flex_attention(query, key, key, block_mask=made)
    torch.testing.assert_close(found, reference(query, key, other))
    with pytest.raises(AssertionError):
        BlockMask.from_kv_blocks(*lists[:3])
    with pytest.raises(RuntimeError):
        BlockMask.from_kv_blocks(torch.ones(1), torch.ones(1))


def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q - kv < 40


def edits() -> dict[str, Callable[[Any], None]]:
    """Return edits of a mask after which its lists, not its mask_mod alone, say what is kept."""

    def function(mask: Any) -> None:
        mask.mask_mod = near

    def one_list(mask: Any) -> None:
        mask.full_kv_num_blocks = torch.zeros_like(mask.full_kv_num_blocks)

    def in_place(mask: Any) -> None:
        mask.kv_num_blocks[:, :, 1:] = 0

    def through_numpy(mask: Any) -> None:
        mask.full_kv_num_blocks.numpy()[..., 2] = 0

    def lengths(mask: Any) -> None:
        mask.seq_lengths = (120, 125)

    return {f.__name__: f for f in (function, one_list, in_place, through_numpy, lengths)}


@pytest.mark.parametrize("edit", edits().values(), ids=edits())
def test_edits_of_fields_mean_what_they_mean_in_pytorch(edit: Callable[[Any], None]) -> None:
    query, key = torch.randn(2, 1, 128, 16), torch.randn(2, 1, 128, 16)
    both = pair(causal, 2, 1, 128, 128, BLOCK_SIZE=32)
    flex.flex_attention(query, key, key, block_mask=both[0])
    for mask in both:
        edit(mask)
    query, key = query[:, :, : both[0].shape[2]], key[:, :, : both[0].shape[3]]
    found = flex.flex_attention(query, key, key, block_mask=both[0])
    torch.testing.assert_close(found, reference(query, key, both[1]))
    check(*both)


def test_reading_a_field_keeps_the_formula() -> None:
    ids = torch.arange(128, dtype=torch.int32) // 50
    mask = create_block_mask(masks.document(ids), None, None, 128, 128, "cpu", 32)
    before = mask.kv_indices
    assert mask.kv_indices is before
    assert str(mask)
    assert mask.kv_num_blocks is mask.as_tuple()[2]
    ids.zero_()  # the tiles follow the data, where PyTorch's keep the old ones
    assert mask.sparsity() == 0
    assert not torch.equal(mask.kv_indices, before)
    assert mask._formula is not None


def test_pytrees() -> None:
    pytree.register_pytree_node(
        BlockMask,
        BlockMask._flatten,
        BlockMask._unflatten,
        flatten_with_keys_fn=BlockMask._flatten_with_keys,
        serialized_type_name="attnkit.flex.BlockMask",
    )
    try:
        ours, expected = pair(causal, 2, 1, 128, 96, BLOCK_SIZE=32)
        leaves, _ = pytree.tree_flatten(ours)
        assert len(leaves) == len(expected._flatten()[0])
        check(pytree.tree_map(lambda t: t.clone(), ours), expected)
        keys = [k for k, _ in pytree.tree_flatten_with_path(ours)[0]]
        assert [str(k[0]) for k in keys[:2]] == [".kv_num_blocks", ".kv_indices"]
        assert pytree.tree_structure(ours) == pytree.tree_structure(copy.copy(ours))
    finally:
        pytree._deregister_pytree_node(BlockMask)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles(way: Callable[[Any], Any]) -> None:
    ours, expected = pair(masks.causal(), 2, 1, 128, 96, BLOCK_SIZE=32, separate_full_blocks=False)
    for mask in (ours, BlockMask._from_lists(expected)):
        again = way(mask)
        assert (again._formula is None) == (mask._formula is None)
        assert repr(again) == repr(mask)
        mask.kv_num_blocks = torch.zeros_like(mask.kv_num_blocks)
        assert again.kv_num_blocks.any()
    unnamed = create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, 8, 8, "cpu")
    with pytest.raises(attnkit.PicklingError, match="lambda"):
        pickle.dumps(unnamed)
    unnamed.mask_mod = lambda b, h, q, kv: q > kv
    with pytest.raises(attnkit.PicklingError, match="lambda"):
        pickle.dumps(unnamed)


def test_the_device_is_that_of_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    assert create_block_mask(causal, 1, 1, 8, 8)._formula.device.type == "meta"  # type: ignore[union-attr]
    assert flex.create_mask(causal, 1, 1, 8, 8).is_meta
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert create_block_mask(causal, 1, 1, 8, 8).kv_indices.device.type == "cpu"
    assert flex.create_mask(causal, 1, 1, 8, 8).device.type == "cpu"


def test_what_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="document_from_cu_seqlens") as error:
        flex.create_nested_block_mask(causal, 1, 1, torch.zeros(2))
    assert isinstance(error.value, attnkit.AttnkitError)
    with pytest.raises(ValueError, match="dq_kv_order must be True or False"):
        create_block_mask(causal, 1, 1, 8, 8, "cpu", dq_kv_order=torch.zeros(1))  # type: ignore[arg-type]
    with pytest.raises(attnkit.ArgumentError, match="reads b, but B=None"):
        create_block_mask(lambda b, h, q, kv: q > b, None, None, 8, 8, "cpu")
