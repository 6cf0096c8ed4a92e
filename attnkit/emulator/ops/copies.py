"""Execute asynchronous copies: cp.async, bulk copies, TMA and st.async (PTX ISA).

Functions named `_*_work` return the part of a copy that moves the data. It runs at once, or for
bulk stores at the commit. In the adversarial mode it may run later.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnkit.emulator.faults import Trap
from attnkit.emulator.machine.address_spaces import OFFSET_MASK, RANK_SHIFT
from attnkit.emulator.machine.async_groups import BulkGroups, CopyGroup, Work
from attnkit.emulator.machine.gang import Gang, Mask
from attnkit.emulator.machine.global_races import GENERIC, STRONG, Access
from attnkit.emulator.machine.knowledge import Clock
from attnkit.emulator.machine.tensor_maps import Box, TensorMap, select
from attnkit.emulator.numerics.formats import Lanes, u1
from attnkit.emulator.ops.atomics import combine
from attnkit.emulator.ops.barriers import check_barriers, lanes_by_address

_KINDS = {"f16": "f2", "s32": "i4", "u32": "u4", "s64": "i8", "u64": "u8", "f32": "f4", "f64": "f8"}
_KINDS |= {"b32": "u4", "b64": "u8"}


# ---- cp.async (non-bulk)
def cp_async(gang: Gang, dst: Lanes, src: Lanes, n: int, valid: Lanes, m: Mask) -> None:
    """Execute cp.async: copy `valid` bytes per lane to shared memory, and zeros up to n bytes."""
    lanes = gang.active(m).tolist()
    for lane in lanes:
        if int(dst[lane]) % n or (int(valid[lane]) and int(src[lane]) % n):
            raise Trap("alignment", f"cp.async of {n} bytes from {int(src[lane]):#x}")
    args = [(int(dst[i]), int(src[i]), int(valid[i])) for i in lanes]
    clock = gang.issue(f"cp.async of {gang.agent_name}", ordered=False)

    def work(line: int = gang.line) -> None:
        for d, s, k in args:
            data = np.zeros(n, u1)
            if k:
                b = gang.memory.find(s, s + k)
                gang.memory.check_defined(b, s - b.base, k)
                if clock is not None:
                    place = gang.launch.races.index(b, s - b.base, k)
                    gang.launch.races.read(place, Access(gang, clock, clock.agent, GENERIC))
                data[:k] = b.data[s - b.base : s - b.base + k]
            gang.cluster.write_shared(d, data, clock, line, generic=True)

    if gang.mode.late:
        gang.cp_current.work.append(work)
    else:
        work()
    if clock is not None:
        gang.cp_current.clocks.append(clock)


def cp_async_commit(gang: Gang) -> None:
    """Execute cp.async.commit_group: close the current group of cp.async."""
    gang.cp_groups.append(gang.cp_current)
    gang.cp_current = CopyGroup()


def cp_async_wait(gang: Gang, n: int) -> bool:
    """Execute cp.async.wait_group n, or cp.async.wait_all if n < 0; return True."""
    if n < 0:
        cp_async_commit(gang)
        n = 0
    while len(gang.cp_groups) > n:
        _complete_copies(gang, gang.cp_groups.pop(0))
    return True


def _complete_copies(gang: Gang, group: CopyGroup) -> None:
    """Complete the copies of a group, and order them before later accesses of the gang."""
    for work in group.work:
        work()
    for clock in group.clocks:
        if gang.clock is not None:
            gang.clock.complete(clock)


def cp_async_arrive(gang: Gang, a: Lanes, m: Mask, noinc: bool) -> None:
    """Execute cp.async.mbarrier.arrive: arrive at an mbarrier when earlier cp.async are done.

    All earlier cp.async of the gang are meant.

    Args:
        a: address of the mbarrier.
        noinc: whether the pending arrivals stay as they are (.noinc); if not, the instruction first
            increments them by the number of its lanes.
    """
    groups = [*gang.cp_groups, gang.cp_current]
    work = [w for g in groups for w in g.work]
    for g in groups:
        g.work = []
    clocks = [c for g in groups for c in g.clocks]
    seen = gang.handed_on(m)
    targets = lanes_by_address(gang, a, m)
    for address, n in targets:
        if not noinc:
            gang.cluster.mbarrier(address).pending += n

    def done() -> None:
        for w in work:
            w()
        for address, n in targets:
            b = gang.cluster.mbarrier(address)
            for c in clocks:
                b.release(c.knows)
            b.release(seen)
            b.arrive(n)

    gang.cluster.submit("copy", done, gang)


# ---- accesses to global memory
def note_bulk(
    gang: Gang, place: tuple[Any, Any], clock: Clock | None, *, write: bool, strong: bool = False
) -> None:
    """Report an access of the asynchronous proxy to global memory to the race detector.

    Args:
        gang: the warp that issued it.
        place: shadow and granules, as `GlobalRaces.index` returns them.
        clock: clock of the operation.
        write: whether it writes.
        strong: whether the access is strong, as that of a reduction is.
    """
    if clock is None:
        return
    races, kind = gang.launch.races, STRONG if strong else 0
    on = races.write if write else races.read
    on(place, Access(gang, clock, clock.agent, kind))


def _bulk_place(gang: Gang, address: int, size: int) -> tuple[Any, Any]:
    """Return the race detector's shadow and granules of a range of global memory."""
    b = gang.memory.find(address, address + size)
    return gang.launch.races.index(b, address - b.base, size)


