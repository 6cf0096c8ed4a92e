"""Execute instructions across the lanes of a warp: elect, shfl, vote, redux, match (PTX ISA).

Also small instructions that need the gang: lane masks, clock registers, trap and nanosleep.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnkit.emulator.faults import Trap
from attnkit.emulator.machine.gang import Gang, Mask
from attnkit.emulator.numerics.formats import Lanes, u4, u8

_REDUX = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def elect(gang: Gang, m: Mask) -> tuple[Lanes, Lanes]:
    """Execute elect.sync: elect the lowest active lane of each warp; return (predicate, number)."""
    gang.meet_lanes(m)
    if m is gang.full:
        return gang.first_lane, np.zeros(gang.width, u4)
    rows = m.reshape(-1, 32)
    first = rows.argmax(1)
    out = np.zeros(rows.shape, bool)
    out[np.arange(len(rows)), first] = True
    return out.ravel() & m, np.repeat(first, 32).astype(u4)


def shfl(
    gang: Gang, a: Lanes, b: Lanes, c: Lanes, mode: str | None, m: Mask
) -> tuple[Lanes, Lanes]:
    """Execute shfl.sync; return (value, whether the source lane is in range).

    Args:
        a: values to exchange.
        b: source lane or distance.
        c: clamp value in bits 0-4, segment mask in bits 8-12.
        mode: "idx", "bfly", "down" or "up".
    """
    gang.meet_lanes(m)
    lane = gang.lane
    segment = (c >> u4(8)) & u4(31)
    low = lane & segment
    high = low | (c & ~segment & u4(31))
    if mode == "idx":
        j = low | (b & ~segment & u4(31))
    elif mode == "bfly":
        j = lane ^ (b & u4(31))
    elif mode == "down":
        j = lane + (b & u4(31))
    else:
        up = lane.astype(np.int64) - (b & u4(31))
        ok = up >= high.astype(np.int64)
        return _gather(gang, a, np.where(ok, up, lane)), ok
    ok = j <= high
    return _gather(gang, a, np.where(ok, j, lane)), ok


def _gather(gang: Gang, a: Lanes, j: Lanes) -> Lanes:
    """Return the value of `a` in lane `j` of the same warp."""
    out: Lanes = a[gang.warp_start + j]
    return out


def vote(gang: Gang, p: Lanes, m: Mask, kind: str) -> Lanes:
    """Execute vote.sync.all, .any, .uni or .ballot; `kind` is the last word."""
    gang.meet_lanes(m)
    rows = (p & m).reshape(-1, 32)
    if kind == "ballot":
        bits = (rows.astype(u8) << np.arange(32, dtype=u8)).sum(1).astype(u4)
        return np.repeat(bits, 32)
    if kind == "any":
        return np.repeat(rows.any(1), 32)
    every = np.repeat((rows | ~m.reshape(-1, 32)).all(1), 32)
    return every if kind == "all" else every | ~np.repeat(rows.any(1), 32)


def redux(gang: Gang, x: Lanes, m: Mask, how: str, nan: bool) -> Lanes:
    """Execute redux.sync: reduce the values of the active lanes of each warp to one value.

    Args:
        how: "add", "min", "max", "and", "or" or "xor".
        nan: for floats, whether a NaN operand gives NaN (.NaN); if not, NaN is ignored.
    """
    gang.meet_lanes(m)
    fn: Any = _REDUX[how]
    if x.dtype.kind == "f" and not nan:
        fn = {"min": np.fmin, "max": np.fmax}[how]
    rows, active = x.reshape(-1, 32), m.reshape(-1, 32)
    out = [
        fn.reduce(r[k]) if k.any() else x.dtype.type(0) for r, k in zip(rows, active, strict=True)
    ]
    return np.repeat(np.array(out, x.dtype), 32)


def match(gang: Gang, x: Lanes, m: Mask) -> Lanes:
    """Execute match.any.sync: return for each lane the bits of the active lanes with its value."""
    gang.meet_lanes(m)
    rows, active = x.reshape(-1, 32), m.reshape(-1, 32)
    same = (rows[:, :, None] == rows[:, None, :]) & active[:, None, :]
    bits: Lanes = (same.astype(u8) << np.arange(32, dtype=u8)).sum(2).astype(u4)
    return bits.ravel()


def lanemask(gang: Gang, kind: str) -> Lanes:
    """Return the special register %lanemask_eq, lt, le, gt or ge; `kind` is the last word."""
    bit = u8(1) << gang.lane.astype(u8)
    full = u8(0xFFFFFFFF)
    table = {
        "eq": bit,
        "lt": bit - u8(1),
        "le": bit * u8(2) - u8(1),
        "gt": full & ~(bit * u8(2) - u8(1)),
        "ge": full & ~(bit - u8(1)),
    }
    return table[kind].astype(u4)


def read_clock(gang: Gang, size: int) -> Lanes:
    """Return %clock or a similar register; `size`: its bytes.

    Here these registers do not measure time: each read counts their value up by one.
    """
    gang.cluster.ticks += 1
    return np.full(gang.width, gang.cluster.ticks, f"u{size}")


def trap(gang: Gang) -> None:
    """Execute trap or brkpt: raise `Trap`, which ends the kernel."""
    raise Trap("trap", "the kernel executed trap or brkpt")


def nanosleep(gang: Gang) -> bool:
    """Execute nanosleep: let other warps run before this gang continues."""
    gang.yielded = True
    return True
