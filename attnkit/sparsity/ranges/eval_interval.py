"""Evaluate the graph on intervals: compute bounds of a node from bounds of its arguments.

An interval is a pair of broadcastable tensors (low, high), whose ends need not be attained:

* i32: exact integers in int64. Arguments must be in int32. Results do not wrap, so a result outside
  int32 is visible. Operations that wrap have all of int32 as their bounds if some of their results
  wrap and others do not.
* bool: (must, may): whether the value is True everywhere, whether it may be True somewhere.
* f32: in the compute dtype. NaN at both ends means "any value, NaN included"; otherwise the value
  is between the ends and not NaN. Basic arithmetic rounds correctly, and correct rounding is
  monotone, so the same operation on the ends bounds the rounded result. Where no bound is safe, the
  result is (NaN, NaN).

Divisors may not be zero, but their interval may contain zero. The rules are sound but not always
tight; tiles that they leave undecided are evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attnkit.graph.ir import BOOL, F32, I32, Node

Interval = tuple[Tensor, Tensor]

INT_LOW = -(2**31)
INT_HIGH = 2**31 - 1
_HALF_TURN = 3.1416  # somewhat more than pi


def transfer(n: Node, args: Sequence[Interval], dtype: torch.dtype = torch.float32) -> Interval:
    """Compute the bounds of an operation from the bounds of its arguments.

    Args:
        n: any node except an arg, a const or a load.
        args: one interval per argument, in the representation of this module.
        dtype: dtype of the graph's f32.
    """
    if n.op == "cast":
        return _cast(n, args[0], dtype)
    if n.op == "round":
        target = getattr(torch, str(n.attr))
        low, high = args[0]
        return _real(low.to(target).to(dtype), high.to(target).to(dtype))
    of = n.args[-1].type if n.args else n.type  # the last argument: `where` begins with a bool
    rule = _RULES[of].get(n.op)
    if rule is None:
        return everything(n, args[0][0], dtype)
    return rule(*args)


def everything(n: Node, like: Tensor, dtype: torch.dtype) -> Interval:
    """Return the interval of all values of the node's type, on the device of `like`."""
    if n.type == BOOL:
        return like.new_zeros((), dtype=torch.bool), like.new_ones((), dtype=torch.bool)
    if n.type == F32:
        nan = like.new_full((), float("nan"), dtype=dtype)
        return nan, nan
    return (
        like.new_full((), INT_LOW, dtype=torch.int64),
        like.new_full((), INT_HIGH, dtype=torch.int64),
    )


def clamp_int32(x: Interval) -> Interval:
    """Clip an integer interval to int32, for values that are proven to be in int32."""
    return x[0].clamp(INT_LOW, INT_HIGH), x[1].clamp(INT_LOW, INT_HIGH)


def _pick(condition: Tensor, chosen: Interval, other: Interval) -> Interval:
    return (
        torch.where(condition, chosen[0], other[0]),
        torch.where(condition, chosen[1], other[1]),
    )


def _full_where(condition: Tensor, x: Interval) -> Interval:
    return x[0].masked_fill(condition, INT_LOW), x[1].masked_fill(condition, INT_HIGH)


def _corners(f: Callable[[Tensor, Tensor], Tensor], a: Interval, b: Interval) -> Interval:
    """Return bounds of a function that is monotone in each argument while the other is fixed."""
    corners = [f(x, y) for x in a for y in b]
    low = high = corners[0]
    for c in corners[1:]:
        low, high = torch.minimum(low, c), torch.maximum(high, c)
    return low, high


def _contains(x: Interval, value: int) -> Tensor:
    return (x[0] <= value) & (x[1] >= value)


def _add(a: Interval, b: Interval) -> Interval:
    return a[0] + b[0], a[1] + b[1]


def _sub(a: Interval, b: Interval) -> Interval:
    return a[0] - b[1], a[1] - b[0]


def _neg(a: Interval) -> Interval:
    return -a[1], -a[0]


def _abs(a: Interval) -> Interval:
    low, high = torch.minimum(a[0].abs(), a[1].abs()), torch.maximum(a[0].abs(), a[1].abs())
    return low.masked_fill(_contains(a, 0), 0), high


def _min(a: Interval, b: Interval) -> Interval:
    return torch.minimum(a[0], b[0]), torch.minimum(a[1], b[1])


def _max(a: Interval, b: Interval) -> Interval:
    return torch.maximum(a[0], b[0]), torch.maximum(a[1], b[1])


def _where(c: Interval, a: Interval, b: Interval) -> Interval:
    either = torch.minimum(a[0], b[0]), torch.maximum(a[1], b[1])
    return _pick(c[0], a, _pick(c[1], either, b))


