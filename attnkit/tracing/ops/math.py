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
from attnkit.tracing.dtypes import result_dtype
from attnkit.tracing.ops.registry import Handler, as_dtype, combine, elementwise, register
from attnkit.tracing.proxy import HANDLERS, Tracer, Value

_ZERO = const(0.0)


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


def _atan(x: Node) -> Node:
    return build("atan2", x, const(1.0))


def _asin(x: Node) -> Node:
    # |x| > 1/2: pi / 2 - 2 atan(sqrt((1 - |x|) / (1 + |x|))), where 1 - |x| is exact
    far, angle = _steep_angle(x)
    size = build("sub", const(math.pi / 2), build("mul", const(2.0), angle))
    signed = build("where", build("lt", x, const(0.0)), build("neg", size), size)
    return build("where", far, signed, angle)


def _acos(x: Node) -> Node:
    far, angle = _steep_angle(x)
    twice = build("mul", const(2.0), angle)
    beyond = build("where", build("lt", x, const(0.0)), build("sub", const(math.pi), twice), twice)
    return build("where", far, beyond, build("sub", const(math.pi / 2), angle))


def _steep_angle(x: Node) -> tuple[Node, Node]:
    """Build the nodes of |x| > 1/2 and of half the arc cosine of |x| there, asin(x) elsewhere."""
    size, one = build("abs", x), const(1.0)
    far = build("lt", const(0.5), size)
    large = build("where", far, size, const(0.5))
    small = build("where", far, const(0.0), x)
    # with 1 / sqrt instead of a division the derivative at 1 has no 0 * inf
    steep = build(
        "mul", build("sqrt", build("sub", one, large)), build("rsqrt", build("add", one, large))
    )
    flat = build("mul", small, build("rsqrt", build("sub", one, build("mul", small, small))))
    return far, _atan(build("where", far, steep, flat))


def _atanh(x: Node) -> Node:
    sides = build("log1p", x), build("log1p", build("neg", x))
    return build("mul", const(0.5), build("sub", *sides))


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
    "sgn": _sign,
    "isposinf": lambda x: build("eq", x, const(math.inf)) if x.type == F32 else FALSE,
    "isneginf": lambda x: build("eq", x, const(-math.inf)) if x.type == F32 else FALSE,
}

_SELU = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946

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
        for name in "exp exp2 expm1 log log2 log1p sqrt rsqrt tanh sigmoid sin cos erf erfinv lgamma".split()
    },
    "logsigmoid": _log_sigmoid,
    "log10": lambda x: build("mul", build("log", x), const(1 / math.log(10))),
    "atan arctan": _atan,
    "atanh arctanh": _atanh,
    "tanhshrink": lambda x: build("sub", x, build("tanh", x)),
    "selu": lambda x: build("mul", const(_SELU[1]), _elu(x, _SELU[0])),
    "asin arcsin": _asin,
    "acos arccos": _acos,
    "deg2rad": lambda x: build("mul", x, const(math.pi / 180)),
    "rad2deg": lambda x: build("mul", x, const(180 / math.pi)),
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


@register("addcmul")
def _addcmul(tracer: Tracer, a: Any, b: Any, c: Any, *, value: Any = 1) -> Value:
    return _add_scaled(tracer, "mul", a, b, c, value)


@register("addcdiv")
def _addcdiv(tracer: Tracer, a: Any, b: Any, c: Any, *, value: Any = 1) -> Value:
    return _add_scaled(tracer, "div", a, b, c, value)


def _add_scaled(tracer: Tracer, op: str, a: Any, b: Any, c: Any, value: Any) -> Value:
    """Return `a + value * (b op c)`; torch rounds the result once."""
    values = [tracer.lift(x) for x in (a, b, c)]
    dtype = result_dtype(values)
    if dtype == torch.bool or (op == "div" and not dtype.is_floating_point):
        raise TypeError(f"expected {'floats' if op == 'div' else 'numbers'}, got {dtype}")

    def node(x: Node, y: Node, z: Node, factor: Node) -> Node:
        return build("add", x, build(op, build("mul", factor, y), z))

    operands = [as_dtype(v, dtype) for v in (*values, tracer.lift(value))]
    return combine(tracer, node, operands, dtype)


