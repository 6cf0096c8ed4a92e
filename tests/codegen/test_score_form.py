"""Check that the score form, which kernels evaluate, equals the score_mod."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnkit import mods
from attnkit.codegen.number_tables import numbers_of, with_tables
from attnkit.codegen.score_form import (
    LOG2E,
    ScoreForm,
    adds_full_bias,
    number_facts,
    score_form,
    weight_form,
)
from attnkit.graph import ir
from attnkit.graph.eval_torch import evaluate
from attnkit.graph.ir import Node
from attnkit.graph.simplify import build
from attnkit.graph.staging import is_relative
from attnkit.testing.expressions import mask_mods, score_mods
from attnkit.testing.limits import Limits
from attnkit.tracing.tracer import trace

N = 20
SMALL = Limits((1, N), (1, N), (1, 2), (1, 3))
SLOPES = torch.tensor([0.25, -0.5, 1.0])
TABLE = torch.linspace(-1.0, 1.0, 2 * N)
HEAD = {"b", "h", "scale"}


def grid(q_len: int = N, kv_len: int = N, batch: int = 2, heads: int = 3) -> dict[str, Tensor]:
    """Return all positions and random scores, by name, for an evaluation."""
    sizes = {"b": batch, "h": heads, "q": q_len, "kv": kv_len}
    env = {
        name: torch.arange(n, dtype=torch.int32).view([n if axis == at else 1 for axis in range(4)])
        for at, (name, n) in enumerate(sizes.items())
    }
    env["score"] = torch.randn(batch, heads, q_len, kv_len, dtype=torch.float64) * 4
    return env


def value(n: Node | None, env: dict[str, Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
    if n is None:
        return torch.zeros((), dtype=torch.float64)
    return evaluate([n], env, [t.detach() for t in tensors], torch.float64)[0]


def assert_same(function: Any, env: dict[str, Tensor], scale: float, origin: int) -> None:
    """Check that the parts of the form, combined as in a kernel, equal the modified score.

    The second form is that of a kernel which reads the numbers of the mod from tables.
    """
    traced = trace(function, "score")
    root, tensors = traced.root, traced.tensors
    # a divisor becomes a factor, whose rounding may change a comparison
    numbers = [n for n in numbers_of([root]) if not n.inverted]
    made = with_tables([root], numbers, len(tensors))
    contents = (torch.tensor(made.floats, dtype=torch.float64), torch.tensor(made.ints))
    tables = tuple(t for t in contents if t.numel())
    slots = frozenset(range(len(tensors), len(tensors) + len(tables)))
    for apart in (False, True):
        form = score_form(root, separate_distance=apart)
        _assert_same(root, form, env, scale, origin, tensors)
        facts = number_facts(form, slots)
        lifted = score_form(made.roots[0], separate_distance=apart, facts=facts)
        _assert_same(root, lifted, env, scale, origin, (*tensors, *tables))
        assert (lifted.plain, lifted.ceiling) == (form.plain, form.ceiling)
        if form.distance is not None:
            assert apart


def _assert_same(
    root: Node,
    form: ScoreForm,
    env: dict[str, Tensor],
    scale: float,
    origin: int,
    tensors: tuple[Tensor, ...],
) -> None:
    expected = value(root, {**env, "score": env["score"] * scale}, tensors)
    parts = {**env, "scale": torch.tensor(scale, dtype=torch.float64)}
    x = value(form.bias, parts, tensors)
    if form.factor is not None:
        x = x + env["score"] * value(form.factor, parts, tensors)
    distance = (env["kv"] - origin).double()
    x = x + value(form.slope, parts, tensors) * distance
    x = x + value(form.distance, parts, tensors) * (env["kv"] - env["q"]).double()
    at_origin = {**parts, "kv": torch.tensor(origin, dtype=torch.int32)}
    row = value(form.row, at_origin, tensors)
    found, expected = torch.broadcast_tensors(x / LOG2E + row, expected)
    finite = expected.isfinite()
    assert torch.equal(found[~finite], expected[~finite])
    size = 1 + sum(float(t[t.isfinite()].abs().max()) for t in (x, row))
    assert float((found - expected)[finite].abs().max()) < 1e-11 * size
    if form.factor is not None:
        assert "score" not in ir.reads(form.factor)
        assert form.bias is None or "score" not in ir.reads(form.bias)
    if form.slope is not None:
        assert ir.reads(form.slope) <= HEAD
    if form.distance is not None:
        assert ir.reads(form.distance) <= HEAD
    if form.row is not None:
        assert "score" not in ir.reads(form.row)


@given(score_mods(SMALL), st.floats(0.05, 2.0), st.integers(0, N - 1))
def test_the_parts_are_the_mod(function: Any, scale: float, origin: int) -> None:
    assert_same(function, grid(), scale, origin)


TERMS = (
    "score", "score * 2.0", "score / 3.0", "-score", "score * SLOPES[h]", "score * (q + 1)",
    "score * TABLE[kv]", "SLOPES[h] * (kv - q)", "-kv * 0.5", "(q - kv) / 3", "SLOPES[h] * kv * b",
    "SLOPES[h]", "TABLE[q]", "TABLE[kv]", "TABLE[q - kv]", "(q - kv).abs() * 0.1", "(kv * q) * 0.01",
    "2.0", "torch.tanh(score)", "5.0 * torch.tanh(score / 5.0)", "(kv + h) * SLOPES[b]", "kv * kv",
)  # fmt: skip


@st.composite
def sums(draw: st.DrawFn) -> Any:
    """Draw a score_mod that sums terms, some of them linear in kv."""
    terms = draw(st.lists(st.sampled_from(TERMS), min_size=1, max_size=5))
    body = "".join(f" {draw(st.sampled_from('+-'))} ({t})" for t in terms)
    names = {"torch": torch, "SLOPES": SLOPES, "TABLE": TABLE}
    return eval(f"lambda score, b, h, q, kv: (0.0{body})", names)


@given(sums(), st.floats(0.05, 2.0), st.integers(0, N - 1))
def test_sums_of_linear_terms(function: Any, scale: float, origin: int) -> None:
    assert_same(function, grid(), scale, origin)


@pytest.mark.parametrize("name", mods.examples())
def test_library(name: str) -> None:
    example = mods.examples(N, heads=3, batch=2)[name]
    lengths = example.q_len, example.kv_len, example.batch, example.heads
    assert_same(example.mod, grid(*lengths), 0.3, 5)


def form_of(function: Any) -> Any:
    return score_form(trace(function, "score").root)


def test_a_linear_term_of_kv_is_split_from_the_elements() -> None:
    form = form_of(mods.alibi(3))
    assert form.slope is not None
    assert form.bias is None
    assert ir.reads(form.row) == {"h", "q", "kv"}
    assert form_of(lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q)).bias is None
    assert form_of(lambda s, b, h, q, kv: s + TABLE[q] * kv).slope is None
    assert form_of(lambda s, b, h, q, kv: s + (kv // 2) * 0.5).slope is None


@pytest.mark.parametrize(
    ("function", "apart"),
    [
        (lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q), True),
        (lambda s, b, h, q, kv: s - SLOPES[h] * (q.float() - kv.float()) / 3, True),
        (lambda s, b, h, q, kv: torch.tanh(s) - ((q - kv) + (q - kv)) * 0.5, True),
        (lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q + 1), False),
        (lambda s, b, h, q, kv: s + SLOPES[h] * (kv - 2 * q), False),
        (lambda s, b, h, q, kv: s + SLOPES[h] * kv, False),
    ],
)
def test_distance_terms_may_be_separate(function: Any, apart: bool) -> None:
    """With a separate distance term, the form has no row term and no slope."""
    form = score_form(trace(function, "score").root, separate_distance=True)
    assert (form.distance is not None) is apart
    assert (form.slope is None) is apart
    assert (form.row is None) is apart
    assert form_of(function).distance is None


def test_terms_of_the_row_alone_leave_the_elements() -> None:
    form = form_of(lambda s, b, h, q, kv: s * 2.0 + TABLE[q] - SLOPES[h] + 3.0)
    assert form.bias is None
    assert form.plain
    assert form.row is not None


@pytest.mark.parametrize(
    ("function", "plain"),
    [
        (lambda s, b, h, q, kv: s, True),
        (lambda s, b, h, q, kv: s * 0.25, True),
        (lambda s, b, h, q, kv: -s, False),
        (lambda s, b, h, q, kv: s * 0.0, False),
        (lambda s, b, h, q, kv: s * SLOPES[h], False),
        (lambda s, b, h, q, kv: s + TABLE[kv], False),
        (lambda s, b, h, q, kv: s + kv, False),
        (lambda s, b, h, q, kv: torch.tanh(s), False),
    ],
)
def test_plain_is_the_score_times_a_positive_number(function: Any, plain: bool) -> None:
    assert form_of(function).plain is plain
    assert score_form(None).plain


EXTREME = torch.tensor([-1e30, -1e4, -3.0, -0.1, 0.0, 0.1, 3.0, 1e4, 1e30], dtype=torch.float64)


def largest(function: Any, scale: float) -> float:
    """Return the largest |bias| of a function's form over extreme scores."""
    traced = trace(function, "score")
    form = score_form(traced.root)
    env = grid()
    env["score"] = EXTREME.view(-1, 1, 1, 1, 1)
    env["scale"] = torch.tensor(scale, dtype=torch.float64)
    return float(value(form.bias, env, traced.tensors).abs().max())


