"""Executes tcgen05: tensor memory and the fifth-generation tensor cores (PTX ISA, tcgen05)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attnkit.emulator.faults import Finding, Trap
from attnkit.emulator.machine.address_spaces import OFFSET_MASK, RANK_SHIFT
from attnkit.emulator.machine.cta import Cta
from attnkit.emulator.machine.gang import Gang, Mask
from attnkit.emulator.machine.matrix_descriptors import MatrixDescriptor, elements, of_tcgen05
from attnkit.emulator.machine.race_detector import Clock
from attnkit.emulator.numerics.formats import ELEMENT_BYTES, STORAGE, Lanes, f4, to_f32, u1, u4
from attnkit.emulator.ops.loads_stores import st_shared
from attnkit.emulator.ops.warp_wide import elect

POISON = 0x7FC0BEEF
_FORMATS = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2"},
    "i8": {0: "u8", 1: "s8"},
}
# Lanes of 64 rows where half of the lanes are used.
_QUARTERS = np.arange(64) // 16 * 32 + np.arange(64) % 16
# Columns and registers per repetition of the tcgen05.ld and st shapes.
_SHAPES = {"32x32b": (1, 1), "16x128b": (4, 2), "16x256b": (8, 4)}


@dataclass(frozen=True)
class DecodedMma:
    """Holds the operands of a tcgen05.mma, and the fields of its instruction descriptor.

    `a` is a column of tensor memory or a descriptor; `d` a column; `disabled` masks lanes of D.
    """

    m: int
    n: int
    k: int
    a_kind: str
    b_kind: str
    a_major: bool
    b_major: bool
    sign: int
    integer: bool
    d: int
    lane: int
    a: MatrixDescriptor | int
    b: MatrixDescriptor
    accumulate: bool
    group: int
    disabled: tuple[int, ...]


# ---- allocation
def tcgen05_alloc(gang: Gang, a: Lanes, n: Lanes, group: int, m: Mask) -> None:
    """Allocate columns, and write the first to shared memory."""
    columns = gang.uniform(n, m)
    base = gang.cta.tmem.allocate(columns, group)
    st_shared(gang, a, elect(gang, m)[0], u4, [np.full(gang.width, base, u4)])


def tcgen05_dealloc(gang: Gang, t: Lanes, n: Lanes, group: int, m: Mask) -> None:
    """Free columns."""
    gang.cta.tmem.free(gang.uniform(t, m) & 0xFFFF, gang.uniform(n, m), group)


def tcgen05_relinquish_alloc_permit(gang: Gang) -> None:
    """Forbid the CTA further allocations."""
    gang.cta.tmem.relinquished = True


# ---- commit
def tcgen05_commit(gang: Gang, a: Lanes, m: Mask, mask: Lanes | None, group: int) -> None:
    """Arrive at mbarriers once earlier tensor-core work of this CTA is done."""
    for lane in gang.active(m).tolist():
        address = int(a[lane])
        targets = [address]
        _ctas_of_group(gang, group)
        if mask is not None:
            ranks = [r for r in range(16) if int(mask[lane]) >> r & 1]
            targets = [address & OFFSET_MASK | r << RANK_SHIFT for r in ranks]
        clock = gang.issue(_tensor_core(gang), ordered=True)
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
                b.release(clock)
                b.arrive(1)

        gang.cluster.submit(_tensor_core(gang), work, gang)


def _has_exited(gang: Gang, address: int, line: int) -> bool:
    """Whether a commit arrives at a CTA that has exited meanwhile; warns of it.

    Published kernels issue their last commits without waiting for them; the time that the peer
    still needs lets that pass.
    """
    rank, ctas = address >> RANK_SHIFT, gang.cluster.ctas
    if rank == gang.cta.rank or rank >= len(ctas) or ctas[rank].alive:
        return False
    text = f"tcgen05.commit may arrive at CTA rank {rank} after it has exited"
    gang.launch.note(Finding("exited", text, gang.place(line), "warning"))
    return True


def _tensor_core(gang: Gang) -> str:
    """Return the name of the tensor cores of the gang's CTA."""
    return f"tcgen05 of CTA rank {gang.cta.rank}"


