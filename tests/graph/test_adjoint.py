"""Compare the adjoint with torch.autograd, on random graphs, ties and non-finite values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.adjoint import Adjoint, adjoint
from attnkit.graph.eval_torch import evaluate
from attnkit.graph.ir import F32, Node, arg, const, load
from attnkit.graph.simplify import build, cast
from attnkit.tracing.tracer import trace

SIZES = {"b": 2, "h": 3, "q": 4, "kv": 5}
TABLES = ((3,), (9,), (2, 4))  # shapes of the captured tensors

score, b, h, q, kv = (arg(name) for name in ("score", "b", "h", "q", "kv"))
slope = load(0, F32, [h])
bias = load(1, F32, [build("sub", q, kv)])  # negative indices wrap
plane = load(2, F32, [b, build("mod", kv, const(4))])

# All operations from floats to a float. A new one without a rule would have gradient 0 and fail.
# `round`, `where` and `cast` are not of this form.
# but for digamma, which only an adjoint makes
UNARY = [
    op for op, form in ir.SIGNATURES.items() if form in (("f", "f"), ("n", "n")) and op != "digamma"
]
BINARY = [op for op, form in ir.SIGNATURES.items() if form in (("ff", "f"), ("nn", "n"))]
UNARY.remove("round")


@st.composite
def graphs(draw: st.DrawFn) -> Node:
    """Draw a float expression over the score, indices and three captured tensors."""
    pool = [score, slope, bias, plane, cast(q, F32), cast(build("sub", q, kv), F32)]
    numbers = st.sampled_from([-1.5, -1.0, 0.0, 0.5, 1.0, 2.0, 2.5])
    for _ in range(draw(st.integers(1, 9))):
        pick = st.sampled_from([*pool[:2], *pool])
        kind = draw(st.sampled_from(["unary", "binary", "binary", "where", "const", "cast"]))
        if kind == "unary":
            made = build(draw(st.sampled_from(UNARY)), draw(pick))
        elif kind == "binary":
            made = build(draw(st.sampled_from(BINARY)), draw(pick), draw(pick))
        elif kind == "where":
            compare = draw(st.sampled_from(["lt", "le", "eq", "ge"]))
            made = build("where", build(compare, draw(pick), draw(pick)), draw(pick), draw(pick))
        elif kind == "const":
            made = build(draw(st.sampled_from(BINARY)), draw(pick), const(draw(numbers)))
        else:
            made = cast(build("lt", draw(pick), draw(pick)), F32)
        pool.append(cast(made, F32))
    return pool[-1]


def inputs(seed: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    random = torch.Generator().manual_seed(seed)
    env = {}
    for axis, (name, size) in enumerate(SIZES.items()):
        shape = [-1 if axis == i else 1 for i in range(4)]
        env[name] = torch.arange(size, dtype=torch.int32).view(shape)
    for name in ("score", "grad"):
        env[name] = torch.randn(tuple(SIZES.values()), dtype=torch.float64, generator=random)
    tensors = [torch.randn(shape, dtype=torch.float64, generator=random) for shape in TABLES]
    return env, tensors


def gradients(found: Adjoint, env: dict[str, Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return dscore, the gradient of each table, and the size of the terms of each sum."""
    memo: dict[Node, Tensor] = {}
    full = tuple(SIZES.values())
    cotangents = [found.dscore, *(c for _, c in found.loads)]
    dscore, *terms = evaluate(cotangents, env, tensors, torch.float64, memo=memo)
    size = torch.ones(full, dtype=torch.float64)
    for value in memo.values():
        if value.is_floating_point() and value.ndim in (0, 4):
            size = torch.maximum(size, value.abs().nan_to_num(0.0))
    grads = [torch.zeros_like(t) for t in tensors]
    sizes = [torch.zeros_like(t) for t in tensors]
    for (n, _), term in zip(found.loads, terms, strict=True):
        index = tuple(i.expand(full) for i in evaluate(n.args, env, tensors))
        grads[int(str(n.attr))].index_put_(index, term.expand(full), accumulate=True)
        sizes[int(str(n.attr))].index_put_(index, size, accumulate=True)
    return [dscore.expand(full), *grads, size, *sizes]


