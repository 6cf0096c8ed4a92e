"""Check that traced values have the dtypes, wrapping and rounding of torch.vmap over scalars.

FlexAttention evaluates a mod with torch.vmap over tensors without dimensions. attnkit passes int32
positions, as FlexAttention's kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnkit.errors import BoundsError, TraceError
from attnkit.graph import ir
from attnkit.graph.adjoint import adjoint
from attnkit.graph.eval_torch import evaluate, mask_dtype
from attnkit.runtime.reference import positions
from attnkit.sparsity.block_mask import check_lengths
from attnkit.tracing.tracer import trace

B, H, Q, K = 1, 2, 8, 9
SHAPE = (B, H, Q, K)


def of_vmap(function: Callable[..., Any], *scores: Tensor) -> Tensor:
    """Evaluate a mod as FlexAttention does, by vmap over b, h, q and kv."""
    for axis in (3, 2, 1, 0):
        dims: list[int | None] = [None] * 4
        dims[axis] = 0
        function = torch.vmap(function, in_dims=(*[0 for _ in scores], *dims))
    result = function(*scores, *(torch.arange(n, dtype=torch.int32) for n in SHAPE))
    assert isinstance(result, Tensor)
    return result


def of_trace(function: Callable[..., Any]) -> Tensor:
    """Evaluate the traced graph of a mask_mod at every position."""
    traced = trace(function, "mask")
    env = positions(SHAPE, torch.device("cpu"))
    dtype = mask_dtype(traced.root, traced.tensors)
    (kept,) = evaluate([traced.root], env, traced.tensors, dtype)
    return kept.expand(SHAPE)


INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TABLES = {
    **{
        dtype: (torch.arange(K) * 7919 % 256 - 100).to(dtype)
        for dtype in (torch.uint8, torch.int8, torch.int16)
    },
    torch.int32: torch.tensor([0, 3, -7, 1000, 65536, 12, -4096, 255, -1], dtype=torch.int32),
    torch.int64: torch.tensor([5, -3, 70, 100, -65536, 12, 4096, 256, 1]),
    torch.bool: torch.tensor([True, False, True, True, False, False, True, False, True]),
    **{
        dtype: torch.tensor([0.1, -3.3, 7.7, 1e-3, 257.3, -0.0, 2.5, -1000.1, 1.0]).to(dtype)
        for dtype in FLOATS
    },
}


# --- single operations, every pair of dtypes --------------------------------------------------
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
    "//": lambda x, y: x // y,
    "%": lambda x, y: x % y,
    "&": lambda x, y: x & y,
    "|": lambda x, y: x | y,
    "^": lambda x, y: x ^ y,
    "==": lambda x, y: x == y,
    "!=": lambda x, y: x != y,
    "<": lambda x, y: x < y,
    ">=": lambda x, y: x >= y,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > 3, x, y),
    "fmod": torch.fmod,
    "add with alpha": lambda x, y: torch.add(x, y, alpha=3),
    "truncated division": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "floor division": lambda x, y: torch.div(x, y, rounding_mode="floor"),
}
NUMBERS = (-1, 300, 2, -129, 0.3, 1e-4, True)


def agree(value: Callable[..., Any]) -> None:
    """Check that a function of (q, kv) has torch's dtype and values, unless torch refuses it."""
    try:
        expected = of_vmap(lambda b, h, q, kv: value(q, kv))
    except (RuntimeError, TypeError, OverflowError):
        return  # torch refuses it
    dtypes: list[torch.dtype] = []

    def probe(x: Any) -> Any:
        dtypes.append(x.dtype)
        return x

    trace(lambda b, h, q, kv: probe(value(q, kv)) == 0, "mask")
    assert dtypes == [expected.dtype]
    table = expected  # every value that occurs, read back at its own place
    found = of_trace(lambda b, h, q, kv: _same(value(q, kv), table[b, h, q, kv]))
    assert found.all()


def _same(x: Any, y: Any) -> Any:
    if not y.dtype.is_floating_point:
        return x == y
    return (x == y) | (torch.isnan(x) & torch.isnan(y))


def _is_left_out(name: str, x: Any, y: Any) -> bool:
    """Return whether torch's result depends on how it is called, or attnkit refuses the call."""
    dtypes = [v if isinstance(v, torch.dtype) else type(v) for v in (x, y)]
    floating = [d is float or (isinstance(d, torch.dtype) and d.is_floating_point) for d in dtypes]
    if _divides(name) and not floating[1]:
        return True  # integers divided by zero are refused
    if name == "add with alpha":
        return any(floating)  # with or without a fused multiply-add
    numbers = any(not isinstance(d, torch.dtype) for d in dtypes)
    if name == "/" and numbers and not any(floating):
        return True  # vmap wraps the number in the dtype of the table, torch without vmap does not
    if name == "truncated division":
        return numbers and any(d in (torch.float16, torch.bfloat16) for d in dtypes)
    return False


