"""Check that all indices that may be negative are found, from the lengths alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from attnkit.codegen.nonnegative import wrapping
from attnkit.graph import ir
from attnkit.graph.eval_torch import evaluate, positions
from attnkit.graph.ir import Node
from attnkit.testing import Limits, mask_mods, score_mods
from attnkit.tracing.tracer import Traced, trace

CPU = torch.device("cpu")
LIMITS = Limits(q_len=(1, 30), kv_len=(1, 30))
TABLE = torch.randn(64)
NUMBER = torch.tensor(5)
NAMES = ("b", "h", "q", "kv")


def loads(traced: Traced) -> list[Node]:
    return [n for n in ir.topo(traced.root) if n.op == "load" and n.args]


def of(mod: Callable[..., Any], q_len: int = 30, kv_len: int = 30) -> list[bool]:
    """Return for each load of a score_mod whether its index may be negative and wrap."""
    traced = trace(mod, "score")
    found = wrapping([traced.root], {"b": 2, "h": 4, "q": q_len, "kv": kv_len})
    return [n in found for n in loads(traced)]


@given(
    (mask_mods(LIMITS) | score_mods(LIMITS)),
    st.tuples(st.integers(1, 3), st.integers(1, 8), st.integers(1, 30), st.integers(1, 30)),
)
def test_no_negative_index_is_missed(
    function: Callable[..., Any], shape: tuple[int, int, int, int]
) -> None:
    traced = trace(function, "score" if function.__name__ == "score_mod" else "mask")
    found = wrapping([traced.root], dict(zip(NAMES, shape, strict=True)))
    env = {**positions(torch.Size(shape), CPU), "score": torch.zeros(shape)}
    for n in loads(traced):
        for index in evaluate(n.args, env, traced.tensors, torch.float32):
            assert n in found or index.min() >= 0


def test_what_the_lengths_prove() -> None:
    assert (
        of(lambda s, b, h, q, kv: s + TABLE[q] + TABLE[kv // 2] + TABLE[h * 3 + b]) == [False] * 3
    )
    assert of(lambda s, b, h, q, kv: s + TABLE[q - kv + 29] + TABLE[q - kv + 28]) == [False, True]
    assert of(lambda s, b, h, q, kv: s + TABLE[(q - kv).abs()] + TABLE[(q - kv) % 7]) == [False] * 2
    assert of(lambda s, b, h, q, kv: s + TABLE[(q - kv).clamp(min=0)]) == [False]


def test_negative_divisors() -> None:
    assert of(lambda s, b, h, q, kv: s + TABLE[q // -3] + TABLE[q % -7]) == [True] * 2
    assert of(lambda s, b, h, q, kv: s + TABLE[(q // -3).abs()]) == [True]  # no range, so perhaps
    assert of(lambda s, b, h, q, kv: s + TABLE[(q % -7).clamp(min=0)]) == [False]


def test_a_captured_number_may_be_anything() -> None:
    assert of(lambda s, b, h, q, kv: s + TABLE[q + NUMBER]) == [True]
    assert of(lambda s, b, h, q, kv: s + TABLE[torch.maximum(NUMBER, q)]) == [False]
    assert of(lambda s, b, h, q, kv: torch.where(kv < NUMBER, s, 0.0)) == []