@given(score_mods(SMALL), st.sampled_from([0.01, 0.125, 3.0]))
def test_a_ceiling_bounds_every_score(function: Any, scale: float) -> None:
    form = form_of(function)
    if form.ceiling is not None:
        assert form.factor is None
        assert form.slope is None
        assert largest(function, scale) <= form.ceiling * (1 + 1e-12)


@pytest.mark.parametrize(
    ("function", "ceiling"),
    [
        (mods.softcap(20.0), 20.0),
        (lambda s, b, h, q, kv: torch.sigmoid(s) * 4.0 - 1.0, 4.0),
        (lambda s, b, h, q, kv: 3.0 - 2.0 * torch.tanh(s * 0.1), 2.0),
        (lambda s, b, h, q, kv: 5.0 * torch.tanh(s / 5.0) + TABLE[q], 5.0),
        (lambda s, b, h, q, kv: 5.0 * torch.tanh(s / 5.0) + TABLE[kv], None),
        (lambda s, b, h, q, kv: 5.0 * torch.tanh(s / 5.0) + kv, None),
        (lambda s, b, h, q, kv: s, None),
        (lambda s, b, h, q, kv: torch.tanh(s) * s, None),
        (lambda s, b, h, q, kv: torch.tanh(s) * math.inf, None),
    ],
)
def test_ceilings(function: Any, ceiling: float | None) -> None:
    """The ceiling bounds the part that depends on the score, without the row term."""
    found = form_of(function).ceiling
    if ceiling is None:
        assert found is None
    else:
        assert found is not None
        assert largest(function, 0.5) <= found * (1 + 1e-12)
        assert found <= 5 * ceiling * LOG2E  # of use to a kernel


