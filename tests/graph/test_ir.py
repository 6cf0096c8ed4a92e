"""Check that nodes are interned and typed, and that they survive a round trip through text."""

from __future__ import annotations

import copy
import gc
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnkit.graph import ir
from attnkit.graph.ir import BOOL, F32, I32, Node, arg, const, load, node
from attnkit.graph.simplify import build


@st.composite
def graphs(draw: st.DrawFn) -> Node:
    """Draw a random f32 graph with constants, loads and shared subexpressions."""
    ints = [arg("q"), arg("kv"), arg("h"), const(draw(st.integers(-9, 9)))]
    floats = [arg("score"), const(draw(st.floats(width=32))), load(0, F32, [arg("h"), arg("q")])]
    for _ in range(draw(st.integers(0, 8))):
        a, b = draw(st.sampled_from(ints)), draw(st.sampled_from(ints))
        ints.append(build(draw(st.sampled_from(["add", "mul", "min", "sub"])), a, b))
        x, y = draw(st.sampled_from(floats)), draw(st.sampled_from(floats))
        floats.append(build(draw(st.sampled_from(["add", "mul", "max", "div"])), x, y))
        floats.append(build("where", build("lt", a, b), x, y))
    return build("add", floats[-1], ints[-1])


@given(graphs())
def test_text_reads_back_to_the_same_node(root: Node) -> None:
    assert ir.parse(ir.text(root)) is root
    assert pickle.loads(pickle.dumps(root)) is root
    assert copy.deepcopy(root) is root


@given(graphs(), graphs())
def test_equal_text_is_equal_graph(a: Node, b: Node) -> None:
    assert (ir.text(a) == ir.text(b)) == (a is b)
    assert ir.parse_all(ir.text(a, b)) == (a, b)


@given(graphs())
def test_topo_puts_arguments_first_and_each_node_once(root: Node) -> None:
    order = ir.topo(root)
    place = {n: i for i, n in enumerate(order)}
    assert len(place) == len(order)
    assert order[-1] is root
    assert all(place[a] < place[n] for n in order for a in n.args)


def test_deep_graphs_need_no_recursion() -> None:
    root = arg("score")
    for i in range(5000):
        root = build("add", root, const(float(i + 1)))
    assert len(ir.topo(root)) == 10001
    assert ir.parse(ir.text(root)) is root


def test_constants_are_told_apart() -> None:
    assert const(1) is const(1)
    assert len({const(1), const(1.0), const(True)}) == 3
    assert const(0.0) is not const(-0.0)
    assert const(math.nan) is const(float("nan"))
    assert const(math.inf) is not const(-math.inf)


def test_types_are_checked() -> None:
    with pytest.raises(AssertionError, match="argument types"):
        node("add", arg("q"), arg("score"))
    with pytest.raises(AssertionError, match="argument types"):
        node("exp", arg("q"))
    with pytest.raises(AssertionError, match="takes 2 arguments"):
        node("add", arg("q"))
    with pytest.raises(AssertionError, match="i32"):
        load(0, F32, [arg("score")])
    assert node("lt", arg("q"), arg("kv")).type == BOOL
    assert node("where", const(True), arg("q"), arg("kv")).type == I32


def test_nodes_are_immutable_and_collected() -> None:
    with pytest.raises(AttributeError):
        arg("q").op = "x"
    before = len(ir._table)
    kept = build("add", arg("q"), const(123_456))
    assert len(ir._table) > before
    del kept
    gc.collect()
    assert len(ir._table) <= before


def test_reads_slots_substitute_renumber() -> None:
    root = build("add", load(1, F32, [arg("h")]), load(0, F32, [arg("kv")]))
    assert ir.reads(root) == {"h", "kv"}
    assert ir.slots(root) == (0, 1)
    swapped = ir.renumber(root, lambda slot: 1 - slot)
    assert swapped is build("add", load(0, F32, [arg("h")]), load(1, F32, [arg("kv")]))
    moved = ir.substitute(root, {arg("h"): arg("b")})
    assert ir.reads(moved) == {"b", "kv"}


@pytest.mark.parametrize(
    ("root", "text"),
    [
        (build("mul", build("add", arg("q"), const(1)), arg("kv")), "(q + 1) * kv"),
        (build("sub", arg("q"), build("sub", arg("kv"), const(-2))), "q - (kv - -2)"),
        (build("eq", build("lt", arg("q"), arg("kv")), const(True)), "(q < kv) == True"),
        (build("and", build("le", arg("q"), arg("kv")), build("lt", arg("h"), arg("b"))),
         "(q <= kv) & (h < b)"),
        (build("not", build("lt", arg("q"), arg("kv"))), "~(q < kv)"),
        (build("neg", build("add", arg("q"), arg("kv"))), "-(q + kv)"),
        (build("exp", arg("q")), "exp(f32(q))"),
        (load(0, F32, []), "gain"),
        (load(1, F32, [arg("h"), arg("q")]), "t1[h, q]"),
    ],
)  # fmt: skip
def test_formula(root: Node, text: str) -> None:
    assert ir.formula(root, ["gain"]) == text


def test_formula_of_a_deep_shared_graph_stays_short() -> None:
    root = arg("score")
    for _ in range(64):
        root = build("mul", root, root)
    assert len(ir.formula(root)) < 5000
    assert "nodes>" in ir.formula(root)


Q, KV, SCORE = arg("q"), arg("kv"), arg("score")


@pytest.mark.parametrize(
    ("root", "text"),
    [
        (node("round", SCORE, attr="bfloat16"), "bfloat16(score)"),
        (node("cast", SCORE, to=I32), "i32(score)"),
        (node("cast", Q, to=BOOL), "bool(q)"),
        (node("wrap_abs", node("wrap_sub", Q, KV)), "abs(q - kv)"),
        (node("wrap_neg", node("wrap_mul", Q, KV)), "-(q * kv)"),
        (node("wrap_add", Q, node("wrap_add", KV, Q)), "q + (kv + q)"),
        (node("with_slope", SCORE, const(0.0), const(0.0)), "detach(score)"),
        (node("with_slope", SCORE, arg("scale"), SCORE), "with_slope(score, scale, score)"),
        (node("min", Q, KV), "min(q, kv)"),
        (node("shl", Q, node("shr", KV, const(2))), "q << (kv >> 2)"),
        (node("or", node("xor", Q, KV), node("and", Q, KV)), "q ^ kv | q & kv"),
        (node("fdiv", node("mod", Q, const(-3)), KV), "q % -3 // kv"),
        (node("pow", node("pow", SCORE, SCORE), SCORE), "score ** score ** score"),
        (node("div", SCORE, node("div", SCORE, const(-0.5))), "score / (score / -0.5)"),
        (node("neg", node("neg", Q)), "--q"),
        (node("not", node("not", load(1, BOOL, []))), "~~t1"),
        (node("lt", node("add", Q, const(1)), KV), "q + 1 < kv"),
        (node("eq", node("eq", Q, KV), node("le", Q, KV)), "(q == kv) == (q <= kv)"),
    ],
)
def test_formula_of_each_kind_of_operation(root: Node, text: str) -> None:
    assert ir.formula(root, ["gain"]) == text


def test_long_formulas_are_cut() -> None:
    root = SCORE
    for _ in range(12):
        root = node("add", root, root)
    text = ir.formula(root)
    assert text.startswith("<add of ") or "<add of " in text
    assert len(text) <= 2 * 2000 + 10
    line = SCORE
    for _ in range(249):
        line = node("add", line, SCORE)
    assert ir.formula(line) == " + ".join(["score"] * 250)
