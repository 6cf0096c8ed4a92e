"""Check that each value gets the lowest level, and that splitting a linear score is exact."""

from __future__ import annotations

import functools
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from attnkit.graph import ir
from attnkit.graph.eval_torch import evaluate
from attnkit.graph.ir import F32, I32, Node, arg, const, load
from attnkit.graph.simplify import build, cast
from attnkit.graph.staging import (
    Level,
    column_axis,
    index_level,
    index_repeats,
    is_relative,
    level_of,
    linear,
    pair_load,
    reads_along_kv,
    reads_pair,
    reads_rows,
    stage,
)
from attnkit.tracing.tracer import trace

SLOPES = torch.linspace(0.1, 1.0, 4)
TABLE = torch.randn(4, 64)


def root_of(function: Any) -> Node:
    return trace(function, "score").root


def test_levels_of_a_mod() -> None:
    staging = stage(
        root_of(lambda s, b, h, q, kv: s * (SLOPES[h] + 1) + TABLE[h, q] + TABLE[h, kv] + (kv - q))
    )
    formulas = {level: [ir.formula(n) for n in nodes] for level, nodes in staging.hoisted.items()}
    assert formulas == {
        Level.HEAD: ["t0[h] + 1.0"],
        Level.ROW: ["t1[h, q]"],
        Level.COLUMN: ["t1[h, kv]"],
        Level.RELATIVE: ["f32(kv - q)"],
    }
    assert staging.levels[staging.root] is Level.ELEMENT
    assert staging.operations(Level.CONSTANT) == 0
    assert staging.operations(Level.HEAD) == 2
    assert staging.operations(Level.RELATIVE) == 2
    assert staging.operations(Level.ELEMENT) == 4
    assert "column" in str(staging)


def test_loads_of_a_row_and_a_column() -> None:
    """The last two indices are a row's and a column's, in any order; the others a head's."""
    h, q, kv = arg("h"), arg("q"), arg("kv")
    types = [load(1, I32, [position]) for position in (q, kv)]
    for index in ([h, *types], types, types[::-1], [const(0), arg("b"), kv, q]):
        assert reads_pair(load(0, F32, index))
        assert column_axis(load(0, F32, index)) == index.index(kv if kv in index else types[1])
    assert not reads_pair(load(0, I32, [h, *types]))
    for index in (
        [kv],
        [q, q],
        [h, q],
        [q, h, kv],
        [q, kv, h],
        [build("sub", q, kv), kv],
        [q, *types],
    ):
        assert not reads_pair(load(0, F32, index))


@given(st.frozensets(st.sampled_from(["b", "h", "scale", "q", "kv", "score", "grad"])))
def test_level_is_the_smallest_that_knows(names: frozenset[str]) -> None:
    # squares, so that no difference q - kv occurs
    squares = [build("mul", cast(arg(n), F32), cast(arg(n), F32)) for n in sorted(names)]
    root = functools.reduce(lambda a, b: build("mul", a, b), squares, load(0, F32, []))
    known = {
        Level.HEAD: "b h scale",
        Level.ROW: "b h scale q",
        Level.COLUMN: "b h scale kv",
    }
    fits = [level for level, text in known.items() if names <= frozenset(text.split())]
    assert level_of(root) is (fits[0] if fits else Level.ELEMENT)


@given(st.integers(-3, 3), st.integers(-3, 3), st.sampled_from(["sub", "add"]))
def test_a_distance_is_relative(i: int, j: int, op: str) -> None:
    q, kv = (build("add", arg(n), const(k)) for n, k in (("q", i), ("kv", j)))
    level = level_of(cast(build(op, q, kv), F32))
    assert level is (Level.RELATIVE if op == "sub" else Level.ELEMENT)


def test_a_comparison_of_positions_is_relative() -> None:
    """A comparison of q and kv is relative if it depends on q - kv alone.

    Its two sides are not relative by themselves, and a sum of positions is not a distance.
    """
    q, kv = arg("q"), arg("kv")
    for op in ("lt", "le", "eq"):
        assert is_relative(build(op, q, kv))
        assert is_relative(build(op, build("add", q, const(3)), kv))
        assert not is_relative(build(op, q, build("neg", kv)))
        assert not is_relative(build(op, q, const(3)))
        assert not is_relative(build(op, build("add", q, q), kv))


def test_level_of_an_index() -> None:
    b, h, q, kv = (arg(n) for n in ("b", "h", "q", "kv"))
    distance = build("sub", q, kv)
    for index, level in (
        ([], Level.HEAD),
        ([const(3)], Level.HEAD),
        ([b, h], Level.HEAD),
        ([h, q], Level.ROW),
        ([kv, const(0)], Level.COLUMN),
        ([h, distance], Level.RELATIVE),
        ([q, kv], Level.ELEMENT),
        ([q, distance], Level.ELEMENT),
    ):
        assert index_level(load(0, F32, index)) is level