# --- integers -------------------------------------------------------------------------------


def _mul(a: Interval, b: Interval) -> Interval:
    return _corners(torch.mul, a, b)


def _quotient(rounding: str) -> Callable[[Interval, Interval], Interval]:
    def divide(a: Interval, b: Interval) -> Interval:
        zero = _contains(b, 0)
        safe = b[0].masked_fill(zero, 1), b[1].masked_fill(zero, 1)
        quotient = _corners(lambda x, y: torch.div(x, y, rounding_mode=rounding), a, safe)
        largest = torch.maximum(a[0].abs(), a[1].abs())  # |a / b| <= |a| for b other than zero
        return _pick(zero, (-largest, largest), quotient)

    return divide


_floor_divide = _quotient("floor")


def _mod(a: Interval, b: Interval) -> Interval:
    low, high = (b[0] + 1).clamp(max=0), (b[1] - 1).clamp(min=0)  # the sign of the divisor
    # if divisor and quotient are constants, a % b = a - b * (a // b) is a minus a constant
    divisor = b[0].masked_fill(b[0] == 0, 1)
    first = torch.div(a[0], divisor, rounding_mode="floor")
    last = torch.div(a[1], divisor, rounding_mode="floor")
    linear = (b[0] == b[1]) & (first == last)
    # 0 <= a < b leaves a as it is
    inside = (a[0] >= 0) & (a[1] < b[0])
    result = _pick(linear, (a[0] - divisor * first, a[1] - divisor * first), (low, high))
    return _pick(inside, a, result)


def _unknown_bits(a: Interval, b: Interval) -> Tensor:
    """Return ones in all bits up to the highest that varies in `a` or `b`; -1 if a sign varies."""
    return _ones_from((a[0] ^ a[1]) | (b[0] ^ b[1]))


def _ones_from(bits: Tensor) -> Tensor:
    """Return ones in all bits up to the highest that is set in `bits`; -1 for negative numbers."""
    for shift in (1, 2, 4, 8, 16):
        bits = bits | (bits >> shift)
    return bits


def _bitwise(f: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Interval, Interval], Interval]:
    """Return the rule of a bitwise operation, based on the leading bits that an interval shares."""

    def rule(a: Interval, b: Interval) -> Interval:
        unknown = _unknown_bits(a, b)
        known = f(a[0], b[0]) & ~unknown
        # where a sign varies: as many bits as the longest end has besides its sign
        ends = [x ^ (x >> 63) for x in (*a, *b)]
        most = _ones_from(ends[0] | ends[1] | ends[2] | ends[3])
        return _pick(unknown < 0, (~most, most), (known, known | unknown))

    return rule


_and_prefix = _bitwise(torch.bitwise_and)
_or_prefix = _bitwise(torch.bitwise_or)


def _and(a: Interval, b: Interval) -> Interval:
    low, high = _and_prefix(a, b)
    for x in (a, b):  # x >= 0 gives 0 <= (x & y) <= x
        positive = x[0] >= 0
        low = torch.where(positive, low.clamp(min=0), low)
        high = torch.where(positive, torch.minimum(high, x[1]), high)
    return low, high


def _or(a: Interval, b: Interval) -> Interval:
    low, high = _or_prefix(a, b)
    both = (a[0] >= 0) & (b[0] >= 0)  # then max(x, y) <= (x | y)
    return torch.where(both, torch.maximum(low, torch.maximum(a[0], b[0])), low), high


def _shift(f: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Interval, Interval], Interval]:
    def rule(a: Interval, b: Interval) -> Interval:
        outside = (b[0] < 0) | (b[1] > 31)
        return _full_where(outside, _corners(f, a, (b[0].clamp(0, 31), b[1].clamp(0, 31))))

    return rule


def _wrapping(rule: Callable[..., Interval]) -> Callable[..., Interval]:
    """Return the rule of an operation that wraps, from the rule of the one without wrapping."""

    def wrapped(*args: Interval) -> Interval:
        low, high = rule(*args)
        first, last = (low - INT_LOW) >> 32, (high - INT_LOW) >> 32
        low, high = low - (first << 32), high - (last << 32)
        same = first == last  # all results lose the same multiple of 2**32
        return torch.where(same, low, INT_LOW), torch.where(same, high, INT_HIGH)

    return wrapped


def _lt(a: Interval, b: Interval) -> Interval:
    return a[1] < b[0], a[0] < b[1]


def _le(a: Interval, b: Interval) -> Interval:
    return a[1] <= b[0], a[0] <= b[1]


