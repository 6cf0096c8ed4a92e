"""Compute sigmoids of scores, the weights of sigmoid attention on Blackwell.

With e = 2**-|x| in (0, 1], 1 / (1 + 2**-x) is 1 / (1 + e) for positive x, and e / (1 + e) otherwise.
A polynomial computes 1 / (1 + e), because the MUFU unit has no time for a reciprocal of every score
besides the power. `tanh.approx` would need one special function too, but its absolute error of
2**-12 is as large as the weights of a long row. The polynomial keeps the relative error, overflows
nowhere, and gives exactly 0 for -inf and 1 for inf.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, cute

from attnkit.templates.common import device
from attnkit.templates.common.polynomials import RECIPROCAL_OF_SUM


def sigmoid(x: Any, dtype: str) -> Any:
    """Return 1 / (1 + 2**-x) to the precision of `dtype`, "bfloat16" or "float16".

    Args:
        x: Float32.
        dtype: dtype to which the result will be rounded.
    """
    e = device.exp2(-abs(x))
    *lower, p = (Float32(c) for c in RECIPROCAL_OF_SUM[dtype])
    for c in reversed(lower):
        p = cute.math.fma(p, e, c)
    return cutlass.select_(x > Float32(0.0), Float32(1.0), e) * p
