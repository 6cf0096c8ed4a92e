"""Handle what changes gradients in a trace: detach, torch.no_grad and autograd.Function.

The forward of an autograd.Function is traced as it runs. Its backward runs on a symbol for the
gradient of the result, when the result is used. It must multiply that gradient by numbers that do
not depend on it, which become slopes in the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.ir import F32, Node, const
from attnkit.graph.simplify import build, cast, value_only, without_gradient
from attnkit.tracing.ops.registry import combine, register
from attnkit.tracing.proxy import HANDLERS, Tracer, TracingMode, Value
from attnkit.util.torch_private import function_class, recorded, result_count

_ZERO, _ONE = const(0.0), const(1.0)


@register("detach")
def _detach(tracer: Tracer, a: Any) -> Value:
    value = tracer.lift(a)
    if value.kind != F32 or tracer.converter.rounds:
        return value.copy()  # integers have no gradient, and masks neither
    return combine(tracer, without_gradient, [value], value.dtype)


def _result(tracer: Tracer, output: Value, context: Any, place: int) -> Value:
    """Return the result of an autograd.Function with the gradient that its backward gives.

    Args:
        tracer: the trace.
        output: the value that the forward returned.
        context: torch's object of the call, the `ctx` of forward and backward; None if the result
            is marked as not differentiable.
        place: place of the output among the results.
    """
    if context is None:
        return _detach(tracer, output)
    function = function_class(context)
    name = function.__name__
    inputs = _inputs(tracer, context)
    if output.sizes:
        tracer.fail(
            f"{name} returns a value of shape {output.sizes}; an autograd.Function must take and "
            "return numbers here. Call it with single elements, as table[h, kv]"
        )
    gradients = _backward(tracer, context, output, place)
    slopes = [(x, _slope(tracer, name, x, gradients[i])) for i, x in inputs if i < len(gradients)]
    terms = [(x.node, slope) for x, slope in slopes if slope is not _ZERO]
    if not terms:
        return _detach(tracer, output)
    x, slope = terms[0]
    if len(terms) > 1:
        parts = [build("with_slope", _ZERO, *term) for term in terms]
        x, slope = parts[0], _ONE
        for part in parts[1:]:
            x = build("add", x, part)
    return Value(tracer, build("with_slope", output.node, x, slope), output.dtype)


HANDLERS[torch.autograd.Function] = _result


def _inputs(tracer: Tracer, context: Any) -> list[tuple[int, Value]]:
    """Return the differentiable inputs of the call, with their places among its arguments."""
    needed = [i for i, needs in enumerate(context.needs_input_grad) if needs]
    edges = [edge for edge in context.next_functions if edge[0] is not None]
    found = []
    for i, (edge, place) in zip(needed, edges, strict=True):
        x = getattr(edge, "variable", None)
        if (id(edge), place) in tracer.outputs:
            x = tracer.outputs[id(edge), place][1]
        if not isinstance(x, Value):
            tracer.fail(
                f"{function_class(context).__name__} takes a captured tensor that requires grad; "
                "pass an element of it, as table[h, kv]"
            )
        found.append((i, x))
    return found


class _Context:
    """Stands for `ctx` in a backward that is traced: gives the Values that forward has saved."""

    def __init__(self, tracer: Tracer, context: Any, output: Value, place: int) -> None:
        self._tracer, self._context = tracer, context
        self._output, self._place = output, place

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(map(self._saved, self._context.saved_tensors))

    def _saved(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, Value):
            return x
        function, _, place = recorded(x)  # torch saves an output without its Python object
        return self._output if (function, place) == (self._context, self._place) else x

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _backward(tracer: Tracer, context: Any, output: Value, place: int) -> tuple[Any, ...]:
    """Trace the backward of an autograd.Function; return the gradients of its arguments."""
    function = function_class(context)
    own = function.backward
    if own is torch.autograd.Function.backward:
        own = function.vjp
    grads = [Value(tracer, _ZERO, output.dtype) for _ in range(result_count(context))]
    grads[place] = Value(tracer, ir.arg("grad"), output.dtype)
    try:
        with torch.enable_grad(), TracingMode(tracer):
            found = own(_Context(tracer, context, output, place), *grads)
    except TypeError as error:
        tracer.fail(f"the backward of {function.__name__} raised {error}", error)
    return found if isinstance(found, tuple) else (found,)


def _slope(tracer: Tracer, name: str, x: Value, gradient: Any) -> Node:
    """Return the number by which a backward multiplies the gradient of its result."""
    if gradient is None:
        return _ZERO
    value = tracer.lift(gradient)
    if x.sizes or value.sizes:
        tracer.fail(f"{name} takes a value of shape {x.sizes}; it must take numbers here")
    slope = _factor(value_only(cast(value.node, F32)))
    if slope is None:
        tracer.fail(
            f"the backward of {name} is {ir.formula(value.node)}; it must multiply grad by a "
            "number that does not depend on grad"
        )
    return slope


def _factor(root: Node) -> Node | None:
    """Return the factor of `grad` in an expression; None if it is no multiple of `grad`."""
    grad = ir.arg("grad")
    factors: dict[Node, Node | None] = {}  # of the nodes that depend on grad
    for n in ir.topo(root):
        if n is grad:
            factors[n] = _ONE
        elif any(a in factors for a in n.args):
            factors[n] = _step(
                n, [factors.get(a, a) for a in n.args], [a in factors for a in n.args]
            )
    return factors[root] if root in factors else _ZERO if root is _ZERO else None


def _step(n: Node, args: list[Node | None], scaled: list[bool]) -> Node | None:
    """Return the factor of `grad` in a node.

    Args:
        n: the node.
        args: for each argument its factor, or the argument itself if it does not depend on `grad`.
        scaled: whether each argument depends on `grad`.
    """
    if any(a is None for a in args):
        return None
    nodes: list[Node] = args  # type: ignore[assignment]
    if n.op in ("neg", "round") or (n.op == "mul" and sum(scaled) == 1):
        return ir.with_args(n, tuple(nodes)) if n.op == "round" else build(n.op, *nodes)
    if n.op == "div" and not scaled[1]:
        return build("div", *nodes)
    free = [a for a, s in zip(nodes, scaled, strict=True) if not s]
    if n.op in ("add", "sub") and all(a is _ZERO for a in free):
        return build(n.op, *nodes)
    if n.op == "where" and not scaled[0] and all(a is _ZERO for a in free[1:]):
        return build("where", *nodes)
    return None