def _box_place(gang: Gang, tm: TensorMap, box: Box) -> tuple[Any, Any]:
    """Return the race detector's shadow and granules of a box of a tensor in global memory."""
    b = gang.memory.find(box.address, box.address + box.size)
    offsets: Any = np.array(box.address - b.base)
    for n, stride in zip(box.shape[:-1], box.strides[:-1], strict=True):
        offsets = offsets[..., None] + stride * np.arange(n)
    return gang.launch.races.index(b, offsets.ravel(), box.shape[-1] * tm.item)


# ---- TMA
def tma_load(
    gang: Gang, dst: Lanes, desc: Lanes, at: list[Lanes], bar: Lanes, m: Mask, mask: Lanes | None
) -> None:
    """Execute a TMA load: copy a box of a tensor to shared memory.

    Args:
        dst: destination in shared memory.
        desc: address of the tensor map.
        at: coordinates of the box, innermost dimension first.
        bar: mbarrier on which the bytes complete.
        mask: with .multicast::cluster, the CTAs that receive the box, each at the same offset of
            its shared memory and on its own mbarrier; None without it.
    """
    for lane in gang.active(m).tolist():
        tm = gang.cta.tensor_map(int(desc[lane]))
        coords = [int(c[lane]) for c in at]
        if len(coords) != len(tm.dims):
            raise Trap("descriptor", f"{len(coords)} coordinates for a map of rank {len(tm.dims)}")
        d, b = int(dst[lane]), int(bar[lane])
        for x, y in _multicast_targets(gang, d, b, mask, lane):
            unit = f"TMA load to {gang.cluster.mbarrier(y).name}"
            clock = gang.issue(unit, ordered=False, m=m)
            check_barriers(gang, [y], clock)
            work = _load_work(gang, tm, coords, x, y, clock)
            record_load(gang, tm.box_bytes, y)
            gang.cluster.submit("copy", work, gang)
        gang.cluster.record("tma", tm.box_bytes)


def record_load(gang: Gang, size: int, bar: int) -> None:
    """Record the event of a copy that will complete `size` bytes on the mbarrier at `bar`."""
    if gang.events is not None:
        b = gang.cluster.mbarrier(bar)
        gang.events.add("load", gang.line, size, b, b.flips)


def _multicast_targets(
    gang: Gang, d: int, b: int, mask: Lanes | None, lane: int
) -> list[tuple[int, int]]:
    """Return the addresses (destination, mbarrier) for each CTA that receives a copy."""
    if mask is None:
        return [(d, b)]
    ranks = [r for r in range(16) if int(mask[lane]) >> r & 1]
    if any(r >= len(gang.cluster.ctas) for r in ranks):
        raise Trap("bounds", f"multicast to ranks {ranks} of a smaller cluster")
    return [(d & OFFSET_MASK | r << RANK_SHIFT, b & OFFSET_MASK | r << RANK_SHIFT) for r in ranks]


