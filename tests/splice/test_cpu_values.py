"""Values in shared memory are those of `eval_torch`; tanh by oneDNN is exact.

They are equal bit for bit but for functions of which PyTorch computes the last elements of a row by
another routine than the others, and for products that are added: there the two differ in a rounding.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.eval_torch import evaluate
from attnkit.graph.ir import F32, Node, arg, const, load, node
from attnkit.graph.simplify import build, cast
from attnkit.splice import cpu_values
from attnkit.splice.cpu_tanh import LARGEST, SMALLEST, tanh
from attnkit.splice.cpu_values import Values

SHAPE = (2, 3, 64, 80)  # more elements than SMALL
UNARY = ["neg", "abs", "floor", "sqrt"]
BINARY = ["add", "sub", "min", "max", "fdiv", "mod", "div"]  # products: in a test of their own


@st.composite
def graphs(draw: st.DrawFn) -> list[Node]:
    """Draw one or two roots over score, grad, positions and a table; nodes are shared often."""
    q, kv, h = arg("q"), arg("kv"), arg("h")
    nodes = [
        arg("score"),
        arg("grad"),
        cast(node("sub", q, kv), F32),
        load(0, F32, [h]),
        const(1.5),
    ]
    for _ in range(draw(st.integers(1, 12))):
        pick = st.sampled_from(nodes)
        kind = draw(st.sampled_from(["unary", "binary", "where", "round"]))
        if kind == "unary":
            new = node(draw(st.sampled_from(UNARY)), draw(pick))
        elif kind == "binary":
            new = node(draw(st.sampled_from(BINARY)), draw(pick), draw(pick))
        elif kind == "round":
            new = node("round", draw(pick), attr=draw(st.sampled_from(["bfloat16", "float32"])))
        else:
            new = node("where", node("lt", draw(pick), draw(pick)), draw(pick), draw(pick))
        nodes.append(new)
    return draw(st.lists(st.sampled_from(nodes[5:]), min_size=1, max_size=2, unique=True))


def environment(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    wide = torch.randn(*SHAPE[:3], SHAPE[3] + 7, dtype=dtype)
    b, h, q, kv = (
        torch.arange(n, dtype=torch.int32).view([-1 if i == axis else 1 for i in range(4)])
        for axis, n in enumerate(SHAPE)
    )
    score = wide[..., 7:]  # columns of a larger chunk
    return {
        "score": score,
        "grad": torch.randn(SHAPE, dtype=dtype),
        "b": b,
        "h": h,
        "q": q,
        "kv": kv,
    }


@settings(max_examples=40)
@given(graphs(), graphs(), st.integers(0, 99), st.sampled_from([torch.float32, torch.float64]))
def test_values_are_those_of_separate_memory(
    first: list[Node], second: list[Node], seed: int, dtype: torch.dtype
) -> None:
    values = Values()
    table = torch.linspace(-2, 2, SHAPE[1])
    for roots in (first, second):  # the second evaluation finds buffers of the first
        env = environment(seed, dtype)
        wanted = [t.clone() for t in evaluate(roots, env, [table], dtype)]
        kept = {name: t.clone() for name, t in env.items()}
        found = values.evaluate(roots, env, (), [table], dtype)
        assert all(torch.equal(env[name], t) for name, t in kept.items())
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        found = values.evaluate(roots, env, ("score", "grad"), [table], dtype)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(table, torch.linspace(-2, 2, SHAPE[1]))


@pytest.mark.parametrize("name", ["exp", "sin", "sigmoid", "erf", "atan2"])
def test_values_of_functions(name: str) -> None:
    score, grad = node("neg", arg("score")), arg("grad")
    root = node(name, score, grad) if name == "atan2" else node(name, score)
    env = environment(0, torch.float32)
    (wanted,) = evaluate([root], env, [], torch.float32)
    for spent in ((), ("score", "grad")):
        (found,) = Values().evaluate([root], env, spent, [], torch.float32)
        torch.testing.assert_close(found, wanted, rtol=3e-7, atol=0)


def factors() -> dict[str, Node]:
    """Return factors of many shapes: a number, a head's, a row's, a tile's."""
    q, kv, h = arg("q"), arg("kv"), arg("h")
    return {
        "number": const(1.7),
        "head": load(0, F32, [h]),
        "row": cast(q, F32),
        "distance": cast(node("sub", q, kv), F32),
        "grad": arg("grad"),
        "score": arg("score"),
    }


@settings(max_examples=60)
@given(
    st.sampled_from(["add", "sub"]),
    *(st.sampled_from(sorted(factors())) for _ in range(3)),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(), ("score", "grad")]),
)
def test_products_that_are_added_are_rounded_once_less(
    kind: str, term: str, left: str, right: str, first: bool, twice: bool, spent: tuple[str, ...]
) -> None:
    """x + a b and x - a b have at most the roundings of both operators, wherever x stands."""
    nodes = factors()
    product = node("mul", nodes[left], nodes[right])
    root = node(kind, product, nodes[term]) if first else node(kind, nodes[term], product)
    roots = [root, node("neg", product)] if twice else [root]  # which reads the product as well
    table = torch.linspace(-2, 2, SHAPE[1])
    env = environment(0, torch.float32)
    wide = {name: t.double() if t.is_floating_point() else t for name, t in env.items()}
    exact = evaluate(roots, wide, [table.double()], torch.float64)
    size = evaluate([product], wide, [table.double()], torch.float64)[0].abs()
    found = Values().evaluate(roots, env, spent, [table], torch.float32)
    for ours, true in zip(found, exact, strict=True):
        assert ours.shape == true.shape
        assert bool(((ours - true).abs() <= 2**-23 * (size + true.abs())).all())