def _eq(a: Interval, b: Interval) -> Interval:
    return (a[1] <= b[0]) & (b[1] <= a[0]), (a[0] <= b[1]) & (b[0] <= a[1])


# --- bools ----------------------------------------------------------------------------------


def _both(a: Interval, b: Interval) -> Interval:
    return a[0] & b[0], a[1] & b[1]


def _either(a: Interval, b: Interval) -> Interval:
    return a[0] | b[0], a[1] | b[1]


def _not(a: Interval) -> Interval:
    return ~a[1], ~a[0]


def _differ(a: Interval, b: Interval) -> Interval:
    must = (a[0] & ~b[1]) | (b[0] & ~a[1])
    return must, (a[1] & ~b[0]) | (b[1] & ~a[0])


def _choose(c: Interval, a: Interval, b: Interval) -> Interval:
    return _either(_both(c, a), _both(_not(c), b))


def _choose_tight(c: Interval, a: Interval, b: Interval) -> Interval:
    must, may = _choose(c, a, b)
    return must | (a[0] & b[0]), may  # both branches true: the condition does not matter


# --- floats ---------------------------------------------------------------------------------


def _real(low: Tensor, high: Tensor, unknown: Tensor | None = None) -> Interval:
    """Return an interval of floats: NaN at both ends if one end is NaN or `unknown` is True."""
    nan = low.isnan() | high.isnan()
    if unknown is not None:
        nan = nan | unknown
    return low.masked_fill(nan, float("nan")), high.masked_fill(nan, float("nan"))


def _endless(a: Interval) -> Tensor:
    return a[0].isinf() | a[1].isinf()


def _add_real(a: Interval, b: Interval) -> Interval:
    clash = (a[1].isposinf() & b[0].isneginf()) | (a[0].isneginf() & b[1].isposinf())
    return _real(a[0] + b[0], a[1] + b[1], clash)  # inf + -inf is NaN


def _sub_real(a: Interval, b: Interval) -> Interval:
    return _add_real(a, _neg(b))


def _mul_real(a: Interval, b: Interval) -> Interval:
    clash = (_contains(a, 0) & _endless(b)) | (_contains(b, 0) & _endless(a))  # 0 * inf is NaN
    return _real(*_corners(torch.mul, a, b), clash)


def _div_real(a: Interval, b: Interval) -> Interval:
    return _real(*_corners(torch.div, a, b), _contains(b, 0) | (_endless(a) & _endless(b)))


def _increasing(f: Callable[[Tensor], Tensor]) -> Callable[[Interval], Interval]:
    """Return the rule of a function that is monotone even after rounding. NaN stays unknown."""

    def rule(a: Interval) -> Interval:
        return _real(f(a[0]), f(a[1]))

    return rule


def _nearly_increasing(f: Callable[[Tensor], Tensor]) -> Callable[[Interval], Interval]:
    """Return the rule of an increasing function whose implementations differ by a few ulp.

    The rule widens the ends by much more than that.
    """

    def rule(a: Interval) -> Interval:
        low, high = f(a[0]), f(a[1])
        slack = 2.0**-16
        low = low - low.abs() * slack - 1e-30
        high = high + high.abs() * slack + 1e-30
        return _real(low, high, low.isposinf() | high.isneginf())  # overflow itself may differ

    return rule


def _length(x: Interval, y: Interval) -> Interval:
    """Bound hypot(x, y), which rises with the sizes of both."""
    low, high = (torch.hypot(*ends) for ends in zip(_abs(x), _abs(y), strict=True))
    slack = 2.0**-16  # implementations differ by a few ulp
    low, high = low - low * slack - 1e-30, high + high * slack + 1e-30
    return _real(low, high, low.isposinf())  # also where the other one is NaN


def _angle(y: Interval, x: Interval) -> Interval:
    """Bound atan2(y, x).

    In the half plane of x > 0, y > 0 or y < 0 it is monotone in each argument.
    """
    low, high = _corners(torch.atan2, y, x)
    half = (x[0] > 0) | (y[0] > 0) | (y[1] < 0)
    slack = 2.0**-16  # implementations differ by a few ulp
    low = torch.where(half, low - low.abs() * slack - 1e-30, -_HALF_TURN)
    high = torch.where(half, high + high.abs() * slack + 1e-30, _HALF_TURN)
    return _real(low, high, y[0].isnan() | x[0].isnan())


_LEAST_AT, _LEAST = 1.4616321, -0.1214863  # where lgamma is least among positive numbers


