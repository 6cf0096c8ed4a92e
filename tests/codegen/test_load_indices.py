"""Check which indices are clamped: those that only captured data keeps inside their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnkit.codegen.load_indices import data_bound
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
