"""Execute tcgen05 instructions except tcgen05.mma (PTX ISA).

These are allocation of tensor memory, commits, copies from shared memory, loads, stores and waits.
`group` is the number of the instruction's .cta_group: 1, or 2 for a pair of CTAs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnkit.emulator.faults import Finding, Trap
from attnkit.emulator.machine.address_spaces import OFFSET_MASK, RANK_SHIFT
from attnkit.emulator.machine.cta import Cta
from attnkit.emulator.machine.gang import Gang, Mask
from attnkit.emulator.machine.knowledge import Clock
from attnkit.emulator.machine.matrix_descriptors import MatrixDescriptor, elements, of_tcgen05
from attnkit.emulator.numerics.formats import Lanes, u1, u4
from attnkit.emulator.ops.barriers import check_barriers
from attnkit.emulator.ops.loads_stores import st_shared
from attnkit.emulator.ops.warp_wide import elect

# Columns and registers per repetition of the tcgen05.ld and st shapes.
_SHAPES = {"32x32b": (1, 1), "16x128b": (4, 2), "16x256b": (8, 4)}


# ---- allocation
def tcgen05_alloc(gang: Gang, a: Lanes, n: Lanes, group: int, m: Mask) -> None:
    """Execute tcgen05.alloc: allocate `n` columns of tensor memory.

    The number of the first column is written to shared memory at `a`.
    """
    columns = gang.uniform(n, m)
    base = gang.cta.tmem.allocate(columns, group)
    st_shared(gang, a, elect(gang, m)[0], u4, [np.full(gang.width, base, u4)])


def tcgen05_dealloc(gang: Gang, t: Lanes, n: Lanes, group: int, m: Mask) -> None:
    """Execute tcgen05.dealloc: free the `n` columns that were allocated at address `t`."""
    gang.cta.tmem.free(gang.uniform(t, m) & 0xFFFF, gang.uniform(n, m), group)


def tcgen05_relinquish_alloc_permit(gang: Gang) -> None:
    """Execute tcgen05.relinquish_alloc_permit: forbid the CTA further allocations."""
    gang.cta.tmem.relinquished = True


# ---- commit
def tcgen05_commit(gang: Gang, a: Lanes, m: Mask, mask: Lanes | None, group: int) -> None:
    """Execute tcgen05.commit: arrive at mbarriers when earlier tcgen05 work of the CTA is done.

    Args:
        a: address of the mbarrier.
        mask: CTAs of the cluster whose mbarrier at this offset gets an arrival; None for that at
            `a` alone.
    """
    for lane in gang.active(m).tolist():
        address = int(a[lane])
        targets = [address]
        ctas_of_group(gang, group)
        if mask is not None:
            ranks = [r for r in range(16) if int(mask[lane]) >> r & 1]
            targets = [address & OFFSET_MASK | r << RANK_SHIFT for r in ranks]
        clock = gang.issue(tensor_core(gang), ordered=True, m=m)
        if clock is not None:
            clock.fence_tensor(after=False)  # implied by tcgen05.commit
        check_barriers(gang, targets, clock)
        if gang.events is not None:
            for t in targets:
                b = gang.cluster.mbarrier(t)
                gang.events.add("tensor commit", gang.line, what=b, phase=b.flips)

        def work(
            targets: list[int] = targets, clock: Clock | None = clock, line: int = gang.line
        ) -> None:
            for t in targets:
                if _has_exited(gang, t, line):
                    continue
                b = gang.cluster.mbarrier(t)
                b.release(clock.knows if clock is not None else None)
                b.arrive(1)

        gang.cluster.submit(tensor_core(gang), work, gang)


def _has_exited(gang: Gang, address: int, line: int) -> bool:
    """Return whether the CTA at which a commit arrives has exited; if so, report a warning.

    It is no error, because published kernels do not wait for their last commits. On hardware this
    works because the peer CTA runs for long enough.
    """
    rank, ctas = address >> RANK_SHIFT, gang.cluster.ctas
    if rank == gang.cta.rank or rank >= len(ctas) or ctas[rank].alive:
        return False
    text = f"tcgen05.commit may arrive at CTA rank {rank} after it has exited"
    gang.launch.note(Finding("exited", text, gang.place(line), "warning"))
    return True


def tensor_core(gang: Gang) -> str:
    """Return the name of the asynchronous unit that executes tcgen05 work of the gang's CTA."""
    return f"tcgen05 of CTA rank {gang.cta.rank}"


