"""Check which masks are compiled for tiles without tables, and which results are exact."""

from __future__ import annotations

import pytest
import torch

from attnkit.graph import ir
from attnkit.graph.affine import Sides
from attnkit.sparsity.ranges.eval_blocks import compile_blocks, is_exact
from attnkit.tracing.tracer import trace

BANDS = {
    "causal": (lambda q, kv: q >= kv, True),
    "window": (lambda q, kv: (q >= kv) & (q - kv <= 5), True),
    "shifted": (lambda q, kv: (q + 3 > kv) & (kv > q - 9), True),
    "diagonal": (lambda q, kv: q == kv, True),
    "rows": (lambda q, kv: (q > 5) & (kv <= q), False),
    "every other diagonal": (lambda q, kv: 2 * q == 2 * kv, False),
    "nothing": (lambda q, kv: (q > kv) & (q < kv), False),
    "dilated": (lambda q, kv: (q - kv) % 2 == 0, False),
}


@pytest.mark.parametrize("name", BANDS)
def test_bands_need_no_table(name: str) -> None:
    """Block ends decide comparisons of q and kv, and conjunctions that keep a band."""
    keep, plain = BANDS[name]
    traced = trace(lambda b, h, q, kv: keep(q, kv), "mask")
    blocks = compile_blocks(traced.root, Sides())
    found = all(key.is_index for key in blocks.keys)
    assert found == plain or (name == "rows" and found)
    assert is_exact(blocks.root, Sides()) == (name != "rows" or is_exact(traced.root, Sides()))


EXACT = {
    "a row and a column": (lambda q, kv, t: (t[q] > 3) & (t[kv] < 2), True),
    "their order": (lambda q, kv, t: t[q] <= t[kv], True),
    "their order with offsets": (lambda q, kv, t: ~(t[q] + q < kv + 3), True),
    "one side": (lambda q, kv, t: (t[q] > 3) | (q % 2 == 0), True),
    "diagonals": (lambda q, kv, t: t[(q - kv) % 9] > 2, True),
    "equal values": (lambda q, kv, t: t[q] == t[kv], False),
    "a diagonal and a row": (lambda q, kv, t: (q - kv > 3) & (t[q] > 2), False),
    "a diagonal and a column": (lambda q, kv, t: (q - kv > 3) | (kv > 2), False),
    "a product": (lambda q, kv, t: t[q] * t[kv] > 5, False),
    "exclusive": (lambda q, kv, t: (t[q] > 3) ^ (t[kv] < 2), False),
    "three": (lambda q, kv, t: ((t[q] > 3) & (t[kv] < 2)) | (q > 3), False),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_is_exact_on_tiles(name: str) -> None:
    keep, exact = EXACT[name]
    table = torch.tensor([3, 5, 1, 2, 2, 8, 0, 4, 6])
    root = trace(lambda b, h, q, kv: keep(q, kv, table), "mask").root
    assert is_exact(root, Sides()) == exact
    equalities = [n for n in ir.topo(root) if n.op == "eq"]
    if name == "equal values":
        assert is_exact(root, Sides(), equalities)
