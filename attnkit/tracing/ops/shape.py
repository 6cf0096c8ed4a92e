"""Handle torch's dtype conversions, factories, shape changes and reductions in a trace.

A reduction over a small axis is unrolled, so the graph has no loops and its evaluators need no code
for reductions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnkit.graph.ir import F32, Node, const
from attnkit.graph.simplify import FALSE, TRUE, build, cast
from attnkit.tracing.dtypes import result_dtype, round_to
from attnkit.tracing.ops.index import index
from attnkit.tracing.ops.registry import Handler, as_dtype, binary, combine, elementwise, register
from attnkit.tracing.proxy import HANDLERS, Tracer, Value

MAX_UNROLL = 128  # largest axis that a reduction unrolls


_HALVES = (torch.float16, torch.bfloat16)
_UNSUPPORTED = (torch.uint32, torch.uint64)


# --- conversions ---------------------------------------------------------------------------
@register("to", "type", "_to_copy")
def _to(tracer: Tracer, a: Any, *args: Any, **kwargs: Any) -> Value:
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.dtype):
            return _convert(tracer.lift(a), x)
        if isinstance(x, Tensor):
            return _convert(tracer.lift(a), x.dtype)
    return tracer.lift(a)


def _convert(value: Value, dtype: torch.dtype) -> Value:
    if dtype.is_complex or dtype in _UNSUPPORTED:
        raise TypeError(f"conversion to {dtype} is not supported; use torch.int32 or torch.float32")
    if dtype in _HALVES and value.dtype != dtype:  # explicit conversions round in scores too
        values = [as_dtype(value, torch.float64)]
        return combine(value.tracer, lambda n: round_to(n, dtype), values, dtype)
    return as_dtype(value, dtype)


register("type_as")(_to)


def _register_conversions() -> None:
    for name, dtype in {
        "float": torch.float32,
        "double": torch.float64,
        "half": torch.float16,
        "bfloat16": torch.bfloat16,
        "int": torch.int32,
        "short": torch.int16,
        "char": torch.int8,
        "byte": torch.uint8,
        "long": torch.int64,
        "bool": torch.bool,
    }.items():
        HANDLERS[getattr(Tensor, name)] = lambda tracer, a, dtype=dtype, **_: _to(tracer, a, dtype)
    same = "positive __pos__ clone contiguous cpu cuda view_as expand_as"
    for name in same.split():
        register(name)(lambda tracer, a, *_, **__: tracer.lift(a).copy())
    HANDLERS[Tensor.view_as] = HANDLERS[Tensor.expand_as] = _same_shape


def _same_shape(tracer: Tracer, a: Value, other: Any) -> Value:
    if a.sizes or tracer.lift(other).sizes:
        raise ValueError(
            "view_as and expand_as are not supported for values with a shape; index them instead"
        )
    return a.copy()


def _fill(tracer: Tracer, value: Any, size: Any, dtype: torch.dtype) -> Value:
    node = as_dtype(tracer.lift(value), dtype, strict=True).node
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return Value(tracer, None if sizes else node, dtype, sizes, lambda *_: node)


def _register_factories() -> None:
    for name, value in {"ones": 1, "zeros": 0}.items():
        register(f"new_{name}")(
            lambda t, a, size=(), *rest, dtype=None, value=value, **_: _fill(
                t, value, (size, *rest) if rest else size, dtype or a.dtype
            )
        )
        register(f"{name}_like")(
            lambda t, a, dtype=None, value=value, **_: _fill(t, value, a.sizes, dtype or a.dtype)
        )
    register("new_full")(
        lambda t, a, size, fill_value, dtype=None, **_: _fill(t, fill_value, size, dtype or a.dtype)
    )
    register("new_tensor")(
        lambda t, a, data, dtype=None, **_: _fill(t, data, (), dtype or t.lift(data).dtype)
    )
    register("full_like")(
        lambda t, a, fill_value, dtype=None, **_: _fill(t, fill_value, a.sizes, dtype or a.dtype)
    )


# --- metadata that is known while tracing --------------------------------------------------
def _size(tracer: Tracer, a: Value, dim: int | None = None) -> torch.Size | int:
    return a.shape if dim is None else a.shape[dim]


def _register_questions() -> None:
    answers: dict[str, Callable[[Value], Any]] = {
        "dim ndimension": lambda a: a.ndim,
        "numel nelement": lambda a: math.prod(a.sizes),
        "is_floating_point": lambda a: a.dtype.is_floating_point,
        "is_complex": lambda a: False,
        "is_signed": lambda a: a.dtype.is_signed,
        "element_size": lambda a: a.dtype.itemsize,
    }
    for names, answer in answers.items():
        handler: Any = lambda tracer, a, answer=answer: answer(a)
        register(*names.split())(handler)
    HANDLERS[Tensor.size] = _size


# --- shapes and reductions ------------------------------------------------------------------
@register("__getitem__")
def _getitem(tracer: Tracer, a: Any, at: Any) -> Value:
    return index(tracer, tracer.lift(a), at if isinstance(at, tuple) else (at,))


@register("unsqueeze")
def _unsqueeze(tracer: Tracer, a: Any, dim: int) -> Value:
    a = tracer.lift(a)
    dim %= len(a.sizes) + 1
    sizes = (*a.sizes[:dim], 1, *a.sizes[dim:])
    return Value(tracer, None, a.dtype, sizes, lambda *i: a.pick(*i[:dim], *i[dim + 1 :]))


@register("squeeze")
def _squeeze(tracer: Tracer, a: Any, dim: int | None = None) -> Value:
    a = tracer.lift(a)
    rank = len(a.sizes)
    drop = {i for i, n in enumerate(a.sizes) if n == 1 and dim in (None, i, i - rank)}
    return index(tracer, a, tuple(0 if i in drop else slice(None) for i in range(rank)))


@register("view", "reshape", "expand", "flatten", "ravel")
def _reshape(tracer: Tracer, a: Any, *size: Any) -> Value:
    a = tracer.lift(a)
    sizes = size[0] if len(size) == 1 and isinstance(size[0], tuple | list) else size
    if not a.sizes and all(n in (1, -1) for n in sizes):
        ones = (1,) * len(sizes)
        return Value(tracer, None, a.dtype, ones, lambda *_: a.node) if sizes else a
    raise ValueError(f"reshaping {a.sizes} to {tuple(sizes)} is not supported; use indexing")


@register("stack")
def _stack(tracer: Tracer, tensors: Any, dim: int = 0) -> Value:
    values = [tracer.lift(t) for t in tensors]
    if any(v.sizes for v in values) or dim not in (0, -1):
        raise ValueError("stack takes numbers, one per (q, kv) pair, along dim 0")
    dtype = result_dtype(values)
    nodes = [as_dtype(v, dtype).node for v in values]

    def pick(i: Node) -> Node:
        if i.op != "const":
            raise ValueError("a stack can be indexed by Python integers only")
        return nodes[int(i.attr)]  # type: ignore[arg-type]

    return Value(tracer, None, dtype, (len(nodes),), pick)


def tree(parts: list[Node], join: Callable[[Node, Node], Node], empty: Node) -> Node:
    """Join nodes in a balanced tree, for short dependency chains and small rounding errors."""
    while len(parts) > 1:
        pairs = [join(x, y) for x, y in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(pairs) * 2 :]
    return parts[0] if parts else empty


def reduce(
    tracer: Tracer, a: Any, join: Callable[[Node, Node], Node], empty: Node, dim: int | None = None
) -> Value:
    """Reduce a Value along the axis `dim`, or along all axes if `dim` is None.

    Args:
        tracer: the trace.
        a: the Value.
        join: function that combines two nodes to one.
        empty: the result for an axis without elements.
        dim: the axis.
    """
    source = tracer.lift(a)
    if not source.sizes:
        return source
    if dim is None and len(source.sizes) > 1:
        first = reduce(tracer, source, join, empty, -1)
        return reduce(tracer, first, join, empty)
    axis = (dim or 0) % len(source.sizes)
    length = source.sizes[axis]
    if length > MAX_UNROLL:
        raise ValueError(
            f"a reduction over {length} elements; at most {MAX_UNROLL} are unrolled. Reduce the "
            "tensor outside of the function, capture the result and index that"
        )

    def pick(*i: Node) -> Node:
        return tree(
            [source.pick(*i[:axis], const(k), *i[axis:]) for k in range(length)], join, empty
        )

    def fitted(*i: Node) -> Node:
        return tracer.converter.fit(pick(*i), source.dtype)

    sizes = source.sizes[:axis] + source.sizes[axis + 1 :]
    if not sizes:
        return Value(tracer, fitted(), source.dtype)
    return Value(tracer, None, source.dtype, sizes, fitted)


def _sum(tracer: Tracer, a: Any, dim: int | None = None) -> Value:
    source = tracer.lift(a)
    if source.kind != F32:
        source = as_dtype(source, torch.int64)
    empty = cast(const(0), source.kind)
    return reduce(tracer, source, lambda x, y: build("add", x, y), empty, dim)


@register("sum")
def _sum_handler(
    tracer: Tracer, a: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    source = tracer.lift(a) if dtype is None else _convert(tracer.lift(a), dtype)
    return _keep_dim(tracer, _sum(tracer, source, _one(dim)), dim, keepdim)


@register("mean")
def _mean(tracer: Tracer, a: Any, dim: Any = None, keepdim: bool = False) -> Value:
    a = tracer.lift(a)
    if a.kind != F32:
        raise TypeError(f"mean needs a float, got {a.dtype}")
    count = math.prod(a.sizes) if dim is None else a.sizes[_one(dim) or 0]
    total = _sum(tracer, a, _one(dim))
    mean = elementwise(tracer, lambda x: build("div", x, const(float(count))), total)
    return _keep_dim(tracer, mean, dim, keepdim)


def _truth(join: str, empty: Node) -> Handler:
    def handler(tracer: Tracer, a: Any, dim: Any = None, keepdim: bool = False) -> Value:
        a = as_dtype(tracer.lift(a), torch.bool)
        joined = reduce(tracer, a, lambda x, y: build(join, x, y), empty, _one(dim))
        return _keep_dim(tracer, joined, dim, keepdim)

    return handler


register("any")(_truth("or", FALSE))
register("all")(_truth("and", TRUE))


def _extreme(op: str) -> Handler:
    def handler(tracer: Tracer, a: Any, dim: Any = None, keepdim: bool = False) -> Value:
        a = tracer.lift(a)
        if a.kind == F32 and math.prod(a.sizes) > 2:
            # torch divides the gradient of a tie evenly; a tree of max does not
            raise ValueError(f"a{op} over floats is not supported; use torch.{op}imum pairwise")
        if a.sizes and 0 in a.sizes:
            raise ValueError(f"a{op} over an empty axis")
        join: Callable[[Node, Node], Node] = lambda x, y: build(op, x, y)
        return _keep_dim(tracer, reduce(tracer, a, join, FALSE, _one(dim)), dim, keepdim)

    return handler


def _register_extremes() -> None:
    for op in ("min", "max"):
        over_axis, pairwise = _extreme(op), binary(op)
        register(f"a{op}")(over_axis)

        def either(
            tracer: Tracer, a: Any, *rest: Any, r: Handler = over_axis, p: Handler = pairwise
        ) -> Value:
            if len(rest) == 1 and isinstance(rest[0], Tensor):
                return p(tracer, a, rest[0])
            if rest:
                raise ValueError("min/max along a dimension returns indices too; use amin/amax")
            return r(tracer, a)

        register(op)(either)


def _one(dim: Any) -> int | None:
    if isinstance(dim, tuple | list):
        if len(dim) != 1:
            raise ValueError("reduce one dimension at a time")
        return int(dim[0])
    return None if dim is None else int(dim)


def _keep_dim(tracer: Tracer, result: Value, dim: Any, keepdim: bool) -> Value:
    if not keepdim:
        return result
    axis = _one(dim)
    if axis is None:
        raise ValueError("keepdim needs a dim")
    return _unsqueeze(tracer, result, axis)


_register_conversions()
_register_factories()
_register_questions()
_register_extremes()