def _divides(name: str) -> bool:
    return name in ("//", "%", "fmod", "truncated division", "floor division")


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("first", TABLES, ids=str)
def test_operations_on_two_dtypes_are_torchs(name: str, first: torch.dtype) -> None:
    operation, table = BINARY[name], TABLES[first]
    for second, other in TABLES.items():
        if not _is_left_out(name, first, second):
            agree(lambda q, kv, other=other: operation(table[kv], other[q]))
    if not _is_left_out(name, first, torch.float32):
        agree(lambda q, kv: operation(table[kv], q + 1))
    if not _is_left_out(name, torch.int32, first):
        agree(lambda q, kv: operation(q - kv, table[kv]))


@pytest.mark.parametrize(
    "name", sorted(BINARY.keys() - {"minimum", "maximum", "fmod"})
)  # take tensors
@pytest.mark.parametrize("dtype", TABLES, ids=str)
def test_operations_on_a_number_are_torchs(name: str, dtype: torch.dtype) -> None:
    operation, table = BINARY[name], TABLES[dtype]
    reflected = name not in ("add with alpha", "truncated division", "floor division")
    for number in NUMBERS:
        if not _is_left_out(name, dtype, float(number) if _divides(name) else number):
            agree(lambda q, kv, number=number: operation(table[kv], number))
        if reflected and not _is_left_out(name, number, dtype):
            agree(lambda q, kv, number=number: operation(number, table[kv]))


# --- random expressions -------------------------------------------------------------------------
# Steps over a stack of values; each takes two values of any dtype and a Python number.
STEPS: list[Callable[[Any, Any, Any], Any]] = [
    lambda x, y, n: x + y,
    lambda x, y, n: x - y,
    lambda x, y, n: x * y,
    lambda x, y, n: x + n,
    lambda x, y, n: n - x,
    lambda x, y, n: x * n,
    lambda x, y, n: x & y,
    lambda x, y, n: x ^ n,
    lambda x, y, n: x | y,
    lambda x, y, n: -x,
    lambda x, y, n: ~x,
    lambda x, y, n: x.abs(),
    lambda x, y, n: x**2,
    lambda x, y, n: x << 3,
    lambda x, y, n: x >> 2,
    lambda x, y, n: x // 3,
    lambda x, y, n: x % 7,
    lambda x, y, n: x % n,
    lambda x, y, n: x // n,
    lambda x, y, n: x / y,
    lambda x, y, n: x / 3,
    lambda x, y, n: n / x,
    lambda x, y, n: torch.where(x > y, x, y),
    lambda x, y, n: torch.where(x == n, y, n),
    lambda x, y, n: torch.minimum(x, y),
    lambda x, y, n: torch.maximum(x, y),
    lambda x, y, n: x.clamp(min=n),
    lambda x, y, n: x.masked_fill(y > 0, n),
    lambda x, y, n: x < n,
    lambda x, y, n: x != n,
    lambda x, y, n: (x <= y) | (x == y),
    lambda x, y, n: x.to(torch.int8),
    lambda x, y, n: x.to(torch.uint8) if not x.dtype.is_floating_point else x,
    lambda x, y, n: x.to(y.dtype) if not x.dtype.is_floating_point else x,
    lambda x, y, n: x.bfloat16(),
    lambda x, y, n: x.half(),
    lambda x, y, n: x.float(),
    lambda x, y, n: x.long() if not x.dtype.is_floating_point else x,
    lambda x, y, n: torch.full_like(x, n),
    lambda x, y, n: torch.ones_like(x) + y,
    lambda x, y, n: torch.floor(x),
    lambda x, y, n: torch.sqrt(x.abs()),
    lambda x, y, n: x + torch.tensor(n),
    lambda x, y, n: torch.stack([x, y]).sum() if x.dtype == y.dtype else x,
    lambda x, y, n: torch.isin(x, torch.tensor([0, 3, 100])),
]
_numbers = st.sampled_from([-1, 0, 1, 2, 3, 100, 127, 128, 200, 255, 256, 300, -128, -129, 40000])
_reals = st.sampled_from([0.1, 0.5, -1.7, 3.0, 1e-3, 300.5])


# Scores are not rounded to 16 bits in between.
_HALVES = [function for function in STEPS if {"bfloat16", "half"} & {*function.__code__.co_names}]
WIDER_STEPS = [function for function in STEPS if function not in _HALVES]
WIDER_TABLES = [d for d in TABLES if d not in (torch.float16, torch.bfloat16, torch.float64)]


@st.composite
def expressions(
    draw: st.DrawFn, dtypes: Sequence[torch.dtype] = (), functions: Sequence[Any] = ()
) -> Callable[..., Any]:
    """Draw a random function of (q, kv, *others) that computes on a stack of values."""
    place = st.integers(0, 50)
    number = st.one_of(_numbers, _numbers, _reals)
    step = st.tuples(st.sampled_from(functions or STEPS), place, place, number)
    tables = draw(st.lists(st.sampled_from(dtypes or list(TABLES)), min_size=1, max_size=3))
    steps = draw(st.lists(step, min_size=1, max_size=5))

    def value(q: Any, kv: Any, *others: Any) -> Any:
        stack = [q, kv, *(TABLES[d][kv] for d in tables), *(TABLES[d][q] for d in tables), *others]
        for function, x, y, n in steps:
            stack.append(function(stack[-1 - x % len(stack)], stack[-1 - y % len(stack)], n))
        return stack[-1]

    return value


