"""Check the interval form of each mask of the library as text, as `explain` prints it."""

from __future__ import annotations

import pytest
import torch

from attnkit import masks
from attnkit.sparsity.intervals.normal_form import intervals_of
from attnkit.util import caches

# mask -> the intervals of its rows at length 96 and the tables of their ends, or why it has none
TEXTS = {
    "causal": [
        "kv < q + 1",
    ],
    "sliding_window": [
        "q - 12 <= kv < q + 1",
    ],
    "sliding_window/both": [
        "q - 12 <= kv < q + 7",
    ],
    "sliding_window/right": [
        "kv < q + 13",
    ],
    "prefix_lm": [
        "kv < max(q + 1, 13)",
    ],
    "dilated": [
        "no interval form: `(q - kv <= 24) & (0 <= q - kv) & ((q - kv) % 3 == 0)` holds in too many stretches of q - kv",
    ],
    "dilated/both": [
        "no interval form: `(q - kv <= 12) & (-12 <= q - kv) & ((q - kv) % 2 == 0)` holds in too many stretches of q - kv",
    ],
    "chunked": [
        "q - q % 15 <= kv < q + 1",
    ],
    "strided": [
        "no interval form: `(0 <= q - kv) & ((q - kv <= 11) | ((q - kv) % 11 == 0))` holds in too many stretches of q - kv",
    ],
    "fixed": [
        "no interval form: a row keeps 7 separate intervals, more than 4",
    ],
    "longformer": [
        "where(q < 3, 0, q - 12) <= kv < where(q < 3, kv_len, q + 13)",
        "kv < 3",
    ],
    "streaming_llm": [
        "q - 12 <= kv < q + 1",
        "kv < min(q + 1, 4)",
    ],
    "block_diagonal": [
        "q // 15 * 15 <= kv < q // 15 * 15 + 15",
    ],
    "causal/bottom-right": [
        "kv < q + 49",
    ],
    "sliding_window/bottom-right": [
        "q + 36 <= kv < q + 52",
    ],
    "dilated/bottom-right": [
        "no interval form: `(q + 48 - kv <= 24) & (0 <= q + 48 - kv) & ((q + 48 - kv) % 3 == 0)` holds in too many stretches of q - kv",
    ],
    "chunked/bottom-right": [
        "max(q - (q + 48 - 5) % 12 + 48, 5) <= kv < q + 49",
    ],
    "streaming_llm/bottom-right": [
        "q + 36 <= kv < q + 49",
        "kv < 4",
    ],
    "prefix": [
        "kv < 12",
    ],
    "block_diagonal/cross": [
        "q // 7 * 11 <= kv < q // 7 * 11 + 11",
    ],
    "block_diffusion": [
        "row_start4[q] <= kv < row_end5[q]",
        "row_start5[q] <= kv < row_end6[q]",
        "row_start4: computed once, int32 [96]",
        "row_end5: computed once, int32 [96]",
        "row_start5: computed once, int32 [96]",
        "row_end6: computed once, int32 [96]",
    ],
    "document": [
        "kv_doc_start[q] <= kv < kv_doc_end[q]",
        "kv_doc_start: computed once, int32 [96]",
        "kv_doc_end: computed once, int32 [96]",
    ],
    "document/causal": [
        "kv_doc_start[q] <= kv < min(q + 1, kv_doc_end[q])",
        "kv_doc_start: computed once, int32 [96]",
        "kv_doc_end: computed once, int32 [96]",
    ],
    "document/unsorted": [
        "no interval form: `kv_doc[kv]` is not in order along kv",
    ],
    "document/batch": [
        "no interval form: `kv_doc[b, kv]` is not in order along kv",
    ],
    "document/cross": [
        "q_doc_start[q] <= kv < q_doc_end[q]",
        "q_doc_start: computed once, int32 [96]",
        "q_doc_end: computed once, int32 [96]",
    ],
    "document_from_lengths": [
        "kv_doc_start[q] <= kv < kv_doc_end[q]",
        "kv_doc_start: computed once, int32 [96]",
        "kv_doc_end: computed once, int32 [96]",
    ],
    "document_from_cu_seqlens": [
        "kv_doc_start[q] <= kv < kv_doc_end[q]",
        "kv_doc_start: computed once, int32 [96]",
        "kv_doc_end: computed once, int32 [96]",
    ],
    "document_from_lengths/within": [
        "max(start[q], place[q] + start[q] - 9) <= kv < min(end[q], start[q] + place[q] + 1)",
    ],
    "shared_prefix": [
        "kv < min(q + 1, 24)",
        "part_start[q] <= kv < min(q + 1, part_end[q])",
        "part_start: computed once, int32 [96]",
        "part_end: computed once, int32 [96]",
    ],
    "shared_prefix/groups": [
        "is_prefix_start[q] <= kv < is_prefix_end[q]",
        "max(group_start[q], part_start[q]) <= kv < min(min(q + 1, group_end[q]), part_end[q])",
        "group_start: computed once, int32 [96]",
        "group_end: computed once, int32 [96]",
        "is_prefix_start: computed once, int32 [96]",
        "is_prefix_end: computed once, int32 [96]",
        "part_start: computed once, int32 [96]",
        "part_end: computed once, int32 [96]",
    ],
    "padding": [
        "kv < kv_lengths[b]",
    ],
    "padding/rows": [
        "kv < where(q < queries[b], kv_lengths[b], 0)",
    ],
    "padding_from_mask": [
        "table_start[b] <= kv",
        "table_start: computed once, int32 [2]",
    ],
    "padding_from_mask/holes": [
        "no interval form: `~(i32(table[b, kv]) == 0)` holds in too many stretches of kv",
    ],
    "chunked/batch": [
        "max(q - (q - starts[b]) % 24, starts[b]) <= kv < q + 1",
    ],
    "chunked/cached": [
        "q + lengths[b] - (q + (lengths[b] - 24)) % 24 - 24 <= kv < q + lengths[b] - 23",
    ],
    "image_spans": [
        "kv < last[b, q] + 1",
    ],
    "image_spans/size": [
        "min(q - 11, first[q]) <= kv < last[q] + 1",
    ],
    "prefix_lm/batch": [
        "kv < max(q + 1, lengths[b])",
    ],
    "causal/cached": [
        "kv < q + lengths[b] - 23",
    ],
    "sliding_window/cached": [
        "q + lengths[b] - 36 <= kv < min(q + lengths[b] - 22, lengths[b])",
    ],
    "longformer/marked": [
        "no interval form: `is_global[kv]` holds in too many stretches of kv",
    ],
    "longformer/batch": [
        "no interval form: `is_global[b, kv]` holds in too many stretches of kv",
    ],
    "topk_blocks": [
        "selected[h, q // 8, 0] * 8 <= kv < selected[h, q // 8, 0] * 8 + 8",
        "selected[h, q // 8, 1] * 8 <= kv < selected[h, q // 8, 1] * 8 + 8",
        "selected[h, q // 8, 2] * 8 <= kv < selected[h, q // 8, 2] * 8 + 8",
    ],
    "topk_blocks/causal": [
        "selected[q, 0] * 8 <= kv < min(selected[q, 0] * 8 + 8, q + 1)",
        "selected[q, 1] * 8 <= kv < min(selected[q, 1] * 8 + 8, q + 1)",
        "selected[q, 2] * 8 <= kv < min(selected[q, 2] * 8 + 8, q + 1)",
        "selected[q, 3] * 8 <= kv < min(selected[q, 3] * 8 + 8, q + 1)",
    ],
    "topk_blocks/marked": [
        "no interval form: `selected[b, h, q // 16, kv // 8]` cannot be solved for kv",
    ],
    "bigbird": [
        "selected[q // 8, 1] * 8 <= kv < selected[q // 8, 1] * 8 + 8",
        "q // 8 * 8 - 8 <= kv < q // 8 * 8 + 16",
        "where(q // 8 < 1, 0, selected[q // 8, 0] * 8) <= kv < where(q // 8 < 1, kv_len, selected[q // 8, 0] * 8 + 8)",
        "kv < 8",
    ],
    "bigbird/heads": [
        "selected[h, q // 8, 1] * 8 <= kv < selected[h, q // 8, 1] * 8 + 8",
        "q // 8 * 8 - 8 <= kv < q // 8 * 8 + 16",
        "where(q // 8 < 0, 0, selected[h, q // 8, 0] * 8) <= kv < where(q // 8 < 0, kv_len, selected[h, q // 8, 0] * 8 + 8)",
    ],
    "natten": [
        "min(max(q - 3, 0), 89) <= kv < min(max(q - 3, 0), 89) + 7",
    ],
    "natten/dilated": [
        "no interval form: a row keeps 6 separate intervals, more than 4",
    ],
    "natten/2d": [
        "row_start4[q] <= kv < row_end4[q]",
        "row_start5[q] <= kv < row_end5[q]",
        "row_start6[q] <= kv < row_end6[q]",
        "row_start4: computed once, int32 [64]",
        "row_end4: computed once, int32 [64]",
        "row_start5: computed once, int32 [64]",
        "row_end5: computed once, int32 [64]",
        "row_start6: computed once, int32 [64]",
        "row_end6: computed once, int32 [64]",
    ],
    "natten/2d-dilated": [
        "row_start7[q] <= kv < row_end7[q]",
        "row_start8[q] <= kv < row_end8[q]",
        "row_start7: computed once, int32 [64]",
        "row_end7: computed once, int32 [64]",
        "row_start8: computed once, int32 [64]",
        "row_end8: computed once, int32 [64]",
    ],
    "natten/2d-tiled": [
        "no interval form: `kv // 4 // 4 + kv % 4 // 2` is not in order along kv",
    ],
    "natten/3d": [
        "no interval form: `kv % 4` is not in order along kv",
    ],
    "natten/3d-tiled": [
        "no interval form: `kv // 8 // 2 // 2 + kv % 8 // 2 // 2` is not in order along kv",
    ],
    "sliding_tile/2d": [
        "row_start5[q] <= kv < row_end5[q]",
        "row_start6[q] <= kv < row_end6[q]",
        "row_start7[q] <= kv < row_end7[q]",
        "row_start5: computed once, int32 [64]",
        "row_end5: computed once, int32 [64]",
        "row_start6: computed once, int32 [64]",
        "row_end6: computed once, int32 [64]",
        "row_start7: computed once, int32 [64]",
        "row_end7: computed once, int32 [64]",
    ],
    "sliding_tile/3d": [
        "row_start5[q] <= kv < row_end5[q]",
        "row_start5: computed once, int32 [64]",
        "row_end5: computed once, int32 [64]",
    ],
    "sliding_tile": [
        "where(64 <= q, 0, row_start2[q]) <= kv < where(64 <= q, kv_len, row_end2[q])",
        "64 <= kv",
        "row_start2: computed once, int32 [69]",
        "row_end2: computed once, int32 [69]",
    ],
    "tree": [
        "no interval form: `first[max(kv - 72, 0)]` is not in order along kv",
    ],
    "tree/batch": [
        "no interval form: `last[b, min(max(kv - contexts[b], 0), 23)]` is not in order along kv",
    ],
    "tree_from_table": [
        "no interval form: `table[q, max(kv - 72, 0)]` cannot be solved for kv",
    ],
    "paged": [
        "no interval form: `0 <= logical_page[b, kv // 8]` holds in too many stretches of kv",
    ],
    "paged/lengths": [
        "no interval form: `0 <= logical_page[b, kv // 8]` holds in too many stretches of kv",
    ],
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts(name: str) -> None:
    e = masks.examples(96)[name]
    found = intervals_of(e.mask, q_len=e.q_len, kv_len=e.kv_len, batch=e.batch, heads=e.heads)
    lines = str(found).splitlines()
    if lines[0][0].isdigit():
        count = sum("computed once" not in line for line in TEXTS[name])
        assert lines.pop(0) == f"{count} interval{'s' * (count != 1)} a row"
    assert [line.strip() for line in lines] == TEXTS[name]


@pytest.mark.parametrize("name", TEXTS)
def test_ends_are_on_the_device_of_the_mask(name: str) -> None:
    """Nothing is on the default device."""
    e = masks.examples(96)[name]
    caches.clear_all()
    with torch.device("meta"):  # on which nothing can be computed by mistake
        found = intervals_of(e.mask, q_len=e.q_len, kv_len=e.kv_len, batch=e.batch, heads=e.heads)
    lines = str(found).splitlines()
    assert [line.strip() for line in lines[lines[0][0].isdigit() :]] == TEXTS[name]