def assert_relative(n: Node, tensors: tuple[Tensor, ...]) -> None:
    """Check that a value depends on q - kv alone, not on the score."""
    env = grid()
    env["score"] = env["score"] * 10
    shape = (2, 3, N, N)
    values = value(n, env, tensors).expand(shape)
    for shift in range(1 - N, N):
        line = values.diagonal(shift, 2, 3)
        same = (line == line[..., :1]) | (line.isnan() & line[..., :1].isnan())
        assert bool(same.all()), ir.formula(n)


@given(
    st.one_of(
        mask_mods(SMALL).map(lambda f: (f, "mask")), score_mods(SMALL).map(lambda f: (f, "score"))
    )
)
def test_relative_values_depend_on_the_difference_alone(drawn: tuple[Any, Any]) -> None:
    traced = trace(*drawn)
    for n in ir.topo(traced.root):
        if is_relative(n):
            assert_relative(n, traced.tensors)


@pytest.mark.parametrize(
    ("function", "relative"),
    [
        (lambda s, b, h, q, kv: TABLE[q - kv] * SLOPES[h], True),
        (lambda s, b, h, q, kv: ((q - kv).abs() < 3).float(), True),
        (lambda s, b, h, q, kv: torch.where(q >= kv + b, 1.0, 0.0), True),
        (lambda s, b, h, q, kv: (q + h - (kv - 2)) * 0.5, True),
        (lambda s, b, h, q, kv: (q + kv) * 0.5, False),
        (lambda s, b, h, q, kv: (q - 2 * kv) * 0.5, False),
        (lambda s, b, h, q, kv: TABLE[q] - TABLE[kv], False),
        (lambda s, b, h, q, kv: s + TABLE[q - kv], False),
        (lambda s, b, h, q, kv: (q - kv + s.int()) * 0.5, False),
        (lambda s, b, h, q, kv: TABLE[(q - kv + s.int()).clamp(0, 9)], False),
        (lambda s, b, h, q, kv: torch.where(q - kv < s.int(), 1.0, 0.0), False),
    ],
)
def test_is_relative(function: Any, relative: bool) -> None:
    traced = trace(function, "score")
    assert is_relative(traced.root) is relative
    if relative:
        assert_relative(traced.root, traced.tensors)


