"""Compute the results of instructions for which numpy has no function; generated code calls these.

Operands and results are vectors of lanes, with one element per thread of a gang (32, 64, 96 or
128). Packed pairs are 32-bit registers with two 16-bit floats, or 16-bit registers with two fp8.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from attnkit.emulator.numerics.formats import (
    Lanes,
    bf16_to_f32,
    f4,
    f8,
    f16_to_f32,
    f32_to_bf16,
    f32_to_bf16_rz,
    f32_to_f16,
    f32_to_fp8,
    f32_to_tf32,
    fp8_to_f32,
    u1,
    u2,
    u4,
    u8,
)

i4, i8 = np.int32, np.int64
TINY = f4(np.finfo(f4).tiny)


def pack2(lo: Lanes, hi: Lanes) -> Lanes:
    """Pack two 32-bit registers into a 64-bit register."""
    out = np.empty((lo.size, 2), u4)
    out[:, 0] = lo
    out[:, 1] = hi
    return out.view(u8).ravel()


def quad(lo: Lanes, hi: Lanes) -> Lanes:
    """Pack two 64-bit registers into a 128-bit register.

    Its 16 bytes are stored as complex128, so that np.where can move them.
    """
    out = np.empty((lo.size, 2), u8)
    out[:, 0] = lo
    out[:, 1] = hi
    return out.view(np.complex128).ravel()


def ftz(x: Lanes) -> Lanes:
    """Flush subnormal float32 values to zero of the same sign."""
    return x * (np.abs(x) >= TINY)


def fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """Compute a * b + c in float32: the product is exact in float64, the sum is rounded twice."""
    return (a.astype(f8) * b + c).astype(f4)


@cache
def _libm_fma() -> Callable[[float, float, float], float]:
    """Return the fma of the C library, which rounds once."""
    function = ctypes.CDLL(ctypes.util.find_library("m")).fma
    function.restype, function.argtypes = ctypes.c_double, [ctypes.c_double] * 3
    return function


def fma64(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """Compute a * b + c in float64, rounded once."""
    one = _libm_fma()
    return np.array([one(*x) for x in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)], f8)


def directed(x: Lanes, mode: str, residual: Lanes | None = None) -> Lanes:
    """Convert float64 to float32, rounding toward zero (rz), down (rm) or up (rp).

    Args:
        mode: "rz", "rm" or "rp".
        residual: the exact value minus `x`, if `x` was rounded. It is less than the last bit of
            `x`.
    """
    r = x.astype(f4)
    wide = r.astype(f8)
    above = (wide > x).astype(np.int8) - (wide < x)
    if residual is not None:
        above = np.where(wide == x, -np.sign(residual).astype(np.int8), above)
    if mode == "rm":
        return np.where(above > 0, np.nextafter(r, f4(-np.inf)), r)
    if mode == "rp":
        return np.where(above < 0, np.nextafter(r, f4(np.inf)), r)
    return np.where(above * np.sign(x) > 0, np.nextafter(r, f4(0)), r)


def odd(x: Lanes) -> Lanes:
    """Convert float64 to float32, rounding toward zero; set the last bit if the result is inexact.

    When the result is rounded to a format of at most 22 bits, that is as if `x` were rounded once.
    """
    r = directed(x, "rz")
    out: Lanes = (r.view(u4) | (r.astype(f8) != x)).view(f4)
    return out


def directed_sum(a: Lanes, b: Lanes, mode: str) -> Lanes:
    """Add two exact float64 values, and round the exact sum to float32 as `directed` does."""
    s = a + b
    t = s - a
    residual = (a - (s - t)) + (b - t)  # exact sum minus the float64 sum
    residual = np.where(np.isfinite(residual), residual, 0.0)
    out = directed(s, mode, residual)
    if mode != "rm":
        return out
    positive = ~(np.signbit(a) | np.signbit(b))
    return np.where((s == 0) & (residual == 0) & ~positive, f4(-0.0), out)


_HALF, _ONE, _SIXTEEN, _UPPER = u4(0x7FFF), u4(1), u4(16), u4(0xFFFF0000)


def bf16x2(hi: Lanes, lo: Lanes) -> Lanes:
    """Round two float32 to a packed pair of bf16."""
    total = hi + lo
    if (total != total).any():  # a NaN, or infinities of both signs
        return (f32_to_bf16(hi).astype(u4) << _SIXTEEN) | f32_to_bf16(lo)
    bits = np.concatenate((hi, lo)).view(u4)
    bits += ((bits >> _SIXTEEN) & _ONE) + _HALF
    n = hi.size
    return (bits[:n] & _UPPER) | (bits[n:] >> _SIXTEEN)


def f16x2(hi: Lanes, lo: Lanes) -> Lanes:
    """Round two float32 to a packed pair of f16."""
    return (f32_to_f16(hi).astype(u4) << u4(16)) | f32_to_f16(lo)


def bf16x2_rz(hi: Lanes, lo: Lanes) -> Lanes:
    """Round two float32 toward zero to a packed pair of bf16."""
    return (f32_to_bf16_rz(hi).astype(u4) << u4(16)) | f32_to_bf16_rz(lo)


def fp8x2(hi: Lanes, lo: Lanes, kind: str) -> Lanes:
    """Round two float32 to a packed pair of fp8."""
    return (f32_to_fp8(hi, kind).astype(u2) << u2(8)) | f32_to_fp8(lo, kind)


def fp8x2_to_f16x2(x: Lanes, kind: str) -> Lanes:
    """Convert a packed pair of fp8 to a packed pair of f16."""
    lo, hi = (x & u2(0xFF)).astype(u1), (x >> u2(8)).astype(u1)
    return f16x2(fp8_to_f32(hi, kind), fp8_to_f32(lo, kind))


def f16x2_to_fp8x2(x: Lanes, kind: str) -> Lanes:
    """Convert a packed pair of f16 to a packed pair of fp8."""
    hi, lo = halves(x, "f16")
    return fp8x2(hi, lo, kind)


def halves(x: Lanes, kind: str) -> tuple[Lanes, Lanes]:
    """Return the high and the low element of a packed pair of bf16 or f16, as float32."""
    if kind == "bf16":
        return (x & u4(0xFFFF0000)).view(f4), (x << u4(16)).view(f4)
    return f16_to_f32((x >> u4(16)).astype(u2)), f16_to_f32((x & u4(0xFFFF)).astype(u2))


def packed(fn: Callable[..., Lanes], kind: str, *xs: Lanes) -> Lanes:
    """Apply `fn` in float32 to both elements of packed pairs, and round to pairs of `kind`."""
    pairs = [halves(x, kind) for x in xs]
    hi, lo = fn(*[p[0] for p in pairs]), fn(*[p[1] for p in pairs])
    return bf16x2(hi, lo) if kind == "bf16" else f16x2(hi, lo)


def half(fn: Callable[..., Lanes], kind: str, *xs: Lanes) -> Lanes:
    """Apply `fn` in float32 to bits of bf16 or f16, and round to bits of `kind`."""
    if kind == "bf16":
        return f32_to_bf16(fn(*[bf16_to_f32(x) for x in xs]))
    return f32_to_f16(fn(*[f16_to_f32(x) for x in xs]))


def idiv(a: Lanes, b: Lanes) -> Lanes:
    """Divide integers, rounding toward zero; division by zero gives all ones, as on NVIDIA GPUs."""
    if a.dtype.kind == "u":
        quotient: Lanes = np.where(b == 0, ~a.dtype.type(0), a // np.maximum(b, a.dtype.type(1)))
        return quotient
    wide = a.astype(i8)
    div = np.where(b == 0, 1, b).astype(i8)
    q = np.abs(wide) // np.abs(div) * (np.sign(wide) * np.sign(div))
    out: Lanes = np.where(b == 0, -1, q).astype(a.dtype)
    return out


def irem(a: Lanes, b: Lanes) -> Lanes:
    """Return the remainder of the integer division `idiv`."""
    with np.errstate(over="ignore"):
        out: Lanes = (a - idiv(a, b) * b).astype(a.dtype)
    return out


def mulhi64(a: Lanes, b: Lanes) -> Lanes:
    """Return the upper 64 bits of products of unsigned 64-bit integers."""
    prod = [(x * y) >> 64 for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    return np.array(prod, u8)


def shl(a: Lanes, n: Lanes, bits: int) -> Lanes:
    """Shift registers of `bits` bits left; a shift by `bits` or more gives 0."""
    s: Lanes = a << np.minimum(n, u4(bits - 1)).astype(a.dtype)
    out: Lanes = np.where(n < bits, s, a.dtype.type(0))
    return out


def shr(a: Lanes, n: Lanes, bits: int) -> Lanes:
    """Shift registers of `bits` bits right, arithmetically if `a` is signed.

    A shift by `bits` or more gives 0, or the sign in every bit.
    """
    s: Lanes = a >> np.minimum(n, u4(bits - 1)).astype(a.dtype)
    out: Lanes = s if a.dtype.kind == "i" else np.where(n < bits, s, a.dtype.type(0))
    return out


def funnel(lo: Lanes, hi: Lanes, n: Lanes, left: bool, clamp: bool) -> Lanes:
    """Shift a pair of 32-bit registers, and return one of them (PTX ISA, shf).

    Args:
        left: whether to shift left and return the upper one (shf.l); if not, the shift is to the
            right and the result the lower one (shf.r).
        clamp: whether shifts by more than 32 count as 32; if not, their lower 5 bits count.
    """
    k = np.minimum(n, u4(32)) if clamp else n & u4(31)
    both = (hi.astype(u8) << u8(32)) | lo
    k8 = k.astype(u8)
    return (((both << k8) >> u8(32)) if left else (both >> k8)).astype(u4)


def prmt(a: Lanes, b: Lanes, sel: Lanes) -> Lanes:
    """Select four bytes of a pair of registers, in the default mode of prmt (PTX ISA, prmt)."""
    both = (b.astype(u8) << u8(32)) | a
    out = np.zeros(a.size, u4)
    for i in range(4):
        s = (sel >> u4(4 * i)) & u4(15)
        byte = ((both >> ((s & u4(7)).astype(u8) * u8(8))) & u8(0xFF)).astype(u4)
        sign = np.where(byte & u4(0x80), u4(0xFF), u4(0))
        out |= np.where(s & u4(8), sign, byte) << u4(8 * i)
    return out


def lop3(a: Lanes, b: Lanes, c: Lanes, table: int) -> Lanes:
    """Apply a bitwise function of three operands; `table` is its truth table (PTX ISA, lop3)."""
    out = np.zeros(a.size, u4)
    for i in range(8):
        if table >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def bfe(a: Lanes, pos: Lanes, length: Lanes) -> Lanes:
    """Extract a bit field, and extend its sign if `a` is signed (PTX ISA, bfe)."""
    bits = a.dtype.itemsize * 8
    p, n = (pos & u4(255)).astype(i8), (length & u4(255)).astype(i8)
    out = np.zeros(a.size, object)
    for i, (x, q, k) in enumerate(zip(a.tolist(), p.tolist(), n.tolist(), strict=True)):
        field = (x & ((1 << bits) - 1)) >> q if q < bits else 0
        field &= (1 << k) - 1
        if a.dtype.kind == "i" and k:
            top = min(q + k - 1, bits - 1)
            if x >> top & 1:
                field |= -1 << min(k, bits - q if q < bits else 0)
        out[i] = field & ((1 << bits) - 1)
    return out.astype(f"u{a.dtype.itemsize}").view(a.dtype)


def bfi(a: Lanes, b: Lanes, pos: Lanes, length: Lanes) -> Lanes:
    """Insert the low `length` bits of `a` into `b` at bit `pos` (PTX ISA, bfi)."""
    bits = u8(a.dtype.itemsize * 8)
    p = np.minimum((pos & u4(255)).astype(u8), u8(63))
    n = np.minimum((length & u4(255)).astype(u8), u8(63))
    mask = np.where((length & u4(255)) >= bits, ~u8(0), (u8(1) << n) - u8(1)) << p
    mask = np.where((pos & u4(255)) >= bits, u8(0), mask)
    return ((b.astype(u8) & ~mask) | ((a.astype(u8) << p) & mask)).astype(a.dtype)


def popc(a: Lanes) -> Lanes:
    """Count the bits that are set."""
    return np.bitwise_count(a).astype(u4)


def clz(a: Lanes) -> Lanes:
    """Count the leading zeros."""
    n = a.dtype.itemsize * 8
    return np.array([n - int(x).bit_length() for x in a.tolist()], u4)


def brev(a: Lanes) -> Lanes:
    """Reverse the bits."""
    n = a.dtype.itemsize * 8
    return np.array([int(f"{x:0{n}b}"[::-1], 2) for x in a.tolist()], a.dtype)


def bfind(a: Lanes, shift: bool) -> Lanes:
    """Return the position of the highest set bit (PTX ISA, bfind); all ones if no bit is set.

    For negative numbers it is that of the highest clear bit.

    Args:
        shift: whether to return how far it is from the highest position instead (.shiftamt).
    """
    top = 8 * a.dtype.itemsize - 1
    if a.dtype.kind == "i":
        a = np.where(a < 0, ~a, a)
    found = [x.bit_length() - 1 for x in a.tolist()]
    if shift:
        found = [top - n if n >= 0 else n for n in found]
    return np.array([n & 0xFFFFFFFF for n in found], u4)


_INTEGRAL = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def float_to_int(x: Lanes, mode: str, dtype: Any) -> Lanes:
    """Convert floats to an integer type, with saturation.

    NaN gives 0, and if the source is f64 or the result has 64 bits the highest bit alone (PTX ISA,
    cvt).

    Args:
        mode: rounding: "rzi", "rni", "rmi" or "rpi".
    """
    info = np.iinfo(dtype)
    y = np.nan_to_num(_INTEGRAL[mode](x.astype(f8)), nan=0.0, posinf=2.0**70, neginf=-(2.0**70))
    big, small = y >= float(info.max), y <= float(info.min)
    out = np.where(big | small, 0, y).astype(dtype)
    out = np.where(big, dtype(info.max), np.where(small, dtype(info.min), out))
    if x.dtype == f8 or info.bits == 64:
        out = np.where(np.isnan(x), dtype(info.min or 1 << (info.bits - 1)), out)
    return out


def int_to_int(x: Lanes, dtype: Any) -> Lanes:
    """Convert integers to another integer type, with saturation (cvt.sat)."""
    info = np.iinfo(dtype)
    lo = max(int(info.min), int(np.iinfo(x.dtype).min))
    hi = min(int(info.max), int(np.iinfo(x.dtype).max))
    return np.clip(x, lo, hi).astype(dtype)


NAMESPACE: dict[str, Any] = {
    "np": np,
    "where": np.where,
    "f2": np.float16,
    "f4": f4,
    "f8": f8,
    "i1": np.int8,
    "i2": np.int16,
    "i4": i4,
    "i8": i8,
    "u1": u1,
    "u2": u2,
    "u4": u4,
    "u8": u8,
    "c16": np.complex128,
    "count": np.count_nonzero,
    **{
        f.__name__: f
        for f in (
            pack2, quad, ftz, fma, fma64, directed, odd, directed_sum, bf16x2, f16x2, bf16x2_rz, fp8x2, fp8x2_to_f16x2,
            f16x2_to_fp8x2, halves, packed, half, idiv, irem, mulhi64, shl, shr, funnel, prmt, lop3, bfe,
            bfi, popc, clz, brev, bfind, float_to_int, int_to_int, bf16_to_f32, f16_to_f32,
            f32_to_bf16, f32_to_bf16_rz, f32_to_f16, f32_to_tf32,
        )
    },
}  # fmt: skip
