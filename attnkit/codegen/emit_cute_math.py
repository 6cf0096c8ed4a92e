"""Emit operations that the DSL lacks or computes differently from torch.

Each function runs while a kernel is traced. It uses only operations that the DSL compiles for the
GPU and for the host. (`cute.math` has erf, expm1 and log1p on the GPU. But the host compiler of the
DSL rejects erf, and it expands the others to `exp(x) - 1` and `log(1 + x)`, which are 0 for small
x.)

The polynomials are weighted minimax fits (Lawson's iteration on Chebyshev nodes) of the functions
named next to them, rounded to float32.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Uint32, cute
from cutlass._mlir.dialects import arith

Value = Any  # a DSL value: the DSL has no static types

_LOG2_E = math.log2(math.e)


def constant(kind: Value, value: float) -> Value:
    """Emit a constant as a DSL value of type `kind`, which arithmetic and `select` accept.

    Floats are rounded here: the DSL warns of those that float32 rounds to 0 or to infinity.
    """
    if kind is Float32 and isinstance(value, float):
        value = ctypes.c_float(value).value
    return kind(kind(value).ir_value())


def number(value: float) -> Value:
    """Emit a Float32 constant."""
    return constant(Float32, value)


def select(condition: Value, yes: Value, no: Value) -> Value:
    """Emit `yes` if `condition` holds, else `no`. Both must have the same DSL type."""
    return type(yes)(cutlass.select_(condition, yes, no))


def floor_divide(a: Value, b: Value) -> Value:
    """Emit torch.floor_divide(a, b) of floats, with the operations of `c10::div_floor_floating`."""
    fmod = a % b
    quotient = (a - fmod) / b
    quotient = select(_beyond(fmod, b), quotient - number(1.0), quotient)
    floored = cute.math.floor(quotient)
    floored = select(quotient - floored > number(0.5), floored + number(1.0), floored)
    direct = a / b
    floored = select(quotient != number(0.0), floored, cute.math.copysign(number(0.0), direct))
    return select(b == number(0.0), direct, floored)


def remainder(a: Value, b: Value) -> Value:
    """Emit torch.remainder(a, b) of floats: fmod, plus the divisor if their signs differ."""
    fmod = a % b
    return select(_beyond(fmod, b), fmod + b, fmod)


def floor_quotient(a: Value, divisor: int) -> Value:
    """Emit floor(a / divisor) of an Int32 `a` for a constant divisor above 1.

    The quotient is the shifted upper half of the product with a 32-bit factor, which is exact for
    0 <= a < 2**31 (Granlund and Montgomery 1994). For a negative `a` it is ~(~a // divisor). The
    division that the compiler generates needs more registers: it adds in 64 bits, in register pairs
    whose lower half is zero, and occupies one zero register for each division in flight.
    """
    bits = (divisor - 1).bit_length()
    factor = (1 << 31 + bits) // divisor + 1
    sign = a >> constant(Int32, 31)
    _, upper = arith.mului_extended((sign ^ a).ir_value(), constant(Uint32, factor).ir_value())
    return sign ^ (Int32(upper) >> constant(Int32, bits - 1))


def _beyond(fmod: Value, b: Value) -> Value:
    """Emit whether a truncated remainder is nonzero and has the opposite sign of the divisor."""
    return (fmod != number(0.0)) & Boolean((b < number(0.0)) != (fmod < number(0.0)))


def sigmoid(a: Value) -> Value:
    """Emit 1 / (1 + exp(-a))."""
    return number(1.0) / (number(1.0) + cute.math.exp(-a))


def fast_sigmoid(a: Value) -> Value:
    """Emit 1 / (1 + exp(-a)) with approximate exp2 and division; relative error near 2^-22."""
    power = cute.math.exp2(a * number(-_LOG2_E), approx=True)
    return cute.math.div(number(1.0), number(1.0) + power, approx=True)


def flushing_sigmoid(a: Value) -> Value:
    """Emit 1 / (1 + exp(-a)) as `fast_sigmoid`, with 0 instead of results below 2^-126.

    This saves the instructions that scale subnormal numbers.
    """
    power = cute.math.exp2(a * number(-_LOG2_E), fastmath=True)
    return cute.arch.rcp_approx(number(1.0) + power)


def expm1(a: Value) -> Value:
    """Emit exp(a) - 1 with an error of about 1.5 ulp.

    For |a| < 1/2, where the subtraction would cancel, a polynomial is evaluated instead.
    """
    near = cute.math.fma(a * a, horner(_EXPM1, a), a)
    far = cute.math.exp(a) - number(1.0)
    return select(abs(a) < number(0.5), near, far)


def log1p(a: Value) -> Value:
    """Emit log(1 + a) with an error of about 1.5 ulp.

    The result is the log of the rounded sum u = 1 + a, plus the rounding error of u divided by u.
    """
    total = number(1.0) + a
    lost = (a - (total - number(1.0))) / total
    inside = (total > number(0.0)) & (total < number(math.inf))
    return cute.math.log(total) + select(inside, lost, number(0.0))


def erf(a: Value) -> Value:
    """Emit the error function erf(a) with an error of about 1 ulp.

    For |a| < 1 the result is an odd polynomial in a, else the sign of a times 1 - 2^-p(|a|) with a
    polynomial p.
    """
    size = abs(a)
    near = cute.math.fma(a, horner(_ERF_NEAR, a * a), a)
    clamped = select(size > number(4.0), number(4.0), size)  # erf(4) rounds to 1; NaN stays
    tail = cute.math.exp2(-horner(_ERF_FAR, clamped))
    far = cute.math.copysign(number(1.0) - tail, a)
    return select(size < number(1.0), near, far)


def erfinv(a: Value) -> Value:
    """Emit the inverse of the error function with an error of about 2 ulp.

    The result is `a` times a polynomial in w = -log(1 - a * a), or in sqrt(w) for a large w (Giles
    2010, with polynomials of our own).
    """
    w = -cute.math.log((number(1.0) - a) * (number(1.0) + a))  # 1 - |a| is exact for |a| > 1/2
    far = w > number(5.0)
    near = horner(_ERFINV_NEAR, select(far, number(0.0), w))
    root = cute.math.sqrt(select(far, w, number(5.0)))
    beyond = horner(_ERFINV_FAR, root - number(3.0))
    inside = a * select(far, beyond, near)
    ends = cute.math.copysign(number(math.inf), a)
    return select(
        abs(a) < number(1.0), inside, select(abs(a) == number(1.0), ends, w * number(math.nan))
    )


def hypot(a: Value, b: Value, *, approx: bool = False) -> Value:
    """Emit sqrt(a * a + b * b) with an error of about 2 ulp, without overflow of the squares.

    An infinite argument gives infinity, beside NaN too.

    Args:
        a, b: the arguments.
        approx: whether to take the root with the approximate instruction of the GPU. That of the
            division would be 0 for large divisors.
    """
    high, wide = abs(a), abs(b)
    longer, shorter = cutlass.max(high, wide), cutlass.min(high, wide)  # pass NaN on
    ratio = select(longer == number(0.0), number(0.0), shorter / longer)
    root = cute.math.sqrt(cute.math.fma(ratio, ratio, number(1.0)), approx=approx)
    length = longer * root
    infinite = (high == number(math.inf)) | (wide == number(math.inf))
    return select(infinite, number(math.inf), length)


def atan2(y: Value, x: Value, *, positive: bool = False, approx: bool = False) -> Value:
    """Emit the angle of the point (x, y) with an error of about 2 ulp.

    The angle of the smaller coordinate to the larger is an odd polynomial in their ratio. Its
    mirror images are the angles in the other octants.

    Args:
        y, x: the coordinates.
        positive: whether `x` is known to be positive and finite, as for atan(y) = atan2(y, 1).
        approx: whether to divide with the approximate instruction of the GPU.
    """
    high, wide = abs(y), abs(x)
    longer, shorter = cutlass.max(high, wide), cutlass.min(high, wide)  # pass NaN on
    ratio = cute.math.div(shorter, longer, approx=True) if approx else shorter / longer
    if not positive:  # 0 / 0 and inf / inf
        ratio = select(longer == number(0.0), number(0.0), ratio)
        ratio = select(shorter == number(math.inf), number(1.0), ratio)
    square = ratio * ratio
    angle = cute.math.fma(horner(_ATAN, square) * square, ratio, ratio)
    # pi / 2 as the sum of two numbers
    steep = number(1.57079637) - (angle + number(4.37113883e-8))
    angle = select(high > wide, steep, angle)
    if not positive:
        behind = cute.math.copysign(number(1.0), x) < number(0.0)  # true for -0.0
        angle = select(behind, number(math.pi) - angle, angle)
    return cute.math.copysign(angle, y)


def horner(coefficients: Sequence[float], a: Value) -> Value:
    """Emit the polynomial in `a` whose coefficients are given, lowest power first."""
    total = number(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = cute.math.fma(total, a, number(c))
    return total


# coefficients for (expm1(x) - x) / x^2 on [-1/2, 1/2]
_EXPM1 = (0.50000006, 0.166666642, 0.0416653603, 0.00833357871, 0.00139961776, 0.000198498077)
# coefficients for erf(x) / x - 1, in powers of x^2, on [0, 1]
_ERF_NEAR = (
    0.128379166, -0.37612626, 0.112835854, -0.026853811, 0.00518832775, -0.000801019254,
    7.85385782e-05,
)  # fmt: skip
# coefficients for erfinv(x) / x, in powers of w = -log(1 - x^2), on [0, 5]
_ERFINV_NEAR = (
    0.886226892, 0.232013822, 0.0115486542, -0.00233429624, -0.000127481602, 4.45651895e-05,
    3.98324573e-06, -1.97646273e-06, 2.2103066e-07, -8.79102302e-09,
)  # fmt: skip
# coefficients for erfinv(x) / x, in powers of sqrt(w) - 3, on [5, 16.7]
_ERFINV_FAR = (
    2.83297682, 1.00167501, 0.00944528636, -0.00763728889, 0.00568697369, -0.00359740551,
    0.00148509175, -5.67762181e-05, -0.000309572526, 0.000115703653,
)  # fmt: skip
# coefficients for (atan(x) / x - 1) / x^2, in powers of x^2, on [0, 1]
_ATAN = (
    -0.333331525, 0.199937731, -0.142110556, 0.106660038, -0.0755221248, 0.0432118401,
    -0.0163679142, 0.0029206886,
)  # fmt: skip
# coefficients for -log2(erfc(x)) on [1, 4]
_ERF_FAR = (
    0.000510294107, 1.62597513, 0.920764923, 0.1486516, -0.031458471, 0.0042409692,
    -0.00026772797,
)  # fmt: skip