SMOOTH = ["add", "sub", "mul", "min", "max"]


@settings(max_examples=200)
@given(st.data(), st.sampled_from([(), ("score", "grad")]))
def test_products_read_what_nothing_has_overwritten(
    data: st.DataObject, spent: tuple[str, ...]
) -> None:
    """Products that are computed later than where they stand have the right factors."""
    nodes = list(factors().values())
    for _ in range(data.draw(st.integers(3, 14))):
        pick = st.sampled_from(nodes[-6:])  # deep graphs, whose values are overwritten soon
        nodes.append(node(data.draw(st.sampled_from(SMOOTH)), data.draw(pick), data.draw(pick)))
    table = torch.linspace(-1, 1, SHAPE[1], dtype=torch.float64)
    env = environment(0, torch.float64)
    env |= {name: env[name] / 16 for name in ("score", "grad")}
    all_values: dict[Node, Tensor] = {}
    (wanted,) = evaluate(nodes[-1:], env, [table], torch.float64, memo=all_values)
    largest = max(float(t.double().abs().max()) for t in all_values.values())
    (found,) = Values().evaluate(nodes[-1:], env, spent, [table], torch.float64)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12 * largest)


def test_a_linear_score_mod_allocates_nothing_of_a_tiles_size() -> None:
    slope = load(0, F32, [arg("h")])
    distance = cast(build("sub", arg("q"), arg("kv")), F32)
    root = build("sub", arg("score"), build("mul", slope, distance))
    values = Values()
    for columns in range(200, 512, 8):  # as the strips of a causal mask grow
        env = {
            "score": torch.randn(1, 4, 64, columns),
            "h": torch.arange(4, dtype=torch.int32).view(1, 4, 1, 1),
            "q": torch.arange(64, dtype=torch.int32).view(1, 1, 64, 1),
            "kv": torch.arange(columns, dtype=torch.int32).view(1, 1, 1, columns),
        }
        place = env["score"].data_ptr()
        (found,) = values.evaluate([root], env, ("score",), [torch.rand(4)], torch.float32)
        assert found.data_ptr() == place
    assert sum(buffer.numel() for buffer in values._buffers) <= 2 * 64 * 512  # distances alone


def numbers() -> Tensor:
    """Return float32 of every exponent and sign, special values, and many near the bend."""
    torch.manual_seed(0)
    bits = torch.arange(0, 0x7F800000, 4099, dtype=torch.int32)
    every = bits.view(torch.float32)
    bend = torch.linspace(0, 12, 1_000_003)
    special = torch.tensor([0.0, math.inf, math.nan, 1e-40, 9.0, 3.4e38])
    positive = torch.cat([every, bend, special])
    return torch.cat([positive, -positive])


def test_tanh_is_exact_to_a_unit_of_the_last_place() -> None:
    x = numbers()
    exact = torch.tanh(x.double())
    found = tanh(x, out=torch.empty_like(x))
    assert torch.equal(found.isnan(), exact.isnan())
    normal = exact.abs() >= torch.finfo(torch.float32).tiny
    off = ((found.double() - exact) / exact)[normal].abs().max().item()
    assert off <= torch.finfo(torch.float32).eps  # a unit of the last place, at most twice torch's
    assert torch.equal(found[~normal & ~exact.isnan()], x[~normal & ~exact.isnan()])
    assert torch.equal(found.signbit(), exact.signbit())


@pytest.mark.parametrize("count", [0, 1, SMALLEST - 1, SMALLEST, 3 * SMALLEST + 5, LARGEST + 9000])
def test_tanh_of_any_number_of_elements(count: int) -> None:
    torch.manual_seed(count)
    x = torch.randn(count)
    torch.testing.assert_close(tanh(x.clone(), out=x.clone()), torch.tanh(x), rtol=2e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("enabled", [True, False])
def test_tanh_in_place_and_of_columns(dtype: torch.dtype, enabled: bool) -> None:
    torch.manual_seed(0)
    with torch.backends.mkldnn.flags(enabled=enabled, allow_tf32=None):
        wide = torch.randn(3, 50, 90, dtype=dtype)
        before, part = wide.clone(), wide[..., 20:70]
        tanh(part, out=part)
    wanted = before.clone()
    wanted[..., 20:70] = torch.tanh(before[..., 20:70])
    torch.testing.assert_close(wide, wanted, rtol=2e-7, atol=0)


def test_every_float_operation_has_a_way_to_write_to_given_memory() -> None:
    missing = {
        op
        for op, (_, result) in ir.SIGNATURES.items()
        if result in ("f", "n", "T", "*") and op not in cpu_values._INTO
    }
    assert missing == {"with_slope", "round"}
