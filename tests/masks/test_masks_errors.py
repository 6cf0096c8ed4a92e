"""Check that errors about masks' arguments name the argument, its value and the expectation."""

from __future__ import annotations

import re

import pytest
import torch

from attnkit import (
    ArgumentError,
    BoundsError,
    DeviceError,
    DTypeError,
    OptionError,
    ShapeError,
    create_block_mask,
    masks,
)

floats = torch.ones(3)
two = torch.tensor([2, 2])

REFUSED = [
    # causal, windows, strides
    (lambda: masks.causal("left"), OptionError, "align must be \"top-left\" or \"bottom-right\", got 'left'"),
    (lambda: masks.causal(q_len=3), ArgumentError, 'align="bottom-right" only'),
    (lambda: masks.causal("bottom-right", q_len=3), ArgumentError, "got q_len=3 and kv_len=None"),
    (lambda: masks.causal("bottom-right", q_len=0, kv_len=3), OptionError, "q_len must be at least 1, got 0"),
    (lambda: masks.causal("bottom-right", q_len=2, kv_len=floats), DTypeError, "kv_len must hold integers (torch.int32), got torch.float32"),
    (lambda: masks.causal("bottom-right", q_len=2, kv_len=-two), OptionError, "kv_len must be at least 0 everywhere, got -2"),
    (lambda: masks.sliding_window(-1), OptionError, "left must be at least 0, or None for no limit (FlashAttention's -1), got -1"),
    (lambda: masks.sliding_window(4, -2), OptionError, "right must be at least 0, or None for no limit (FlashAttention's -1), got -2"),
    (lambda: masks.sliding_window(1.5), ArgumentError, "left must be an int, got float"),
    (lambda: masks.sliding_window(True), ArgumentError, "left must be an int, got bool"),
    (lambda: masks.sliding_window(2**31), OptionError, "left must be at most 2147483647, got 2147483648"),
    (lambda: masks.sliding_window(None, None), ArgumentError, "left and right are both None"),
    (lambda: masks.dilated(4, 0), OptionError, "dilation must be at least 1, got 0"),
    (lambda: masks.dilated(-4, 1), OptionError, "left must be at least 0, got -4"),
    (lambda: masks.strided(0), OptionError, "stride must be at least 1, got 0"),
    (lambda: masks.fixed(4, 5), OptionError, "summary must be at most 4, got 5"),
    (lambda: masks.streaming_llm(-1), OptionError, "window must be at least 0, got -1"),
    (lambda: masks.streaming_llm(4, sinks=-1), OptionError, "sinks must be at least 0, got -1"),
    (lambda: masks.prefix(-1), OptionError, "length must be at least 0, got -1"),
    (lambda: masks.prefix_lm(two[None]), ShapeError, "length must have shape [B], got (1, 2)"),
    (lambda: masks.longformer(2, floats), DTypeError, "global_tokens must be torch.bool, got torch.float32"),
    (lambda: masks.longformer(2, -1), OptionError, "global_tokens must be at least 0, got -1"),
    (lambda: masks.block_diagonal(0), OptionError, "size must be at least 1, got 0"),
    (lambda: masks.block_diffusion(8, 0), OptionError, "block must be at least 1, got 0"),
    # documents and padding
    (lambda: masks.document([0, 0, 1]), ArgumentError, "ids must be a tensor [S] or [B, S], got list"),
    (lambda: masks.document(floats), DTypeError, "ids must hold integers (torch.int32), got torch.float32"),
    (lambda: masks.document(floats > 0), DTypeError, "ids must hold integers (torch.int32), got torch.bool"),
    (lambda: masks.document(two[None, None]), ShapeError, "ids must have shape [S] or [B, S], got (1, 1, 2)"),
    (lambda: masks.document(two[:0]), ShapeError, "ids must not be empty, got shape (0,)"),
    (lambda: masks.document(two, two[None]), ShapeError, "got shapes (2,) and (1, 2)"),
    (lambda: masks.document(two, sorted_ids=1), ArgumentError, "sorted_ids must be True or False, got 1"),
    (lambda: masks.document(two.to(torch.uint8), padding=-1), OptionError, "padding must be at least 0, got -1"),
    (lambda: masks.document(two, padding="no"), ArgumentError, "padding must be an int, got str"),
    (lambda: masks.document(torch.ones(3).int().to_sparse()), ArgumentError, "ids must be dense, got torch.sparse_coo; pass ids.to_dense()"),
    (lambda: masks.document(torch.nested.nested_tensor([two, two])), ArgumentError, "ids must not be a nested tensor"),
    (lambda: masks.document_from_lengths(two, align="top-left"), ArgumentError, "align has a meaning with within=... only"),
    (lambda: masks.document_from_lengths(two, within=3), ArgumentError, "within must be a mask or a mask_mod, got int"),
    (lambda: masks.document_from_lengths(two, within=masks.causal(), align="left"), OptionError, "align must be \"top-left\" or \"bottom-right\", got 'left'"),
    (lambda: masks.document_from_lengths(two, within=masks.natten((2,), 1)), ShapeError, "within must fit documents of any length; natten((2,), 1) was built for query length 2, kv length 2"),
    (lambda: masks.document_from_lengths(torch.tensor([2**40, 1])), OptionError, "lengths must sum to at most 2147483647, got 1099511627777"),
    (lambda: masks.document_from_lengths(torch.ones(2, dtype=torch.int32, device="meta")), ArgumentError, "lengths must have data, because the mask reads it once; got a tensor without data (meta)"),
    (lambda: masks.causal() & masks.document_from_cu_seqlens(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 3])), OptionError, "causal() compares the positions of queries and keys, but document_from_cu_seqlens([3], [3]) packs them at different offsets"),
    (lambda: masks.padding(two, side="top"), OptionError, "side must be \"right\" or \"left\", got 'top'"),
    (lambda: masks.padding(two, side="left"), ArgumentError, "side=\"left\" needs kv_len"),
    (lambda: masks.padding(two, kv_len=3), ArgumentError, "side=\"left\" only"),
    (lambda: masks.padding_from_mask([[1, 0]]), ArgumentError, "attention_mask must be a tensor [B, S], got list"),
    (lambda: masks.padding_from_mask(two), ShapeError, "attention_mask must have shape [B, S], got (2,)"),
    (lambda: masks.padding_from_mask(torch.ones(1, 1, 3, 3)), ShapeError, "attention_mask must have shape [B, S], got (1, 1, 3, 3)"),
    (lambda: masks.padding_from_mask(two[None]), OptionError, "attention_mask must hold 0 for padding and 1 for tokens, got 2"),
    (lambda: masks.padding_from_mask(torch.tensor([[0.0, -torch.inf]])), OptionError, "got -inf; of an additive mask of 0 and -inf, pass `mask == 0`"),
    (lambda: masks.padding_from_mask(torch.tensor([[1.0, torch.nan]])), OptionError, "attention_mask must hold 0 for padding and 1 for tokens, got nan"),
    (lambda: masks.padding_from_mask(torch.ones(1, 2, dtype=torch.complex64)), DTypeError, "attention_mask must hold bools, ints or floats, got torch.complex64"),
    (lambda: masks.padding_from_mask(two[None] > 0, rows=1), ArgumentError, "rows must be True or False, got 1"),
    (lambda: masks.chunked(0), OptionError, "size must be at least 1, got 0"),
    (lambda: masks.chunked(4.0), ArgumentError, "size must be an int, got float"),
    (lambda: masks.chunked(4, start=-1), OptionError, "start must be at least 0, got -1"),
    (lambda: masks.chunked(4, start=-two), OptionError, "start must be at least 0 everywhere, got -2"),
    (lambda: masks.chunked(4, start=floats), DTypeError, "start must hold integers (torch.int32), got torch.float32"),
    (lambda: masks.chunked(4, start=two[None]), ShapeError, "start must have shape [B], got (1, 2)"),
    (lambda: masks.chunked(4, kv_len=3), ArgumentError, 'align="bottom-right" only'),
    (lambda: masks.chunked(4, start=two, align="bottom-right", q_len=2, kv_len=torch.tensor([2, 3, 4])), ShapeError, "start is for batch size 2 and kv_len for 3: they cannot be combined"),
    (lambda: masks.image_spans([0, 1]), ArgumentError, "ids must be a tensor [S] or [B, S], got list"),
    (lambda: masks.image_spans(floats), DTypeError, "ids must hold integers (torch.int32) or bools, got torch.float32"),
    (lambda: masks.image_spans(two[None, None]), ShapeError, "ids must have shape [S] or [B, S], got (1, 1, 2)"),
    (lambda: masks.image_spans(two > 0, text=1), OptionError, "text must be at most 0, got 1"),
    (lambda: masks.image_spans(two, text=None), ArgumentError, "text must be an int, got NoneType"),
    (lambda: masks.image_spans(two, size=0), OptionError, "size must be at least 1, got 0"),
    (lambda: masks.image_spans(torch.ones(2, dtype=torch.int32, device="meta")), ArgumentError, "ids must have data, because the mask reads it once; got a tensor without data (meta)"),
    (lambda: masks.zero_padding(torch.ones(2, 1, 3), two), ShapeError, "tensor must have shape [B, H, S, D], got (2, 1, 3)"),
    (lambda: masks.zero_padding(torch.ones(3, 1, 3, 1), two), ShapeError, "one entry per batch entry of tensor, 3, got 2"),
    (lambda: masks.sliding_window(), ArgumentError, "give left (keys before the query) or size (keys with the query's own), got neither"),
    (lambda: masks.sliding_window(3, size=4), ArgumentError, "got both"),
    (lambda: masks.sliding_window(size=0), OptionError, "size must be at least 1, got 0"),
    (lambda: masks.streaming_llm(3, size=4), ArgumentError, "give window (keys before the query) or size"),
    (lambda: masks.paged(masks.causal(), two[None], 2**20, 2**20), OptionError, "pages * page_size must be at most 2147483647"),
    (lambda: masks.natten((2**16, 2**16), 3), OptionError, "shape must have at most 2147483647 tokens"),
    (lambda: masks.examples(device="gpu"), DeviceError, "device must be a device of this machine, such as 'cpu', got 'gpu'"),
    (lambda: masks.examples(seed=-1), OptionError, "seed must be at least 0, got -1"),
    (lambda: masks.document(torch.tensor([0, 2, 1]), sorted_ids=True), OptionError, "ids must not decrease along the sequence (sorted_ids=True)"),
    (lambda: masks.document(torch.tensor([0, 1]), torch.tensor([1, 0]), sorted_ids=True), OptionError, "kv_ids must not decrease along the sequence (sorted_ids=True)"),
    (lambda: masks.document(torch.tensor([[0, 1], [1, 0]]), sorted_ids=True), OptionError, "ids must not decrease along the sequence (sorted_ids=True)"),
    (lambda: masks.document_from_cu_seqlens(torch.tensor([0, 3]), torch.tensor([0, 5, 8])), ShapeError, "must have the same shape, got (2,) and (3,)"),
    (lambda: masks.document_from_cu_seqlens(torch.tensor([0, 2, 3]), torch.tensor([0, 5, 3])), OptionError, "kv_cu_seqlens must not decrease, or documents would overlap; entry 2 is 3 after 5"),
    (lambda: masks.document_from_lengths(torch.tensor([3, -1])), OptionError, "lengths must be at least 0 everywhere, got -1"),
    (lambda: masks.document_from_lengths(two, total=5), OptionError, "lengths must sum to total = 5, got 4"),
    (lambda: masks.document_from_lengths(two * 0), OptionError, "lengths must hold a length above 0, got zeros only"),
    (lambda: masks.document_from_lengths(two, two[:1]), ShapeError, "lengths and kv_lengths must have the same shape, got (2,) and (1,)"),
    (lambda: masks.document_from_cu_seqlens(torch.tensor([1, 3])), OptionError, "cu_seqlens must begin with 0, got 1"),
    (lambda: masks.document_from_cu_seqlens(torch.tensor([0, 5, 3])), OptionError, "documents would overlap; entry 2 is 3 after 5"),
    (lambda: masks.document_from_cu_seqlens(torch.tensor([0])), ShapeError, "must have shape [N + 1] with N >= 1, got (1,)"),
    (lambda: masks.document_from_cu_seqlens(torch.tensor([0, 4]), total=6), OptionError, "cu_seqlens must end with total = 6, got 4"),
    (lambda: masks.padding([2, 2]), ArgumentError, "kv_lengths must be a tensor [B], got list"),
    (lambda: masks.padding(two, two[:1]), ShapeError, "got shapes (1,) and (2,)"),
    (lambda: masks.shared_prefix(-1, two), OptionError, "prefixes must be at least 0, got -1"),
    (lambda: masks.shared_prefix(2, two[None]), ArgumentError, "prefixes must be int [G] where suffixes is [G, N], got an int"),
    (lambda: masks.shared_prefix(two, two), ShapeError, "suffixes must have shape [G, N] with G = 2"),
    (lambda: masks.shared_prefix(0, two * 0), OptionError, "got zeros only"),
    # blocks, trees, pages
    (lambda: masks.topk_blocks(two, 2, 2), ShapeError, "selected must have shape [query blocks, K]"),
    (lambda: masks.topk_blocks(torch.ones(2, 2), 2, 2), DTypeError, "selected must hold integers (torch.int32), got torch.float32"),
    (lambda: masks.topk_blocks(torch.zeros(2, 129).int(), 2, 2), ShapeError, "at most 128 indices per query block, got 129"),
    (lambda: masks.topk_blocks(two[None], 0, 2), OptionError, "q_block must be at least 1, got 0"),
    (lambda: masks.bigbird(two[None] > 0, 2), DTypeError, "random_blocks must hold integers (torch.int32), got torch.bool"),
    (lambda: masks.bigbird(two[None], 2, window_blocks=-1), OptionError, "window_blocks must be at least 0, got -1"),
    (lambda: masks.tree(torch.tensor([-1, 1])), OptionError, "parents[1] must be -1 or stand before its child (1), got 1"),
    (lambda: masks.tree(torch.tensor([-2])), OptionError, "parents[0] must be -1 or stand before its child (0), got -2"),
    (lambda: masks.tree(torch.tensor([-1]), context=-1), OptionError, "context must be at least 0, got -1"),
    (lambda: masks.tree_from_table(torch.ones(2, 2)), DTypeError, "table must be torch.bool, got torch.float32"),
    (lambda: masks.paged(3, two[None], 4, 4), ArgumentError, "mask must be a mask or a mask_mod, got int"),
    (lambda: masks.paged(masks.causal(), torch.tensor([[0, 4]]), 8, 4), OptionError, "page_table must hold pages below pages = 4, got 4"),
    (lambda: masks.paged(masks.causal(), two[None], 8, 4), OptionError, "distinct pages in each row"),
    (lambda: masks.paged(masks.causal(), torch.tensor([[0, -2]]), 8, 4), OptionError, "page_table must be at least -1 everywhere, got -2"),
    (lambda: masks.paged(masks.causal(), torch.tensor([[0, 1]]), 8, 4, two), ShapeError, "one entry per row of page_table, 1, got 2"),
    # grids
    (lambda: masks.natten(9, 3), ArgumentError, "shape must be a tuple of ints, got int"),
    (lambda: masks.natten((2, 2, 2, 2), 1), OptionError, "shape must have 1 to 3 axes, got (2, 2, 2, 2)"),
    (lambda: masks.natten((4, 4), (3,)), OptionError, "kernel must have 2 entries, one per axis, got (3,)"),
    (lambda: masks.natten((4, 4), 5), OptionError, "kernel * dilation must be at most the length 4 of axis 0, got 5 * 1"),
    (lambda: masks.natten((8,), 3, dilation=3), OptionError, "got 3 * 3"),
    (lambda: masks.natten((8,), 3, stride=4), OptionError, "stride must be at most kernel, got 4 > 3 on axis 0"),
    (lambda: masks.natten((8,), 3, causal=1), ArgumentError, "causal must be a bool or a tuple of bools, got 1"),
    (lambda: masks.natten((8, 8), 3, causal=(True,)), OptionError, "causal must have 2 entries"),
    (lambda: masks.natten((8, 6), 3, tile=4), OptionError, "tile must divide shape (8, 6) along every axis, got (4, 4)"),
    (lambda: masks.natten((0,), 3), OptionError, "shape[0] must be at least 1, got 0"),
    (lambda: masks.sliding_tile((8, 8), 2, 2), OptionError, "kernel must be odd and at most the tiles of the grid, (4, 4), got (2, 2)"),
    (lambda: masks.sliding_tile((8, 8), 4, 3), OptionError, "kernel must be odd and at most the tiles of the grid, (2, 2), got (3, 3)"),
    (lambda: masks.sliding_tile((8, 8), 4, 1, text=-1), OptionError, "text must be at least 0, got -1"),
    (lambda: masks.tile_order("88", 2), ArgumentError, "shape must be a tuple of ints, got str"),
    (lambda: masks.examples(8), OptionError, "length must be at least 32, got 8"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "message"), REFUSED, ids=[m for _, _, m in REFUSED])
