"""Check ranges of integer operations against the results for all small arguments."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable

import pytest

from attnkit.graph import ir
from attnkit.graph.ir import BOOL, F32, I32, load
from attnkit.tracing.int_ranges import INT32, IntRanges, Range

X, Y = load(0, I32, []), load(1, I32, [])

# operations whose range is exact
EXACT: dict[str, Callable[..., int]] = {
    "neg": operator.neg, "abs": abs, "add": operator.add, "sub": operator.sub,
    "mul": operator.mul, "min": min, "max": max, "shl": operator.lshift, "shr": operator.rshift,
}  # fmt: skip
# operations whose range may be larger than need be
SOUND: dict[str, Callable[..., int]] = {
    "mod": operator.mod, "fdiv": operator.floordiv, "tdiv": lambda a, b: int(a / b),
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
}  # fmt: skip


def intervals(op: str, place: int) -> list[Range]:
    """Return intervals of small integers that argument number `place` of an operation may take."""
    low = 0 if place and op in ("shl", "shr") else -5
    pairs = itertools.combinations_with_replacement(range(low, 6), 2)
    if place and op in ("mod", "fdiv", "tdiv"):
        return [(a, b) for a, b in pairs if a > 0 or b < 0]
    return list(pairs)


def range_of(op: str, *arguments: Range) -> Range:
    """Return the range of an operation on values in the given ranges."""
    ranges, nodes = IntRanges(position=100), (X, Y)[: len(arguments)]
    for n, (low, high) in zip(nodes, arguments, strict=True):
        ranges.set(n, low, high)
    return ranges.of(ir.node(op, *nodes))


@pytest.mark.parametrize("op", [*EXACT, *SOUND])
def test_all_small_intervals(op: str) -> None:
    function = EXACT.get(op) or SOUND[op]
    places = range(1 if op in ("neg", "abs") else 2)
    for chosen in itertools.product(*(intervals(op, i) for i in places)):
        values = itertools.product(*(range(low, high + 1) for low, high in chosen))
        results = [function(*v) for v in values]
        low, high = range_of(op, *chosen)
        assert low <= min(results) <= max(results) <= high, chosen
        if op in EXACT:
            assert (low, high) == (min(results), max(results)), chosen


def test_bounds_that_the_comparison_with_small_integers_leaves_open() -> None:
    assert range_of("mod", (-100, 100), (3, 7)) == (0, 6)
    assert range_of("mod", (-100, 100), (-7, -3)) == (-6, 0)
    assert range_of("fdiv", (-100, 50), (3, 7)) == (-100, 50)
    assert range_of("fdiv", (-100, 50), (-1, 7)) == (-100, 100)
    assert range_of("fdiv", (3, 50), (-1, 7)) == (-50, 50)
    assert range_of("tdiv", (-50, -3), (-1, 7)) == (-50, 50)
    assert range_of("and", (-9, 9), (3, 7)) == (0, 7)
    assert range_of("and", (0, 3), (0, 7)) == (0, 3)
    assert range_of("or", (0, 5), (0, 9)) == (0, 15)
    assert range_of("xor", (-17, 5), (0, 9)) == (-32, 31)
    assert range_of("shl", (1, 1), (0, 40)) == (1, 1 << 31)
    assert range_of("shr", (-8, 8), (0, 32)) == INT32


def test_leaves() -> None:
    ranges = IntRanges(position=100)
    assert ranges.of(ir.arg("kv")) == (0, 100)
    assert ranges.of(ir.const(-7)) == (-7, -7)
    assert ranges.of(load(2, BOOL, [])) == (0, 1)
    assert ranges.of(load(2, I32, [])) == INT32
    assert ranges.of(ir.node("cast", load(2, F32, []), to=I32)) == INT32
    assert ranges.of(ir.node("cast", load(2, BOOL, []), to=I32)) == (0, 1)
    chosen = ir.node("where", load(2, BOOL, []), ir.arg("q"), ir.const(-7))
    assert ranges.of(chosen) == (-7, 100)