def _ctas_of_group(gang: Gang, group: int) -> list[Cta]:
    """Return the CTAs that an operation of `group` CTAs works on.

    The even one of a pair is first (PTX ISA, "CTA Pair"); none of them may have exited ("Issue
    Granularity").
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


# ---- mma
def tcgen05_mma(
    gang: Gang,
    d: Lanes,
    a: Lanes,
    in_tmem: bool,
    b: Lanes,
    idesc: Lanes,
    accumulate: Lanes,
    kind: str,
    group: int,
    m: Mask,
    disable: list[Lanes] | None,
) -> None:
    """Start a product into tensor memory.

    Args:
        d, a, b: column of D; descriptor or column of A; descriptor of B.
        in_tmem: A is in tensor memory.
        idesc: instruction descriptor.
        kind: as PTX names it, such as "f16".
        group: CTAs that compute it together.
        disable: masks of lanes of D to leave as they are.
    """
    for lane in gang.active(m).tolist():
        off = tuple(int(x[lane]) for x in disable or ())
        fields = _instruction(kind, int(idesc[lane]))
        _check_shape(fields[0], fields[1], kind, group)
        at = _first_lane(int(d[lane]), fields[0], group)
        if in_tmem and int(a[lane]) >> 16 != at:
            raise Trap("tensor-memory", f"tcgen05.mma: A at lane {int(a[lane]) >> 16}, D at {at}")
        p = DecodedMma(
            *fields,
            int(d[lane]) & 0xFFFF,
            at,
            (int(a[lane]) & 0xFFFF) if in_tmem else of_tcgen05(int(a[lane])),
            of_tcgen05(int(b[lane])),
            bool(accumulate[lane]),
            group,
            tuple(0 if x == POISON else x for x in off),
        )
        _ctas_of_group(gang, group)
        clock = gang.issue(_tensor_core(gang), ordered=True)

        def work(p: DecodedMma = p, clock: Clock | None = clock, line: int = gang.line) -> None:
            _product(gang, p, clock, line)

        gang.cluster.submit(_tensor_core(gang), work, gang)
        gang.cluster.record("tensor", 2 * p.m * p.n * p.k)
        rows = p.m if isinstance(p.a, MatrixDescriptor) else 0
        operands = (rows + p.n) * p.k * ELEMENT_BYTES[p.a_kind]
        gang.cluster.record("operands", operands)
        if gang.events is not None:
            flop = 2 * p.m * p.n * p.k
            gang.events.add("tensor product", gang.line, flop, (group, operands))


def _product(gang: Gang, p: DecodedMma, clock: Clock | None, line: int) -> None:
    """Compute a product, and add it to tensor memory."""
    pair = _ctas_of_group(gang, p.group)
    rows_b = p.n // p.group
    right = np.concatenate([_operand(c, p.b, rows_b, p.k, p.b_kind, p.b_major) for c in pair])
    rows = p.m // p.group
    for number, c in enumerate(pair):
        if clock is not None:
            _note_product(gang, c, p, rows, rows_b, clock, line)
        if isinstance(p.a, int):
            out = _from_tensor_memory(c, p, rows, right)
        else:
            out = _operand(c, p.a, rows, p.k, p.a_kind, p.a_major) @ right.T
        _accumulate(c, p, p.sign * out, rows, number)


def _accumulate(c: Cta, p: DecodedMma, out: Lanes, rows: int, number: int) -> None:
    """Write D: 128 rows by lane; 64 rows by 16 lanes of each quarter, or in two halves.

    PTX ISA, "Data Path Layout Organization": layouts A and D, F, B.
    """
    columns = p.n
    if rows == 64 and p.group == 2:
        out = np.concatenate([out[:, : p.n // 2], out[:, p.n // 2 :]])
        columns = p.n // 2
    c.tmem.check(p.d, columns)
    lanes: Any = slice(None)
    if rows == 64 and p.group == 1:
        lanes = p.lane + _QUARTERS
    target = c.tmem.data[p.d : p.d + columns]
    view: Lanes = target.view(np.int32 if p.integer else f4)
    new: Lanes = out.T.astype(view.dtype)
    if p.accumulate:
        new = view[:, lanes] + new
    skip = np.zeros(128, bool)
    for i, word in enumerate(p.disabled[4 * number : 4 * number + 4]):
        skip[32 * i : 32 * i + 32] = (word >> np.arange(32)) & 1
    keep = ~skip[lanes]
    if keep.all():
        view[:, lanes] = new
    else:
        view[:, np.arange(128)[lanes][keep]] = new[:, keep]


def _note_product(
    gang: Gang, c: Cta, p: DecodedMma, rows: int, rows_b: int, clock: Clock, line: int
) -> None:
    """Tell the race detector of the accesses of a product."""
    race = gang.race
    assert race is not None

    def read(x: MatrixDescriptor, n: int, kind: str, major: bool) -> None:
        i = race.granules(c.rank, elements(x, (0, n), p.k, ELEMENT_BYTES[kind], major))
        race.read(i, clock, asynchronous=True, line=line)

    read(p.b, rows_b, p.b_kind, p.b_major)
    if isinstance(p.a, MatrixDescriptor):
        read(p.a, rows, p.a_kind, p.a_major)
    else:
        race.read(race.tensor(c.rank, p.a, 8), clock, asynchronous=False, line=line)
    columns = p.n // 2 if rows == 64 and p.group == 2 else p.n
    i = race.tensor(c.rank, p.d, columns)
    if p.accumulate:
        race.read(i, clock, asynchronous=False, line=line)
    race.write(i, clock, generic=False, line=line)


# ---- cp
def tcgen05_cp(gang: Gang, t: Lanes, desc: Lanes, shape: str, group: int, m: Mask) -> None:
    """Copy rows of shared memory to the lanes of tensor memory."""
    rows, bits = (int(x) for x in shape.removesuffix("b").split("x"))
    for lane in gang.active(m).tolist():
        x, column = of_tcgen05(int(desc[lane])), int(t[lane]) & 0xFFFF
        clock, line = gang.issue(_tensor_core(gang), ordered=True), gang.line

        def work(
            x: MatrixDescriptor = x,
            column: int = column,
            clock: Clock | None = clock,
            line: int = line,
        ) -> None:
            for c in _ctas_of_group(gang, group):
                index = c.checked(elements(x, (0, rows), bits // 8, 1, False))
                words = c.view(u1, 1)[index].view(u4)
                c.tmem.check(column, bits // 32)
                c.tmem.data[column : column + bits // 32] = np.tile(words, (128 // rows, 1)).T
                if clock is not None and gang.race is not None:
                    g = gang.race.granules(c.rank, index)
                    gang.race.read(g, clock, asynchronous=True, line=line)
                    i = gang.race.tensor(c.rank, column, bits // 32)
                    gang.race.write(i, clock, generic=False, line=line)

        gang.cluster.submit(_tensor_core(gang), work, gang)


# ---- ld, st, wait
def _tmem_places(
    gang: Gang, a: Lanes, m: Mask, shape: str, registers: int
) -> list[tuple[int, int, int]]:
    """Return per active warp (first lane of the gang, tensor-memory lane, column)."""
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
    """Return (column, lane) of every register [registers, 32] of a warp."""
    r, t = np.arange(registers)[:, None], np.arange(32)[None, :]
    if shape == "32x32b":
        return column + r + 0 * t, lane + t + 0 * r
    if shape == "16x128b":
        return column + 4 * (r // 2) + t % 4, lane + t // 4 + 8 * (r % 2)
    return column + 8 * (r // 4) + 2 * (t % 4) + r % 2, lane + t // 4 + 8 * (r // 2 % 2)


def _note_tmem(gang: Gang, lane: int, column: int, n: int, write: bool) -> None:
    """Tell the race detector of a tcgen05.ld or tcgen05.st."""
    if gang.race is None:
        return
    clock = gang.issue(f"tcgen05.{'st' if write else 'ld'} of {gang.agent_name}", ordered=True)
    if clock is None or gang.clock is None:
        return
    i = gang.race.tensor(gang.cta.rank, column, n, lane // 32)
    if write:
        gang.race.write(i, clock, generic=False, line=gang.line)
    else:
        gang.race.read(i, clock, asynchronous=False, line=gang.line)
        if not gang.mode.strict_loads:
            # The hardware does not let a register be used before its load is done.
            gang.clock.join(clock.known, clock.fenced)
    gang.tmem_clocks[write] = clock


def tcgen05_ld(gang: Gang, a: Lanes, shape: str, n: int, m: Mask) -> list[Lanes]:
    """Load registers from tensor memory."""
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
    """Store registers to tensor memory."""
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
    """Execute tcgen05.wait::st or wait::ld."""
    if stores:
        for work in gang.st_pending:
            work()
        gang.st_pending = []
    clock = gang.tmem_clocks.get(stores)
    if clock is not None and gang.clock is not None:
        gang.clock.join(clock.known, clock.fenced)
    return True


def _instruction(kind: str, i: int) -> tuple[int, int, int, str, str, bool, bool, int, bool]:
    """Decode an instruction descriptor to the first fields of `DecodedMma`.

    PTX ISA, "Instruction descriptor".
    """
    fa, fb, fd = (i >> 7) & 7, (i >> 10) & 7, (i >> 4) & 3
    table, integer = _FORMATS[kind], kind == "i8"
    if fa not in table or fb not in table or fd != (2 if integer else 1) or i & 0b1100:
        raise Trap(
            "encoding", f"tcgen05.mma kind::{kind} descriptor {i:#x}: format not implemented"
        )
    m, n = ((i >> 24) & 31) * 16, ((i >> 17) & 63) * 8
    k = 32 // ELEMENT_BYTES[table[fa]]
    sign = (-1 if i >> 13 & 1 else 1) * (-1 if i >> 14 & 1 else 1)
    return m, n, k, table[fa], table[fb], bool(i >> 15 & 1), bool(i >> 16 & 1), sign, integer


def _check_shape(m: int, n: int, kind: str, group: int) -> None:
    """Check M and N: N in steps of 8, or 16 for more rows or two CTAs (PTX ISA, "Matrix Shape")."""
    step = 32 if kind == "i8" and group == 2 else 8 if (m, group) == (64, 1) else 16
    if m not in ((64, 128) if group == 1 else (128, 256)) or n % step or not 8 <= n <= 256:
        raise Trap(
            "encoding",
            f"tcgen05.mma.kind::{kind} of M={m} N={n} with cta_group::{group}: M is "
            f"{'64 or 128' if group == 1 else '128 or 256'}, N a multiple of {step} up to 256",
        )


def _first_lane(d: int, m: int, group: int) -> int:
    """Return the first lane of D: 0, or 16 where half of the lanes are used (layout F)."""
    lane = d >> 16
    if lane and not (lane == 16 and (m, group) == (64, 1)):
        raise Trap("tensor-memory", f"tcgen05.mma accumulator at lane {lane}, M={m}")
    return lane


def _operand(c: Cta, x: MatrixDescriptor, rows: int, k: int, kind: str, major: bool) -> Lanes:
    """Return an operand in shared memory, [rows, K] float32."""
    item = ELEMENT_BYTES[kind]
    index = c.checked(elements(x, (0, rows), k, item, major))
    return to_f32(c.view(STORAGE[item], 1)[index // item], kind)


def _from_tensor_memory(c: Cta, p: DecodedMma, rows: int, right: Lanes) -> Lanes:
    """Multiply A from tensor memory: 32 bytes of a row are 8 columns of its lane.

    With 64 rows of a pair's 128, the upper lanes hold A once more, and make the second half of the
    columns.
    """
    assert isinstance(p.a, int)
    c.tmem.check(p.a, 8)
    lanes = p.lane + _QUARTERS if (rows, p.group) == (64, 1) else np.arange(128)
    words = np.ascontiguousarray(c.tmem.data[p.a : p.a + 8][:, lanes].T)
    left = to_f32(words.view(STORAGE[ELEMENT_BYTES[p.a_kind]]), p.a_kind)
    if (rows, p.group) != (64, 2):
        return left @ right.T
    half = p.n // 2
    return np.concatenate([left[:64] @ right[:half].T, left[64:] @ right[half:].T], axis=1)
