"""Execute mma.sync, ldmatrix and stmatrix, which work on matrices of one warp."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnkit.emulator.faults import Trap
from attnkit.emulator.machine.address_spaces import OFFSET_MASK, RANK_SHIFT, SHARED_BASE
from attnkit.emulator.machine.gang import Gang, Mask
from attnkit.emulator.machine.race_detector import COLLECTIVE
from attnkit.emulator.numerics.formats import Lanes, u2, u4
from attnkit.emulator.numerics.fragments import (
    a_operand,
    accumulators,
    b_operand,
    packed_accumulators,
    to_registers,
)

_T = np.arange(32)


# ---- mma.sync
def mma(
    gang: Gang,
    shape: tuple[int, int, int],
    types: tuple[str, str, str],
    a: list[Lanes],
    b: list[Lanes],
    c: list[Lanes],
    m: Mask,
) -> list[Lanes]:
    """Execute mma.sync: compute D = A B + C for each warp, and return the registers of D.

    Args:
        shape: (M, N, K).
        types: types of D, A and B, as PTX names them.
        a, b, c: registers of the fragments (`numerics.fragments`).
    """
    dt, at, bt = types
    x, y = a_operand(a, at), b_operand(b, bt)
    if x.shape[2] != shape[2] or y.shape[2] != shape[2]:
        raise Trap("encoding", f"mma of K={shape[2]} with registers for K={x.shape[2]}")
    d = to_registers(np.matmul(x, y.transpose(0, 2, 1)))
    gang.cluster.record("tensor", 2 * shape[0] * shape[1] * shape[2] * len(gang.warps_of(m)))
    acc = accumulators(c, dt)
    total = [v + d[i].astype(v.dtype) for i, v in enumerate(acc)]
    return packed_accumulators(total, dt)


# ---- ldmatrix, stmatrix
def _matrix_rows(gang: Gang, a: Lanes, n: int, m: Mask) -> tuple[Any, Lanes, Lanes]:
    """Return the CTA, the byte offsets of the matrix rows, and the active warps.

    The offsets are [active warps, 8 n] in shared memory of the gang's own CTA. Lanes 8 j to 8 j + 7 of a warp give the
    addresses of the rows of matrix j. A row has 16 bytes and must be aligned to them.
    """
    rows = a.reshape(-1, 32)[:, : 8 * n].astype(np.int64)
    on = m.reshape(-1, 32).any(1)
    rows = rows[on]
    cta = gang.cta
    if (rows >> RANK_SHIFT != cta.rank).any():
        bad = int(rows[rows >> RANK_SHIFT != cta.rank][0])
        raise Trap("bounds", f"matrix row at shared address {bad:#x}: not in the warp's own CTA")
    off = (rows & OFFSET_MASK) - SHARED_BASE
    if (rows & 15).any():
        raise Trap("alignment", f"matrix row at shared +{int(off[(off & 15) != 0][0]):#x}")
    if off.min() < 0 or off.max() + 16 > cta.smem.size:
        raise Trap("bounds", f"matrix row at shared +{int(off.max()):#x}, size {cta.smem.size:#x}")
    return cta, off, on


def ldmatrix(gang: Gang, a: Lanes, n: int, trans: bool, m: Mask) -> list[Lanes]:
    """Execute ldmatrix: load `n` 8x8 matrices of 16-bit elements per warp; return n registers."""
    cta, off, on = _matrix_rows(gang, a, n, m)
    if gang.race is not None and gang.clock is not None:
        i = gang.race.shared(cta.rank, off.ravel(), 16)
        gang.race.read(i, gang.clock, asynchronous=False, line=gang.line, lanes=COLLECTIVE)
    out = []
    for j in range(n):
        row = off[:, 8 * j : 8 * j + 8]
        if trans:
            view = cta.view(u2, 1)
            lo = view[row[:, 2 * (_T % 4)] // 2 + _T // 4]
            hi = view[row[:, 2 * (_T % 4) + 1] // 2 + _T // 4]
            got = lo.astype(u4) | hi.astype(u4) << u4(16)
        else:
            got = cta.view(u4, 1)[row[:, _T // 4] // 4 + _T % 4]
        full = np.zeros((len(on), 32), u4)
        full[on] = got
        out.append(full.ravel())
    return out


def stmatrix(gang: Gang, a: Lanes, values: list[Lanes], trans: bool, m: Mask) -> None:
    """Execute stmatrix: store 8x8 matrices of 16-bit elements, one per register of `values`."""
    cta, off, on = _matrix_rows(gang, a, len(values), m)
    if gang.race is not None and gang.clock is not None:
        i = gang.race.shared(cta.rank, off.ravel(), 16)
        gang.race.write(i, gang.clock, generic=True, line=gang.line, lanes=COLLECTIVE)
    for j, v in enumerate(values):
        row, x = off[:, 8 * j : 8 * j + 8], v.reshape(-1, 32)[on]
        if trans:
            view = cta.view(u2, 1)
            view[row[:, 2 * (_T % 4)] // 2 + _T // 4] = (x & u4(0xFFFF)).astype(u2)
            view[row[:, 2 * (_T % 4) + 1] // 2 + _T // 4] = (x >> u4(16)).astype(u2)
        else:
            cta.view(u4, 1)[row[:, _T // 4] // 4 + _T % 4] = x
