"""What every handler needs: registering, and applying a function of nodes to shaped Values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attnkit.graph.ir import BOOL, I32, Node, const
from attnkit.graph.simplify import build
from attnkit.tracing.proxy import HANDLERS, Tracer, Value
from attnkit.util.shapes import broadcast

Handler: TypeAlias = Callable[..., Value]

PARTS = ("", "end", "inner")  # from whole to less

# What torch makes of arithmetic on two bools, whose result is a bool.
_OF_BOOLS = {"add": "or", "mul": "and", "min": "and", "max": "or"}


def register(*names: Any) -> Callable[[Handler], Handler]:
    """Register a handler for torch functions, by name in every namespace or by object."""

    def decorate(handler: Handler) -> Handler:
        for name in names:
            if not isinstance(name, str):
                HANDLERS[name] = handler
                continue
            for space in (torch, Tensor, torch.nn.functional, torch.special, torch._C._nn):
                function = getattr(space, name, None)
                if callable(function):
                    HANDLERS[function] = handler
        return handler

    return decorate


def elementwise(tracer: Tracer, function: Callable[..., Node], *inputs: Any) -> Value:
    """Apply a function of nodes to Values, broadcasting their shapes."""
    values = [tracer.lift(x) for x in inputs]
    if not any(v.sizes for v in values):
        return Value(tracer, function(*(v.node for v in values)))
    sizes = broadcast(*(v.sizes for v in values))

    def at(v: Value, position: tuple[Node, ...]) -> Node:
        own = position[len(position) - len(v.sizes) :]
        zero = const(0)
        return v.pick(*(zero if n == 1 else i for n, i in zip(v.sizes, own, strict=True)))

    def pick(*position: Node) -> Node:
        return function(*(at(v, position) for v in values))

    sample = pick(*[const(0)] * len(sizes))
    part = max((v.part for v in values), key=PARTS.index)
    return Value(tracer, None, tuple(sizes), sample.type, pick, part=part)


def wrapping(handler: Handler) -> Handler:
    """A handler of integer arithmetic whose result wraps as torch's does, in 8 or 16 bits."""

    def handled(tracer: Tracer, *inputs: Any, **options: Any) -> Value:
        result = handler(tracer, *inputs, **options)
        dtype = _narrow(tracer, inputs)
        if dtype is None or result.kind != I32:
            return result
        least, size = torch.iinfo(dtype).min, 2 ** torch.iinfo(dtype).bits

        def wrap(x: Node) -> Node:
            above = build("and", build("sub", x, const(least)), const(size - 1))
            return build("add", above, const(least))

        return _marked(elementwise(tracer, wrap, result), dtype)

    return handled


def narrowing(handler: Handler) -> Handler:
    """A handler whose result is no wider than its inputs, and cannot wrap."""

    def handled(tracer: Tracer, *inputs: Any, **options: Any) -> Value:
        result = handler(tracer, *inputs, **options)
        dtype = _narrow(tracer, [*inputs, *options.values()])
        return _marked(result, dtype) if dtype is not None and result.kind == I32 else result

    return handled


def _marked(value: Value, dtype: torch.dtype) -> Value:
    """A value in which torch computes with a dtype below int32."""
    node = None if value.sizes else value.node
    return Value(
        value.tracer, node, value.sizes, value.kind, value.pick, value.origin, value.part, dtype
    )


def _narrow(tracer: Tracer, inputs: Sequence[Any]) -> torch.dtype | None:
    """The dtype below int32 in which torch computes with integers, if it does."""
    found: torch.dtype | None = None
    for x in inputs:
        if not isinstance(x, Value | Tensor):
            continue  # Python's numbers take the dtype of the others
        value = tracer.lift(x)
        if value.kind == BOOL:
            continue
        if value.narrow is None:
            return None
        found = value.narrow if found is None else torch.promote_types(found, value.narrow)
    return found


def binary(op: str) -> Handler:
    """The handler of an operation on two Values, with torch's `alpha`."""

    def node(x: Node, y: Node) -> Node:
        bools = x.type == y.type == BOOL
        return build(_OF_BOOLS.get(op, op) if bools else op, x, y)

    def handler(tracer: Tracer, a: Any, b: Any, *, alpha: Any = 1) -> Value:
        if alpha != 1:
            b = elementwise(tracer, lambda x, y: build("mul", x, y), b, alpha)
        return elementwise(tracer, node, a, b)

    return handler
