"""Convert register fragments of mma and wgmma to matrices and back, for many warps at once.

A register of a lane holds 4 bytes of an operand. Lane t of a warp holds row t // 4 of each half of
8 rows. Of each 16-byte chunk of a row it holds the 4 bytes from byte 4 * (t % 4) on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnkit.emulator.numerics.formats import (
    ELEMENT_BYTES,
    STORAGE,
    Lanes,
    f4,
    f32_to_f16,
    to_f32,
    u4,
)


def a_operand(regs: list[Lanes], kind: str) -> Lanes:
    """Convert registers of A to matrices [warps, 16, K], float32 (float64 for 8-bit integers).

    Register j holds the 8 rows of half j % 2, and 16-byte chunk j // 2 along K.
    """
    item = ELEMENT_BYTES[kind]
    x = np.stack([r.view(u4) for r in regs]).reshape(len(regs) // 2, 2, -1, 8, 4)
    x = x[..., None].view(STORAGE[item])
    x = np.ascontiguousarray(x.transpose(2, 1, 3, 0, 4, 5))
    return to_f32(x.reshape(x.shape[0], 16, -1), kind)


def b_operand(regs: list[Lanes], kind: str) -> Lanes:
    """Convert registers of B to transposed matrices [warps, 8, K], of types as in `a_operand`.

    Register j holds 16-byte chunk j along K.
    """
    item = ELEMENT_BYTES[kind]
    x = np.stack([r.view(u4) for r in regs]).reshape(len(regs), -1, 8, 4)
    x = x[..., None].view(STORAGE[item])
    x = np.ascontiguousarray(x.transpose(1, 2, 0, 3, 4))
    return to_f32(x.reshape(x.shape[0], 8, -1), kind)


def to_registers(d: Lanes) -> Lanes:
    """Convert matrices D [warps, 16, N] to registers [N / 2, lanes], one element each.

    Register 4 n + 2 h + l of lane t holds row 8 h + t // 4, column 8 n + 2 (t % 4) + l.
    """
    warps, _, n = d.shape
    x = d.reshape(warps, 2, 8, n // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4)
    return np.ascontiguousarray(x).reshape(n // 2, warps * 32)


def accumulators(regs: list[Any], kind: str) -> list[Lanes]:
    """Convert accumulator registers of type `kind` to vectors of one element per lane.

    The vectors are float32 for f32 and f16 (two per register), and int32 for s32.
    """
    if kind == "f32":
        return [r.view(f4) for r in regs]
    if kind == "s32":
        return [r.view(np.int32) for r in regs]
    out = []
    for r in regs:
        pair = r.view(np.float16).astype(f4)
        out += [pair[0::2], pair[1::2]]
    return out


def packed_accumulators(values: list[Lanes], kind: str) -> list[Lanes]:
    """Convert vectors as `accumulators` returns them to registers: float32, or uint32 with bits.

    Registers of f16 (pairs) and s32 are uint32.
    """
    if kind == "f32":
        return values
    if kind == "s32":
        return [v.astype(np.int32).view(u4) for v in values]
    halves = [f32_to_f16(v).astype(u4) for v in values]
    return [lo | hi << u4(16) for lo, hi in zip(halves[0::2], halves[1::2], strict=True)]
