"""Check that graphs which read numbers from tables mean what the graphs with constants mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnkit import masks, mods
from attnkit.codegen.load_indices import data_bound
from attnkit.codegen.nonnegative import wrapping
from attnkit.codegen.number_tables import NumberTables, numbers_of, with_tables
from attnkit.graph import ir
from attnkit.graph.adjoint import adjoint
from attnkit.graph.eval_torch import evaluate
from attnkit.graph.ir import Node
from attnkit.graph.staging import Level, level_of
from attnkit.testing.expressions import mask_mods, score_mods
from attnkit.testing.limits import Limits
from attnkit.tracing.tracer import Kind, trace

N = 12
SMALL = Limits((1, N), (1, N), (1, 2), (1, 3))
SIZES = {"b": 2, "h": 3, "q": N, "kv": N}
BIAS = torch.linspace(-1.0, 1.0, 2 * N)

floats = st.floats(2.0**-99, 2.0**99) | st.floats(-100.0, -0.01)
numbers = floats.filter(lambda x: x != 1.0)  # x * 1 is x


def grid() -> dict[str, Tensor]:
    """Return all positions, a score for each, and the gradient of each modified score."""
    random = torch.Generator().manual_seed(0)
    env = {
        name: torch.arange(n, dtype=torch.int32).view([n if axis == at else 1 for axis in range(4)])
        for at, (name, n) in enumerate(SIZES.items())
    }
    for name in ("score", "grad"):
        env[name] = torch.randn(tuple(SIZES.values()), dtype=torch.float64, generator=random)
    return env


GRID = grid()


def lifted(function: Any, kind: Kind = "score") -> tuple[Node, NumberTables, tuple[Tensor, ...]]:
    """Return a graph, the graph that reads all its numbers, and the captured tensors."""
    traced = trace(function, kind)
    found = with_tables([traced.root], numbers_of([traced.root]), len(traced.tensors))
    return traced.root, found, traced.tensors


def contents(found: NumberTables) -> list[Tensor]:
    """Return the tables of numbers that the graph reads, in float64."""
    ints = torch.tensor(found.ints, dtype=torch.int32)
    tables = [torch.tensor(found.floats, dtype=torch.float64), ints]
    return [t for t in tables if t.numel()]


def meaning(root: Node, tensors: Any) -> Tensor:
    data = [t.detach() for t in tensors]
    return evaluate([root], GRID, data, torch.float64)[0]


def check(function: Any, kind: Kind) -> None:
    """Check that numbers in tables give the bits that constants give; divisors have a test below."""
    traced = trace(function, kind)
    chosen = [n for n in numbers_of([traced.root]) if not n.inverted]
    found = with_tables([traced.root], chosen, len(traced.tensors))
    root, tensors = found.roots[0], [*traced.tensors, *contents(found)]
    assert root is not None
    torch.testing.assert_close(
        meaning(root, tensors), meaning(traced.root, traced.tensors), rtol=0, atol=0, equal_nan=True
    )
    if kind == "score":
        ours, theirs = adjoint(root).dscore, adjoint(traced.root).dscore
        size = 1 + meaning(theirs, traced.tensors).abs().nan_to_num().max()
        torch.testing.assert_close(
            meaning(ours, tensors), meaning(theirs, traced.tensors), rtol=1e-12,
            atol=1e-13 * float(size), equal_nan=True,
        )  # fmt: skip


@given(score_mods(SMALL))
def test_scores_and_derivatives_are_equal(function: Any) -> None:
    check(function, "score")


@given(mask_mods(SMALL))
def test_masks_are_equal(function: Any) -> None:
    check(function, "mask")


@given(numbers, numbers)
def test_a_divisor_is_a_factor(by: float, cap: float) -> None:
    root, found, tensors = lifted(lambda s, b, h, q, kv: torch.tanh(s / by) * cap)
    (made,) = found.roots
    assert made is not None
    assert "div" not in {n.op for n in ir.topo(made)}
    ours, theirs = (meaning(r, (*tensors, *contents(found))) for r in (made, root))
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=0)


FAMILIES: dict[str, tuple[Kind, Callable[[float], Any]]] = {
    "softcap": ("score", lambda x: mods.softcap(abs(x))),
    "temperature": ("score", lambda x: lambda s, b, h, q, kv: s * x),
    "shift": ("score", lambda x: mods.alibi(2).shift(q=1 + int(abs(x)) % 1000)),
    "fill": ("score", lambda x: lambda s, b, h, q, kv: torch.where(kv < 3, s, x)),
    "entry": ("score", lambda x: lambda s, b, h, q, kv: s + BIAS[1 + int(abs(x)) % 9]),
    "window": ("mask", lambda x: masks.sliding_window(2 + int(abs(x)) % 1000)),
    "slope": ("mask", lambda x: lambda b, h, q, kv: kv * x < q + h),
}


@pytest.mark.parametrize("name", FAMILIES)
@given(st.data())
@settings(max_examples=10)
def test_all_values_have_one_graph(name: str, data: st.DataObject) -> None:
    kind, make = FAMILIES[name]
    graphs = {lifted(make(data.draw(numbers)), kind)[1].roots for _ in range(3)}
    assert len(graphs) == 1


def test_numbers_are_known_before_rows_and_columns() -> None:
    _, found, _ = lifted(mods.softcap(5.0))
    loads = [n for root in found.roots if root for n in ir.topo(root) if n.op == "load"]
    assert [level_of(n) for n in loads] == [Level.HEAD, Level.HEAD]


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, kv: s**2.5,
        lambda s, b, h, q, kv: s + 0.3 ** (q - kv),
        lambda s, b, h, q, kv: s + (q // 3 + kv % 5),
        lambda s, b, h, q, kv: s % 2.5,
        lambda s, b, h, q, kv: s + ((q >> 2) ^ 6) + (kv & 12) + (h << 3),
        lambda s, b, h, q, kv: torch.atan2(s, s * math.inf),
        lambda s, b, h, q, kv: s * 2.0**110 + 2.0**-110,
        lambda s, b, h, q, kv: torch.where(kv < q, s + 0, -math.inf),
        lambda s, b, h, q, kv: torch.where(kv <= q, -s, math.nan),
    ],
)
def test_constants_that_stay(function: Any) -> None:
    root, found, _ = lifted(function)
    assert found.roots == (root,)
    assert (found.floats, found.ints) == ((), ())


def test_chosen_numbers_are_replaced_and_others_stay() -> None:
    root = trace(lambda s, b, h, q, kv: torch.tanh(s / 5.0) * 5.0 + 5.0, "score").root
    divisor, cap, shift = numbers_of([root])
    assert [divisor.value, cap.value, shift.value] == [0.2, 5.0, 5.0]
    found = with_tables([root, None, root], [cap], 4)
    made, nothing, same = found.roots
    assert made is not None
    assert ir.formula(made) == "tanh(score / 5.0) * t4[0] + 5.0"
    assert nothing is None
    assert same is made


def test_a_difference_with_an_integer_is_a_sum() -> None:
    found = [
        lifted(f)[1].roots
        for f in (lambda s, b, h, q, kv: s + (q - 3), lambda s, b, h, q, kv: s + (q + 3))
    ]
    assert found[0] == found[1]


def test_a_known_number_proves_indices() -> None:
    """An index with a number from a table is neither wrapped nor clamped if it stays inside."""
    _, found, tensors = lifted(lambda s, b, h, q, kv: s + BIAS[q - kv + 11] + BIAS[kv - 12])
    roots = [r for r in found.roots if r is not None]
    first, second = (n for n in ir.topo(*roots) if n.op == "load" and ir.reads(n))
    shapes = [t.shape for t in (*tensors, *contents(found))]
    assert wrapping(roots, SIZES, dict(found.known)) == {second}
    assert wrapping(roots, SIZES) == {first, second}
    assert data_bound(roots, SIZES, shapes, dict(found.known)) == frozenset()
    assert data_bound(roots, SIZES, shapes) == {first, second}