@register("nan_to_num")
def _nan_to_num(
    tracer: Tracer,
    a: Any,
    nan: float | None = 0.0,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Value:
    source = tracer.lift(a)
    if not source.dtype.is_floating_point:
        return source
    limits = torch.finfo(source.dtype)
    found = (
        nan or 0.0,
        limits.max if posinf is None else posinf,
        limits.min if neginf is None else neginf,
    )

    def node(x: Node, instead: Node, above: Node, below: Node) -> Node:
        finite = build("where", build("eq", x, const(-math.inf)), below, x)
        finite = build("where", build("eq", x, const(math.inf)), above, finite)
        return build("where", _nan(x), instead, finite)

    return elementwise(tracer, node, source, *found)


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


@register("atan2", "arctan2")
def _atan2(tracer: Tracer, y: Any, x: Any) -> Value:
    return elementwise(tracer, lambda a, b: build("atan2", a, b), y, x, floating=True)


@register("hypot")
def _hypot(tracer: Tracer, a: Any, b: Any) -> Value:
    def node(x: Node, y: Node) -> Node:
        if F32 not in (x.type, y.type):
            raise TypeError("hypot needs floats, got ints; convert with .float()")
        return build("hypot", x, y)

    return elementwise(tracer, node, a, b)


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


@register("softshrink")
def _softshrink(tracer: Tracer, a: Any, lambd: float = 0.5) -> Value:
    def node(x: Node) -> Node:
        below = build("where", build("lt", x, const(-lambd)), build("add", x, const(lambd)), _ZERO)
        above = build("where", build("gt", x, const(lambd)), build("sub", x, const(lambd)), below)
        return build("where", _nan(x), x, above)

    return elementwise(tracer, node, a, floating=True)


@register("hardshrink")
def _hardshrink(tracer: Tracer, a: Any, lambd: float = 0.5) -> Value:
    def node(x: Node) -> Node:
        inside = build("and", build("le", const(-lambd), x), build("le", x, const(lambd)))
        return build("where", inside, _ZERO, x)

    return elementwise(tracer, node, a, floating=True)


@register("threshold")
def _threshold(
    tracer: Tracer, a: Any, threshold: float, value: float, inplace: bool = False
) -> Value:
    def node(x: Node, limit: Node, instead: Node) -> Node:
        return build("where", build("le", x, limit), instead, x)

    return elementwise(tracer, node, a, threshold, value)


@register("logaddexp2")
def _logaddexp2(tracer: Tracer, a: Any, b: Any) -> Value:
    def node(x: Node, y: Node) -> Node:
        same = build("eq", x, y)
        difference = build("where", same, _ZERO, build("sub", x, y))
        small = build("log1p", build("exp2", build("neg", build("abs", difference))))
        return build("add", build("max", x, y), build("mul", small, const(1 / math.log(2.0))))

    return elementwise(tracer, node, a, b, floating=True)


def _beside_nan(op: str) -> Callable[..., Value]:
    def node(x: Node, y: Node) -> Node:
        first = build(op, y, x)  # a tie goes to the first argument, and its gradient too
        return build("where", build("or", first, _nan(y)), x, y)

    return lambda tracer, a, b: elementwise(tracer, node, a, b)


register("fmax")(_beside_nan("le"))
register("fmin")(_beside_nan("ge"))


@register("leaky_relu")
def _leaky(tracer: Tracer, a: Any, negative_slope: float = 0.01, inplace: bool = False) -> Value:
    def node(x: Node) -> Node:
        scaled = build("mul", x, const(float(negative_slope)))
        return build("where", build("gt", x, const(0.0)), x, scaled)

    return elementwise(tracer, node, a, floating=True)


_register_unary()