@given(score_mods(SMALL), st.sampled_from([0.25, 1.0, -0.5]), st.booleans())
def test_the_form_of_a_weight_is_the_weight(function: Any, scale: float, sigmoid: bool) -> None:
    """Without a softmax no term is left out, and a sigmoid at the root is left to the kernel."""
    traced, env = trace(function, "score"), grid()
    root = build("sigmoid", traced.root) if sigmoid else traced.root
    expected = value(root, {**env, "score": env["score"] * scale}, traced.tensors)
    parts = {**env, "scale": torch.tensor(scale, dtype=torch.float64)}
    for split in (True, False):
        form = weight_form(root, split_sigmoid=split)
        assert form.slope is form.row is form.distance is None
        x = value(form.bias, parts, traced.tensors)
        if form.factor is not None:
            x = x + env["score"] * value(form.factor, parts, traced.tensors)
        if form.weight == "sigmoid":
            assert split
            x = 1 / (1 + torch.exp2(-x))
        found, true = torch.broadcast_tensors(x, expected)
        torch.testing.assert_close(found, true, rtol=1e-9, atol=1e-9, equal_nan=True)


FULL, IDS = torch.randn(2, 8, 8), torch.arange(8) % 3


@pytest.mark.parametrize(
    ("function", "full"),
    [
        (lambda s, b, h, q, kv: s + FULL[h, q, kv], True),
        (lambda s, b, h, q, kv: s - FULL[0, kv, q] * FULL[h, 0, 1], True),
        (lambda s, b, h, q, kv: s + FULL[h, q, kv] + FULL[h, q, 0], True),  # a term of the row
        (lambda s, b, h, q, kv: s + FULL[h, q, kv] + FULL[h, 0, kv], False),
        (lambda s, b, h, q, kv: s + FULL[h, q, kv] + kv, False),
        (lambda s, b, h, q, kv: 2 * s + FULL[h, q, kv], False),
        (lambda s, b, h, q, kv: s * FULL[h, q, kv], False),
        (lambda s, b, h, q, kv: s + FULL[h, IDS[q], IDS[kv]], False),
        (lambda s, b, h, q, kv: s + FULL[h, 0, q - kv], False),
        (lambda s, b, h, q, kv: s, False),
    ],
)
def test_full_bias(function: Any, full: bool) -> None:
    assert form_of(function).full_bias is full


def test_a_full_bias_beside_a_slope() -> None:
    function = lambda s, b, h, q, kv: s + FULL[h, q, kv] + FULL[h, 0, 0] * (kv - q)
    root = trace(function, "score").root
    assert not form_of(function).full_bias
    assert adds_full_bias(root)
    assert not adds_full_bias(trace(lambda s, b, h, q, kv: s + 0.5 * (kv - q), "score").root)