def autograd(root: Node, env: dict[str, Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    leaves = [env["score"].clone().requires_grad_(), *(t.clone().requires_grad_() for t in tensors)]
    (value,) = evaluate([root], {**env, "score": leaves[0]}, leaves[1:], torch.float64)
    if not value.requires_grad:
        return [torch.zeros_like(t) for t in leaves]
    full = value.expand(tuple(SIZES.values()))
    found = torch.autograd.grad(full, leaves, env["grad"], allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)]


@given(root=graphs(), seed=st.integers(0, 2**31))
@settings(max_examples=2 * settings.default.max_examples, deadline=None)
def test_random_graphs_agree_with_autograd(root: Node, seed: int) -> None:
    env, tensors = inputs(seed)
    found = gradients(adjoint(root), env, tensors)
    # the terms are the same, their order of summation is not
    for ours, size, theirs in zip(found[:4], found[4:], autograd(root, env, tensors), strict=True):
        known = (
            theirs.isfinite()
        )  # torch lets 0 * inf = NaN flow out of floor, the adjoint does not
        difference = (ours - theirs)[known].abs()
        assert (difference <= 1e-12 * size[known]).all(), f"{root}: {difference.max()}"


@pytest.mark.parametrize("op", [*UNARY, *BINARY])
def test_each_operation_agrees_with_autograd_everywhere(op: str) -> None:
    grid = torch.tensor(
        [-math.inf, -2.5, -1.0, -0.5, 0.0, 0.25, 1.0, 2.0, 3.5, math.inf, math.nan],
        dtype=torch.float64,
    )
    operands = [score, slope][: len(ir.SIGNATURES[op][0])]
    found = adjoint(build(op, *operands))
    x, y = (t.reshape(-1) for t in torch.meshgrid(grid, grid, indexing="ij"))
    env = {"h": torch.arange(y.numel(), dtype=torch.int32), "grad": torch.full_like(x, 0.75)}
    leaves = [x.clone().requires_grad_(), y.clone().requires_grad_()]
    (value,) = evaluate([build(op, *operands)], {**env, "score": leaves[0]}, leaves[1:], x.dtype)
    theirs = torch.autograd.grad(value, leaves, env["grad"], allow_unused=True)
    cotangents = {score: found.dscore, **dict(found.loads)}
    for n, reference in zip(operands, theirs, strict=False):
        (ours,) = evaluate([cotangents.get(n, const(0.0))], {**env, "score": x}, [y], x.dtype)
        torch.testing.assert_close(ours.expand_as(x), reference, equal_nan=True)


def test_derivative_of_a_power_at_its_edges_is_torchs() -> None:
    for base in (0.0, -1.0, 2.0, math.nan):
        for exponent in (-1.0, 0.0, 0.5, 1.0, 2.0):
            x = torch.tensor(base, dtype=torch.float64, requires_grad=True)
            y = torch.tensor(exponent, dtype=torch.float64, requires_grad=True)
            theirs = torch.autograd.grad(torch.pow(x, y), [x, y])
            found = adjoint(build("pow", score, load(0, F32, [])))
            one = torch.tensor(1.0, dtype=torch.float64)
            env = {"score": x.detach(), "grad": one}
            roots = [found.dscore, found.loads[0][1]]
            ours = evaluate(roots, env, [y.detach()], torch.float64)
            torch.testing.assert_close(tuple(ours), theirs, equal_nan=True)
            (x_only,) = torch.autograd.grad(torch.pow(x, exponent), x)
            fixed = adjoint(build("pow", score, const(exponent))).dscore
            (ours_fixed,) = evaluate([fixed], env, [], torch.float64)
            torch.testing.assert_close(ours_fixed, x_only, equal_nan=True)


def _clamp(low: float, high: float) -> Node:
    above = build("where", build("lt", const(high), score), const(high), score)
    return build("where", build("lt", score, const(low)), const(low), above)


TIES: dict[str, tuple[Node, Callable[[Tensor, Tensor], Tensor]]] = {
    "relu": (
        build("where", build("lt", const(0.0), score), score, const(0.0)),
        lambda x, y: torch.relu(x),
    ),
    "clamp": (_clamp(-1.0, 1.0), lambda x, y: x.clamp(-1.0, 1.0)),
    "abs": (build("abs", score), lambda x, y: x.abs()),
    "maximum": (build("max", score, slope), torch.maximum),
    "minimum": (build("min", score, slope), torch.minimum),
    "amax": (build("max", score, slope), lambda x, y: torch.stack([x, y]).amax(0)),
    "amin": (build("min", score, slope), lambda x, y: torch.stack([x, y]).amin(0)),
    "leaky_relu": (
        build("where", build("lt", const(0.0), score), score, build("mul", score, const(0.1))),
        lambda x, y: torch.nn.functional.leaky_relu(x, 0.1),
    ),
    "where": (
        build("where", build("eq", score, slope), score, slope),
        lambda x, y: torch.where(x == y, x, y),
    ),
}


@pytest.mark.parametrize("name", TIES)
def test_ties_follow_torch(name: str) -> None:
    root, function = TIES[name]
    values = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])
    x, y = (t.reshape(-1).clone() for t in torch.meshgrid(values, values, indexing="ij"))
    leaves = [x.requires_grad_(), y.requires_grad_()]
    grad = torch.linspace(1, 2, x.numel())
    theirs = torch.autograd.grad(function(*leaves), leaves, grad, allow_unused=True)
    found = adjoint(root)
    env = {"score": x.detach(), "grad": grad, "h": torch.arange(x.numel(), dtype=torch.int32)}
    ours = evaluate([found.dscore, *(c for _, c in found.loads)], env, [y.detach()])
    for mine, reference in zip(ours, theirs, strict=False):
        assert torch.equal(mine, reference)


