"""Check affine forms of integers and what expressions depend on, against every position."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.affine import KV, Affine, Q, Side, Sides, comparable, is_diagonal_pair
from attnkit.graph.eval_torch import evaluate
from attnkit.graph.ir import BOOL, F32, I32, Node, arg, const, load, node

B, H = arg("b"), arg("h")
TENSORS = (torch.tensor([4, -1, 7, 0, 2]), torch.tensor([3, 3, -6, 1, 8, 0, 5]))
POSITIONS = {
    "b": torch.tensor([0, 1]).view(2, 1, 1, 1),
    "h": torch.arange(2).view(2, 1, 1),
    "q": torch.arange(5).view(5, 1),
    "kv": torch.arange(7),
}
ROW, COLUMN = load(0, I32, [Q]), load(1, I32, [KV])
LEAVES = [Q, KV, B, H, ROW, COLUMN, const(3), const(-2), const(0)]


def values(n: Node) -> Tensor:
    env = {name: at.to(torch.int32) for name, at in POSITIONS.items()}
    return evaluate([n], env, TENSORS)[0].expand(2, 2, 5, 7)


@st.composite
def sums(draw: st.DrawFn) -> Node:
    """Draw an integer of sums, products and a few operations that are no sums."""
    pool = list(LEAVES)
    for _ in range(draw(st.integers(1, 7))):
        a, b = draw(st.sampled_from(pool)), draw(st.sampled_from(pool))
        op = draw(st.sampled_from(["add", "add", "sub", "sub", "neg", "mul", "times", "min"]))
        if op == "mul":
            pool.append(node("mul", *draw(st.permutations([a, const(draw(st.integers(-3, 3)))]))))
        elif op == "times":
            pool.append(node("mul", a, draw(st.sampled_from([Q, H]))))
        else:
            pool.append(node(op, a) if op == "neg" else node(op, a, b))
    return pool[-1]


@st.composite
def expressions(draw: st.DrawFn) -> Node:
    """Draw a sum, or a comparison of two sums."""
    op = draw(st.sampled_from(["sum", "lt", "le", "eq"]))
    return draw(sums()) if op == "sum" else node(op, draw(sums()), draw(sums()))


@given(sums())
def test_an_affine_form_has_the_value(n: Node) -> None:
    form = Sides().affine(n)
    total = torch.tensor(form.offset)
    for term, coefficient in form.terms:
        assert coefficient
        assert term.op not in ("add", "sub", "neg", "const")
        total = total + coefficient * values(term)
    assert len(dict(form.terms)) == len(form.terms)
    assert torch.equal(total.expand(2, 2, 5, 7), values(n).long())


@given(expressions())
def test_what_an_expression_depends_on(n: Node) -> None:
    """The value is constant in a tile, along rows, along columns or along diagonals."""
    sides = Sides()
    side, found = sides.side(n), values(n)
    if side is Side.MIXED:
        assert {"q", "kv"} <= ir.reads(n)
        return
    alone = sides.alone(n)
    assert not ir.reads(alone) & {"q", "kv"} - {side.value if side is not Side.DIAGONAL else "q"}
    if side is Side.DIAGONAL:  # q of the form stands for q - kv
        q, kv = POSITIONS["q"], POSITIONS["kv"]
        env = {"b": POSITIONS["b"], "h": POSITIONS["h"], "q": q - kv, "kv": kv}
        env = {name: at.to(torch.int32) for name, at in env.items()}
        assert torch.equal(evaluate([alone], env, TENSORS)[0].expand(2, 2, 5, 7), found)
    else:
        assert torch.equal(values(alone), found)


D = node("sub", Q, KV)
DEPENDS = [
    (const(1), Side.CONST),
    (node("add", B, H), Side.CONST),
    (ROW, Side.Q),
    (node("min", Q, H), Side.Q),
    (node("add", COLUMN, KV), Side.KV),
    (D, Side.DIAGONAL),
    (node("min", D, const(3)), Side.DIAGONAL),
    (node("sub", node("mul", Q, const(2)), node("mul", const(2), KV)), Side.DIAGONAL),
    (node("sub", node("mul", Q, const(2)), KV), Side.MIXED),
    (node("add", Q, KV), Side.MIXED),
    (node("add", D, COLUMN), Side.MIXED),
    (node("add", D, KV), Side.Q),
    (node("sub", node("add", ROW, Q), node("add", ROW, KV)), Side.DIAGONAL),
    (node("min", ROW, COLUMN), Side.MIXED),
    (node("mul", Q, KV), Side.MIXED),
    (node("sub", node("mul", Q, KV), node("mul", Q, KV)), Side.CONST),
    (arg("score"), Side.MIXED),
    *((node(op, node("add", Q, KV), node("add", ROW, KV)), Side.Q) for op in ("lt", "le", "eq")),
    *((node(op, Q, KV), Side.DIAGONAL) for op in ("lt", "le", "eq")),
    *((node(op, ROW, COLUMN), Side.MIXED) for op in ("lt", "le", "eq")),
]


@pytest.mark.parametrize(("n", "side"), DEPENDS, ids=lambda x: str(getattr(x, "value", x)))
def test_known_sides(n: Node, side: Side) -> None:
    sides = Sides()
    assert sides.side(n) is side
    assert len(sides) == len(ir.topo(n))
    if side is Side.MIXED:
        with pytest.raises(AssertionError, match="mixed"):
            sides.alone(n)


def test_sides_of_several_nodes() -> None:
    sides = Sides()
    assert sides.join([]) is Side.CONST
    assert sides.join([B, const(2)]) is Side.CONST
    assert sides.join([B, Q, ROW]) is Side.Q
    assert sides.join([D, H]) is Side.DIAGONAL
    assert sides.join([D, Q]) is Side.MIXED
    assert sides.join([Q, KV]) is Side.MIXED


def test_large_numbers_are_not_expanded() -> None:
    """Neither a coefficient beyond 2^20 nor an offset beyond 2^40 enters a sum."""
    for factor, whole in ((1 << 20, False), ((1 << 20) + 1, True), (-(1 << 20) - 1, True)):
        n = node("mul", Q, const(factor))
        assert Sides().affine(n) == (Affine(((n, 1),), 0) if whole else Affine(((Q, factor),), 0))
    start = node("add", Q, const(1 << 30))
    for factor, whole in ((1 << 10, False), ((1 << 10) + 1, True), (-(1 << 10) - 1, True)):
        n = node("mul", start, const(factor))
        expanded = Affine(((Q, factor),), factor << 30)
        assert Sides().affine(n) == (Affine(((n, 1),), 0) if whole else expanded)


def test_parts_of_forms() -> None:
    form = Affine(((Q, 2), (KV, -1)), 5)
    assert form.scaled(-3) == Affine(((Q, -6), (KV, 3)), -15)
    assert form.scaled(0) == Affine((), 0)
    assert form.plus(Affine(((KV, 1), (H, 4)), 1)) == Affine(((Q, 2), (H, 4)), 6)
    assert Sides().difference(node("lt", KV, Q)) == Affine(((KV, 1), (Q, -1)), 0)
    assert is_diagonal_pair([(Q, 3), (KV, -3)])
    for terms in ([(Q, 3), (KV, -2)], [(Q, 3)], [(Q, 1), (KV, 1)], [(Q, 1), (KV, -1), (H, 1)]):
        assert not is_diagonal_pair(terms)
    assert all(comparable(node(op, Q, KV)) for op in ("lt", "le", "eq"))
    floats = [load(2, F32, [at]) for at in (Q, KV)]
    assert not comparable(node("lt", *floats))
    assert not comparable(node("and", node("lt", Q, KV), load(3, BOOL, [])))
    assert not comparable(node("add", Q, KV))
