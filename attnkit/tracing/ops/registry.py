"""Register handlers of torch functions, and apply functions of nodes to Values with shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attnkit.graph.ir import BOOL, I32, Node, const
from attnkit.graph.simplify import build
from attnkit.tracing.proxy import HANDLERS, Tracer, Value
from attnkit.util.shapes import broadcast
from attnkit.util.torch_private import neural_functions

Handler: TypeAlias = Callable[..., Value]

PARTS = ("", "end", "inner")  # in order: the whole tensor first

# Arithmetic on two bools is a logical operation in torch.
_OF_BOOLS = {"add": "or", "mul": "and", "min": "and", "max": "or"}


def register(*names: Any) -> Callable[[Handler], Handler]:
    """Return a decorator that registers a handler for torch functions.

    Args:
        names: the functions, or their names in every namespace of torch.
    """

    def decorate(handler: Handler) -> Handler:
        for name in names:
            if not isinstance(name, str):
                HANDLERS[name] = handler
                continue
            for space in (torch, Tensor, torch.nn.functional, torch.special, neural_functions):
                function = getattr(space, name, None)
                if callable(function):
                    HANDLERS[function] = handler
        return handler

    return decorate


def elementwise(tracer: Tracer, function: Callable[..., Node], *inputs: Any) -> Value:
    """Apply a function of nodes to Values element by element, broadcasting their shapes."""
    values = [tracer.lift(x) for x in inputs]
    if not any(v.sizes for v in values):
        return Value(tracer, function(*(v.node for v in values)))
    sizes = broadcast(*(v.sizes for v in values))

    def at(v: Value, position: tuple[Node, ...]) -> Node:
        index = position[len(position) - len(v.sizes) :]
        zero = const(0)
        return v.pick(*(zero if n == 1 else i for n, i in zip(v.sizes, index, strict=True)))

    def pick(*position: Node) -> Node:
        return function(*(at(v, position) for v in values))

    sample = pick(*[const(0)] * len(sizes))
    part = max((v.part for v in values), key=PARTS.index)
    return Value(tracer, None, tuple(sizes), sample.type, pick, part=part)


def wrapping(handler: Handler) -> Handler:
    """Make a handler of integer arithmetic wrap its result in 8 or 16 bits where torch does."""

    def handled(tracer: Tracer, *inputs: Any, **options: Any) -> Value:
        result = handler(tracer, *inputs, **options)
        dtype = _narrow_dtype(tracer, inputs)
        if dtype is None or result.kind != I32:
            return result
        least, size = torch.iinfo(dtype).min, 2 ** torch.iinfo(dtype).bits

        def wrap(x: Node) -> Node:
            above = build("and", build("sub", x, const(least)), const(size - 1))
            return build("add", above, const(least))

        return _with_dtype(elementwise(tracer, wrap, result), dtype)

    return handled


def narrowing(handler: Handler) -> Handler:
    """Make a handler whose result cannot wrap return the 8- or 16-bit dtype that torch returns."""

    def handled(tracer: Tracer, *inputs: Any, **options: Any) -> Value:
        result = handler(tracer, *inputs, **options)
        dtype = _narrow_dtype(tracer, [*inputs, *options.values()])
        return _with_dtype(result, dtype) if dtype is not None and result.kind == I32 else result

    return handled


def _with_dtype(value: Value, dtype: torch.dtype) -> Value:
    """Return a copy of a Value with the dtype, narrower than int32, in which torch computes it."""
    node = None if value.sizes else value.node
    return Value(
        value.tracer, node, value.sizes, value.kind, value.pick, value.origin, value.part, dtype
    )


def _narrow_dtype(tracer: Tracer, inputs: Sequence[Any]) -> torch.dtype | None:
    """Find the dtype, if narrower than int32, in which torch computes with these integers."""
    result: torch.dtype | None = None
    for x in inputs:
        if not isinstance(x, Value | Tensor):
            continue  # Python numbers take the dtype of the other inputs
        value = tracer.lift(x)
        if value.kind == BOOL:
            continue
        if value.narrow_dtype is None:
            return None
        result = (
            value.narrow_dtype
            if result is None
            else torch.promote_types(result, value.narrow_dtype)
        )
    return result


def binary(op: str) -> Handler:
    """Return the handler of an operation on two Values, with torch's `alpha`."""

    def node(x: Node, y: Node) -> Node:
        bools = x.type == y.type == BOOL
        return build(_OF_BOOLS.get(op, op) if bools else op, x, y)

    def handler(tracer: Tracer, a: Any, b: Any, *, alpha: Any = 1) -> Value:
        if alpha != 1:
            b = elementwise(tracer, lambda x, y: build("mul", x, y), b, alpha)
        return elementwise(tracer, node, a, b)

    return handler
