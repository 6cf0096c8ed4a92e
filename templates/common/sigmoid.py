"""Compute sigmoids of scores, the weights of sigmoid attention.

The MUFU unit computes the power. It has no time for a reciprocal of every score besides, so the FMA
units compute that, with more digits than P, of 16 bits, can keep. `tanh.approx` would need one
special function too, but its absolute error of 2**-12 is as large as the weights of a long row.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32

from attnkit.templates.common import device


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + 2**-x), with a relative error below 4e-5; exactly 0 for -inf, NaN for NaN.

    Args:
        x: Float32.
    """
    return device.reciprocal_on_fma(Float32(1.0) + device.exp2(-x))
