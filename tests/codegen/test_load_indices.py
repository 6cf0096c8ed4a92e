"""Check which indices are clamped: those that only captured data keeps inside their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnkit.codegen.distance_tables import distance_tables
from attnkit.codegen.load_indices import LoadIndices, data_bound, wrapping_unless_tables
from attnkit.codegen.nonnegative import wrapping
from attnkit.graph import ir
from attnkit.tracing.tracer import trace

IDS, TABLE = torch.arange(30) % 5, torch.randn(8)
SIZES = {"b": 2, "h": 4, "q": 30, "kv": 30}


def clamped(mod: Callable[..., Any]) -> list[bool]:
    """Return for each load from TABLE in a score_mod whether its index is clamped."""
    traced = trace(mod, "score")
    shapes = [t.shape for t in traced.tensors]
    found = data_bound([traced.root], SIZES, shapes)
    return [
        n in found
        for n in ir.topo(traced.root)
        if n.op == "load" and traced.tensors[int(str(n.attr))] is TABLE
    ]


def test_indices_from_data_are_clamped() -> None:
    assert clamped(lambda s, b, h, q, kv: s + TABLE[IDS[q]]) == [True]
    assert clamped(lambda s, b, h, q, kv: s + TABLE[IDS[q] - IDS[kv]]) == [True]
    assert clamped(lambda s, b, h, q, kv: s + TABLE[IDS[q].clamp(max=7)]) == [True]
    assert clamped(lambda s, b, h, q, kv: s + TABLE[torch.where(q > kv, IDS[q], 0)]) == [True]
    assert clamped(lambda s, b, h, q, kv: s + TABLE[IDS[q] % 9]) == [True]


def test_indices_that_the_lengths_or_a_clamp_bound_are_not() -> None:
    assert clamped(lambda s, b, h, q, kv: s + TABLE[h]) == [False]
    assert clamped(lambda s, b, h, q, kv: s + TABLE[q // 4]) == [False]
    assert clamped(lambda s, b, h, q, kv: s + TABLE[(q - kv).clamp(-8, 7)]) == [False]
    assert clamped(lambda s, b, h, q, kv: s + TABLE[IDS[q] % 8]) == [False]
    assert clamped(lambda s, b, h, q, kv: s + TABLE[IDS[q].clamp(-8, 7)]) == [False]
    assert clamped(lambda s, b, h, q, kv: s + TABLE[(IDS[q] > IDS[kv]).int()]) == [False]


def test_loads_that_a_rewrite_makes_wrap() -> None:
    root = trace(lambda s, b, h, q, kv: s + TABLE[h] + TABLE[q - 4], "score").root
    other = trace(lambda s, b, h, q, kv: s + TABLE[h] + TABLE[kv], "score").root
    made = LoadIndices(wrapping([root], SIZES)).with_new_loads([other, None], [root, None])
    loads = {n for n in ir.topo(root, other) if n.op == "load"}
    assert {ir.formula(n) for n in loads if made.wraps(n)} == {"t0[q - 4]", "t0[kv]"}
    assert LoadIndices().with_new_loads([other], [root]) == LoadIndices()


def test_only_indices_of_tables_by_distance_never_wrap() -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + TABLE[(q - kv).clamp(0, 7)] + TABLE[q - 4]

    root = trace(mod, "score").root
    assert wrapping_unless_tables([root]) is None
    tables = distance_tables(root)
    assert tables is not None
    read = {n for n in ir.topo(tables.score) if n.op == "load"}
    wrap = wrapping_unless_tables([tables.score])
    assert wrap is not None
    assert {ir.formula(n) for n in read - wrap} == {"t1[q - kv + kv_last]"}
    assert wrapping([tables.score], SIZES) == wrap
