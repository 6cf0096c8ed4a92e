"""Check how many tiles of each mask interval arithmetic leaves open, and how many a search."""

from __future__ import annotations

import pytest

from attnkit import masks
from attnkit.sparsity.classify import classify
from attnkit.sparsity.hierarchical import Statistics
from attnkit.tracing.tracer import trace

# Of each mask, at length 300: the tiles in blocks of (32, 16) that interval arithmetic leaves open,
# and those of them that are evaluated at every position; then the nodes of 4 x 4 tiles in blocks of
# (10, 15) that are looked into, and their tiles that are left open and evaluated. A mask takes
# longer to classify if a number rises.
LEFT = {
    "causal": (0, 0, 10, 0, 0),
    "sliding_window": (0, 0, 14, 0, 0),
    "sliding_window/both": (0, 0, 16, 0, 0),
    "sliding_window/right": (0, 0, 11, 0, 0),
    "prefix_lm": (0, 0, 10, 0, 0),
    "dilated": (0, 0, 18, 0, 0),
    "dilated/both": (0, 0, 18, 0, 0),
    "chunked": (31, 0, 10, 53, 0),
    "strided": (0, 0, 26, 0, 0),
    "fixed": (61, 0, 26, 151, 0),
    "longformer": (72, 0, 26, 128, 1),
    "streaming_llm": (52, 0, 19, 107, 0),
    "block_diagonal": (0, 0, 10, 0, 0),
    "causal/bottom-right": (0, 0, 6, 0, 0),
    "sliding_window/bottom-right": (0, 0, 9, 0, 0),
    "dilated/bottom-right": (0, 0, 11, 0, 0),
    "chunked/bottom-right": (22, 0, 7, 36, 0),
    "streaming_llm/bottom-right": (29, 0, 13, 60, 0),
    "prefix": (0, 0, 8, 0, 0),
    "block_diagonal/cross": (0, 0, 16, 0, 0),
    "block_diffusion": (65, 6, 24, 86, 13),
    "document": (0, 0, 17, 0, 0),
    "document/causal": (39, 0, 13, 71, 0),
    "document/unsorted": (0, 0, 40, 0, 0),
    "document/batch": (0, 0, 80, 0, 0),
    "document/cross": (0, 0, 15, 0, 0),
    "document_from_lengths": (0, 0, 17, 0, 0),
    "document_from_cu_seqlens": (0, 0, 17, 0, 0),
    "document_from_lengths/within": (36, 0, 14, 64, 0),
    "shared_prefix": (34, 1, 18, 59, 0),
    "shared_prefix/groups": (41, 1, 17, 78, 7),
    "padding": (0, 0, 16, 0, 0),
    "padding/rows": (0, 0, 11, 0, 0),
    "padding_from_mask": (0, 0, 16, 0, 0),
    "padding_from_mask/holes": (0, 0, 80, 0, 0),
    "chunked/batch": (46, 0, 16, 70, 0),
    "chunked/cached": (25, 0, 9, 34, 0),
    "image_spans": (0, 0, 24, 0, 0),
    "image_spans/size": (48, 0, 15, 87, 0),
    "prefix_lm/batch": (0, 0, 18, 0, 0),
    "causal/cached": (0, 0, 6, 0, 0),
    "sliding_window/cached": (26, 0, 9, 47, 0),
    "longformer/marked": (153, 0, 39, 309, 1),
    "longformer/batch": (240, 0, 70, 470, 1),
    "topk_blocks": (175, 0, 77, 428, 0),
    "topk_blocks/causal": (107, 3, 26, 299, 30),
    "topk_blocks/marked": (530, 0, 160, 1694, 0),
    "bigbird": (102, 0, 39, 234, 3),
    "bigbird/heads": (166, 0, 72, 407, 4),
    "natten": (37, 0, 14, 58, 0),
    "natten/dilated": (37, 9, 12, 68, 0),
    "natten/2d": (30, 0, 15, 118, 15),
    "natten/2d-dilated": (32, 0, 16, 137, 69),
    "natten/2d-tiled": (44, 0, 19, 176, 37),
    "natten/3d": (54, 0, 25, 213, 49),
    "natten/3d-tiled": (80, 0, 33, 328, 68),
    "sliding_tile/2d": (48, 0, 20, 190, 17),
    "sliding_tile/3d": (48, 0, 22, 186, 25),
    "sliding_tile": (16, 0, 22, 125, 38),
    "tree": (10, 2, 4, 35, 12),
    "tree/batch": (20, 4, 8, 77, 30),
    "tree_from_table": (10, 0, 4, 35, 0),
    "paged": (0, 0, 139, 0, 0),
    "paged/lengths": (0, 0, 168, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_as_many_tiles_are_left_open_as_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = masks.examples(300)[name]
    traced = trace(example.mask, "mask")
    counts: list[int] = []
    for block in ((32, 16), (10, 15)):
        found = Statistics()
        classify(traced.root, traced.tensors, q_len=example.q_len, kv_len=example.kv_len,
                 block=block, batch=example.batch, heads=max(1, example.heads), device="cpu",
                 statistics=found)  # fmt: skip
        counts += [found.nodes, found.open, found.dense]
        monkeypatch.setattr("attnkit.sparsity.classify._DENSE_TILES", 0)
        monkeypatch.setattr("attnkit.sparsity.classify._NODE", 4)
        monkeypatch.setattr("attnkit.sparsity.hierarchical._MAX_DENSE_TILES", 0)
    assert counts == [0, *LEFT[name]]


def test_tiles_are_counted_in_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = trace(masks.examples(300)["natten/2d-dilated"].mask, "mask")
    monkeypatch.setattr("attnkit.sparsity.classify._DENSE_TILES", 0)
    monkeypatch.setattr("attnkit.sparsity.classify._NODE", 4)
    monkeypatch.setattr("attnkit.sparsity.hierarchical._MAX_DENSE_TILES", 0)
    counts = []
    for most in (1 << 18, 5):
        monkeypatch.setattr("attnkit.sparsity.hierarchical._MAX_OPEN", most)
        found = Statistics()
        classify(traced.root, traced.tensors, q_len=300, kv_len=300, block=(10, 15), batch=1,
                 heads=1, device="cpu", statistics=found)  # fmt: skip
        counts.append((found.nodes, found.open, found.dense))
    assert counts[0] == counts[1]
    assert counts[0][2] > 0