def test_tables_of_pairs() -> None:
    """The last two indices belong to a row and a column, and nothing else reads the tensor."""
    h, q, kv = arg("h"), arg("q"), arg("kv")
    row, column = load(0, I32, [q]), load(1, I32, [kv])
    table = load(2, F32, [h, row, column])
    assert pair_load([build("add", arg("score"), table)]) is table
    assert column_axis(table) == 2
    other = load(2, F32, [column, row])
    assert pair_load([other]) is other
    assert column_axis(other) == 0
    assert pair_load([table, other]) is None
    for indices in ([row], [column], [row, q], [row, column, h], [build("sub", q, kv), column]):
        assert pair_load([load(2, F32, indices)]) is None
    assert pair_load([load(2, I32, [row, column])]) is None


def test_which_indices_repeat() -> None:
    h, q, kv = (arg(n) for n in ("h", "q", "kv"))
    distance = build("sub", q, kv)
    half = build("max", distance, const(2))
    row, column = load(1, I32, [q]), load(1, I32, [kv])
    for index, repeats in (
        ([h, distance], False),
        ([h, half], True),
        ([load(1, I32, [distance])], True),
        ([q, kv], False),
        ([distance, q], False),
        ([build("add", q, kv), distance], False),
        ([build("add", q, kv)], True),
        ([row, column], True),
        ([q, column], True),
        ([q, column, kv], False),
    ):
        assert index_repeats(load(0, F32, index)) is repeats


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(-2, 2)), min_size=1, max_size=3))
def test_an_index_that_does_not_repeat_is_injective(axes: list[tuple[int, int]]) -> None:
    q, kv = arg("q"), arg("kv")

    def total(a: int, b: int) -> Node:
        parts = [q if a > 0 else build("neg", q)] * abs(a) + [
            kv if b > 0 else build("neg", kv)
        ] * abs(b)
        return functools.reduce(lambda x, y: build("add", x, y), parts, const(0))

    index = load(0, F32, [total(a, b) for a, b in axes])
    if index_level(index) is not Level.ELEMENT or index_repeats(index):
        return
    places = {tuple(a * i + b * j for a, b in axes) for i in range(-4, 5) for j in range(-4, 5)}
    assert len(places) == 81


@st.composite
def linear_scores(draw: st.DrawFn) -> Node:
    free = [load(0, F32, [arg("h")]), build("add", arg("q"), const(0.5)), const(-1.5)]
    root = arg("score")
    for _ in range(draw(st.integers(0, 6))):
        op = draw(st.sampled_from(["add", "sub", "mul", "div", "neg", "rsub", "rmul", "self"]))
        other = draw(st.sampled_from(free))
        if op == "neg":
            root = build("neg", root)
        elif op == "self":
            root = build("add", root, arg("score"))
        elif op in ("rsub", "rmul"):
            root = build(op[1:], other, root)
        else:
            root = build(op, root, other)
    return root


@given(linear_scores())
def test_linear_split_has_the_same_value(root: Node) -> None:
    split = linear(root)
    assert split is not None
    assert "score" not in ir.reads(split.factor, split.bias)
    env = {
        "score": torch.randn(5, 1, 1, dtype=torch.float64),
        "h": torch.arange(4, dtype=torch.int32).view(4, 1),
        "q": torch.arange(3, dtype=torch.int32),
    }
    again = build("add", build("mul", arg("score"), split.factor), split.bias)
    a, b = evaluate([root, again], env, [SLOPES], torch.float64)
    torch.testing.assert_close(*torch.broadcast_tensors(a, b), rtol=1e-12, atol=1e-12)


def test_what_is_not_linear() -> None:
    for function in (
        lambda s, b, h, q, kv: torch.tanh(s),
        lambda s, b, h, q, kv: s * s,
        lambda s, b, h, q, kv: 1 / s,
        lambda s, b, h, q, kv: torch.where(q >= kv, s, -1.0),  # a NaN score must not pass
        lambda s, b, h, q, kv: SLOPES[h] + 0 * q,
    ):
        assert linear(root_of(function)) is None


def test_alibi_is_additive() -> None:
    split = linear(root_of(lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q)))
    assert split is not None
    assert split.factor is const(1.0)
    assert ir.formula(split.bias) == "t0[h] * f32(kv - q)"


def test_loads_along_kv() -> None:
    q, kv, h = arg("q"), arg("kv"), arg("h")
    later, half = build("add", kv, const(3)), build("min", kv, const(2))
    for index, along in (
        ([h, q, kv], True),
        ([q, later], True),
        ([build("sub", kv, q)], True),
        ([kv, q], False),
        ([kv, kv], False),
        ([build("neg", kv)], False),
        ([q, half], False),
        ([load(1, I32, [q]), kv], False),
        ([], False),
    ):
        assert reads_along_kv(load(0, F32, index)) is along


def test_loads_of_rows() -> None:
    q, kv, h = arg("q"), arg("kv"), arg("h")
    for index, rows in (
        ([h, q, kv], True),
        ([build("neg", q), kv], True),
        ([kv], True),
        ([q, build("add", kv, const(4))], False),
        ([build("sub", kv, q)], False),
        ([load(1, I32, [q]), kv], False),
        ([build("mul", q, const(2)), kv], False),
        ([kv, kv], False),
        ([kv, q], False),
        ([], False),
    ):
        assert reads_rows(load(0, F32, index)) is rows