def test_bad_argument(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    "mask",
    [
        masks.document(torch.tensor([0, 0, 1])),
        masks.document(torch.arange(8), torch.arange(7)),
        masks.document(torch.zeros(1, 7).int()),
        masks.longformer(1, torch.tensor([True, False])),
        masks.padding_from_mask(torch.ones(1, 7)),
        masks.padding_from_mask(torch.ones(1, 7), rows=True),
        masks.image_spans(torch.zeros(7).int()),
        masks.topk_blocks(torch.zeros(2, 1).int(), 2, 2),
        masks.topk_blocks(torch.ones(4, 3).bool(), 2, 2),
        masks.bigbird(torch.zeros(3, 1).int(), 2),
        masks.causal() & masks.document(torch.tensor([0, 0, 1])),
    ],
    ids=repr,
)
def test_lengths_beyond_the_captured_tensors_are_refused(mask):
    with pytest.raises(ShapeError, match=r"for (query|kv) length [2-7] at most, got 8"):
        create_block_mask(mask, 1, None, 8, 8)


BUILT_FOR = [
    (masks.natten((4, 4), 3), 16, 16),
    (masks.natten((4, 4), 3, tile=2), 16, 16),
    (masks.sliding_tile((8,), 2, 3), 8, 8),
    (masks.sliding_tile((8,), 2, 3, text=1), 9, 9),
    (masks.block_diffusion(6, 2), 12, 12),
    (masks.causal("bottom-right", q_len=3, kv_len=5), 3, 5),
    (masks.causal("bottom-right", q_len=3, kv_len=two), 3, None),
    (masks.sliding_window(2, 1, align="bottom-right", q_len=3, kv_len=5), 3, 5),
    (masks.dilated(2, 2, align="bottom-right", q_len=3, kv_len=two), 3, None),
    (masks.streaming_llm(2, align="bottom-right", q_len=3, kv_len=5), 3, 5),
    (masks.chunked(2, align="bottom-right", q_len=3, kv_len=5), 3, 5),
    (masks.document_from_lengths(two), 4, 4),
    (masks.document_from_lengths(two, two + 1), 4, 6),
    (masks.document_from_cu_seqlens(torch.tensor([0, 2, 5])), 5, 5),
    (masks.shared_prefix(2, two), 6, 6),
    (masks.shared_prefix(two, two[:, None]), 8, 8),
    (masks.tree(torch.tensor([-1, 0, 1])), 3, 3),
    (masks.tree(torch.tensor([-1, 0, 1]), context=4), 3, 7),
    (masks.tree(torch.tensor([-1, 0, 1]), context=two), 3, None),
    (masks.tree_from_table(torch.ones(2, 3).bool(), context=4), 2, 7),
    (masks.paged(masks.causal(), torch.tensor([[0, 1]]), 2, 3), None, 6),
    (masks.paged(masks.natten((4,), 3), torch.tensor([[0, 1]]), 2, 3), 4, 6),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mask", "q_len", "kv_len"), BUILT_FOR, ids=[repr(m) for m, *_ in BUILT_FOR]
)
def test_other_lengths_than_the_mask_was_built_for_are_refused(mask, q_len, kv_len):
    right = (q_len or 4, kv_len or 8)
    batch = 2 if kv_len is None else 1
    create_block_mask(mask, batch, None, *right).runs.counts()
    for axis, (name, built) in enumerate((("query length", q_len), ("kv length", kv_len))):
        for other in () if built is None else (built - 1, built + 1):
            lengths = [*right]
            lengths[axis] = other
            with pytest.raises(ShapeError, match=f"was built for {name} {built}, got {other}"):
                create_block_mask(mask, batch, None, *lengths)


