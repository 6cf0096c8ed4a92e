"""Check that a graph with unknown numbers becomes that of a trace with the numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnkit.errors import BoundsError, TraceError
from attnkit.graph import ir
from attnkit.graph.eval_torch import evaluate
from attnkit.tracing.numbers import with_numbers
from attnkit.tracing.tracer import Kind, Traced, trace

INTS = [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod]
INTS += [operator.lt, operator.ge, operator.eq, torch.minimum, torch.maximum]
FLOATS = [*INTS, operator.truediv, operator.pow]


def swapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y: function(y, x)


def unknown(build: Callable[[Any, Any], Any], number: float, kind: Kind) -> Traced:
    """Trace `build(position or score, number)` as if `number` were not known."""
    if kind == "score":
        return trace(
            lambda s, b, h, q, kv: build(s, s.tracer.unknown_number(0, type(number))), kind
        )
    return trace(lambda b, h, q, kv: build(q, q.tracer.unknown_number(0, type(number))) > 1, kind)


def known(build: Callable[[Any, Any], Any], number: float, kind: Kind) -> Traced:
    if kind == "score":
        return trace(lambda s, b, h, q, kv: build(s, number), kind)
    return trace(lambda b, h, q, kv: build(q, number) > 1, kind)


@given(
    st.sampled_from(INTS[:7]),
    st.booleans(),
    st.integers(1, 1000) | st.integers(-1000, -1),
    st.sampled_from(["score", "mask"]),
)
def test_ints(op: Any, turned: bool, number: int, kind: Kind) -> None:
    build = swapped(op) if turned else op
    if kind == "score":
        full = lambda x, n: torch.where(build(x, n) > 0, x, 1.0)
    else:
        full = lambda x, n: torch.where(build(x + 1, n) > 0, x, 1)
    inserted = with_numbers(unknown(full, number, kind).root, [number], [])
    assert inserted is known(full, number, kind).root


PRODUCTS: list[Callable[[Any, Any], Any]] = [
    lambda x, n: x * n + x,
    lambda x, n: x * n - x,
    lambda x, n: x - x * n,
    lambda x, n: -(x * n),
    lambda x, n: x * n * 2,
]


@pytest.mark.parametrize("build", PRODUCTS)
def test_products_that_may_wrap_until_the_number_is_known(build: Any) -> None:
    root = unknown(build, 5, "mask").root
    assert any(n.op.startswith("wrap_") for n in ir.topo(root))
    for number, wraps in ((5, False), (-3, False), (2**30, True)):
        inserted = with_numbers(root, [number], [])
        assert any(n.op.startswith("wrap_") for n in ir.topo(inserted)) == wraps
        if not wraps:
            assert inserted is known(build, number, "mask").root


@given(st.sampled_from(FLOATS[-2:] + FLOATS[:5]), st.booleans(), st.floats(-1e3, 1e3))
def test_floats_in_a_score(op: Any, turned: bool, number: float) -> None:
    build = swapped(op) if turned else op
    full = lambda x, n: torch.where(build(x, n) > 0, x, 1.0)
    inserted = with_numbers(unknown(full, number, "score").root, [], [number])
    assert inserted is known(full, number, "score").root


@given(
    st.sampled_from([operator.mul, operator.add, operator.truediv, operator.pow]),
    st.floats(0.01, 100),
    st.integers(1, 10_000),
)
def test_floats_in_a_mask(op: Any, number: float, position: int) -> None:
    """A mask rounds each float to its dtype; the graphs may differ in roundings without effect."""
    roots = [
        with_numbers(unknown(op, number, "mask").root, [], [number]),
        known(op, number, "mask").root,
    ]
    env = {"q": torch.tensor(position, dtype=torch.int32)}
    values = [evaluate([root], env, (), torch.float32)[0] for root in roots]
    assert torch.equal(*values)


def test_an_operation_that_depends_on_the_value_refuses_an_unknown_number() -> None:
    for build in (operator.rshift, operator.lshift, lambda q, n: q**n, lambda q, n: q[:n]):
        with pytest.raises(TraceError):
            unknown(build, 3, "mask")


def test_text_of_a_number() -> None:
    root = unknown(operator.mul, 2.5, "score").root
    assert ir.parse(ir.text(root)) is root
    assert ir.formula(root) == "score * f32_0"


def test_large_ints() -> None:
    score = unknown(operator.mul, 2, "score").root
    assert with_numbers(score, [2**40], []).args[1].attr == 2.0**40  # a float
    mask = trace(lambda b, h, q, kv: q < q.tracer.unknown_number(0, int), "mask").root
    with pytest.raises(BoundsError, match="does not fit into 32 bits"):
        with_numbers(mask, [2**40], [])


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1])
def test_a_number_alone_must_fit_into_32_bits(number: int) -> None:
    root = ir.number(0, ir.I32)
    with pytest.raises(BoundsError, match=f"the integer {number} "):
        with_numbers(root, [number], [])
    inside = number - 1 if number > 0 else number + 1
    assert with_numbers(root, [inside], []) is ir.const(inside)
    as_float = ir.node("cast", root, to=ir.F32)
    assert with_numbers(as_float, [number], []) is ir.const(float(number))
    assert with_numbers(ir.number(1, ir.F32), [], [0.5, 1.5]) is ir.const(1.5)


def test_rounded_numbers() -> None:
    rounded = ir.node("round", ir.number(0, ir.F32), attr="bfloat16")
    assert with_numbers(rounded, [], [1.001]) is ir.const(1.0)
    kept = ir.node("round", ir.arg("score"), attr="bfloat16")
    assert with_numbers(kept, [], []) is kept


@pytest.mark.parametrize(("op", "number"), [("wrap_add", -(2**31)), ("wrap_sub", 2**31 - 1)])
def test_operations_up_to_the_ends_of_int32_do_not_wrap(op: str, number: int) -> None:
    step = ir.node("where", ir.node("lt", ir.arg("q"), ir.arg("kv")), ir.const(0), ir.const(1))
    root = ir.node(op, ir.number(0, ir.I32), step)
    assert with_numbers(root, [number], []).op == op.removeprefix("wrap_")
    other = ir.node({"wrap_add": "wrap_sub", "wrap_sub": "wrap_add"}[op], *root.args)
    assert with_numbers(other, [number], []).op.startswith("wrap_")