@given(expressions())
@settings(deadline=None)
def test_random_expressions_are_torchs(value: Callable[[Any, Any], Any]) -> None:
    try:
        expected = of_vmap(lambda b, h, q, kv: value(q, kv))
    except (RuntimeError, TypeError, OverflowError):
        return  # torch refuses it
    mask = lambda b, h, q, kv: _same(value(q, kv), expected[b, h, q, kv])
    try:
        traced = trace(mask, "mask")
        check_lengths(traced, Q, K, B, H)
    except (TraceError, BoundsError):
        return  # attnkit refuses it: int64 results above 32 bits, division by zero
    assert of_trace(mask).all()


@given(expressions(WIDER_TABLES, WIDER_STEPS), st.integers(0, 2**31))
@settings(deadline=None)
def test_random_score_mods_have_torchs_value_and_derivative(
    value: Callable[..., Any], seed: int
) -> None:
    mod = lambda s, b, h, q, kv: s * 0.5 + value(q, kv, s)
    scores = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).mul_(2)
    scores.requires_grad_()
    try:
        expected = of_vmap(mod, scores)
        grad = torch.linspace(1, 2, expected.numel()).view(SHAPE)
        (slope,) = torch.autograd.grad(expected, scores, grad.to(expected.dtype))
    except (RuntimeError, TypeError, OverflowError):
        return  # torch refuses it
    try:
        traced = trace(mod, "score")
        check_lengths(traced, Q, K, B, H)
    except (TraceError, BoundsError):
        return
    env = {**positions(SHAPE, torch.device("cpu")), "score": scores.detach(), "grad": grad}
    found, derivative = evaluate([traced.root, adjoint(traced.root).dscore], env, traced.tensors)
    close = {"rtol": 1e-5, "atol": 1e-4, "equal_nan": True}
    torch.testing.assert_close(found.expand(SHAPE), expected.detach().float(), **close)
    known = slope.isfinite()  # torch lets 0 * inf = NaN flow out of floor
    torch.testing.assert_close(derivative.expand(SHAPE)[known], slope[known], **close)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_sums_of_captured_integers_keep_their_plain_form(dtype: torch.dtype) -> None:
    """Tiles are classified by this form. Products may exceed int32, and wrap."""
    ids = torch.arange(K).to(dtype)
    traced = trace(lambda b, h, q, kv: ids[kv] + q - ids[q].int() > 3, "mask")
    assert not any(n.op.startswith("wrap_") for n in ir.topo(traced.root))
    large = trace(lambda b, h, q, kv: ids[kv].int() * ids[q].int() * 5 * ids[h].int() > 3, "mask")
    wraps = any(n.op.startswith("wrap_") for n in ir.topo(large.root))
    assert wraps == (dtype != torch.int8)


def test_a_float_becomes_a_byte_as_in_torch() -> None:
    scores = torch.linspace(-1e5, 1e5, B * H * Q * K).view(SHAPE)
    mod = lambda s, b, h, q, kv: s.to(torch.int16) + s.to(torch.int8) * 0.5
    traced = trace(mod, "score")
    assert not check_lengths(traced, Q, K, B, H)
    env = {**positions(SHAPE, torch.device("cpu")), "score": scores}
    assert torch.equal(evaluate([traced.root], env, [])[0], of_vmap(mod, scores))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16], ids=str)
def test_bits_of_narrow_tables_are_proven_to_stay(dtype: torch.dtype) -> None:
    table = TABLES[dtype]
    mask = lambda b, h, q, kv: ((table[q] | table[kv]) ^ table[q]) + table[kv] > 3
    traced = trace(mask, "mask")
    assert not check_lengths(traced, Q, K, B, H)
    assert torch.equal(of_trace(mask), of_vmap(mask))


def test_only_results_that_a_dtype_cannot_hold_are_rounded() -> None:
    """A mask is compared at the precision of torch, which rounds each result."""
    half = TABLES[torch.float16]

    def rounded(of: Callable[[Any, Any], Any]) -> list[str]:
        root = trace(lambda b, h, q, kv: of(q, kv) > 0, "mask").root
        return [str(n.attr) for n in ir.topo(root) if n.op == "round"]

    for exact in (
        lambda q, kv: -half[q].abs(),
        lambda q, kv: torch.minimum(half[q], -half[kv]),
        lambda q, kv: torch.maximum(half[q], half[kv]).floor(),
        lambda q, kv: torch.where(q > kv, half[q], 1.5),
        lambda q, kv: torch.where(q > kv, half[q], math.nan),
        lambda q, kv: half[q].float(),
        lambda q, kv: half[q].float().abs(),
    ):
        assert rounded(exact) == []
    for inexact in (
        lambda q, kv: half[q] + 1.5,
        lambda q, kv: half[q] * half[kv],
        lambda q, kv: torch.where(q > kv, half[q], 1.5) * 3.25,
    ):
        assert rounded(inexact) == ["float16"]