def _load_work(
    gang: Gang, tm: TensorMap, at: list[int], dst: int, bar: int, clock: Clock | None
) -> Work:
    """Return the work of a TMA load: write the box, with zeros outside the tensor."""

    def work(line: int = gang.line) -> None:
        dt = np.dtype(f"u{tm.item}")
        dense = np.zeros(tm.box[::-1], dt)
        box = select(tm, at)
        if box is not None:
            b = gang.memory.find(box.address, box.address + box.size)
            gang.memory.check_defined(b, box.address - b.base, box.size)
            if clock is not None:
                note_bulk(gang, _box_place(gang, tm, box), clock, write=False)
            view: Lanes = np.ndarray(box.shape, dt, b.data.data, box.address - b.base, box.strides)
            dense[box.slices] = view
        gang.cluster.write_swizzled(dst, dense.reshape(-1).view(u1), tm, clock, line)
        gang.cluster.complete_tx(bar, tm.box_bytes, clock)

    return work


def tma_store(
    gang: Gang, desc: Lanes, at: list[Lanes], src: Lanes, m: Mask, how: str | None
) -> None:
    """Execute a TMA store: copy or reduce a box from shared memory to global memory.

    The machine instruction acts once per warp, so the compiler leaves out elect.sync before plain
    stores. Lanes of a warp with equal operands therefore make one plain store together.

    Args:
        desc: address of the tensor map.
        at: coordinates of the box, innermost dimension first.
        src: source in shared memory.
    """
    lanes = gang.active(m)
    if how is None and lanes.size > 1:
        lanes = _distinct_stores(gang, lanes, [desc, src, *at])
    for lane in lanes.tolist():
        tm, s = gang.cta.tensor_map(int(desc[lane])), int(src[lane])
        coords = [int(c[lane]) for c in at]
        clock = gang.issue(f"TMA store of {gang.agent_name}", ordered=False, m=m)
        landing = gang.issue(f"TMA store to memory of {gang.agent_name}", ordered=False, m=m)
        box = select(tm, coords)
        if clock is not None and landing is not None and box is not None:
            gang.cluster.note_swizzled_read(s, tm, box, clock, gang.line)
            note_bulk(gang, _box_place(gang, tm, box), landing, write=True, strong=how is not None)
        work = _store_work(gang, tm, coords, s, how)
        _issue_bulk_store(gang, lane, work, (clock, landing), tm.box_bytes)
        gang.cluster.record("tma", tm.box_bytes)


def _distinct_stores(gang: Gang, lanes: Lanes, fields: list[Lanes]) -> Lanes:
    """Return the lanes whose operands differ from those of all earlier lanes of their warp."""
    keys = np.stack([gang.warp_start[lanes], *(f[lanes].astype(np.int64) for f in fields)])
    _, first = np.unique(keys, axis=1, return_index=True)
    return lanes[np.sort(first)]


def _store_work(gang: Gang, tm: TensorMap, at: list[int], src: int, how: str | None) -> Work:
    """Return the work of a TMA store: write or reduce the part of the box inside the tensor."""

    def work() -> None:
        raw = gang.cluster.read_swizzled(src, tm)
        box = select(tm, at)
        if box is None:
            return
        dt = np.dtype(f"u{tm.item}")
        dense = raw.view(dt).reshape(tm.box[::-1])[box.slices]
        b = gang.memory.find(box.address, box.address + box.size)
        out: Lanes = np.ndarray(box.shape, dt, b.data.data, box.address - b.base, box.strides)
        if how is None:
            out[...] = dense
        else:
            fmt = tm.kind if tm.kind in ("f16", "bf16") else None
            arith = dt if fmt else np.dtype(tm.kind)
            new = combine(how, fmt, out.view(arith), dense.view(arith))
            out.view(arith)[...] = new
        if b.written is not None:
            mark: Lanes = np.ndarray(
                (*box.shape, tm.item),
                bool,
                b.written.data,
                box.address - b.base,
                (*box.strides, 1),
            )
            mark[...] = True

    return work


