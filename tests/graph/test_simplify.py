"""Check that every rewrite rule is exact on random values, including NaN and infinities."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnkit.graph import ir
from attnkit.graph.eval_torch import evaluate
from attnkit.graph.ir import BOOL, F32, I32, Node, Type, arg, const, node
from attnkit.graph.simplify import build, cast, negate, promote

FLOATS = torch.tensor(
    [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.75, 1e-30, -1e30, math.inf, -math.inf, math.nan]
)
INTS = torch.tensor([0, 1, -1, 2, -3, 4, 7, -8, 31, 100, -101, 46340], dtype=torch.int32)
X = {F32: arg("score"), I32: arg("q"), BOOL: node("lt", arg("q"), arg("h"))}
Y = {F32: arg("grad"), I32: arg("kv"), BOOL: node("lt", arg("kv"), arg("h"))}
CONSTS: dict[Type, list[Any]] = {
    F32: [0.0, -0.0, 1.0, -1.0, 2.0, 3.0, 4.0, 0.5, 0.25, -4.0, math.inf, math.nan],
    I32: [0, 1, -1, 2, 3, -4],
    BOOL: [True, False],
}


def values(root: Node) -> torch.Tensor:
    env = {
        "score": FLOATS.view(-1, 1),
        "grad": FLOATS.view(1, -1),
        "q": INTS.view(-1, 1),
        "kv": INTS.view(1, -1),
        "h": torch.tensor(1, dtype=torch.int32),
    }
    return evaluate([root], env, ())[0]


def assert_equal(plain: Node, rewritten: Node) -> None:
    a, b = torch.broadcast_tensors(values(plain), values(rewritten))
    assert a.dtype == b.dtype
    if a.dtype == torch.float32:
        torch.testing.assert_close(b, a, rtol=3e-7, atol=0, equal_nan=True)
    else:
        assert torch.equal(a, b)


def operands(letter: str) -> list[tuple[Type, ...]]:
    return {"n": [I32, F32], "i": [I32], "f": [F32], "b": [BOOL], "w": [I32, BOOL]}.get(
        letter, [I32, F32, BOOL]
    )


def test_a_value_without_gradient_loses_what_changes_gradients_inside() -> None:
    score, grad = ir.arg("score"), ir.arg("grad")
    inner = build("tanh", build("with_slope", build("sin", score), score, const(2.0)))
    plain = build("tanh", build("sin", score))
    assert build("with_slope", inner, grad, inner) is ir.node("with_slope", plain, grad, plain)
    assert build("with_slope", const(1.0), const(0.0), const(0.0)) is const(1.0)


def cases() -> list[tuple[str, tuple[Node, ...]]]:
    found = []
    for op, (letters, _) in ir.SIGNATURES.items():
        if op in ("cast", "round", "where") or len(letters) > 2:
            continue
        for kind in operands(letters[0]):
            if len(letters) == 1:
                inner = [X[kind]]
                if op in ("neg", "abs"):
                    inner += [build("neg", X[kind]), build("abs", X[kind])]
                found += [(op, (x,)) for x in inner]
                continue
            constants = [const(c) for c in CONSTS[kind]]
            found += [(op, (X[kind], c)) for c in constants]
            found += [(op, (c, Y[kind])) for c in constants]
            found += [(op, (X[kind], X[kind])), (op, (X[kind], Y[kind]))]
            found += [(op, (c, d)) for c in constants for d in constants[:4]]
    return found


def defined(op: str, args: tuple[Node, ...]) -> bool:
    """Return whether an operation is defined: no integer division by zero, shift counts 0 to 7."""
    if op in ("fdiv", "mod", "tdiv") and args[0].type == I32:
        return bool((values(args[1]) != 0).all())
    if op in ("shl", "shr"):
        return bool(((values(args[1]) >= 0) & (values(args[1]) < 8)).all())
    return True


@pytest.mark.parametrize("op", sorted({op for op, _ in cases()}))
def test_rules_of_an_operation(op: str) -> None:
    checked = 0
    for name, args in cases():
        if name == op and defined(op, args):
            assert_equal(node(op, *args), build(op, *args))
            checked += 1
    assert checked


@pytest.mark.parametrize("kind", [I32, F32, BOOL])
def test_where(kind: Type) -> None:
    condition = X[BOOL]
    for c in (condition, build("not", condition), const(True), const(False)):
        for a, b in ((X[kind], Y[kind]), (X[kind], X[kind]), (const(CONSTS[kind][0]), Y[kind])):
            assert_equal(node("where", c, a, b), build("where", c, a, b))


@pytest.mark.parametrize("op", ["gt", "ge", "ne"])
def test_derived_comparisons(op: str) -> None:
    for kind in (I32, F32):
        found = values(build(op, X[kind], Y[kind]))
        expected = getattr(torch, op)(values(X[kind]), values(Y[kind]))
        assert torch.equal(found, expected)


@given(st.sampled_from([I32, F32, BOOL]), st.sampled_from([I32, F32, BOOL]), st.data())
def test_casts_of_constants(source: Type, to: Type, data: st.DataObject) -> None:
    value = data.draw(st.sampled_from(CONSTS[source]))
    if source == F32 and to == I32 and not math.isfinite(value):
        return  # undefined in torch too
    plain = const(value) if source == to else node("cast", const(value), to=to)
    assert_equal(plain, cast(const(value), to))


def test_promotion_is_that_of_torch_scalars() -> None:
    kinds = {BOOL: torch.bool, I32: torch.int32, F32: torch.float32}
    for a in kinds:
        for b in kinds:
            (x, y) = promote(X[a], Y[b])
            assert kinds[x.type] == kinds[y.type] == torch.promote_types(kinds[a], kinds[b])


_Q, _KV, _SCORE, _TRUE, _FALSE = arg("q"), arg("kv"), arg("score"), const(True), const(False)
_NEAR = build("lt", _Q, _KV)
# Expressions that would stay correct but larger if their rule were dropped.
SMALLER: list[tuple[str, tuple[Node, ...], Node]] = [
    ("add", (const(0), _Q), _Q),
    ("sub", (_Q, const(0)), _Q),
    ("mul", (const(1), _SCORE), _SCORE),
    ("mul", (_Q, const(0)), const(0)),
    ("mul", (const(0), _Q), const(0)),
    ("div", (_SCORE, const(1.0)), _SCORE),
    ("fdiv", (_Q, const(1)), _Q),
    ("tdiv", (_Q, const(1)), _Q),
    ("mod", (_Q, const(1)), const(0)),
    ("min", (_SCORE, _SCORE), _SCORE),
    ("max", (_Q, _Q), _Q),
    ("and", (_TRUE, _NEAR), _NEAR),
    ("and", (_NEAR, _FALSE), _FALSE),
    ("and", (_NEAR, _NEAR), _NEAR),
    ("or", (_FALSE, _NEAR), _NEAR),
    ("or", (_NEAR, _TRUE), _TRUE),
    ("or", (_NEAR, _NEAR), _NEAR),
    ("xor", (_FALSE, _NEAR), _NEAR),
    ("xor", (_NEAR, _TRUE), build("not", _NEAR)),
    ("neg", (build("neg", _SCORE),), _SCORE),
    ("abs", (build("abs", _SCORE),), build("abs", _SCORE)),
    ("abs", (build("neg", _SCORE),), build("abs", _SCORE)),
    ("le", (_Q, _Q), _TRUE),
    ("eq", (_Q, _Q), _TRUE),
    ("lt", (_SCORE, _SCORE), _FALSE),
    ("where", (_TRUE, _SCORE, _Q), _SCORE),
    ("where", (_NEAR, _SCORE, _SCORE), _SCORE),
    ("where", (build("not", _NEAR), _Q, _KV), build("where", _NEAR, _KV, _Q)),
    ("pow", (_SCORE, const(0.0)), const(1.0)),
    ("pow", (_SCORE, const(1.0)), _SCORE),
    ("pow", (_SCORE, const(-1.0)), build("div", const(1.0), _SCORE)),
    ("pow", (const(4.0), _SCORE), build("exp2", build("mul", _SCORE, const(2.0)))),
]


@pytest.mark.parametrize(("op", "args", "expected"), SMALLER, ids=lambda x: str(x))
def test_each_rule_makes_it_smaller(op: str, args: tuple[Node, ...], expected: Node) -> None:
    assert build(op, *args) is expected


def test_normal_form_is_small() -> None:
    q, kv, score = arg("q"), arg("kv"), arg("score")
    assert build("add", q, const(0)) is q
    assert build("mul", score, const(1)) is score
    assert build("sub", q, q) is const(0)
    assert build("div", score, const(8.0)) is build("mul", score, const(0.125))
    assert build("not", build("not", build("lt", q, kv))) is build("lt", q, kv)
    assert build("and", build("lt", q, kv), const(True)) is build("lt", q, kv)
    assert build("add", const(3), const(4)) is const(7)
    assert build("pow", score, const(3)).op == "mul"
    assert build("mul", const(2**30), const(4)).op == "mul"  # would leave int32: not folded


def test_a_negated_constant_is_a_constant() -> None:
    assert negate(const(True)) is const(False)
    assert negate(const(False)) is const(True)
