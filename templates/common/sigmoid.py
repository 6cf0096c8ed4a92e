"""Compute sigmoids of scores, the weights of sigmoid attention.

The MUFU unit computes the power. It has no time for a reciprocal of every score besides, so the FMA
units compute that, with more digits than P, of 16 bits, can keep. `tanh.approx` would need one
special function too, but its absolute error of 2**-12 is as large as the weights of a long row.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, cute

from attnkit.templates.common import device

SMALL = -5.0  # largest x of `small_sigmoid`
LARGEST_TERM = (
    2.0**63
)  # of `sigmoid_pair`: the product of two has a reciprocal that is not subnormal


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + 2**-x), with a relative error below 4e-5; exactly 0 for -inf, NaN for NaN.

    Args:
        x: Float32.
    """
    return device.reciprocal_on_fma(Float32(1.0) + device.exp2(-x))


def small_sigmoid(x: Any) -> Any:
    """Return 1 / (1 + 2**-x) for x <= `SMALL`, with a relative error below 1.7e-4.

    With e = 2**x this is e / (1 + e), and e (1 - 0.975 e) for a small e: the constant minimizes the
    largest relative error. The result is exactly 0 for -inf, and NaN for NaN.

    Args:
        x: Float32.
    """
    e = device.exp2(x)
    return e * device.shifted(e, Float32(-0.97476438), Float32(1.0))


def sigmoid_pair(x: Any, y: Any) -> tuple[Any, Any]:
    """Compute two sigmoids, 1 / (1 + 2**-x) and 1 / (1 + 2**-y), with one reciprocal instruction.

    With a = 1 + 2**-x and b = 1 + 2**-y, 1 / a is b / (a b). The relative error is below 1e-6.
    Results are at least 2**-63, also for -inf, because a and b are limited; NaN for NaN.

    Args:
        x, y: Float32.
    """
    a, b = (
        cute.arch.fmin(Float32(1.0) + device.exp2(-z), Float32(LARGEST_TERM), nan=True)
        for z in (x, y)
    )
    r = cute.arch.rcp_approx(a * b)
    return r * b, r * a
