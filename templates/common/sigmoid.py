"""Compute sigmoids of scores, the weights of sigmoid attention.

With e = 2**-|x| in (0, 1], 1 / (1 + 2**-x) is 1 / (1 + e) for positive x, and e / (1 + e) otherwise.
A polynomial computes 1 / (1 + e), because the MUFU unit has no time for a reciprocal of every score
besides the power. `tanh.approx` would need one special function too, but its absolute error of
2**-12 is as large as the weights of a long row. Both functions here keep the relative error: they
overflow nowhere, and give exactly 0 for -inf and 1 for inf.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, cute

from attnkit.templates.common import device
from attnkit.templates.common.polynomials import RECIPROCAL_OF_SUM

# bits of -0.0; as a Float32 constant the DSL may take it for 0.0, to which it is equal
MINUS = -(1 << 31)


def sigmoid(x: Any, dtype: str, minus: Any = None) -> Any:
    """Return 1 / (1 + 2**-x) to the precision of `dtype`, "bfloat16" or "float16".

    Args:
        x: Float32.
        dtype: dtype to which the result will be rounded.
        minus: -0.0, if it orders the computation after the value that it depends on.
    """
    e = device.exp2(-abs(x) if minus is None else device.with_bits(x, minus))
    *lower, p = (Float32(c) for c in RECIPROCAL_OF_SUM[dtype])
    for c in reversed(lower):
        p = cute.math.fma(p, e, c)
    return cutlass.select_(x > Float32(0.0), Float32(1.0), e) * p


def sigmoid_on_mufu(x: Any, minus: Any) -> Any:
    """Return 1 / (1 + 2**-x) with two special functions: fewer instructions, more MUFU time.

    Args:
        x: Float32.
        minus: -0.0, as in `sigmoid`.
    """
    power = device.exp2(device.with_flipped_bits(x, minus))
    return cute.arch.rcp_approx(Float32(1.0) + power)
