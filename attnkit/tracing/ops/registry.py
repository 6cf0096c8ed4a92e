"""Register handlers of torch functions, and apply node functions to Values elementwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attnkit.graph.ir import BOOL, F32, Node, const
from attnkit.graph.simplify import build
from attnkit.tracing.dtypes import result_dtype
from attnkit.tracing.proxy import HANDLERS, Tracer, Value
from attnkit.util.shapes import broadcast
from attnkit.util.torch_private import neural_functions

Handler: TypeAlias = Callable[..., Value]

PARTS = ("", "end", "inner")  # ordered by coverage, the whole tensor first

# Operations for which the low 32 bits of the result depend only on those of the arguments.
_RING = ("add", "sub", "mul", "xor")

# Arithmetic on two bools is a logical operation in torch.
_OF_BOOLS = {"add": "or", "mul": "and", "min": "and", "max": "or"}


def register(*names: Any) -> Callable[[Handler], Handler]:
    """Return a decorator that registers a handler for torch functions.

    Args:
        names: the functions, or names that are looked up in torch, Tensor, torch.nn.functional and
            other namespaces of torch.
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


def elementwise(
    tracer: Tracer,
    function: Callable[..., Node],
    *inputs: Any,
    floating: bool = False,
    strict: bool = False,
    wraps: bool = False,
) -> Value:
    """Apply a node function to Values elementwise, with the broadcasting and dtypes of torch.

    The inputs are converted to the dtype in which torch computes with them, and the result to the
    dtype in which torch stores it.

    Args:
        tracer: the trace.
        function: function from one node per input to the node of the result.
        inputs: Values, tensors and Python numbers.
        floating: whether integers and bools are first converted to floats.
        strict: whether Python numbers that do not fit into the dtype are an error; else they wrap.
        wraps: whether Python numbers wrap in int32 too, see `Converter.number`.
    """
    values = [tracer.lift(x) for x in inputs]
    dtype = result_dtype(values)
    if floating and not dtype.is_floating_point:
        dtype = tracer.converter.default
    converted = [as_dtype(v, dtype, strict=strict, wraps=wraps) for v in values]
    return combine(tracer, function, converted, dtype)


def as_dtype(
    value: Value, dtype: torch.dtype, *, strict: bool = False, wraps: bool = False
) -> Value:
    """Return a Value converted to `dtype`. See `elementwise` for `strict` and `wraps`."""
    convert, source = value.tracer.converter, value.dtype
    if value.number is not None:
        n = convert.number(value.number, dtype, strict=strict, wraps=wraps)
        return Value(value.tracer, n, dtype)
    if source == dtype:
        return value
    if not value.sizes:
        return Value(value.tracer, convert.convert(value.node, source, dtype), dtype)

    def pick(*index: Node) -> Node:
        return convert.convert(value.pick(*index), source, dtype)

    return Value(value.tracer, None, dtype, value.sizes, pick, part=value.part)


def combine(
    tracer: Tracer, function: Callable[..., Node], values: Sequence[Value], dtype: torch.dtype
) -> Value:
    """Apply a node function to Values elementwise, broadcasting their shapes.

    Args:
        tracer: the trace.
        function: function from one node per Value to the node of the result.
        values: the Values, in the dtypes that the function expects.
        dtype: dtype in which torch computes. The result has this dtype, except that bool results
            are bool, integer results of bool or float computations are int64, and float results of
            integer computations have torch's default dtype.
    """
    converter = tracer.converter

    def fitted(*nodes: Node) -> Node:
        n = function(*nodes)
        return converter.fit(n, _dtype_of(n, dtype, converter.default))

    if not any(v.sizes for v in values):
        n = function(*(v.node for v in values))
        found = _dtype_of(n, dtype, converter.default)
        return Value(tracer, converter.fit(n, found), found)
    sizes = broadcast(*(v.sizes for v in values))

    def at(v: Value, position: tuple[Node, ...]) -> Node:
        index = position[len(position) - len(v.sizes) :]
        zero = const(0)
        return v.pick(*(zero if n == 1 else i for n, i in zip(v.sizes, index, strict=True)))

    def pick(*position: Node) -> Node:
        return fitted(*(at(v, position) for v in values))

    sample = function(*(at(v, (const(0),) * len(sizes)) for v in values))
    found = _dtype_of(sample, dtype, converter.default)
    part = max((v.part for v in values), key=PARTS.index)
    return Value(tracer, None, found, tuple(sizes), pick, part=part)


def _dtype_of(n: Node, dtype: torch.dtype, default: torch.dtype) -> torch.dtype:
    """Return the dtype that torch gives to the result `n` of a computation in `dtype`."""
    if n.type == BOOL:
        return torch.bool
    if n.type == F32:
        return dtype if dtype.is_floating_point else default
    return torch.int64 if dtype == torch.bool or dtype.is_floating_point else dtype


def binary_node(op: str) -> Callable[[Node, Node], Node]:
    """Return a function that builds the node of `op` from two nodes, a logical one for bools."""

    def node(x: Node, y: Node) -> Node:
        bools = x.type == y.type == BOOL
        return build(_OF_BOOLS.get(op, op) if bools else op, x, y)

    return node


def binary(op: str) -> Handler:
    """Return the handler of a binary operation `op`, with torch's optional factor `alpha`."""
    node = binary_node(op)

    def handler(tracer: Tracer, a: Any, b: Any, *, alpha: Any = 1) -> Value:
        if alpha == 1:
            return elementwise(tracer, node, a, b, wraps=op in _RING)
        values = [tracer.lift(a), tracer.lift(b)]
        dtype = result_dtype(values)
        first, second, factor = (as_dtype(v, dtype) for v in (*values, tracer.lift(alpha)))
        scaled = combine(tracer, binary_node("mul"), [second, factor], dtype)
        return combine(tracer, node, [first, scaled], dtype)

    return handler
