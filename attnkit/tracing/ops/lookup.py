"""Handle torch's functions that look up elements of a tensor: select, gather, take and embedding.

Each becomes an index into the tensor. Except for `select` and `take`, torch refuses negative
indices in these functions, while an index into a tensor counts them from the end. Such an index is
moved out of the tensor, so that the check of indices finds it, unless it is provably at least 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from attnkit.graph.ir import I32, Node, const
from attnkit.graph.simplify import build, without_gradient
from attnkit.tracing.ops.index import index, whole
from attnkit.tracing.ops.registry import elementwise, register
from attnkit.tracing.proxy import HANDLERS, Tracer, Value
from attnkit.util.shapes import broadcast


def _indices(tracer: Tracer, x: Any) -> Value:
    value = tracer.lift(x)
    if value.kind != I32 or value.number is not None:
        got = "a number" if value.number is not None else str(value.dtype)
        raise TypeError(f"expected a tensor of integer indices, got {got}")
    return value


def _from_start(tracer: Tracer, at: Value, size: int) -> Value:
    """Return the indices `at` with `size`, which is out of range, in place of negative ones."""

    def node(i: Node) -> Node:
        if tracer.converter.never_negative(i):
            return i
        return build("where", build("lt", i, const(0)), const(size), i)

    return elementwise(tracer, node, at)


def _axis(source: Value, dim: int) -> int:
    rank = max(len(source.sizes), 1)
    if not -rank <= dim < rank:
        raise IndexError(f"dim {dim} is out of range for a tensor of shape {source.sizes}")
    return dim % rank


def _lookup(tracer: Tracer, source: Value, axis: int, at: Value) -> Value:
    """Return `source[:, ..., at, ...]` with `at` in place of the axis."""
    return index(
        tracer, source, (*[slice(None)] * axis, _from_start(tracer, at, source.sizes[axis]))
    )


@register("index_select")
def _index_select(tracer: Tracer, a: Any, dim: int, at: Any) -> Value:
    source, at = tracer.lift(a), _indices(tracer, at)
    if len(at.sizes) > 1:
        raise ValueError(f"expected indices of shape [n], got shape {at.sizes}")
    if not source.sizes:
        raise ValueError("index_select of one number; use the number itself")
    if not at.sizes:  # torch takes it as one of shape [1]
        at = Value(tracer, None, at.dtype, (1,), lambda _, n=at.node: n)
    return _lookup(tracer, source, _axis(source, dim), at)


@register("select")
def _select(tracer: Tracer, a: Any, dim: int, at: Any) -> Value:
    source = tracer.lift(a)
    if not source.sizes:
        raise ValueError("select of one number, which has no dimensions")
    return index(tracer, source, (*[slice(None)] * _axis(source, dim), at))


@register("embedding")
def _embedding(
    tracer: Tracer,
    at: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    table = tracer.lift(weight)
    if len(table.sizes) != 2:
        raise ValueError(f"expected a weight of shape [n, features], got shape {table.sizes}")
    if max_norm is not None:
        raise ValueError("max_norm changes the weight at every call; normalize it outside")
    if scale_grad_by_freq or sparse:
        name = "sparse" if sparse else "scale_grad_by_freq"
        raise ValueError(
            f"{name}=True changes the gradient of the weight, which is dense and the sum over all "
            f"scores here; use {name}=False"
        )
    at = _indices(tracer, at)
    found = _lookup(tracer, table, 0, at)
    if padding_idx is None or tracer.converter.rounds:  # a mask has no gradient
        return found
    count = table.sizes[0]
    if not -count <= padding_idx < count:
        raise ValueError(f"padding_idx={padding_idx} is not among the {count} rows")
    padding = const(padding_idx % count)

    def pick(*position: Node) -> Node:
        n, i = found.pick(*position), at.pick(*position[: len(at.sizes)])
        return build("where", build("eq", i, padding), without_gradient(n), n)

    return Value(tracer, None, found.dtype, found.sizes, pick, part=found.part)


# The C++ function has another order of arguments, and -1 for no padding index.
HANDLERS[torch.embedding] = lambda tracer, weight, at, padding=-1, scale=False, sparse=False: (
    _embedding(tracer, at, weight, None if padding == -1 else padding, None, 2.0, scale, sparse)
)


@register("gather")
def _gather(tracer: Tracer, a: Any, dim: int, at: Any, *, sparse_grad: bool = False) -> Value:
    source, at = tracer.lift(a), _indices(tracer, at)
    axis = _axis(source, dim)
    if len(source.sizes) != len(at.sizes):
        raise ValueError(
            f"a tensor of shape {source.sizes} and indices of shape {at.sizes}; "
            "expected the same number of dimensions"
        )
    if any(
        n > size
        for d, (n, size) in enumerate(zip(at.sizes, source.sizes, strict=True))
        if d != axis
    ):
        raise ValueError(
            f"indices of shape {at.sizes} into a tensor of shape {source.sizes}; expected no more "
            f"than its size in every dimension except {axis}"
        )
    return _along(tracer, source, axis, at)


def _along(tracer: Tracer, source: Value, axis: int, at: Value) -> Value:
    """Return the tensor of the shape of `at` whose element i is `source[..., at[i], ...]`.

    The other indices are those of i, or 0 where the source has size 1.
    """
    if not source.sizes:
        return source  # torch too allows only the index 0
    source = whole(tracer, source)
    inside = _from_start(tracer, at, source.sizes[axis])

    def pick(*position: Node) -> Node:
        chosen = inside.pick(*position)
        return source.pick(
            *(
                chosen if d == axis else const(0) if source.sizes[d] == 1 else i
                for d, i in enumerate(position)
            )
        )

    return Value(tracer, None, source.dtype, at.sizes, pick)


@register("take_along_dim")
def _take_along_dim(tracer: Tracer, a: Any, indices: Any, dim: int | None = None) -> Value:
    source, at = tracer.lift(a), _indices(tracer, indices)
    if dim is None:
        if len(at.sizes) != 1:
            raise ValueError(f"without dim, expected indices of shape [n], got shape {at.sizes}")
        return _take(tracer, source, _from_start(tracer, at, math.prod(source.sizes)))
    axis = _axis(source, dim)
    if len(source.sizes) != len(at.sizes):
        raise ValueError(
            f"a tensor of shape {source.sizes} and indices of shape {at.sizes}; "
            "expected the same number of dimensions"
        )
    rest = [(*v.sizes[:axis], 1, *v.sizes[axis + 1 :]) for v in (source, at)]
    sizes = list(broadcast(*rest))
    sizes[axis] = at.sizes[axis]

    def pick(*position: Node) -> Node:
        return at.pick(
            *(const(0) if n == 1 else i for n, i in zip(at.sizes, position, strict=True))
        )

    return _along(tracer, source, axis, Value(tracer, None, at.dtype, tuple(sizes), pick))


@register("take")
def _take(tracer: Tracer, a: Any, at: Any) -> Value:
    source, at = tracer.lift(a), _indices(tracer, at)
    if len(source.sizes) < 2:
        return index(tracer, source, (at,)) if source.sizes else source
    parts = []
    for d, size in enumerate(source.sizes):
        step = const(math.prod(source.sizes[d + 1 :]))
        row = elementwise(tracer, lambda i, s=step: build("fdiv", i, s), at)
        # the first index alone leaves its dimension, where `at` leaves the tensor
        parts.append(
            elementwise(tracer, lambda i, n=size: build("mod", i, const(n)), row) if d else row
        )
    return index(tracer, source, tuple(parts))