# ---- bulk copies without a tensor map
def bulk_load(
    gang: Gang, dst: Lanes, src: Lanes, n: Lanes, bar: Lanes, m: Mask, mask: Lanes | None
) -> None:
    """Execute cp.async.bulk from global to shared memory; `mask` is as in `tma_load`."""
    for lane in gang.active(m).tolist():
        s, size = int(src[lane]), _checked(int(dst[lane]), int(src[lane]), int(n[lane]))
        for d, b in _multicast_targets(gang, int(dst[lane]), int(bar[lane]), mask, lane):
            unit = f"bulk load to {gang.cluster.mbarrier(b).name}"
            clock = gang.issue(unit, ordered=False, m=m)
            check_barriers(gang, [b], clock)
            record_load(gang, size, b)
            gang.cluster.submit("copy", _bulk_work(gang, d, s, size, b, clock), gang)
        gang.cluster.record("tma", size)


def _bulk_work(gang: Gang, dst: int, src: int, size: int, bar: int, clock: Clock | None) -> Work:
    """Return the work of a bulk load."""

    def work(line: int = gang.line) -> None:
        b = gang.memory.find(src, src + size)
        gang.memory.check_defined(b, src - b.base, size)
        if clock is not None:
            note_bulk(gang, _bulk_place(gang, src, size), clock, write=False)
        data = b.data[src - b.base : src - b.base + size]
        gang.cluster.write_shared(dst, data, clock, line, generic=False)
        gang.cluster.complete_tx(bar, size, clock)

    return work


def bulk_remote(
    gang: Gang, dst: Lanes, src: Lanes, n: Lanes, bar: Lanes, m: Mask, how: str | None, kind: str
) -> None:
    """Execute cp.async.bulk from shared memory to shared memory of another CTA of the cluster.

    With `how` it is cp.reduce.async.bulk, on elements of type `kind`.
    """
    for lane in gang.active(m).tolist():
        d, s, b = int(dst[lane]), int(src[lane]), int(bar[lane])
        size = _checked(d, s, int(n[lane]))
        unit = f"copy to {gang.cluster.mbarrier(b).name}"
        clock = gang.issue(unit, ordered=False, m=m)
        check_barriers(gang, [b], clock)
        record_load(gang, size, b)
        work = _remote_work(gang, d, s, size, b, clock, (how, kind))
        gang.cluster.submit("copy", work, gang)
        gang.cluster.record("tma", size)


def _remote_work(
    gang: Gang,
    dst: int,
    src: int,
    size: int,
    bar: int,
    clock: Clock | None,
    how: tuple[str | None, str],
) -> Work:
    """Return the work of a copy to another CTA; `how` is (reduction or None, type of elements)."""

    def work(line: int = gang.line) -> None:
        cluster = gang.cluster
        data = cluster.read_shared(src, size, clock, line)
        if how[0] is not None:
            dt = _KINDS[how[1]]
            old = cluster.read_shared(dst, size, None, line)
            data = combine(how[0], None, old.view(dt), data.view(dt)).view(u1)
        cluster.write_shared(dst, data, clock, line, generic=False)
        cluster.complete_tx(bar, size, clock)

    return work


def bulk_store(
    gang: Gang, dst: Lanes, src: Lanes, n: Lanes, m: Mask, how: str | None, kind: str
) -> None:
    """Execute cp.async.bulk from shared memory to global memory.

    With `how` it is cp.reduce.async.bulk, on elements of type `kind`.
    """
    for lane in gang.active(m).tolist():
        d, s = int(dst[lane]), int(src[lane])
        size = _checked(d, s, int(n[lane]))
        clock = gang.issue(f"bulk store of {gang.agent_name}", ordered=False, m=m)
        landing = gang.issue(f"bulk store to memory of {gang.agent_name}", ordered=False, m=m)
        if clock is not None and landing is not None:
            gang.cluster.read_shared(s, size, clock, gang.line)
            place = _bulk_place(gang, d, size)
            note_bulk(gang, place, landing, write=True, strong=how is not None)

        def work(d: int = d, s: int = s, size: int = size) -> None:
            data = gang.cluster.read_shared(s, size, None, 0)
            b = gang.memory.find(d, d + size)
            out = b.data[d - b.base : d - b.base + size]
            if how is None:
                out[:] = data
            else:
                fmt = kind if kind in ("f16", "bf16") else None
                dt = "u2" if fmt else _KINDS[kind]
                out.view(dt)[:] = combine(how, fmt, out.view(dt), data.view(dt))
            gang.memory.mark(b, d - b.base, size)

        _issue_bulk_store(gang, lane, work, (clock, landing), size)
        gang.cluster.record("tma", size)


