"""Emit the logarithm of the gamma function and its derivative, which the DSL lacks.

As in `emit_cute_math`, the polynomials are weighted minimax fits of the functions named next to
them, rounded to float32.
"""

from __future__ import annotations

import math
from typing import Any

from cutlass import cute

from attnkit.codegen.emit_cute_math import horner, number, select

Value = Any  # a DSL value: the DSL has no static types

_STEPS = 5  # from below 8 to below 3


def lgamma(a: Value) -> Value:
    """Emit log(abs(gamma(a))) with an error of about 2.5 ulp for a > 0.

    For 1 <= a < 3 the result is (a - 1) (a - 2) times a polynomial, so that it keeps its relative
    precision at its zeros. Below and up to 8 the recurrence gamma(a + 1) = a gamma(a) leads there,
    and above there is Stirling's series (both as in Cephes, Moshier 1989). For a < 0 the result is
    that of the reflection gamma(a) gamma(1 - a) = pi / sin(pi a): its error is about 2.5 ulp of the
    larger of its two terms and 1, so that little is left of it beside its zeros there.
    """
    size, below = abs(a), a < number(0.0)
    small, large = size < number(1.0), size >= number(8.0)
    near = select(large, number(2.5), size)  # NaN stays
    product = number(1.0)
    for _ in range(_STEPS):
        again = near >= number(3.0)
        near = select(again, near - number(1.0), near)
        product = select(again, product * near, product)
    first = select(small, size, near - number(1.0))  # of gamma(size + 1) if `small`
    second = select(small, size - number(1.0), near - number(2.0))
    base = first * second * horner(_LGAMMA, second)
    argument = select(small, select(below, number(1.0), size), select(large, size, product))
    log = cute.math.log(argument)
    inverse = number(1.0) / size
    series = cute.math.fma(inverse, horner(_STIRLING, inverse * inverse), number(_HALF_LOG_2_PI_E))
    stirling = cute.math.fma(size - number(0.5), log - number(1.0), series)
    positive = select(large, stirling, select(small, base - log, base + log))
    _, sine = _folded_sine(size)
    # pi cancels: the series of the sine lacks its factor
    mirrored = -cute.math.log(select(small, sine, size * sine)) - positive
    result = select(below, mirrored, positive)
    return select(size == number(math.inf), number(math.inf), result)


def digamma(a: Value) -> Value:
    """Emit the derivative of lgamma with an error of about 4 ulp of its largest term.

    Six steps of the recurrence psi(a + 1) = psi(a) + 1 / a lead to the asymptotic series, and the
    reflection psi(a) = psi(1 - a) - pi cot(pi a) to positive arguments (Bernardo, Algorithm AS 103,
    1976). At negative integers the result is NaN, as torch's.
    """
    size, above = abs(a), a > number(0.0)
    base = select(above, a, number(1.0) + size)
    short = select(base > number(1e8), number(1e8), base)  # beyond, the steps add nothing
    steps = _two_steps(short, 0, 5) + (_two_steps(short, 1, 4) + _two_steps(short, 2, 3))
    shifted = base + number(6.0)
    inverse = number(1.0) / shifted
    square = inverse * inverse
    tail = cute.math.fma(number(0.5), inverse, horner(_PSI, square) * square)
    psi = (cute.math.log(shifted) - tail) - steps
    folded, sine = _folded_sine(size)
    rest = size - cute.math.floor(size)
    other = number(0.5) - folded
    cosine = other * horner(_SINE, other * other)
    cotangent = cosine / sine
    cotangent = select(rest > number(0.5), -cotangent, cotangent)
    # -pi cot(pi a) with a = -size, and at a = +0.0 with a = size
    mirrored = psi - cute.math.copysign(number(math.pi), a) * cotangent
    pole = (rest == number(0.0)) & (size > number(0.0))
    return select(above, psi, select(pole, size * number(math.nan), mirrored))


def _two_steps(a: Value, i: int, j: int) -> Value:
    """Emit 1 / (a + i) + 1 / (a + j) with one division."""
    first, second = a + number(float(i)), a + number(float(j))
    return (first + second) / (first * second)


def _folded_sine(size: Value) -> tuple[Value, Value]:
    """Emit the distance of `size` to the nearest integer, and abs(sin(pi size)) / pi."""
    rest = size - cute.math.floor(size)
    folded = select(rest > number(0.5), number(1.0) - rest, rest)
    return folded, folded * horner(_SINE, folded * folded)


_HALF_LOG_2_PI_E = 0.5 * math.log(2 * math.pi) - 0.5
_STIRLING = (1 / 12, -1 / 360, 1 / 1260)
_PSI = (1 / 12, -1 / 120, 1 / 252)
# coefficients for lgamma(x) / ((x - 1) (x - 2)), in powers of x - 2, on [1, 3]
_LGAMMA = (
    0.422784328, -0.10031727, 0.0329649448, -0.0123849772, 0.0049994844, -0.00210205, 0.00091048953,
    -0.000425597827, 0.000195833534, -5.23928684e-05, 2.02178562e-05, -3.87439104e-05, 1.9319601e-05,
)  # fmt: skip
# coefficients for sin(pi x) / (pi x), in powers of x^2, on [0, 1/2]
_SINE = (1.0, -1.64493406, 0.811742187, -0.190747902, 0.0261174701, -0.00223723124)
