"""What every handler needs: registering, and applying a function of nodes to shaped Values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attnkit.expr import Node, const
from attnkit.proxy import HANDLERS, Tracer, Value
from attnkit.rewrite import build
from attnkit.shapes import broadcast

Handler: TypeAlias = Callable[..., Value]

PARTS = ("", "end", "inner")  # from whole to less


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


def binary(op: str) -> Handler:
    """The handler of an operation on two Values, with torch's `alpha`."""

    def handler(tracer: Tracer, a: Any, b: Any, *, alpha: Any = 1) -> Value:
        if alpha != 1:
            b = elementwise(tracer, lambda x, y: build("mul", x, y), b, alpha)
        return elementwise(tracer, lambda x, y: build(op, x, y), a, b)

    return handler
