"""Handle torch's elementwise math functions in a trace: exponentials, activations, rounding.

If a function selects between two formulas, the formula that is not selected gets a safe argument,
so that its derivative does not become inf / inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from attnkit.graph.ir import F32, Node, const
from attnkit.graph.simplify import FALSE, build, cast, negate
from attnkit.tracing.ops.registry import Handler, elementwise, register
from attnkit.tracing.proxy import HANDLERS, Tracer, Value


def _unless_int(function: Callable[[Node], Node]) -> Callable[[Node], Node]:
    return lambda x: function(x) if x.type == F32 else x  # rounding leaves an int as it is


def truncate(x: Node) -> Node:
    """Build the node of a float `x` rounded towards zero."""
    down = build("floor", x)
    up = build("neg", build("floor", build("neg", x)))
    return build("where", build("lt", x, const(0.0)), up, down)


def _round_half_even(x: Node) -> Node:
    """Build the node of `x` rounded to the nearest integer, ties to even; keep infinities."""
    down = build("floor", x)
    fraction = build("sub", x, down)
    even = build("add", down, build("mod", down, const(2.0)))
    up = build("where", build("gt", fraction, const(0.5)), build("add", down, const(1.0)), down)
    return build("where", build("eq", fraction, const(0.5)), even, up)


def _sinh(x: Node) -> Node:
    # expm1(x) - expm1(-x) is accurate near 0, where exp(x) - exp(-x) cancels
    both = build("sub", build("expm1", x), build("expm1", build("neg", x)))
    return build("mul", const(0.5), both)


def _cosh(x: Node) -> Node:
    return build("mul", const(0.5), build("add", build("exp", x), build("exp", build("neg", x))))


def _nan(x: Node) -> Node:
    return build("ne", x, x) if x.type == F32 else FALSE


def _infinite(x: Node) -> Node:
    return build("eq", build("abs", x), const(math.inf)) if x.type == F32 else FALSE


def _sign(x: Node) -> Node:
    zero, one = cast(const(0), x.type), cast(const(1), x.type)
    negative = build("where", build("lt", x, zero), build("neg", one), zero)
    return build("where", build("lt", zero, x), one, negative)


def _relu(x: Node) -> Node:
    zero = cast(const(0), x.type)
    # relu'(0) = 0 and relu(NaN) = NaN, as torch
    return build("where", build("le", x, zero), zero, x)


def _gelu(x: Node, approximate: str) -> Node:
    half = build("mul", x, const(0.5))
    if approximate == "none":
        inner = build("erf", build("mul", x, const(math.sqrt(0.5))))
    else:
        cube = build("mul", build("mul", x, x), x)
        sum_ = build("add", x, build("mul", const(0.044715), cube))
        inner = build("tanh", build("mul", const(math.sqrt(2 / math.pi)), sum_))
    return build("mul", half, build("add", const(1.0), inner))


def _softplus(x: Node, beta: float, threshold: float) -> Node:
    scaled = build("mul", x, const(float(beta)))
    large = build("gt", scaled, const(float(threshold)))
    # the argument is replaced where the other branch is selected: if exp overflows there, its
    # derivative is inf / inf
    safe = build("where", large, const(0.0), scaled)
    small = build("div", build("log1p", build("exp", safe)), const(float(beta)))
    return build("where", large, x, small)


def _log_sigmoid(x: Node) -> Node:
    small = build("log1p", build("exp", build("neg", build("abs", x))))
    return build("sub", build("min", x, const(0.0)), small)  # min(x, 0) - log(1 + exp(-|x|))


def _elu(x: Node, alpha: float) -> Node:
    positive = build("gt", x, const(0.0))
    safe = build("where", positive, const(0.0), x)
    return build("where", positive, x, build("mul", const(float(alpha)), build("expm1", safe)))


# Functions whose result has the dtype of their argument.
_UNARY: dict[str, Callable[[Node], Node]] = {
    "neg negative __neg__": lambda x: build("neg", x),
    "abs absolute __abs__": lambda x: build("abs", x),
    "floor __floor__": _unless_int(lambda x: build("floor", x)),
    "ceil __ceil__": _unless_int(lambda x: build("neg", build("floor", build("neg", x)))),
    "trunc fix": _unless_int(truncate),
    "square": lambda x: build("mul", x, x),
    "isnan": _nan,
    "isinf": _infinite,
    "isfinite": lambda x: negate(build("or", _nan(x), _infinite(x))),
    "sign": _sign,
    "relu": _relu,
}

# Functions that convert integers to floats.
_FLOAT: dict[str, Callable[[Node], Node]] = {
    "frac": lambda x: build("sub", x, truncate(x)),
    "sinh": _sinh,
    "cosh": _cosh,
    "tan": lambda x: build("div", build("sin", x), build("cos", x)),
    "mish": lambda x: build("mul", x, build("tanh", _softplus(x, 1.0, 20.0))),
    "reciprocal": lambda x: build("div", const(1.0), x),
    "silu": lambda x: build("mul", x, build("sigmoid", x)),
    "softsign": lambda x: build("div", x, build("add", const(1.0), build("abs", x))),
    **{
        name: (lambda x, op=name: build(op, x))  # type: ignore[misc]
        for name in "exp exp2 expm1 log log2 log1p sqrt rsqrt tanh sigmoid sin cos erf".split()
    },
    "logsigmoid": _log_sigmoid,
    "log10": lambda x: build("mul", build("log", x), const(1 / math.log(10))),
    "expit": lambda x: build("sigmoid", x),
}


def _register_unary() -> None:
    for floating, functions in ((False, _UNARY), (True, _FLOAT)):
        for names, function in functions.items():
            handler: Handler = (
                lambda tracer, a, inplace=False, function=function, floating=floating: elementwise(
                    tracer, function, a, floating=floating
                )
            )
            register(*names.split())(handler)
    approximate = getattr(torch.ops.approx, "tanh", None) if hasattr(torch.ops, "approx") else None
    if approximate is not None:
        register(approximate)(HANDLERS[torch.tanh])


@register("round")
def _round(tracer: Tracer, a: Any, *, decimals: int = 0) -> Value:
    if decimals:
        raise ValueError(f"decimals={decimals} is not supported; scale, round and scale back")
    return elementwise(tracer, _unless_int(_round_half_even), a)


@register("logaddexp")
def _logaddexp(tracer: Tracer, a: Any, b: Any) -> Value:
    def node(x: Node, y: Node) -> Node:
        same = build("eq", x, y)  # the difference of equal infinities is NaN
        difference = build("where", same, const(0.0), build("sub", x, y))
        small = build("log1p", build("exp", build("neg", build("abs", difference))))
        return build("add", build("max", x, y), small)

    return elementwise(tracer, node, a, b, floating=True)


@register("relu6")
def _relu6(tracer: Tracer, a: Any, inplace: bool = False) -> Value:
    def node(x: Node) -> Node:
        six = cast(const(6), x.type)
        return _relu(build("where", build("le", six, x), six, x))

    return elementwise(tracer, node, a)


@register("gelu")
def _gelu_handler(tracer: Tracer, a: Any, approximate: str = "none") -> Value:
    return elementwise(tracer, lambda x: _gelu(x, approximate), a, floating=True)


@register("softplus")
def _softplus_handler(tracer: Tracer, a: Any, beta: float = 1, threshold: float = 20) -> Value:
    return elementwise(tracer, lambda x: _softplus(x, beta, threshold), a, floating=True)


@register("elu")
def _elu_handler(tracer: Tracer, a: Any, alpha: float = 1.0, inplace: bool = False) -> Value:
    return elementwise(tracer, lambda x: _elu(x, alpha), a, floating=True)


@register("leaky_relu")
def _leaky(tracer: Tracer, a: Any, negative_slope: float = 0.01, inplace: bool = False) -> Value:
    def node(x: Node) -> Node:
        scaled = build("mul", x, const(float(negative_slope)))
        return build("where", build("gt", x, const(0.0)), x, scaled)

    return elementwise(tracer, node, a, floating=True)


_register_unary()