def _issue_bulk_store(
    gang: Gang, lane: int, work: Work, clocks: tuple[Clock | None, Clock | None], size: int
) -> None:
    """Add a store to the current bulk async-group of its thread.

    Args:
        gang: the warp.
        lane: the lane that issues it.
        work: function that reads the source and writes to global memory.
        clocks: clocks of the read of its source and of the write to global memory; None outside
            race mode.
        size: bytes.
    """
    if gang.events is not None:
        gang.events.add("store", gang.line, size)
    state = gang.cta.bulk.setdefault(int(gang.thread[lane]), BulkGroups())
    state.current.work.append(work)
    state.current.lines.append(gang.line)
    clock, landing = clocks
    if clock is not None and landing is not None:
        state.current.clocks.append(clock)
        state.current.landings.append(landing)


def _bulk_states(gang: Gang, m: Mask) -> list[BulkGroups]:
    """Return the bulk async-groups of those active threads that have any."""
    if not gang.cta.bulk:
        return []
    mine = [gang.cta.bulk.get(t) for t in gang.thread[m].tolist()]
    return [s for s in mine if s is not None]


def bulk_commit(gang: Gang, m: Mask) -> None:
    """Execute cp.async.bulk.commit_group: close the current bulk async-group of each thread."""
    if gang.events is not None:
        gang.events.add("store commit", gang.line)
    for s in _bulk_states(gang, m):
        if not gang.mode.late:
            for work in s.current.work:
                work()
            s.current.work = []
        s.committed.append(s.current)
        s.current = CopyGroup()


def bulk_wait(gang: Gang, n: int, read: bool, m: Mask) -> bool:
    """Execute cp.async.bulk.wait_group: complete all but the n latest groups; return True.

    With `read` (.read), only the reads of their sources are ordered before later accesses.
    """
    if gang.events is not None:
        gang.events.add("store wait", gang.line, n)
    for s in _bulk_states(gang, m):
        while len(s.committed) > n:
            group = s.committed.pop(0)
            _complete_copies(gang, group)
            s.landing.append(group)
        if not read:
            # all groups in `landing` are older than those in `committed`, so these count first
            done = len(s.landing) - max(0, n - len(s.committed))
            for group in s.landing[:done]:
                for clock in group.landings:
                    if gang.clock is not None:
                        gang.clock.complete(clock)
            s.landing = s.landing[done:]
    return True


# ---- st.async
def st_async(gang: Gang, a: Lanes, values: list[Lanes], bar: Lanes, m: Mask, dt: Any) -> None:
    """Execute st.async: store to a CTA's shared memory, and complete the bytes on its mbarrier."""
    for lane in gang.active(m).tolist():
        data = np.array([v[lane] for v in values], dt).view(u1)
        d, b = int(a[lane]), int(bar[lane])
        unit = f"st.async to {gang.cluster.mbarrier(b).name}"
        clock = gang.issue(unit, ordered=False, m=m)
        check_barriers(gang, [b], clock)
        record_load(gang, data.size, b)

        def work(d: int = d, b: int = b, data: Lanes = data, c: Clock | None = clock) -> None:
            gang.cluster.write_shared(d, data, c, gang.line, generic=False)
            gang.cluster.complete_tx(b, data.size, c)

        gang.cluster.submit("copy", work, gang)


def _checked(dst: int, src: int, size: int) -> int:
    """Return the size of a bulk copy; raise `Trap` if it or an address is no multiple of 16."""
    if dst % 16 or src % 16 or size % 16:
        raise Trap("alignment", f"bulk copy of {size} bytes from {src:#x} to {dst:#x}: 16 needed")
    return size
