"""Execute atomics on shared, global and generic addresses (PTX ISA, atom and red).

Lanes with the same address are applied one after another, in order of the lane number. If all
addresses differ, one numpy operation applies all lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnkit.emulator.faults import Trap
from attnkit.emulator.machine.gang import Gang, Mask
from attnkit.emulator.machine.knowledge import Order
from attnkit.emulator.numerics.formats import Lanes
from attnkit.emulator.numerics.lane_arithmetic import half, packed
from attnkit.emulator.ops.loads_stores import (
    global_offsets,
    items_of,
    masks_by_rank,
    masks_by_space,
    note_global,
    shared_offsets,
)

_REDUCE: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "min": lambda a, b: np.fmin(a, b) if a.dtype.kind == "f" else np.minimum(a, b),
    "max": lambda a, b: np.fmax(a, b) if a.dtype.kind == "f" else np.maximum(a, b),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "exch": lambda a, b: b,
    "inc": lambda a, b: np.where(a >= b, a.dtype.type(0), a + a.dtype.type(1)),
    "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - a.dtype.type(1)),
}


def combine(how: str, fmt: str | None, old: Any, new: Any) -> Any:
    """Return the result of the reduction `how` of `old` and `new`.

    Args:
        fmt: 16-bit float format of the operands, such as "bf16", or "bf16x2" for packed pairs; they
            are then integers that hold its bits. None if numpy has their type.
    """
    fn = _REDUCE[how]
    if fmt is None:
        return fn(old, new)
    kind = fmt.removesuffix("x2")
    one = packed if fmt.endswith("x2") else half
    return one(fn, kind, np.atleast_1d(old), np.atleast_1d(new))


def _combined(how: str, fmt: str | None, old: Lanes, values: list[Lanes]) -> Lanes:
    """Return the values that an atomic stores; `values` are its operands, two for cas."""
    if how == "cas":
        swapped: Lanes = np.where(old == values[0], values[1], old)
        return swapped
    out: Lanes = combine(how, fmt, old, values[0])
    return out


def _apply(view: Lanes, i: Lanes, how: str, fmt: str | None, values: list[Lanes]) -> Lanes:
    """Apply an atomic to items `i` of `view`, one per lane in order; return the old values."""
    if np.unique(i).size == i.size:
        old: Lanes = view[i]
        view[i] = _combined(how, fmt, old, values)
        return old
    before = np.empty(i.size, view.dtype)
    for lane, at in enumerate(i.tolist()):
        one = slice(at, at + 1)
        before[lane] = view[at]
        view[one] = _combined(how, fmt, view[one], [v[lane : lane + 1] for v in values])
    return before


def atom_global(
    gang: Gang,
    a: Lanes,
    m: Mask,
    dt: Any,
    how: str,
    values: list[Lanes],
    fmt: str | None,
    order: Order,
) -> Lanes:
    """Execute atom on global memory; return the old values."""
    item, left = np.dtype(dt).itemsize, m
    old = np.zeros(gang.width, dt)
    while True:
        b, off, part = global_offsets(gang, a, left, item)
        gang.memory.check_defined(b, off, item)
        note_global(gang, (b, off), part, item, order, read=True, write=True)
        view, i = items_of(b, off, dt)
        old[part] = _apply(view, i, how, fmt, [v[part] for v in values])
        left = left & ~part
        if part is gang.full or not left.any():
            break
    gang.cluster.events += 1
    return old


def red_vector(
    gang: Gang,
    a: Lanes,
    m: Mask,
    dt: Any,
    how: str,
    values: list[Lanes],
    fmt: str | None,
    order: Order,
) -> None:
    """Execute red on a vector of elements per lane in global memory; `values`: its elements."""
    n, left = len(values), m
    size = np.dtype(dt).itemsize * n
    while True:
        b, off, part = global_offsets(gang, a, left, size)
        gang.memory.check_defined(b, off, size)
        note_global(gang, (b, off), part, size, order, read=True, write=True, elements=n)
        view, i = items_of(b, off, dt)
        for j, v in enumerate(values):
            _apply(view, i + j, how, fmt, [v[part]])
        left = left & ~part
        if part is gang.full or not left.any():
            break
    gang.cluster.events += 1


def atom_shared(
    gang: Gang, a: Lanes, m: Mask, dt: Any, how: str, values: list[Lanes], fmt: str | None
) -> Lanes:
    """Execute atom on shared memory; return the old values."""
    item = np.dtype(dt).itemsize
    old = np.zeros(gang.width, dt)
    for part in masks_by_rank(gang, a, m):
        rank, off = shared_offsets(gang, a, part, item)
        if gang.race is not None and gang.clock is not None:
            i = gang.race.shared(rank, off, item)
            gang.race.atomic(i, gang.clock, line=gang.line)
        view = gang.cluster.ctas[rank].view(dt, 1)
        old[part] = _apply(view, off // item, how, fmt, [v[part] for v in values])
    gang.cluster.events += 1
    return old


def atom_generic(
    gang: Gang,
    a: Lanes,
    m: Mask,
    dt: Any,
    how: str,
    values: list[Lanes],
    fmt: str | None,
    order: Order,
) -> Lanes:
    """Execute atom on generic addresses; return the old values."""
    old = np.zeros(gang.width, dt)
    for space, part in masks_by_space(gang, a, m):
        if space == "shared":
            got = atom_shared(gang, a, part, dt, how, values, fmt)
        elif space == "global":
            got = atom_global(gang, a, part, dt, how, values, fmt, order)
        else:
            raise Trap("bounds", f"atomic on memory of state space .{space}")
        old[part] = got[part]
    return old
