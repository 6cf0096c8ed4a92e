"""Handle torch's searches in a captured tensor in a trace: isin, bucketize and searchsorted.

Each searches one traced number by a reduction over all elements of the tensor. A reduction is
unrolled, so the tensor must be small.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnkit.graph.ir import I32, Node
from attnkit.graph.simplify import FALSE, build, cast, negate
from attnkit.tracing.ops.registry import elementwise, register
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
    same = elementwise(tracer, lambda x, y: build("eq", x, y), element, test_elements)
    any_same = reduce(tracer, same, lambda x, y: build("or", x, y), FALSE)
    return elementwise(tracer, negate, any_same) if invert else any_same


@register("bucketize")
def _bucketize(
    tracer: Tracer, x: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False
) -> Value:
    return _count_before(tracer, "input", x, "boundaries", boundaries, right)


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
    return _count_before(tracer, "input", x, "sorted_sequence", sorted_sequence, right)


def _count_before(tracer: Tracer, what: str, x: Any, where: str, bounds: Any, right: bool) -> Value:
    """Count the bounds that are less than a number; with `right`, those that are not greater."""
    number, edges = _number(tracer, what, x), tracer.lift(bounds)
    if len(edges.sizes) != 1:
        raise ValueError(
            f"{where} of shape {edges.sizes} is not supported; index one row of it, as {where}[h]"
        )

    def before(value: Node, edge: Node) -> Node:
        # negated, so that all bounds are before NaN, as in torch
        beyond = build("lt" if right else "le", value, edge)
        return cast(negate(beyond), I32)

    counted = elementwise(tracer, before, number, edges)
    return reduce(tracer, counted, lambda a, b: build("add", a, b), cast(FALSE, I32))


def _number(tracer: Tracer, what: str, x: Any) -> Value:
    value = tracer.lift(x)
    if value.sizes:
        raise ValueError(f"{what} of shape {value.sizes} is not supported; search one number")
    return value
