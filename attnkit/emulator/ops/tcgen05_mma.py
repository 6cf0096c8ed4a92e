"""Execute matrix products of the fifth-generation tensor cores (PTX ISA, tcgen05.mma)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attnkit.emulator.faults import Trap
from attnkit.emulator.machine.cta import Cta
from attnkit.emulator.machine.gang import Gang, Mask
from attnkit.emulator.machine.knowledge import Clock
from attnkit.emulator.machine.matrix_descriptors import MatrixDescriptor, elements, of_tcgen05
from attnkit.emulator.numerics.formats import ELEMENT_BYTES, STORAGE, Lanes, f4, to_f32
from attnkit.emulator.ops.tcgen05 import ctas_of_group, tensor_core

# Initial value of 32-bit registers (`execution.generated_kernel`). A mask of disabled lanes that
# the kernel has never written counts as 0.
POISON = 0x7FC0BEEF
_FORMATS = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2"},
    "i8": {0: "u8", 1: "s8"},
}
# Lanes of the 64 rows of a product that uses half of the lanes (layout F): 16 of each quarter.
_QUARTERS = np.arange(64) // 16 * 32 + np.arange(64) % 16


@dataclass(frozen=True)
class DecodedMma:
    """Holds the operands of a tcgen05.mma, and the fields of its instruction descriptor.

    Attributes:
        m, n, k: shape of the product, of all CTAs of the group together.
        a_kind, b_kind: formats of A and B.
        a_major, b_major: whether A and B are MN-major.
        sign: sign of the product, 1 or -1 (the negate bits of A and B).
        integer: whether D is int32; if not, it is float32.
        d: first column of D in tensor memory.
        lane: first lane of D, and of A if A is in tensor memory.
        a: descriptor of A in shared memory, or its first column in tensor memory.
        b: descriptor of B.
        accumulate: whether the product is added to D; if not, it overwrites D.
        group: number of CTAs that compute the product together.
        disabled: masks of lanes of D that keep their value, four words of 32 lanes for each CTA.
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
    """Execute tcgen05.mma: start an asynchronous product into tensor memory.

    Args:
        d, a, b: tensor-memory address of D; descriptor or tensor-memory address of A; descriptor of
            B.
        in_tmem: whether A is in tensor memory.
        idesc: instruction descriptor.
        accumulate: whether the product is added to D; if not, it overwrites D.
        kind: kind of the instruction in PTX, such as "f16".
        group: number of CTAs that compute the product together.
        disable: masks of lanes of D that keep their value.
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
        ctas_of_group(gang, group)
        clock = gang.issue(tensor_core(gang), ordered=True, m=m)

        def work(p: DecodedMma = p, clock: Clock | None = clock, line: int = gang.line) -> None:
            _product(gang, p, clock, line)

        gang.cluster.submit(tensor_core(gang), work, gang)
        gang.cluster.record("tensor", 2 * p.m * p.n * p.k)
        rows = p.m if isinstance(p.a, MatrixDescriptor) else 0
        operands = (rows + p.n) * p.k * ELEMENT_BYTES[p.a_kind]
        gang.cluster.record("operands", operands)
        if gang.events is not None:
            flop = 2 * p.m * p.n * p.k
            gang.events.add("tensor product", gang.line, flop, (group, operands))


def _product(gang: Gang, p: DecodedMma, clock: Clock | None, line: int) -> None:
    """Compute a product, and store it to tensor memory or add it to the values there.

    Each CTA of a group of two holds half of the rows of A and half of the rows of B, and gets its
    half of the rows of D.
    """
    pair = ctas_of_group(gang, p.group)
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
    """Write one CTA's rows of the product to D in tensor memory, or add them to D.

    128 rows of a CTA take one lane each (layouts A and D). 64 rows take 16 lanes of each quarter
    (layout F). With a pair of CTAs, 64 rows take two lanes each, one per half of the columns
    (layout B). See PTX ISA, "Data Path Layout Organization".

    Args:
        rows: rows of the CTA.
        number: 0 or 1, the CTA's place in the group.
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
    """Report the accesses of a product in one CTA to the race detector.

    `rows` and `rows_b` are the CTA's rows of A and B.
    """
    race = gang.race
    assert race is not None

    def read(x: MatrixDescriptor, n: int, kind: str, major: bool) -> None:
        item = ELEMENT_BYTES[kind]
        i = race.granules(c.rank, elements(x, (0, n), p.k, item, major), item)
        race.read(i, clock, asynchronous=True, line=line)

    read(p.b, rows_b, p.b_kind, p.b_major)
    if isinstance(p.a, MatrixDescriptor):
        read(p.a, rows, p.a_kind, p.a_major)
    else:
        i = race.tensor(c.rank, p.a, 8)
        race.check_tensor(i, clock, line, write=False)
        race.read(i, clock, asynchronous=False, line=line)
    columns = p.n // 2 if rows == 64 and p.group == 2 else p.n
    i = race.tensor(c.rank, p.d, columns)
    race.check_tensor(i, clock, line, write=True)
    if p.accumulate:
        race.read(i, clock, asynchronous=False, line=line)
    race.write(i, clock, generic=False, line=line)


def _instruction(kind: str, i: int) -> tuple[int, int, int, str, str, bool, bool, int, bool]:
    """Decode an instruction descriptor to the first nine fields of `DecodedMma`.

    See PTX ISA, "Instruction descriptor".
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
    """Raise `Trap` unless M and N are allowed for the kind and the number of CTAs.

    See PTX ISA, "Matrix Shape".
    """
    step = 32 if kind == "i8" and group == 2 else 8 if (m, group) == (64, 1) else 16
    if m not in ((64, 128) if group == 1 else (128, 256)) or n % step or not 8 <= n <= 256:
        raise Trap(
            "encoding",
            f"tcgen05.mma.kind::{kind} of M={m} N={n} with cta_group::{group}: M is "
            f"{'64 or 128' if group == 1 else '128 or 256'}, N a multiple of {step} up to 256",
        )


def _first_lane(d: int, m: int, group: int) -> int:
    """Return the first lane of D: 0, or also 16 if D uses half of the lanes (layout F)."""
    lane = d >> 16
    if lane and not (lane == 16 and (m, group) == (64, 1)):
        raise Trap("tensor-memory", f"tcgen05.mma accumulator at lane {lane}, M={m}")
    return lane


def _operand(c: Cta, x: MatrixDescriptor, rows: int, k: int, kind: str, major: bool) -> Lanes:
    """Read an operand from shared memory: [rows, K] in float32, or float64 for 8-bit integers."""
    item = ELEMENT_BYTES[kind]
    index = c.checked(elements(x, (0, rows), k, item, major))
    return to_f32(c.view(STORAGE[item], 1)[index // item], kind)


def _from_tensor_memory(c: Cta, p: DecodedMma, rows: int, right: Lanes) -> Lanes:
    """Multiply A from tensor memory by the transpose of B, whose rows are `right`.

    A row of A has 32 bytes, which are 8 columns of its lane. If each CTA of a pair has 64 rows, the
    upper 64 lanes hold A a second time, and compute the second half of the columns of D.
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
