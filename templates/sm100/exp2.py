"""2**x on the FMA units, two at a time: FlashAttention-4's relief for the exponential unit.

Blackwell multiplies twice as fast as Hopper and takes as many exponentials: a block of 128 x 128
scores with 128 columns keeps the exponential unit as long as the tensor cores, 1024 clocks. So a
share of the exponentials is computed here, with the packed float32 instructions.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, cute

from attnkit.templates.common.polynomials import EXP2_FROM_FLOOR
from attnkit.templates.sm100 import device

# of the polynomials, by the dtype that P is rounded to: less than one in a thousand is rounded to
# another number than the exact power would be
DEGREES = {"bfloat16": 4, "float16": 5}
_MAGIC = 12582912.0  # 1.5 * 2**23: the low bits of x + _MAGIC, rounded down, are floor(x)
_LEAST = -127.0


def exp2_pair(x: Any, y: Any, degree: int = 3) -> tuple[Any, Any]:
    """2**x and 2**y, Float32, without the exponential unit; x and y are below 128, or NaN.

    The relative error is below 8.6e-5, 3e-6 or 1.7e-7 for degree 3, 4 or 5. Integers are exact,
    -inf and all below -126 give 0, NaN gives NaN: as the exponential unit does.

    Args:
        x, y: Float32.
        degree: of the polynomial, 3 to 5. After rounding to bfloat16 all are alike.
    """
    both = tuple(cute.arch.fmax(v, Float32(_LEAST), nan=True) for v in (x, y))
    magic = Float32(_MAGIC), Float32(_MAGIC)
    shifted = cute.arch.add_packed_f32x2(both, magic, rnd="rm")
    whole = cute.arch.sub_packed_f32x2(shifted, magic, rnd="rn")
    rest = cute.arch.sub_packed_f32x2(both, whole, rnd="rn")
    *lower, p = (pair(c) for c in EXP2_FROM_FLOOR[degree])
    for c in reversed(lower):
        p = cute.arch.fma_packed_f32x2(p, rest, c, rnd="rn")
    # A product with 2**j, not j added to the bits of p: that would make a number of NaN. It also
    # takes what is below -126 to 0.
    return cute.arch.mul_packed_f32x2(p, tuple(_power(t) for t in shifted), rnd="rn")


def pair(value: float) -> tuple[Any, Any]:
    """A constant for packed arithmetic."""
    return Float32(value), Float32(value)


def _power(shifted: Any) -> Any:
    """2**j from j + _MAGIC."""
    bits = device.pure(
        "mad.lo.s32", Int32, shifted.bitcast(Int32), Int32(1 << 23), Int32(127 << 23)
    )
    return bits.bitcast(Float32)