def ctas_of_group(gang: Gang, group: int) -> list[Cta]:
    """Return the CTAs on which an operation of `group` CTAs works.

    The even CTA of a pair is first (PTX ISA, "CTA Pair"). Raise `Trap` if the peer CTA has exited
    ("Issue Granularity").
    """
    if group == 1:
        return [gang.cta]
    even, ctas = gang.cta.rank & ~1, gang.cluster.ctas
    if even + 1 >= len(ctas):
        raise Trap("encoding", "cta_group::2 in a cluster without a CTA pair")
    for c in ctas[even : even + 2]:
        if c is not gang.cta and not c.alive:
            raise Trap("exited", f"cta_group::2: the peer CTA of rank {c.rank} has exited")
    return ctas[even : even + 2]


# ---- cp
def tcgen05_cp(gang: Gang, t: Lanes, desc: Lanes, shape: str, group: int, m: Mask) -> None:
    """Execute tcgen05.cp: copy rows from shared memory to lanes of tensor memory.

    32 rows are copied to each of the four quarters of the lanes.

    Args:
        t: address in tensor memory.
        desc: descriptor of the source.
        shape: rows and bits of a row, such as "128x256b".
    """
    rows, bits = (int(x) for x in shape.removesuffix("b").split("x"))
    for lane in gang.active(m).tolist():
        x, column = of_tcgen05(int(desc[lane])), int(t[lane]) & 0xFFFF
        clock, line = gang.issue(tensor_core(gang), ordered=True, m=m), gang.line

        def work(
            x: MatrixDescriptor = x,
            column: int = column,
            clock: Clock | None = clock,
            line: int = line,
        ) -> None:
            for c in ctas_of_group(gang, group):
                index = c.checked(elements(x, (0, rows), bits // 8, 1, False))
                words = c.view(u1, 1)[index].view(u4)
                c.tmem.check(column, bits // 32)
                c.tmem.data[column : column + bits // 32] = np.tile(words, (128 // rows, 1)).T
                if clock is not None and gang.race is not None:
                    g = gang.race.granules(c.rank, index, 1)
                    gang.race.read(g, clock, asynchronous=True, line=line)
                    i = gang.race.tensor(c.rank, column, bits // 32)
                    gang.race.check_tensor(i, clock, line, write=True)
                    gang.race.write(i, clock, generic=False, line=line)

        gang.cluster.submit(tensor_core(gang), work, gang)


# ---- ld, st, wait
def _tmem_places(
    gang: Gang, a: Lanes, m: Mask, shape: str, registers: int
) -> list[tuple[int, int, int]]:
    """Return (first lane in the gang, lane of tensor memory, column) of each active warp.

    Raise `Trap` if a warp does not reach its lanes: warp w reaches the 32 lanes from 32 (w % 4) on.
    """
    columns = registers * _SHAPES[shape][0] // _SHAPES[shape][1]
    out = []
    for w in gang.warps_of(m):
        at = 32 * gang.warps.index(w)
        lane, column = int(a[at]) >> 16, int(a[at]) & 0xFFFF
        half = lane - 32 * (w % 4)
        if half != 0 and not (half == 16 and shape != "32x32b"):
            raise Trap(
                "tensor-memory", f"lane {lane}: warp {w} reaches lanes {32 * (w % 4)} and on"
            )
        gang.cta.tmem.check(column, columns)
        out.append((at, lane, column))
    return out


def _tmem_cells(
    gang: Gang, shape: str, lane: int, column: int, registers: int
) -> tuple[Lanes, Lanes]:
    """Return the column and the lane of tensor memory of each register of a warp.

    Both are [registers, 32] (PTX ISA, "Data Movement Shape").
    """
    r, t = np.arange(registers)[:, None], np.arange(32)[None, :]
    if shape == "32x32b":
        return column + r + 0 * t, lane + t + 0 * r
    if shape == "16x128b":
        return column + 4 * (r // 2) + t % 4, lane + t // 4 + 8 * (r % 2)
    return column + 8 * (r // 4) + 2 * (t % 4) + r % 2, lane + t // 4 + 8 * (r // 2 % 2)


def _note_tmem(gang: Gang, lane: int, column: int, n: int, write: bool) -> None:
    """Report a tcgen05.ld or tcgen05.st of a warp to the race detector; `n`: number of columns."""
    if gang.race is None:
        return
    clock = gang.issue(f"tcgen05.{'st' if write else 'ld'} of {gang.agent_name}", ordered=True)
    if clock is None or gang.clock is None:
        return
    i = gang.race.tensor(gang.cta.rank, column, n, lane // 32)
    gang.race.check_tensor(i, clock, gang.line, write=write)
    if write:
        gang.race.write(i, clock, generic=False, line=gang.line)
    else:
        gang.race.read(i, clock, asynchronous=False, line=gang.line)
        if not gang.mode.strict_loads:
            # Hardware delays the use of a register until its load is complete.
            gang.clock.complete(clock)
    gang.tmem_clocks[write] = clock


def tcgen05_ld(gang: Gang, a: Lanes, shape: str, n: int, m: Mask) -> list[Lanes]:
    """Execute tcgen05.ld: return `n` registers from tensor memory."""
    places = _tmem_places(gang, a, m, shape, n)
    data = gang.cta.tmem.data
    gang.cluster.record("tmem", 128 * n * len(places))
    columns = n * _SHAPES[shape][0] // _SHAPES[shape][1]
    for _, lane, column in places:
        _note_tmem(gang, lane, column, columns, False)
    if shape == "32x32b":
        if len(places) == 1 and gang.width == 32:
            _, lane, column = places[0]
            return list(data[column : column + n, lane : lane + 32].copy())
        full = np.zeros((n, gang.width), u4)
        for at, lane, column in places:
            full[:, at : at + 32] = data[column : column + n, lane : lane + 32]
        return list(full)
    full = np.zeros((n, gang.width), u4)
    for at, lane, column in places:
        full[:, at : at + 32] = data[_tmem_cells(gang, shape, lane, column, n)]
    return list(full)


def tcgen05_st(gang: Gang, a: Lanes, shape: str, values: list[Lanes], m: Mask) -> None:
    """Execute tcgen05.st: store registers to tensor memory, at the wait if stores are delayed."""
    n = len(values)
    gang.cluster.record("tmem", 128 * n * len(gang.warps_of(m)))
    for at, lane, column in _tmem_places(gang, a, m, shape, n):
        _note_tmem(gang, lane, column, n * _SHAPES[shape][0] // _SHAPES[shape][1], True)
        cells = _tmem_cells(gang, shape, lane, column, n)
        data = np.stack([v[at : at + 32] for v in values])

        def work(cells: Any = cells, data: Lanes = data) -> None:
            gang.cta.tmem.data[cells] = data

        if gang.mode.late:
            gang.st_pending.append(work)
        else:
            work()


def tcgen05_wait(gang: Gang, stores: bool) -> bool:
    """Execute tcgen05.wait::st if `stores` is true, else tcgen05.wait::ld."""
    gang.meet_lanes(gang.full)
    if stores:
        for work in gang.st_pending:
            work()
        gang.st_pending = []
    clock = gang.tmem_clocks.get(stores)
    if clock is not None and gang.clock is not None:
        gang.clock.complete(clock)
    return True
