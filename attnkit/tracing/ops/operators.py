"""Handle operators of `torch.ops` in a trace, by the decomposition that is registered for them.

An operator of aten with a handler of the same name is that function. Of other operators torch knows
what they compute if a Python kernel is registered for CompositeImplicitAutograd, or an entry in the
table of decompositions. Such a function is run on traced values. An operator without one is opaque.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnkit.tracing.proxy import HANDLERS, Tracer, TracingMode, Value
from attnkit.util.torch_private import (
    OpOverload,
    OpOverloadPacket,
    decomposition,
    neural_functions,
    registered_autograd,
)

_SPACES = (torch, Tensor, torch.nn.functional, torch.special, neural_functions)


def _operator(tracer: Tracer, function: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operator of `torch.ops`; NotImplemented if it is opaque.

    Args:
        tracer: the trace.
        function: any function.
        args, kwargs: its arguments.
    """
    if not isinstance(function, OpOverload | OpOverloadPacket):
        return NotImplemented
    overload: Any = function
    if isinstance(function, OpOverloadPacket):
        overload = getattr(function, "default", None)
    if overload is None or overload.namespace == "aten":
        return _of_aten(tracer, function, args, kwargs)
    body = decomposition(overload)
    if body is None:
        return NotImplemented
    # what the body reads is not guarded
    tracer.derived = True
    with TracingMode(tracer):
        result = _with_gradient(tracer, overload, body)(*args, **kwargs)
    results = result if isinstance(result, tuple | list) else (result,)
    if not all(isinstance(x, Value) for x in results):
        tracer.fail(
            f"the decomposition of {overload.name()} returned {type(result).__name__}; expected "
            "what it computes from its arguments"
        )
    return result


HANDLERS[OpOverload] = _operator


def _of_aten(tracer: Tracer, function: Any, args: Any, kwargs: Any) -> Any:
    packet = function if isinstance(function, OpOverloadPacket) else function.overloadpacket
    for space in _SPACES:
        handler = HANDLERS.get(getattr(space, packet.__name__, None))
        if handler is not None and str(packet).startswith("aten."):
            return handler(tracer, *args, **kwargs)
    return NotImplemented


def _with_gradient(tracer: Tracer, overload: Any, body: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes `body` and has the gradient that the operator has."""
    own = registered_autograd(overload)
    if own is None:
        return body
    backward, setup = own
    if backward is None or any(a.kwarg_only for a in overload._schema.arguments):
        tracer.fail(
            f"{overload.name()} has a gradient of its own, which is not known while tracing; "
            "define the operator with torch.library.custom_op and without keyword-only arguments"
        )

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        if setup is not None:
            setup(ctx, inputs, output)

    members = {"forward": body, "setup_context": save, "backward": backward}
    made = type(
        overload.name(),
        (torch.autograd.Function,),
        {name: staticmethod(member) for name, member in members.items()},
    )
    return made.apply  # type: ignore[attr-defined,no-any-return]
