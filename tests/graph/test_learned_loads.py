"""Check which learned loads have a gradient that is 0 because they shift whole rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnkit.graph.learned_loads import learned_loads
from attnkit.tracing.tracer import trace

LENGTH = 6
TABLE = torch.randn(LENGTH, LENGTH)


def loads(mod: Any, lse_gradient: bool = False) -> int:
    traced = trace(mod, "score")
    return len(learned_loads(traced.root, [True] * len(traced.tensors), lse_gradient))


MODS: dict[str, tuple[Any, int]] = {
    "row": (lambda s, b, h, q, kv: s + TABLE[h, q], 0),
    "head": (lambda s, b, h, q, kv: s - TABLE[h, 0].abs(), 0),
    "row times row": (lambda s, b, h, q, kv: s + TABLE[h, q] * q, 0),
    "gate": (lambda s, b, h, q, kv: s + TABLE[h, q] - TABLE[h, kv], 1),
    "column": (lambda s, b, h, q, kv: s + TABLE[h, kv], 1),
    "scale": (lambda s, b, h, q, kv: s * TABLE[h, q], 1),
    "slope": (lambda s, b, h, q, kv: s + TABLE[h, 0] * (q - kv), 1),
    "inside": (lambda s, b, h, q, kv: torch.tanh(s + TABLE[h, q]), 1),
    "twice": (lambda s, b, h, q, kv: s * TABLE[h, q] + TABLE[h, q], 1),
    "relative": (lambda s, b, h, q, kv: s + TABLE[h, q - kv], 1),
}


@pytest.mark.parametrize("name", MODS)
def test_which_loads_need_a_kernel(name: str) -> None:
    mod, expected = MODS[name]
    assert loads(mod) == expected
    assert loads(mod, lse_gradient=True) >= max(expected, 1)


@given(st.lists(st.sampled_from(list(MODS)), min_size=1, max_size=3))
def test_a_load_that_is_left_out_has_no_gradient(names: list[str]) -> None:
    """Compare with autograd: the sum over a row of the gradient of each table's own copy."""
    tables = [TABLE.double().clone().requires_grad_() for _ in names]
    score = torch.randn(1, LENGTH, LENGTH, LENGTH, dtype=torch.float64)
    positions = torch.meshgrid(*map(torch.arange, score.shape), indexing="ij")
    kept = []
    for name, table in zip(names, tables, strict=True):
        mod, _ = MODS[name]
        own = type(mod)(mod.__code__, {**mod.__globals__, "TABLE": table})
        score = own(score, *positions)
        kept.append(own)
    weights = torch.randn(LENGTH, LENGTH, dtype=torch.float64)
    (torch.softmax(score, -1) @ weights).cos().sum().backward()

    def whole(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        for own in kept:
            s = own(s, b, h, q, kv)
        return s

    traced = trace(whole, "score")
    found = learned_loads(traced.root, [True] * len(traced.tensors), False)
    slots = {int(str(load.attr)) for load, _ in found}
    for slot, tensor in enumerate(traced.tensors):
        if slot not in slots:
            gradient = next(t.grad for t in tables if t is tensor)
            assert gradient.abs().max() < 1e-12
