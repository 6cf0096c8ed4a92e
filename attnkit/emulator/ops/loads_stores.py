"""Execute loads and stores on shared, global, local and generic addresses (PTX ISA, ld and st)."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnkit.emulator.faults import Trap
from attnkit.emulator.machine.address_spaces import (
    LOCAL_BASE,
    OFFSET_MASK,
    PARAM_BASE,
    RANK_SHIFT,
    SHARED_BASE,
)
from attnkit.emulator.machine.gang import Gang, Mask
from attnkit.emulator.machine.global_memory import Buffer
from attnkit.emulator.machine.global_races import GENERIC, STRONG, Access
from attnkit.emulator.machine.knowledge import Order
from attnkit.emulator.numerics.formats import Lanes, u8


# ---- shared memory
def shared_offsets(gang: Gang, a: Lanes, m: Mask, size: int) -> tuple[int, Lanes]:
    """Return the CTA rank and the byte offsets in its shared memory that the lanes `m` address.

    Raise `Trap` unless the CTA exists and every access of `size` bytes is aligned and in bounds.
    `masks_by_rank` splits a mask so that all lanes address the same CTA.
    """
    x = a if m is gang.full else a[m]
    bits = int(np.bitwise_or.reduce(x))
    rank = int(x[0]) >> RANK_SHIFT
    if rank >= len(gang.cluster.ctas) or bits >> RANK_SHIFT != rank:
        top = int(x.max())
        rank = top >> RANK_SHIFT
        raise Trap("bounds", f"shared address {top:#x}: no CTA of rank {rank} in the cluster")
    if rank != gang.cta.rank:
        gang.cluster.reached(rank)
    if bits & (size - 1):
        bad = int(x[(x & x.dtype.type(size - 1)) != 0][0]) & OFFSET_MASK
        raise Trap("alignment", f"shared access of {size} bytes at +{bad - SHARED_BASE:#x}")
    off = (x & x.dtype.type(OFFSET_MASK)).astype(np.int64) - SHARED_BASE
    lo, hi = int(off.min()), int(off.max())
    if lo < 0 or hi + size > gang.cluster.ctas[rank].smem.size:
        bad = lo if lo < 0 else hi
        have = gang.cluster.ctas[rank].smem.size
        raise Trap("bounds", f"shared access of {size} bytes at {bad:+#x}, size {have:#x}")
    return rank, off


def masks_by_rank(gang: Gang, a: Lanes, m: Mask) -> list[Mask]:
    """Split a mask by the CTA whose shared memory the lanes address."""
    if len(gang.cluster.ctas) == 1:
        return [m]
    ranks = (a >> a.dtype.type(RANK_SHIFT)).astype(np.int64)
    every = np.unique(ranks[m])
    return [m] if every.size == 1 else [m & (ranks == r) for r in every]


def ld_shared(
    gang: Gang, a: Lanes, m: Mask, dt: Any, n: int, used: int | None = None
) -> list[Lanes]:
    """Load `n` elements per lane from shared memory.

    Args:
        used: how many of the elements, from the first on, the kernel uses; None if all. The race
            detector ignores the others.
    """
    parts = masks_by_rank(gang, a, m)
    size = np.dtype(dt).itemsize * n
    out = np.zeros((n, gang.width), dt)
    for part in parts:
        rank, off = shared_offsets(gang, a, part, size)
        if gang.race is not None and gang.clock is not None and used != 0:
            seen = size if used is None else size // n * used
            i, lanes = gang.race.shared(rank, off, seen), gang.race.repeated(gang.lane[part], seen)
            gang.race.read(i, gang.clock, asynchronous=False, line=gang.line, lanes=lanes)
        got = gang.cluster.ctas[rank].view(dt, n)[off // size]
        if part is gang.full:
            return list(np.ascontiguousarray(got.T)) if n > 1 else [got]
        out[:, part] = got.T
    return list(out)


def st_shared(gang: Gang, a: Lanes, m: Mask, dt: Any, values: list[Lanes]) -> None:
    """Store elements to shared memory; `values` has one vector per element of a lane."""
    n = len(values)
    size = np.dtype(dt).itemsize * n
    for part in masks_by_rank(gang, a, m):
        rank, off = shared_offsets(gang, a, part, size)
        if gang.race is not None and gang.clock is not None:
            i, lanes = gang.race.shared(rank, off, size), gang.race.repeated(gang.lane[part], size)
            gang.race.write(i, gang.clock, generic=True, line=gang.line, lanes=lanes)
        target = gang.cluster.ctas[rank].view(dt, n)
        i = off // size
        chosen = values if part is gang.full else [v[part] for v in values]
        if n == 1:
            target[i] = chosen[0]
        else:
            for j, v in enumerate(chosen):
                target[i, j] = v


# ---- global memory
def global_offsets(gang: Gang, a: Lanes, m: Mask, size: int) -> tuple[Any, Lanes, Mask]:
    """Return a buffer, byte offsets of the lanes that address it, and the mask of those lanes.

    Other lanes of `m` may address other buffers; callers repeat this call for them. Raise `Trap`
    unless accesses of `size` bytes are aligned and in bounds.
    """
    x = a if m is gang.full else a[m]
    if int(np.bitwise_or.reduce(x)) & (size - 1):
        bad = int(x[(x & u8(size - 1)) != 0][0])
        raise Trap("alignment", f"global access of {size} bytes at {bad:#x}")
    lo, hi = int(x.min()), int(x.max())
    memory = gang.memory
    for b in memory.buffers:
        if b.base <= lo and hi + size <= b.end:
            return b, (x - u8(b.base)).astype(np.int64), m
    b = memory.find(lo, lo + size)
    part = m & (a >= u8(b.base)) & (a + u8(size) <= u8(b.end))
    return b, (a[part] - u8(b.base)).astype(np.int64), part


def note_global(
    gang: Gang,
    at: tuple[Buffer, Lanes],
    m: Mask,
    size: int,
    order: Order | None,
    *,
    read: bool,
    write: bool,
    elements: int = 1,
) -> None:
    """Report an access to global memory to the race detector.

    Args:
        gang: the warp.
        at: buffer, and offset in bytes of each active lane.
        m: mask of the active lanes.
        size: bytes that each lane accesses.
        order: semantics and scope of a strong access; None for a weak one.
        read, write: whether it reads, and whether it writes; an atomic does both.
        elements: how many atomics of equal size a lane makes, at adjacent addresses.
    """
    race, clock = gang.race, gang.clock
    if race is None or clock is None:
        return
    b, off = at
    races = gang.launch.races
    place = races.index(b, off, size)
    kind = GENERIC | (STRONG if order else 0)
    if read:
        agent = race.agent_of(clock, gang.lane[m], write=False)
        races.read(place, Access(gang, clock, agent, kind))
    strong = order is not None
    addresses: list[int] = []
    if strong or (write and races.released):
        starts = b.base + np.unique(off)[:, None]
        addresses = (starts + np.arange(0, size, size // elements)).ravel().tolist()
    if order and read:
        races.acquire(addresses, gang, order)
    if write:
        agent = race.agent_of(clock, gang.lane[m], write=True)
        races.write(place, Access(gang, clock, agent, kind))
        races.release(addresses, gang, m, order, read)
        clock.tick()


def ld_global(
    gang: Gang,
    a: Lanes,
    m: Mask,
    dt: Any,
    n: int,
    order: Order | None = None,
    constant: bool = False,
) -> list[Lanes]:
    """Load `n` elements per lane from global memory; `constant`: whether it is ld.global.nc."""
    item = np.dtype(dt).itemsize
    out, left = np.zeros((n, gang.width), dt), m
    while True:
        b, off, part = global_offsets(gang, a, left, item * n)
        gang.memory.check_defined(b, off, item * n)
        if constant and gang.clock is not None:
            races, access = gang.launch.races, Access(gang, gang.clock, gang.clock.agent, GENERIC)
            races.check_constant(races.index(b, off, item * n), access)
        note_global(gang, (b, off), part, item * n, order, read=True, write=False)
        view, i = items_of(b, off, dt)
        if part is gang.full:
            return [view[i + j] for j in range(n)]
        for j in range(n):
            out[j, part] = view[i + j]
        left = left & ~part
        if not left.any():
            return list(out)


def st_global(
    gang: Gang, a: Lanes, m: Mask, dt: Any, values: list[Lanes], order: Order | None = None,
    defined: bool = True,
) -> None:  # fmt: skip
    """Store elements to global memory; `values` has one vector per element of a lane.

    Unless `defined`, the memory counts as not written afterwards.
    """
    item, left = np.dtype(dt).itemsize, m
    while True:
        b, off, part = global_offsets(gang, a, left, item * len(values))
        gang.memory.mark(b, off, item * len(values), defined)
        note_global(gang, (b, off), part, item * len(values), order, read=False, write=True)
        view, i = items_of(b, off, dt)
        for j, v in enumerate(values):
            view[i + j] = v if part is gang.full else v[part]
        gang.cluster.events += 1
        left = left & ~part
        if part is gang.full or not left.any():
            return


def items_of(b: Any, off: Any, dt: Any) -> tuple[Lanes, Lanes]:
    """Return a view of buffer `b` as items of type `dt`, and the index of each offset in it.

    The buffer need not start at a multiple of the item size, so the view may skip its first bytes.
    """
    item = np.dtype(dt).itemsize
    skew = -b.base % item
    if skew == 0:
        return b.view(dt), off // item
    data = b.data[skew:]
    return data[: data.size // item * item].view(dt), (off - skew) // item


# ---- local and generic addresses
def ld_local(gang: Gang, a: Lanes, m: Mask, dt: Any, n: int) -> list[Lanes]:
    """Load `n` elements per lane from local memory."""
    rows, i, view = _local_items(gang, a, m, dt, n)
    out = np.zeros((n, gang.width), dt)
    for j in range(n):
        out[j, m] = view[rows, i + j]
    return list(out)


def st_local(gang: Gang, a: Lanes, m: Mask, dt: Any, values: list[Lanes]) -> None:
    """Store elements to local memory."""
    rows, i, view = _local_items(gang, a, m, dt, len(values))
    for j, v in enumerate(values):
        view[rows, i + j] = v[m]


def _local_items(gang: Gang, a: Lanes, m: Mask, dt: Any, n: int) -> tuple[Lanes, Lanes, Lanes]:
    """Return (threads, indices of items, local memory as items) of the active lanes.

    Local memory as items is [threads, items].
    """
    item, memory = np.dtype(dt).itemsize, gang.cta.local
    off = a[m].astype(np.int64) - LOCAL_BASE
    if (off < 0).any() or (off + item * n > memory.shape[1]).any():
        raise Trap("bounds", f"local access at {int(off.min()):+#x}, size {memory.shape[1]:#x}")
    if (off % (item * n)).any():
        raise Trap("alignment", f"local access of {item * n} bytes at {int(off.max()):+#x}")
    return gang.thread[m], off // item, memory.view(dt)


def masks_by_space(gang: Gang, a: Lanes, m: Mask) -> list[tuple[str, Mask]]:
    """Split a mask by the state space of the lanes' generic addresses.

    The state spaces are "shared", "local", "param" and "global".
    """
    out: list[tuple[str, Mask]] = []
    left = m
    for space in ("shared", "local", "param"):
        part = gang.narrowed(left, is_in_space(gang, a, space))
        if part is not None:
            out.append((space, part))
            left = left & ~part
    part = gang.narrowed(m, left)
    return out if part is None else [*out, ("global", part)]


def ld_generic(
    gang: Gang, a: Lanes, m: Mask, dt: Any, n: int, order: Order | None = None
) -> list[Lanes]:
    """Load `n` elements per lane from generic addresses, which may be kernel parameters."""
    out = np.zeros((n, gang.width), dt)
    for space, part in masks_by_space(gang, a, m):
        if space == "global":
            got = ld_global(gang, a, part, dt, n, order)
        elif space == "param":
            got = _ld_params(gang, a, part, dt, n)
        else:
            got = (ld_shared if space == "shared" else ld_local)(gang, a, part, dt, n)
        if part is gang.full:
            return got
        out[:, part] = [x[part] for x in got]
    return list(out)


def st_generic(
    gang: Gang, a: Lanes, m: Mask, dt: Any, values: list[Lanes], order: Order | None = None
) -> None:
    """Store elements to generic addresses."""
    for space, part in masks_by_space(gang, a, m):
        if space == "global":
            st_global(gang, a, part, dt, values, order)
        elif space == "param":
            raise Trap("bounds", f"store to kernel parameters at {gang.uniform(a, part):#x}")
        else:
            (st_shared if space == "shared" else st_local)(gang, a, part, dt, values)


def is_in_space(gang: Gang, a: Lanes, space: str) -> Lanes:
    """Execute isspacep: return the lanes whose generic address lies in state space `space`."""
    small = a < u8(1 << 32)
    for b in gang.memory.buffers:
        if b.base < 1 << 32:
            small &= (a < u8(b.base)) | (a >= u8(b.end))
    local = (a >= u8(LOCAL_BASE)) & (a < u8(LOCAL_BASE + (1 << 32)))
    param = (a >= u8(PARAM_BASE)) & (a < u8(PARAM_BASE + (1 << 20)))
    spaces = {"shared": small, "local": local, "param": param}
    return spaces[space] if space in spaces else ~small & ~local & ~param


def ld_param(gang: Gang, address: int, dt: Any) -> Lanes:
    """Return a kernel parameter as a vector with the same value in every lane."""
    return gang.cta.param(address - PARAM_BASE, dt, gang.width)


def _ld_params(gang: Gang, a: Lanes, m: Mask, dt: Any, n: int) -> list[Lanes]:
    """Load `n` elements per lane from generic addresses of kernel parameters."""
    item = np.dtype(dt).itemsize
    out = np.zeros((n, gang.width), dt)
    for address in np.unique(a[m]).tolist():
        if address - PARAM_BASE + n * item > len(gang.launch.params):
            size = len(gang.launch.params)
            text = f"kernel parameters at {address - PARAM_BASE:+#x}, size {size:#x}"
            raise Trap("bounds", text)
        lanes = m & (a == u8(address))
        for j in range(n):
            out[j, lanes] = ld_param(gang, address + j * item, dt)[lanes]
    return list(out)
