"""Check that library masks refuse calls of other sizes than their tables."""

from __future__ import annotations

import re

import pytest
import torch

from attnkit import ShapeError, create_block_mask, masks
from attnkit.graph.ir import reads
from attnkit.tracing.tracer import trace

EXAMPLES = masks.examples(40)
READ = {name: reads(trace(example.mask, "mask").root) for name, example in EXAMPLES.items()}
two = torch.tensor([2, 2])


@pytest.mark.parametrize("name", [n for n, names in READ.items() if {"b", "h"} & set(names)])
def test_every_example_declares_its_axes(name):
    mask, q_len, kv_len, batch, heads = EXAMPLES[name]
    create_block_mask(mask, batch, heads, q_len, kv_len)
    if "h" in READ[name]:
        for other in (heads - 1, heads + 1):
            with pytest.raises(ShapeError, match=f"{heads} query heads, got {other}"):
                create_block_mask(mask, batch, other, q_len, kv_len)
    if "b" in READ[name]:
        for other in (batch - 1, batch + 1):
            with pytest.raises(ShapeError, match=f"batch size {batch}, got {other}"):
                create_block_mask(mask, other, heads, q_len, kv_len)


REFUSED = [
    (masks.document(torch.zeros(8, 3).int()), "ids has shape (8, 3), read as [b, len]: for batch size 8, got 3; it looks transposed: pass ids.T"),
    (masks.document(torch.zeros(2, 8).int()), "for batch size 2, got 3; build it for the batch of the query"),
    (masks.document(torch.zeros(1, 8).int()), "to share it, pass ids.expand(3, -1)"),
    (masks.document(torch.zeros(7).int()), "ids has shape (7,), read as [len]: for query length 7 at most, got 8"),
    (masks.document(torch.zeros(8).int(), torch.zeros(7).int()), "kv_ids has shape (7,), read as [kv]: for kv length 7 at most, got 8"),
    (masks.padding(two), "kv_lengths has shape (2,), read as [b]: for batch size 2, got 3"),
    (masks.padding(two, side="left", kv_len=8), "kv_lengths has shape (2,), read as [b]: for batch size 2, got 3"),
    (masks.padding_from_mask(torch.ones(8, 3)), "attention_mask has shape (8, 3), read as [b, kv]: for batch size 8, got 3; it looks transposed: pass attention_mask.T"),
    (masks.chunked(4, start=two), "start has shape (2,), read as [b]: for batch size 2, got 3"),
    (masks.image_spans(torch.ones(2, 8).int()), "ids has shape (2, 8), read as [b, q]: for batch size 2, got 3"),
    (masks.prefix_lm(two), "length has shape (2,), read as [b]: for batch size 2, got 3"),
    (masks.causal("bottom-right", q_len=8, kv_len=two), "kv_len has shape (2,), read as [b]: for batch size 2, got 3"),
    (masks.longformer(1, torch.ones(2, 8).bool()), "global_tokens has shape (2, 8), read as [b, len]: for batch size 2, got 3"),
    (masks.topk_blocks(torch.zeros(2, 4, 1).int(), 2, 2), "selected has shape (2, 4, 1), read as [h, q / 2, _]: for 2 query heads, got 4"),
    (masks.topk_blocks(torch.zeros(3, 1).int(), 2, 2), "selected has shape (3, 1), read as [q / 2, _]: for query length 6 at most, got 8"),
    (masks.bigbird(torch.zeros(2, 4, 1).int(), 2), "random_blocks has shape (2, 4, 1), read as [h, q / 2, _]: for 2 query heads, got 4"),
    (masks.tree(torch.full((2, 8), -1)), "parents has shape (2, 8), read as [b, _]: for batch size 2, got 3"),
    (masks.tree_from_table(torch.ones(2, 8, 8).bool()), "table has shape (2, 8, 8), read as [b, _, _]: for batch size 2, got 3"),
    (masks.tree_from_table(torch.ones(8, 6).bool(), two), "context has shape (2,), read as [b]: for batch size 2, got 3"),
    (masks.paged(masks.prefix(two), torch.arange(4).reshape(2, 2), 2, 4), "page_table is (2, 2): for batch size 2, got 3"),
    (masks.paged(masks.document(torch.zeros(7).int()), torch.arange(3)[:, None], 2, 4), "ids has shape (7,), read as [len]: for query length 7 at most, got 8"),
    (masks.document_from_lengths(two * 2, within=masks.prefix(two)), "length has shape (2,), read as [b]: for batch size 2, got 3"),
    (~masks.padding(two) | masks.causal(), "kv_lengths has shape (2,), read as [b]: for batch size 2, got 3"),
    (masks.padding(two).shift(q=3), "kv_lengths has shape (2,), read as [b]: for batch size 2, got 3"),
    (masks.document(torch.zeros(10).int()).shift(q=3), "ids has shape (10,), read as [len]: for query length 7 at most, got 8"),
]  # fmt: skip


@pytest.mark.parametrize(("mask", "message"), REFUSED, ids=[repr(m) for m, _ in REFUSED])
def test_tables_of_another_size_are_refused(mask, message):
    with pytest.raises(ShapeError, match=re.escape(message)):
        create_block_mask(mask, 3, 4, 8, 8)


def test_tables_for_different_batches_do_not_combine():
    message = "kv_lengths is for batch size 2 and length for 3: they cannot be combined"
    with pytest.raises(ShapeError, match=message):
        masks.padding(two) & masks.prefix(torch.tensor([1, 2, 3]))
    with pytest.raises(ShapeError, match="page_table is for batch size 1 and length for 2"):
        masks.paged(masks.prefix(two), torch.tensor([[0, 1]]), 2, 4)
