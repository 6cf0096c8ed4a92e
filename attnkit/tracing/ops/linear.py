"""Handle torch's products of vectors and small matrices in a trace: dot, matmul and linear.

Every sum is unrolled to loads, products and a tree of sums, so the matrices must be small.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from attnkit.graph.ir import F32, Node, const
from attnkit.graph.simplify import build, cast
from attnkit.tracing.dtypes import result_dtype
from attnkit.tracing.ops.registry import PARTS, as_dtype, binary, register
from attnkit.tracing.ops.shape import MAX_UNROLL, tree
from attnkit.tracing.proxy import Tracer, Value, dispatch

MAX_PRODUCTS = 4096  # largest number of products that one trace may unroll

_HALVES = (torch.float16, torch.bfloat16)
_OUTSIDE = (
    "compute the product outside of the function, capture the result and index that; or capture "
    "a table of the function over the distances q - kv"
)


def contract(tracer: Tracer, a: Value, b: Value) -> Value:
    """Return the sums over k of `a[i, k] * b[j, k]`, of shape [i, j].

    Args:
        tracer: the trace.
        a: Value of shape [i, k]; i stands for any number of dimensions, or none.
        b: Value of shape [j, k], of the dtype of `a`.

    Returns:
        The sums in the dtype in which torch adds them: float32 for 16-bit floats.
    """
    dtype = result_dtype([a, b])
    if dtype == torch.bool:
        raise TypeError("torch has no product of bool matrices; convert them with .float()")
    dtype = torch.float32 if dtype in _HALVES else dtype
    a, b = as_dtype(a, dtype), as_dtype(b, dtype)
    length, rank = a.sizes[-1], len(a.sizes) - 1
    if length > MAX_UNROLL:
        raise ValueError(
            f"a sum over {length} products for each score; at most {MAX_UNROLL} are unrolled. "
            f"{_OUTSIDE.capitalize()}"
        )

    def join(op: str, x: Node, y: Node) -> Node:
        return tracer.converter.fit(build(op, x, y), dtype)

    @functools.cache  # the next layer reads each element once for each of its own
    def pick(*at: Node) -> Node:
        tracer.products += length
        if tracer.products > MAX_PRODUCTS:
            tracer.fail(
                f"linear layers and products of matrices with more than {MAX_PRODUCTS} products "
                f"for each score; {_OUTSIDE}"
            )
        i, j = at[:rank], at[rank:]
        terms = [join("mul", a.pick(*i, const(k)), b.pick(*j, const(k))) for k in range(length)]
        return tree(terms, functools.partial(join, "add"), cast(const(0), a.kind))

    sizes = a.sizes[:-1] + b.sizes[:-1]
    if not sizes:
        return Value(tracer, pick(), dtype)
    # an index that k replaces is inside; one that the caller may still choose, perhaps not
    parts = [v.part for v in (a, b) if len(v.sizes) > 1]
    return Value(tracer, None, dtype, sizes, pick, part=max(parts, key=PARTS.index))


def _of_captured(tracer: Tracer, function: Any, *values: Value) -> Value | None:
    """Return the product of captured tensors, computed now; None if a traced value takes part."""
    if any(v.origin is None for v in values):
        return None
    return tracer.lift(dispatch(tracer, function, tuple(v.origin for v in values), {}))


def _transposed(a: Value) -> Value:
    if len(a.sizes) < 2:
        return a
    return Value(a.tracer, None, a.dtype, a.sizes[::-1], lambda i, j: a.pick(j, i), part=a.part)


def _product(tracer: Tracer, a: Value, b: Value) -> Value:
    """Return the product of a vector or matrix with a vector or matrix."""
    if a.sizes[-1] != b.sizes[0]:
        raise ValueError(
            f"a product of shapes {a.sizes} and {b.sizes}; {a.sizes[-1]} and {b.sizes[0]} differ"
        )
    if len(a.sizes) + len(b.sizes) > 2:
        known = _of_captured(tracer, torch.matmul, a, b)
        if known is not None:
            return known
    return as_dtype(contract(tracer, a, _transposed(b)), result_dtype([a, b]))


@register("matmul", "__matmul__")
def _matmul(tracer: Tracer, a: Any, b: Any) -> Value:
    a, b = tracer.lift(a), tracer.lift(b)
    if not {len(a.sizes), len(b.sizes)} <= {1, 2}:
        raise ValueError(
            f"a product of shapes {a.sizes} and {b.sizes}; expected vectors and matrices. Of two "
            "captured rows torch.dot(a[i], b[j]) is the product; else " + _OUTSIDE
        )
    return _product(tracer, a, b)


@register("__rmatmul__")
def _rmatmul(tracer: Tracer, a: Any, b: Any) -> Value:
    return _matmul(tracer, b, a)


def _of_ranks(*ranks: int) -> Any:
    def handler(tracer: Tracer, a: Any, b: Any) -> Value:
        a, b = tracer.lift(a), tracer.lift(b)
        if (len(a.sizes), len(b.sizes)) != ranks:
            raise ValueError(
                f"a product of shapes {a.sizes} and {b.sizes}; expected {ranks[0]} and {ranks[1]} "
                f"dimensions. The function sees one score at a time: {_OUTSIDE}"
            )
        return _product(tracer, a, b)

    return handler


register("dot", "vdot", "inner")(_of_ranks(1, 1))
register("mv")(_of_ranks(2, 1))
register("mm")(_of_ranks(2, 2))


@register("linear")
def _linear(tracer: Tracer, x: Any, weight: Any, bias: Any = None) -> Value:
    x, weight = tracer.lift(x), tracer.lift(weight)
    if len(weight.sizes) not in (1, 2):
        raise ValueError(f"expected a weight of shape [out, in] or [in], got {weight.sizes}")
    if not x.sizes or x.sizes[-1] != weight.sizes[-1]:
        raise ValueError(
            f"expected an input of shape [..., {weight.sizes[-1]}], got {x.sizes}. The function "
            "sees one score at a time: torch.stack makes a row of numbers, and a captured table "
            "has rows, as table[h]"
        )
    values = [x, weight] if bias is None else [x, weight, tracer.lift(bias)]
    dtype = result_dtype(values)
    if not dtype.is_floating_point or any(v.kind != F32 for v in values):
        raise TypeError(f"expected floats, got {[v.dtype for v in values]}; convert with .float()")
    known = _of_captured(tracer, torch.nn.functional.linear, *values)
    if known is not None:
        return known
    sums = contract(tracer, x, weight)
    if bias is not None:
        sums = binary("add")(tracer, sums, as_dtype(values[2], sums.dtype))
    return as_dtype(sums, dtype)
