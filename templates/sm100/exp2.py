"""Compute 2**x on the FMA units, two values at a time, to relieve the MUFU unit.

Blackwell's tensor cores are twice as fast as Hopper's, but its MUFU unit is not. For a block of
128 x 128 scores and a head_dim of 128 both take 1024 clocks. As in FlashAttention-4, a part of the
exponentials is therefore computed with packed float32 instructions.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, cute

from attnkit.templates.common.polynomials import EXP2_FROM_FLOOR
from attnkit.templates.sm100 import device

# Degree of the polynomial for each dtype of P: after rounding to the dtype, fewer than one in a
# thousand values differs from the rounded exact power.
DEGREES = {"bfloat16": 4, "float16": 5}
_MAGIC = 12582912.0  # 1.5 * 2**23: the low bits of x + _MAGIC, rounded down, are floor(x)
_LEAST = -127.0


def exp2_pair(x: Any, y: Any, degree: int = 3) -> tuple[Any, Any]:
    """Return 2**x and 2**y, computed on the FMA units; x and y must be below 128, or NaN.

    The relative error is below 8.6e-5, 3e-6 or 1.7e-7 for degree 3, 4 or 5. As on the MUFU unit,
    results for integers are exact, -inf and values below -126 give 0, and NaN gives NaN.

    Args:
        x, y: Float32.
        degree: degree of the polynomial, 3 to 5. After rounding to bfloat16 the errors are about
            equal.
    """
    both = tuple(cute.arch.fmax(v, Float32(_LEAST), nan=True) for v in (x, y))
    magic = Float32(_MAGIC), Float32(_MAGIC)
    shifted = cute.arch.add_packed_f32x2(both, magic, rnd="rm")
    whole = cute.arch.sub_packed_f32x2(shifted, magic, rnd="rn")
    rest = cute.arch.sub_packed_f32x2(both, whole, rnd="rn")
    *lower, p = (pair(c) for c in EXP2_FROM_FLOOR[degree])
    for c in reversed(lower):
        p = cute.arch.fma_packed_f32x2(p, rest, c, rnd="rn")
    # Multiply by 2**j: adding j to the exponent bits of p would turn NaN into a number. The product
    # also gives 0 for x below -126.
    return cute.arch.mul_packed_f32x2(p, tuple(_power(t) for t in shifted), rnd="rn")


def pair(value: float) -> tuple[Any, Any]:
    """Return a constant as a pair of Float32 for packed arithmetic."""
    return Float32(value), Float32(value)


def _power(shifted: Any) -> Any:
    """Return 2**j, given the float j + _MAGIC."""
    bits = device.pure(
        "mad.lo.s32", Int32, shifted.bitcast(Int32), Int32(1 << 23), Int32(127 << 23)
    )
    return bits.bitcast(Float32)
