"""Convert between float32 and formats of GPUs: bf16, f16, tf32 and two formats of fp8.

Rounding is to nearest even unless a docstring says otherwise, and turns NaN into the canonical NaN
of the format (PTX ISA, cvt).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Lanes = NDArray[Any]

u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64
f2, f4, f8 = np.float16, np.float32, np.float64


def bf16_to_f32(bits: Lanes) -> Lanes:
    """Convert bits of bf16 to float32."""
    return (bits.astype(u4) << u4(16)).view(f4)


def f32_to_bf16(x: Lanes) -> Lanes:
    """Round float32 to bits of bf16."""
    bits = np.ascontiguousarray(x).view(u4)
    rounded = ((bits + u4(0x7FFF) + ((bits >> u4(16)) & u4(1))) >> u4(16)).astype(u2)
    return np.where(x != x, u2(0x7FFF), rounded)


def f32_to_bf16_rz(x: Lanes) -> Lanes:
    """Round float32 toward zero to bits of bf16."""
    return np.where(x != x, u2(0x7FFF), (x.view(u4) >> u4(16)).astype(u2))


def f16_to_f32(bits: Lanes) -> Lanes:
    """Convert bits of f16 to float32."""
    return bits.view(f2).astype(f4)


def f32_to_f16(x: Lanes) -> Lanes:
    """Round float32 to bits of f16."""
    return np.where(x != x, u2(0x7FFF), x.astype(f2).view(u2))


def f32_to_tf32(x: Lanes) -> Lanes:
    """Round float32 to tf32, to nearest with ties away from zero (cvt.rna).

    tf32 has 10 bits of mantissa. Infinity and NaN keep their bits.
    """
    bits = x.view(u4)
    return np.where(np.isfinite(x), (bits + u4(0x1000)) & u4(0xFFFFE000), bits).view(f4)


def tf32_operand(bits: Lanes) -> Lanes:
    """Convert bits of a tf32 operand to float32 as a tensor core reads them: drop the low 13."""
    return (bits & u4(0xFFFFE000)).view(f4)


@cache
def fp8_table(kind: str) -> NDArray[np.float32]:
    """Return the values of the 256 codes of e4m3 or e5m2.

    e4m3 has no infinity, and NaN at 0x7f and 0xff; e5m2 is like IEEE formats.
    """
    exp_bits, man_bits, bias = (4, 3, 7) if kind == "e4m3" else (5, 2, 15)
    code = np.arange(256)
    sign = np.where(code & 0x80, -1.0, 1.0)
    e = (code >> man_bits) & ((1 << exp_bits) - 1)
    m = code & ((1 << man_bits) - 1)
    frac = m / (1 << man_bits)
    value = np.where(e == 0, frac * 2.0 ** (1 - bias), (1 + frac) * 2.0 ** (e - float(bias)))
    value = sign * value
    if kind == "e4m3":
        value[(code & 0x7F) == 0x7F] = np.nan
    else:
        top = e == 31
        value[top] = np.where(m[top] == 0, sign[top] * np.inf, np.nan)
    return value.astype(f4)


def fp8_to_f32(bits: Lanes, kind: str) -> Lanes:
    """Convert bits of fp8 to float32; `kind` is "e4m3" or "e5m2"."""
    return fp8_table(kind)[bits]


def f32_to_fp8(x: Lanes, kind: str) -> Lanes:
    """Round float32 to bits of fp8, to nearest even (cvt.rn.satfinite).

    Values out of range become the largest finite value with their sign.
    """
    table = fp8_table(kind)[:128]
    finite = table[np.isfinite(table)].astype(f8)
    a = np.minimum(np.abs(np.nan_to_num(x.astype(f8))), finite[-1])
    hi = np.searchsorted(finite, a)
    lo = np.maximum(hi - 1, 0)
    below, above = a - finite[lo], finite[hi] - a
    code = np.where((below < above) | ((below == above) & (lo % 2 == 0)), lo, hi)
    code = code | np.where(np.signbit(x), 0x80, 0)
    return np.where(x != x, 0x7F, code).astype(u1)


def to_f32(bits: Lanes, kind: str) -> Lanes:
    """Convert elements of a tensor-core operand to float32 (to float64 for s8 and u8)."""
    if kind == "bf16":
        return bf16_to_f32(bits)
    if kind == "f16":
        return f16_to_f32(bits)
    if kind == "tf32":
        return tf32_operand(bits)
    if kind in ("e4m3", "e5m2"):
        return fp8_to_f32(bits, kind)
    signed = bits.view(np.int8) if kind == "s8" else bits
    return signed.astype(f8)  # exact, as sums of products of 8-bit integers stay below 2**53


ELEMENT_BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
STORAGE = {1: u1, 2: u2, 4: u4}
