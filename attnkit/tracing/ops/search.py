"""Handle torch's search functions in a trace: isin, bucketize and searchsorted.

Each function compares one traced number with all elements of a captured tensor. The comparison is
an unrolled reduction, so the tensor must be small.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnkit.graph.ir import I32, Node
from attnkit.graph.simplify import FALSE, build, cast, negate
from attnkit.tracing.ops.registry import as_dtype, combine, elementwise, register
from attnkit.tracing.ops.shape import reduce
from attnkit.tracing.proxy import Tracer, Value


@register("isin")
def _isin(
    tracer: Tracer,
    elements: Any,
    test_elements: Any,
    *,
    assume_unique: bool = False,
    invert: bool = False,
) -> Value:
    element = _number(tracer, "elements", elements)
    values = [element, tracer.lift(test_elements)]
    same = combine(tracer, lambda x, y: build("eq", x, y), values, torch.bool)
    any_same = reduce(tracer, same, lambda x, y: build("or", x, y), FALSE)
    return elementwise(tracer, negate, any_same) if invert else any_same


@register("bucketize")
def _bucketize(
    tracer: Tracer, x: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False
) -> Value:
    counted = _count_before(tracer, "input", x, "boundaries", boundaries, right)
    return as_dtype(counted, torch.int32) if out_int32 else counted


@register("searchsorted")
def _searchsorted(
    tracer: Tracer,
    sorted_sequence: Any,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Value:
    if sorter is not None:
        raise ValueError("sorter is not supported; sort the captured tensor outside")
    if side is not None:
        right = side == "right"
    counted = _count_before(tracer, "input", x, "sorted_sequence", sorted_sequence, right)
    return as_dtype(counted, torch.int32) if out_int32 else counted


def _count_before(tracer: Tracer, what: str, x: Any, where: str, bounds: Any, right: bool) -> Value:
    """Count the elements of `bounds` below the number `x`, or with `right` those not above `x`."""
    number, edges = _number(tracer, what, x), tracer.lift(bounds)
    if len(edges.sizes) != 1:
        raise ValueError(
            f"{where} of shape {edges.sizes} is not supported; index one row of it, as {where}[h]"
        )

    def before(value: Node, edge: Node) -> Node:
        # negated, so that all bounds are before NaN, as in torch
        beyond = build("lt" if right else "le", value, edge)
        return cast(negate(beyond), I32)

    counted = combine(tracer, before, [number, edges], torch.int64)
    return reduce(tracer, counted, lambda a, b: build("add", a, b), cast(FALSE, I32))


def _number(tracer: Tracer, what: str, x: Any) -> Value:
    value = tracer.lift(x)
    if value.sizes:
        raise ValueError(f"{what} of shape {value.sizes} is not supported; search one number")
    return value