@pytest.mark.parametrize(
    "make",
    [
        lambda: masks.sliding_window(-1, align="bottom-right", q_len=2, kv_len=2),
        lambda: masks.sliding_window(1, -1, align="bottom-right", q_len=2, kv_len=2),
        lambda: masks.dilated(1, 2, -1, align="bottom-right", q_len=2, kv_len=2),
        lambda: masks.streaming_llm(-1, align="bottom-right", q_len=2, kv_len=2),
        lambda: masks.longformer(-1, 2),
        lambda: masks.natten((4,), -1),
    ],
)
def test_negative_windows_are_refused(make):
    with pytest.raises(OptionError, match=r"must be at least [01].*, got -1"):
        make()


@pytest.mark.parametrize("make", [masks.sliding_window, masks.streaming_llm])
def test_alignment_needs_lengths(make):
    with pytest.raises(ArgumentError, match="needs q_len and kv_len, got q_len=3 and kv_len=None"):
        make(4, align="bottom-right", q_len=3)
    with pytest.raises(ArgumentError, match='align="bottom-right" only'):
        make(4, q_len=3)


def test_pages_that_hold_more_keys_than_the_mask_has():
    table = torch.tensor([[0, 1]])
    with pytest.raises(ShapeError, match="built for kv length 3, and the pages of an entry hold 4"):
        masks.paged(masks.natten((3,), 3), table, 2, 3)
    masks.paged(masks.natten((3,), 3), table, 2, 3, torch.tensor([3]))


