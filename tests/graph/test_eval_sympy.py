"""Compare sympy with torch for every operation, and its derivatives with the adjoint."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import sympy
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attnkit.graph import eval_sympy, ir
from attnkit.graph.adjoint import adjoint
from attnkit.graph.eval_torch import evaluate
from attnkit.graph.ir import BOOL, F32, I32, Node, arg, const, load
from attnkit.graph.simplify import build, cast

score, h, q, kv = (arg(name) for name in ("score", "h", "q", "kv"))
slope = load(0, F32, [h])
bias = load(1, F32, [q, kv])
NAMES = ["slope", "bias"]
SLOPES = torch.tensor([0.5, -0.25, 0.75], dtype=torch.float64)
BIASES = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(4, 5)

MEANINGS = {
    "slope": lambda i: float(SLOPES[int(i)]),
    "bias": lambda i, j: float(BIASES[int(i), int(j)]),
    "trunc": lambda x: float(math.trunc(x)),
    "bitand": lambda a, b: int(a) & int(b),
    "bitor": lambda a, b: int(a) | int(b),
    "bitxor": lambda a, b: int(a) ^ int(b),
    "shl": lambda a, b: int(a) << int(b),
    "shr": lambda a, b: int(a) >> int(b),
    "with_slope": lambda value, x, slope: value,
    "bfloat16": lambda x: float(torch.tensor(float(x)).bfloat16()),
    "Heaviside": lambda x, at_zero=0.5: at_zero if x == 0 else float(x > 0),
}


def number(expression: Any, at: dict[str, float]) -> float:
    symbols = [eval_sympy.symbol(name) for name in at]
    value = sympy.lambdify(symbols, expression, modules=[MEANINGS, "mpmath"])(*at.values())
    return float(value)


def ours(root: Node, at: dict[str, float]) -> float:
    kinds = {F32: torch.float64, I32: torch.int32}
    env = {k: torch.tensor(v, dtype=kinds[ir.ARG_TYPES[k]]) for k, v in at.items()}
    return float(evaluate([root], env, [SLOPES, BIASES], torch.float64)[0])


@st.composite
def smooth_graphs(draw: st.DrawFn) -> Node:
    """Draw differentiable expressions whose partial functions get arguments in their domain."""
    pool = [score, slope, bias, build("sub", q, kv), build("mul", score, slope)]
    for _ in range(draw(st.integers(1, 6))):
        pick = st.sampled_from(pool)
        positive = build("add", build("mul", a := draw(pick), a), const(0.5))
        bounded = build("tanh", draw(pick))
        op = draw(st.sampled_from(SMOOTH))
        if op in ("add", "sub", "mul"):
            made = build(op, draw(pick), draw(pick))
        elif op == "erfinv":
            made = build("erfinv", build("mul", bounded, const(0.75)))
        elif op in ("atan2", "hypot"):
            made = build(op, draw(pick), positive)
        elif op == "div":
            made = build("div", draw(pick), positive)
        elif op == "pow":
            made = build("pow", positive, draw(st.sampled_from([bounded, const(1.5)])))
        elif op in ("lgamma", "log", "log2", "log1p", "sqrt", "rsqrt"):
            made = build(op, positive)
        else:
            made = build(op, bounded if op.startswith("exp") else draw(pick))
        pool.append(cast(made, F32))
    return pool[-1]


SMOOTH = (
    "add sub mul div pow neg exp exp2 expm1 log log2 log1p sqrt rsqrt tanh sigmoid sin cos erf erfinv lgamma hypot atan2"
).split()


@given(root=smooth_graphs(), at=st.floats(-2, 2), place=st.integers(0, 11))
@settings(max_examples=60, deadline=None)
def test_adjoint_is_the_derivative_that_sympy_finds(root: Node, at: float, place: int) -> None:
    point = {"score": at, "h": place % 3, "q": place % 4, "kv": place % 5}
    expected = number(eval_sympy.derivative(root, NAMES), point)
    assume(abs(expected) < 1e6)
    found = ours(adjoint(root).dscore, {**point, "grad": 1.0})
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("op", ["min", "max", "abs", "floor", "fdiv", "mod", "where"])
def test_derivatives_beside_a_kink_agree(op: str) -> None:
    operands = [score, slope][: len(ir.SIGNATURES[op][0])]
    condition = [build("lt", score, slope)] if op == "where" else []
    root = build(op, *condition, *([score, const(2.0)] if condition else operands))
    root = build("mul", root, build("sin", score))
    for at in (-1.3, 0.3, 1.7):
        point = {"score": at, "h": 0}
        expected = number(eval_sympy.derivative(root, NAMES), point)
        found = ours(adjoint(root).dscore, {**point, "grad": 1.0})
        assert found == pytest.approx(expected, rel=1e-9)


TAKES = {"n": (F32, I32), "w": (I32, BOOL), "T": (F32, I32, BOOL)}
TAKES |= {"f": (F32,), "i": (I32,), "b": (BOOL,)}
OPERANDS = {
    F32: (score, slope),
    I32: (build("sub", q, kv), build("add", h, const(2))),
    BOOL: (build("lt", q, kv), build("lt", h, const(1))),
}


def samples() -> list[Node]:
    """Return one node for each operation and argument type."""
    found = [ir.node("round", score, attr="bfloat16")]
    for op, (letters, _) in ir.SIGNATURES.items():
        for kind in TAKES[letters[-1]]:
            args = (*OPERANDS[kind], bias)[: letters.count(letters[-1])]
            if op == "where":
                found.append(ir.node(op, OPERANDS[BOOL][1], *args))
            elif op == "cast":
                found += [ir.node(op, *args, to=to) for to in OPERANDS]
            elif op != "round":
                found.append(ir.node(op, *args))
    return found


def test_every_operation_has_a_meaning_and_a_sample() -> None:
    assert set(eval_sympy._operations()) == set(ir.SIGNATURES)
    assert {n.op for n in samples()} == set(ir.SIGNATURES)


@pytest.mark.parametrize("root", samples(), ids=str)
def test_every_operation_has_torchs_value(root: Node) -> None:
    converted = eval_sympy.to_sympy(root, NAMES)
    for place, at in enumerate([0.3, 1.7, 2.6, -1.25]):
        point = {"score": at, "h": place % 3, "q": (3 * place) % 4, "kv": place}
        expected = ours(root, point)
        if math.isfinite(expected):
            assert number(converted, point) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_text_shows_formula_and_derivative() -> None:
    alibi = build("add", score, build("mul", slope, build("sub", kv, q)))
    assert eval_sympy.describe(alibi, ["slopes"]).splitlines() == [
        "score' = score + (kv - q)⋅slopes(h)",
        "d score' / d score = 1",
    ]
    softcap = build("mul", build("tanh", build("div", score, const(20.0))), const(20.0))
    text = eval_sympy.describe(softcap)
    assert "20⋅tanh" in text
    assert "1 - tanh" in text
    assert "d score' / d score = " in text
    causal = build("le", kv, q)
    assert eval_sympy.describe(causal) == "keep = kv ≤ q"


def test_captured_numbers_and_flags_are_named() -> None:
    scaled = build("mul", score, load(0, F32, []))
    assert eval_sympy.describe(scaled, ["gain"]).startswith("score' = gain⋅score\n")
    assert eval_sympy.describe(scaled).startswith("score' = score⋅t₀\n")
    flagged = load(0, BOOL, [kv])
    assert eval_sympy.describe(flagged, ["kept"]) == "keep = kept(kv) ≠ 0"


def test_wide_text_is_written_on_one_line() -> None:
    root = score
    for i in range(12):
        root = build("add", root, build("div", build("sin", score), load(i, F32, [h])))
    assert eval_sympy.describe(root, width=60).count("\n") == 1


def test_gelu_takes_no_simplification() -> None:
    inner = build("add", const(1.0), build("erf", build("mul", score, const(math.sqrt(0.5)))))
    gelu = build("mul", build("mul", const(0.5), score), inner)
    expected = 0.5 * (1 + math.erf(0.7 * math.sqrt(0.5)))
    expected += 0.7 * math.exp(-0.245) / math.sqrt(2 * math.pi)
    assert number(eval_sympy.derivative(gelu), {"score": 0.7}) == pytest.approx(expected)


def test_importing_the_module_does_not_import_sympy() -> None:
    code = "import sys, attnkit.graph.eval_sympy; sys.exit('sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("root", "names", "lines"),
    [
        (
            build("mul", score, slope),
            ["slopes"],
            ["score' = score⋅slopes(h)", "d score' / d score = slopes(h)"],
        ),
        (
            build("mul", score, slope),
            [],
            ["score' = score⋅t₀(h)", "d score' / d score = t₀(h)"],
        ),
        (
            build("div", score, build("add", score, const(2.0))),
            [],
            [
                "           score",
                "score' = ─────────",
                "         score + 2",
                "                          score           1",
                "d score' / d score = - ──────────── + ─────────",
                "                                  2   score + 2",
                "                       (score + 2)",
            ],
        ),
        (
            build("and", build("lt", q, kv), build("lt", h, const(2))),
            [],
            ["keep = h < 2 ∧ q < kv"],
        ),
        (
            build("or", build("lt", q, kv), build("not", build("lt", h, const(2)))),
            [],
            ["keep = h ≥ 2 \N{LOGICAL OR} q < kv"],
        ),
        (
            build("eq", build("xor", q, build("and", kv, build("or", h, q))), const(3)),
            [],
            ["keep = bitxor(q, bitand(kv, bitor(h, q))) = 3"],
        ),
    ],
)
def test_layout_of_formulas(root: Node, names: list[str], lines: list[str]) -> None:
    assert eval_sympy.describe(root, names).splitlines() == lines


def test_formulas_are_laid_out_up_to_the_width() -> None:
    root = build("div", score, build("add", score, const(2.0)))
    laid_out = eval_sympy.describe(root, width=48).splitlines()
    width = max(map(len, laid_out))
    assert len(laid_out) == 7
    assert eval_sympy.describe(root, width=width).splitlines() == laid_out
    narrower = eval_sympy.describe(root, width=width - 1).splitlines()
    assert narrower[:3] == laid_out[:3]
    assert narrower[3:] == ["d score' / d score = -score/(score + 2)**2 + 1/(score + 2)"]
    root = score
    for name in range(40):
        root = build("add", root, load(name, F32, [h]))
    assert len(eval_sympy.describe(root, width=1000).splitlines()) == 2  # never wrapped


def test_bit_operations_are_integers() -> None:
    for op in ("and", "or", "xor", "shl", "shr"):
        assert eval_sympy.to_sympy(build(op, q, kv)).is_integer
    assert eval_sympy.to_sympy(load(0, I32, [q])).is_integer
    assert eval_sympy.to_sympy(load(0, F32, [q])).is_integer is None
    assert eval_sympy.to_sympy(load(0, F32, [q])).is_real