def _log_gamma(a: Interval) -> Interval:
    """Bound lgamma: falling, then rising for positive numbers, with poles at the others.

    For a < 0 the reflection gamma(a) gamma(1 - a) = pi / sin(pi a) gives lgamma(a) >= log(pi) -
    lgamma(1 + |a|).
    """
    positive = a[0] > 0
    least = torch.lgamma(a[0].clamp(max=_LEAST_AT).maximum(a[1].clamp(max=_LEAST_AT)))
    least = torch.where(a[0] > _LEAST_AT, torch.lgamma(a[0]), least)
    depth = math.log(math.pi) - torch.lgamma(1 + a[0].abs()).clamp(min=0)
    low = torch.where(positive, least, depth.clamp(max=_LEAST))
    high = torch.where(positive, torch.maximum(*map(torch.lgamma, a)), math.inf)
    slack = 2.0**-16  # implementations differ by a few ulp, of 1 near the zeros
    low = low - low.abs().clamp(min=1) * slack
    high = high + high.abs().clamp(min=1) * slack
    return _real(low, high, low.isposinf())


def _lt_real(a: Interval, b: Interval) -> Interval:
    return a[1] < b[0], ~(a[0] >= b[1])  # negated, so that NaN means "perhaps"


def _le_real(a: Interval, b: Interval) -> Interval:
    return a[1] <= b[0], ~(a[0] > b[1])


def _eq_real(a: Interval, b: Interval) -> Interval:
    return (a[1] <= b[0]) & (b[1] <= a[0]), ~((a[0] > b[1]) | (b[0] > a[1]))


def _cast(n: Node, a: Interval, dtype: torch.dtype) -> Interval:
    source = n.args[0].type
    if n.type == F32:
        return a[0].to(dtype), a[1].to(dtype)  # rounds monotonically
    if n.type == BOOL:
        zero = (a[0] == 0) & (a[1] == 0)
        return (a[0] > 0) | (a[1] < 0), ~zero  # anything to bool is `!= 0`; NaN is true
    if source == BOOL:
        return a[0].to(torch.int64), a[1].to(torch.int64)
    # below int32 every machine gives the minimum; above it, and for NaN, machines differ
    unsafe = ~(a[1] < 2.0**31)
    low = a[0].masked_fill(unsafe, INT_LOW).clamp(min=INT_LOW).to(torch.int64)
    high = a[1].masked_fill(unsafe, 0).clamp(min=INT_LOW).to(torch.int64)
    return low, high.masked_fill(unsafe, INT_HIGH)


_RULES: dict[str, dict[str, Callable[..., Interval]]] = {
    I32: {
        "add": _add,
        "sub": _sub,
        "mul": _mul,
        "neg": _neg,
        "abs": _abs,
        "min": _min,
        "max": _max,
        "fdiv": _floor_divide,
        "tdiv": _quotient("trunc"),
        "mod": _mod,
        "and": _and,
        "or": _or,
        "xor": _bitwise(torch.bitwise_xor),
        "shl": _shift(torch.bitwise_left_shift),
        "shr": _shift(torch.bitwise_right_shift),
        "lt": _lt,
        "le": _le,
        "eq": _eq,
        "where": _where,
        "wrap_add": _wrapping(_add),
        "wrap_sub": _wrapping(_sub),
        "wrap_mul": _wrapping(_mul),
        "wrap_neg": _wrapping(_neg),
        "wrap_abs": _wrapping(_abs),
    },
    BOOL: {
        "and": _both,
        "or": _either,
        "xor": _differ,
        "not": _not,
        "eq": lambda a, b: _not(_differ(a, b)),
        "lt": lambda a, b: _both(_not(a), b),  # False < True
        "le": lambda a, b: _either(_not(a), b),
        "where": _choose_tight,
    },
    F32: {
        "add": _add_real,
        "sub": _sub_real,
        "mul": _mul_real,
        "div": _div_real,
        "neg": _neg,
        "abs": _abs,
        "min": _min,
        "max": _max,
        "sqrt": _increasing(torch.sqrt),
        "floor": _increasing(torch.floor),
        "exp": _nearly_increasing(torch.exp),
        "exp2": _nearly_increasing(torch.exp2),
        "expm1": _nearly_increasing(torch.expm1),
        "log": _nearly_increasing(torch.log),
        "log2": _nearly_increasing(torch.log2),
        "log1p": _nearly_increasing(torch.log1p),
        "tanh": _nearly_increasing(torch.tanh),
        "sigmoid": _nearly_increasing(torch.sigmoid),
        "erf": _nearly_increasing(torch.erf),
        "erfinv": _nearly_increasing(torch.erfinv),
        "lgamma": _log_gamma,
        "hypot": _length,
        "atan2": _angle,
        "with_slope": lambda value, x, slope: value,
        "lt": _lt_real,
        "le": _le_real,
        "eq": _eq_real,
        "where": _where,
    },
}