def test_ids_beyond_32_bits_are_refused():
    mask = masks.document(torch.tensor([0, 2**40]))
    with pytest.raises(BoundsError, match="int32"):
        _ = create_block_mask(mask, None, None, 2, 2).runs


def test_edited_ids_count():
    ids = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
    block_mask = create_block_mask(masks.document(ids), None, None, 4, 4, BLOCK_SIZE=2)
    assert block_mask.to_dense().tolist() == [[[[1, 0], [0, 1]]]]
    ids.zero_()
    assert block_mask.to_dense().tolist() == [[[[1, 1], [1, 1]]]]


@pytest.mark.parametrize(("shape", "tile"), [((12,), 3), ((4, 6), (2, 3)), ((2, 4, 6), (1, 2, 3))])
def test_tile_order_is_a_permutation_that_keeps_tiles_together(shape, tile):
    order = masks.tile_order(shape, tile)
    count = torch.Size(shape).numel()
    assert torch.equal(order.sort().values, torch.arange(count))
    # under the permutation, a row-major mask is the tiled one
    plain = masks.natten(shape, 2)
    tiled = masks.natten(shape, 2, tile=tile)
    places = torch.arange(count)
    by_row = plain(0, 0, order[:, None], order[None, :])
    assert torch.equal(tiled(0, 0, places[:, None], places[None, :]), by_row)


def test_labels_say_how_a_mask_was_built():
    assert (
        repr(masks.causal() & ~masks.sliding_window(4, None))
        == "causal() & ~sliding_window(4, None)"
    )
    assert repr(masks.natten((4, 4), 3, stride=2)) == "natten((4, 4), 3, stride=2)"
    assert repr(masks.document(two)) == "document([2])"
