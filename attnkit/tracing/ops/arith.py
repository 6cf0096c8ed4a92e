"""Handle torch's arithmetic, bit operations, comparisons and selections in a trace.

A handler takes the tracer and the arguments of the torch call. It returns a Value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.ir import BOOL, F32, I32, Node, const
from attnkit.graph.simplify import build, cast, negate, power
from attnkit.tracing.dtypes import result_dtype
from attnkit.tracing.numbers import known
from attnkit.tracing.ops.math import truncate
from attnkit.tracing.ops.registry import (
    Handler,
    as_dtype,
    binary,
    combine,
    elementwise,
    register,
)
from attnkit.tracing.proxy import HANDLERS, Tracer, Value


def _arithmetic(op: str) -> Handler:
    combine = binary(op)

    def handler(tracer: Tracer, a: Any, b: Any, **kwargs: Any) -> Value:
        if op == "sub" and all(tracer.lift(x).kind == BOOL for x in (a, b)):
            tracer.fail("subtracting bools is not supported; use ^ or logical_not")
        return combine(tracer, a, b, **kwargs)

    return handler


def _swapped(handler: Handler) -> Handler:
    return lambda tracer, a, b: handler(tracer, b, a)


def _integer_divide(op: str, a: Node, b: Node) -> Node:
    if b.op == "const" and b.type != F32 and a.type != F32 and not b.attr:
        raise ValueError(f"division by zero in {ir.formula(a)} {op} 0")
    return build(op, a, b)


def _floor_divide(tracer: Tracer, a: Any, b: Any) -> Value:
    values = [tracer.lift(a), tracer.lift(b)]
    dtype = result_dtype(values)
    half = tracer.converter.rounds and dtype in (torch.float16, torch.bfloat16)
    if half and values[1].number is None:  # torch divides by a number in float32
        return _half_floor_divide(tracer, *(as_dtype(v, dtype) for v in values))
    return elementwise(tracer, lambda x, y: _integer_divide("fdiv", x, y), a, b)


def _half_floor_divide(tracer: Tracer, a: Value, b: Value) -> Value:
    """Floor-divide 16-bit floats as `c10::div_floor_floating`, rounding to 16 bits at each step."""
    add, subtract = binary("add"), binary("sub")
    remainder = _fmod(tracer, a, b)
    quotient = _div(tracer, subtract(tracer, a, remainder), b)
    signs = binary("ne")(tracer, binary("lt")(tracer, b, 0), binary("lt")(tracer, remainder, 0))
    beyond = _logical("and")(tracer, binary("ne")(tracer, remainder, 0), signs)
    quotient = _where(tracer, beyond, subtract(tracer, quotient, 1), quotient)
    floored = elementwise(tracer, lambda x: build("floor", x), quotient)
    up = binary("gt")(tracer, subtract(tracer, quotient, floored), 0.5)
    floored = _where(tracer, up, add(tracer, floored, 1), floored)
    return _where(tracer, binary("eq")(tracer, b, 0), _div(tracer, a, b), floored)


def _remainder(tracer: Tracer, a: Any, b: Any) -> Value:
    return elementwise(tracer, lambda x, y: _integer_divide("mod", x, y), a, b)


def _pow(tracer: Tracer, a: Any, b: Any) -> Value:
    base, exponent = tracer.lift(a), tracer.lift(b)
    if result_dtype([base, exponent]).is_floating_point:
        return elementwise(tracer, power, base, exponent)
    return _int_power(tracer, base, exponent)


def _int_power(tracer: Tracer, base: Value, exponent: Value) -> Value:
    power = known(exponent.number)
    if power is not None and 0 <= power <= 32:
        product = binary("mul")
        result = elementwise(tracer, lambda x, _: cast(const(1), x.type), base, power)
        for _ in range(int(power)):
            result = product(tracer, result, base)  # wraps at every step, as torch's product
        return result
    if base.number == 2:
        # `sparsity.index_bounds` refuses a negative exponent
        return elementwise(tracer, lambda x, y: build("shl", const(1), y), base, exponent)
    shown = [ir.formula(v.node) for v in (base, exponent)]
    raise ValueError(f"integer power {shown[0]} ** {shown[1]}; convert to float")


def _float_power(tracer: Tracer, a: Any, b: Any) -> Value:
    values = [as_dtype(tracer.lift(x), torch.float64) for x in (a, b)]
    return combine(tracer, power, values, torch.float64)


def _register_binary() -> None:
    for op, names in {
        "add": "add __add__ __radd__ __iadd__",
        "mul": "mul multiply __mul__ __rmul__ __imul__",
        "lt": "lt less __lt__",
        "le": "le less_equal __le__",
        "gt": "gt greater __gt__",
        "ge": "ge greater_equal __ge__",
        "eq": "eq __eq__",
        "ne": "ne not_equal __ne__",
        "min": "minimum",
        "max": "maximum",
    }.items():
        register(*names.split())(binary(op))
    register("sub", "subtract", "__sub__", "__isub__")(_arithmetic("sub"))
    register("__rsub__")(_swapped(_arithmetic("sub")))
    register(torch.rsub)(
        lambda tracer, a, b, alpha=1: _arithmetic("sub")(tracer, b, a, alpha=alpha)
    )
    register("floor_divide", "__floordiv__")(_floor_divide)
    register("__rfloordiv__")(_swapped(_floor_divide))
    register("remainder", "__mod__")(_remainder)
    register("__rmod__")(_swapped(_remainder))
    register("pow", "__pow__", "__ipow__")(_pow)
    register("float_power")(_float_power)
    register("__rpow__")(_swapped(_pow))


def _bitwise(op: str) -> Handler:
    def node(a: Node, b: Node) -> Node:
        if F32 in (a.type, b.type):
            raise TypeError("bit operations need ints or bools, got a float")
        if op in ("shl", "shr"):
            return _shift(op, cast(a, I32), cast(b, I32))
        return build(op, a, b)

    def handler(tracer: Tracer, a: Any, b: Any) -> Value:
        values = [tracer.lift(a), tracer.lift(b)]
        if op in ("shl", "shr"):
            known(values[1].number)  # a shift by 32 bits or more gives another expression
        return elementwise(tracer, node, *values, wraps=op == "xor")

    return handler


def _shift(op: str, a: Node, b: Node) -> Node:
    if b.op == "const" and not 0 <= int(b.attr) < 32:  # type: ignore[arg-type]
        return const(0) if op == "shl" else build("shr", a, const(31))  # all bits leave
    return build(op, a, b)


def _logical(op: str) -> Handler:
    def node(a: Node, b: Node) -> Node:
        return build(op, cast(a, BOOL), cast(b, BOOL))

    return lambda tracer, a, b: combine(tracer, node, [tracer.lift(a), tracer.lift(b)], torch.bool)


def _invert(a: Node) -> Node:
    if a.type == F32:
        raise TypeError("~ needs an int or a bool, got a float")
    return negate(a) if a.type == BOOL else build("sub", const(-1), a)  # ~x = -1 - x


def _register_bits() -> None:
    for op, stem in {"and": "and", "or": "or", "xor": "xor"}.items():
        register(f"__{stem}__", f"__r{stem}__", f"__i{stem}__", f"bitwise_{stem}")(_bitwise(op))
        register(f"logical_{stem}")(_logical(op))
    for op, stem, name in (("shl", "lshift", "left"), ("shr", "rshift", "right")):
        register(f"__{stem}__", f"bitwise_{name}_shift")(_bitwise(op))
        register(f"__r{stem}__")(_swapped(_bitwise(op)))
    register("bitwise_not", "__invert__")(lambda t, a: elementwise(t, _invert, a))
    register("logical_not")(lambda t, a: elementwise(t, lambda x: negate(cast(x, BOOL)), a))


@register("div", "divide", "true_divide", "__truediv__", "__div__", "__itruediv__")
def _div(tracer: Tracer, a: Any, b: Any, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return elementwise(tracer, lambda x, y: build("div", x, y), a, b, floating=True)
    if rounding_mode == "floor":
        return _floor_divide(tracer, a, b)
    if result_dtype([tracer.lift(a), tracer.lift(b)]).is_floating_point:
        return elementwise(tracer, truncate, _div(tracer, a, b))
    return elementwise(tracer, lambda x, y: _integer_divide("tdiv", x, y), a, b)


@register("__rtruediv__", "__rdiv__")
def _divided(tracer: Tracer, a: Any, b: Any) -> Value:
    if not tracer.converter.rounds:
        return _div(tracer, b, a)
    return binary("mul")(tracer, _div(tracer, 1, a), b)  # torch rounds the reciprocal first


@register("fmod")
def _fmod(tracer: Tracer, a: Any, b: Any) -> Value:
    def node(x: Node, y: Node) -> Node:
        if F32 not in (x.type, y.type):
            # fmod(x, y) = x - y * trunc(x / y)
            return build("sub", x, build("mul", y, _integer_divide("tdiv", x, y)))
        # the remainder of |x| by |y|, with the sign of x: exact, unlike x - y * trunc(x / y)
        size = build("mod", _size(x), _size(y))
        return build("where", build("lt", x, const(0.0)), build("neg", size), size)

    return elementwise(tracer, node, a, b)


def _size(x: Node) -> Node:
    """Build the node of |x| whose derivative at 0 is 1, while that of `abs` is 0."""
    x = cast(x, F32)
    return build("where", build("lt", x, const(0.0)), build("neg", x), x)


@register("lerp")
def _lerp(tracer: Tracer, start: Any, end: Any, weight: Any) -> Value:
    def node(a: Node, b: Node, w: Node) -> Node:
        return build("add", a, build("mul", w, build("sub", b, a)))

    return elementwise(tracer, node, start, end, weight)


@register("where")
def _where(tracer: Tracer, condition: Any, a: Any = None, b: Any = None) -> Value:
    if a is None or b is None:
        raise TypeError("where needs a condition and two values")
    if isinstance(condition, Value) and condition.kind != BOOL:
        raise TypeError(f"where expects a bool condition, got {condition.dtype}")
    chosen = [tracer.lift(a), tracer.lift(b)]
    dtype = result_dtype(chosen)
    values = [tracer.lift(condition), *(as_dtype(v, dtype, strict=True) for v in chosen)]
    return combine(tracer, lambda c, x, y: build("where", c, x, y), values, dtype)


HANDLERS[Tensor.where] = lambda tracer, a, condition, b: _where(tracer, condition, a, b)


@register("masked_fill")
def _masked_fill(tracer: Tracer, a: Any, mask: Any, value: Any) -> Value:
    source = tracer.lift(a)
    filler = as_dtype(tracer.lift(value), source.dtype, strict=True)
    values = [tracer.lift(mask), filler, source]
    return combine(tracer, lambda m, v, x: build("where", m, v, x), values, source.dtype)


@register("clamp", "clip")
def _clamp(tracer: Tracer, a: Any, min: Any = None, max: Any = None) -> Value:
    bounds = [tracer.lift(x) for x in (min, max) if x is not None]
    dtype = result_dtype([tracer.lift(a), *bounds])
    result = as_dtype(tracer.lift(a), dtype)
    for bound, beyond, op in ((min, "lt", "max"), (max, "gt", "min")):
        if bound is None:
            continue
        values = [result, as_dtype(tracer.lift(bound), dtype, strict=True)]
        result = combine(
            tracer, lambda x, y, beyond=beyond, op=op: _bound(x, y, beyond, op), values, dtype
        )
    return result


def _bound(x: Node, bound: Node, beyond: str, op: str) -> Node:
    if F32 not in (x.type, bound.type):
        return build(op, x, bound)  # min and max have tight integer ranges
    return build("where", build(beyond, x, bound), bound, x)  # the derivative at a bound is 1


register("clamp_min")(lambda tracer, a, min: _clamp(tracer, a, min=min))
register("clamp_max")(lambda tracer, a, max: _clamp(tracer, a, max=max))


@register("hardtanh")
def _hardtanh(
    tracer: Tracer, a: Any, min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False
) -> Value:
    def node(x: Node, low: Node, high: Node) -> Node:
        low, high = cast(low, x.type), cast(high, x.type)
        # unlike that of clamp, the derivative at a bound is 0
        below = build("where", build("le", high, x), high, x)
        return build("where", build("le", x, low), low, below)

    return elementwise(tracer, node, a, min_val, max_val, strict=True)


_register_binary()
_register_bits()