ACTIVATIONS = {
    "mish": torch.nn.functional.mish,
    "relu6": torch.nn.functional.relu6,
    "gelu": torch.nn.functional.gelu,
    "softplus": torch.nn.functional.softplus,
    "elu": torch.nn.functional.elu,
    "logsigmoid": torch.nn.functional.logsigmoid,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "tan": torch.tan,
    "round": torch.round,
    "frac": torch.frac,
    "atan": torch.atan,
    "asin": lambda s: torch.asin(s / 9.5),
    "acos": lambda s: torch.acos(s / 9.5),
    "hypot": lambda s: torch.hypot(s, 2 - s),
    "logaddexp": lambda s: torch.logaddexp(2 * s, 1 - s),
    "logaddexp, one infinite": lambda s: torch.logaddexp(s, torch.where(s > 0, s, -math.inf)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_traced_functions_have_torchs_derivative(name: str) -> None:
    function = ACTIVATIONS[name]
    scores = torch.linspace(-9.0, 9.0, 37, dtype=torch.float64).requires_grad_()
    theirs = torch.autograd.grad(function(scores).sum(), scores)[0]
    root = trace(lambda s, b, h, q, kv: function(s), "score").root
    env = {"score": scores.detach(), "grad": torch.ones_like(scores)}
    (ours,) = evaluate([adjoint(root).dscore], env, [], torch.float64)
    torch.testing.assert_close(ours.expand_as(theirs), theirs, rtol=1e-13, atol=1e-13)


def test_branch_not_taken_gets_exactly_zero_even_for_an_infinite_cotangent() -> None:
    root = build("where", build("lt", const(0.0), score), slope, build("mul", score, const(2.0)))
    found = adjoint(root)
    env = {
        "score": torch.tensor([1.0, -1.0]),
        "h": torch.tensor([0, 1], dtype=torch.int32),
        "grad": torch.tensor([math.inf, math.inf]),
    }
    ours = evaluate([found.dscore, found.loads[0][1]], env, [torch.ones(2)])
    assert ours[0].tolist() == [0.0, math.inf]
    assert ours[1].tolist() == [math.inf, 0.0]


def test_rounding_passes_the_gradient() -> None:
    root = ir.node("round", build("mul", score, const(3.0)), attr="bfloat16")
    assert adjoint(root).dscore is build("mul", arg("grad"), const(3.0))


@pytest.mark.parametrize(
    "root",
    [
        build("floor", score),
        cast(cast(score, "i32"), F32),
        cast(build("lt", score, slope), F32),
        build("fdiv", score, slope),
        build("exp", cast(build("mul", q, kv), F32)),
        const(3.0),
    ],
    ids=str,
)
def test_flat_expressions_have_no_gradient(root: Node) -> None:
    assert adjoint(root) == Adjoint(const(0.0), ())


def test_parts_without_score_or_table_get_no_cotangent() -> None:
    heavy = build("exp", build("sin", cast(q, F32)))
    assert adjoint(build("add", score, heavy)).dscore is arg("grad")
    assert adjoint(build("mul", score, heavy)).dscore is build("mul", arg("grad"), heavy)


def test_integer_tables_get_no_gradient_and_loads_appear_once() -> None:
    document = load(3, "i32", [q])
    root = build("add", build("mul", slope, slope), build("mul", slope, document))
    found = adjoint(root)
    assert [n for n, _ in found.loads] == [slope]
    assert found.dscore is const(0.0)


def test_branches_of_one_condition_are_merged() -> None:
    positive = build("lt", const(0.0), score)
    root = build("where", positive, score, build("mul", score, const(0.1)))
    grad = arg("grad")
    merged = build("where", positive, grad, build("mul", grad, const(0.1)))
    assert adjoint(root).dscore is merged


@st.composite
def branching(draw: st.DrawFn) -> Node:
    """Draw a sum of `where` nodes with one condition, whose branches share subexpressions."""
    condition = build(draw(st.sampled_from(["lt", "le", "eq"])), q, kv)
    parts = [score, slope, *(build("mul", score, const(k)) for k in (2.0, -1.0, 0.5, 3.0))]
    parts += [build("neg", score), build("tanh", score), const(0.0)]
    pick = st.sampled_from(parts)
    count = draw(st.integers(1, 3))
    root = build("where", condition, draw(pick), draw(pick))
    for _ in range(count):
        root = build("add", root, build("where", condition, draw(pick), draw(pick)))
        root = build("where", condition, *draw(st.permutations([root, draw(pick)])))
    return root


@given(root=branching(), seed=st.integers(0, 2**31))
@settings(deadline=None)
def test_branches_of_one_condition_agree_with_autograd(root: Node, seed: int) -> None:
    env, tensors = inputs(seed)
    found = gradients(adjoint(root), env, tensors)
    for ours, theirs in zip(found[:4], autograd(root, env, tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("swapped", [False, True])
def test_each_branch_keeps_its_side(swapped: bool) -> None:
    """The adjoint of a `where` keeps the cotangents in the order of its branches."""
    condition, grad = build("lt", q, kv), arg("grad")
    branches = [score, build("mul", score, const(3.0))]
    slopes = [grad, build("mul", grad, const(3.0))]
    if swapped:
        branches, slopes = branches[::-1], slopes[::-1]
    found = adjoint(build("where", condition, *branches)).dscore
    assert found is build("where", condition, *slopes)


def test_text_names_each_gradient() -> None:
    found = adjoint(build("add", score, build("mul", slope, cast(build("sub", kv, q), F32))))
    assert str(found) == "d score = grad\nd t0[h] = grad * f32(kv - q)"
    assert found.describe(["slopes"]).endswith("d slopes[h] = grad * f32(kv - q)")


def test_second_differentiation_is_refused() -> None:
    with pytest.raises(AssertionError, match="does not read grad"):
        adjoint(build("mul", score, arg("grad")))
