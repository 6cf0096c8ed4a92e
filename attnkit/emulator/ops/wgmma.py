"""Execute asynchronous matrix products of a warpgroup (PTX ISA, wgmma.mma_async).

Products are collected until their group is committed. They are computed at the commit, or at the
wait in the adversarial mode. Products that accumulate one after another in the same registers are
then computed as one product of larger K. The 16 rows of every warp are computed separately, so that
the bits of a result do not depend on how many warps run together.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from attnkit.emulator.faults import Trap
from attnkit.emulator.machine.async_groups import WgmmaForm, WgmmaGroup
from attnkit.emulator.machine.gang import Gang, Mask
from attnkit.emulator.machine.knowledge import Clock
from attnkit.emulator.machine.matrix_descriptors import elements, of_wgmma
from attnkit.emulator.numerics.formats import ELEMENT_BYTES, STORAGE, Lanes, f4, to_f32
from attnkit.emulator.numerics.fragments import (
    a_operand,
    accumulators,
    packed_accumulators,
    to_registers,
)

_CHUNK = 16  # bytes that are contiguous in every canonical layout


@lru_cache(maxsize=2048)
def _chunks(
    descriptors: tuple[int, ...], rows: tuple[int, int], k: int, item: int, mn_major: bool
) -> tuple[Lanes, int]:
    """Return the indices of an operand's 16-byte chunks in shared memory, and the largest index.

    The operand joins the operands of all `descriptors` along K. The indices are
    [rows, chunks along K], or [K, chunks along the rows] for MN-major operands.

    Args:
        rows: first row, and the row after the last.
        k: K of one descriptor.
        item: bytes of an element.
    """
    step = _CHUNK // item
    parts = []
    for d in descriptors:
        off = elements(of_wgmma(d), rows, k, item, mn_major)
        if int(off.min()) < 0:
            raise Trap("bounds", f"matrix operand at shared {int(off.min()):+#x}")
        parts.append(off[::step].T if mn_major else off[:, ::step])
    index = np.ascontiguousarray(np.concatenate(parts, axis=0 if mn_major else 1)) // _CHUNK
    return index, int(index.max())


def wgmma(gang: Gang, form: WgmmaForm, a: Any, b: Lanes, accumulate: Lanes, m: Mask) -> None:
    """Execute wgmma.mma_async: add this gang's rows of the product to the current group.

    Args:
        a: indices of the registers of A, or its matrix descriptor.
        b: matrix descriptor of B.
        accumulate: whether the product is added to D (scale-d); if not, it overwrites D.
    """
    if m is not gang.full:
        raise Trap("encoding", "wgmma with inactive lanes")
    gang.meet_lanes(m)
    first = a if form.a_in_registers else gang.uniform(a, m)
    second = gang.uniform(b, m)
    of_wgmma(second)
    clock = gang.issue(f"wgmma of {gang.agent_name}", ordered=True)
    if clock is not None:
        _note_operand_read(gang, second, (0, form.n), form, 1, clock)
        if not form.a_in_registers:
            _note_operand_read(gang, first, _row_range(gang), form, 0, clock)
    _record_product(gang, form)
    if gang.events is not None:
        flop = 2 * 16 * len(gang.warps) * form.n * form.k
        operands = _operand_bytes(gang, form)
        gang.events.add("product", gang.line, flop, (form.a_in_registers, operands))
    for w in gang.warps:
        gang.cta.products[w] += 1
    group = gang.wgmma_current
    group.items.append((form, first, second, bool(gang.uniform(accumulate, m))))
    group.lines.append(gang.line)
    group.clock = clock


def _record_product(gang: Gang, form: WgmmaForm) -> None:
    """Count the FLOP and bytes of a product."""
    record = gang.cluster.record
    record("tensor", 2 * 16 * form.n * form.k * len(gang.warps))
    record("operands", _operand_bytes(gang, form))


def _operand_bytes(gang: Gang, form: WgmmaForm) -> int:
    """Return the bytes that the gang's part of a product reads from shared memory.

    B is read once for the four warps of a warpgroup.
    """
    warps = len(gang.warps)
    rows = 0 if form.a_in_registers else 16 * warps
    return (rows + form.n * warps // 4) * form.k * ELEMENT_BYTES[form.types[1]]


def _row_range(gang: Gang) -> tuple[int, int]:
    """Return the first of the 64 rows that the gang computes, and the row after the last."""
    return 16 * (gang.warps[0] % 4), 16 * (gang.warps[-1] % 4) + 16


def _note_operand_read(
    gang: Gang, descriptor: int, rows: tuple[int, int], form: WgmmaForm, side: int, clock: Clock
) -> None:
    """Report the read of an operand to the race detector; `side` is 0 for A, 1 for B."""
    assert gang.race is not None
    item, mn_major = ELEMENT_BYTES[form.types[1 + side]], bool(form.major[side])
    bytes_ = elements(of_wgmma(descriptor), rows, form.k, item, mn_major)
    i = gang.race.granules(gang.cta.rank, bytes_, item)
    gang.race.read(i, clock, asynchronous=True, line=gang.line)


# ---- groups
def wgmma_commit(gang: Gang) -> None:
    """Execute wgmma.commit_group, and compute the group unless asynchronous work is delayed."""
    if gang.events is not None:
        gang.events.add("product commit", gang.line)
    if not gang.mode.late:
        multiply_group(gang, gang.wgmma_current)
    gang.wgmma_groups.append(gang.wgmma_current)
    gang.wgmma_current = WgmmaGroup()


def wgmma_wait(gang: Gang, n: int) -> bool:
    """Execute wgmma.wait_group: complete all but the n latest groups."""
    gang.meet_lanes(gang.full)
    if gang.events is not None:
        gang.events.add("product wait", gang.line, n)
    while len(gang.wgmma_groups) > n:
        group = gang.wgmma_groups.pop(0)
        multiply_group(gang, group)
        if group.clock is not None and gang.clock is not None:
            gang.clock.complete(group.clock)
    return True


def multiply_group(gang: Gang, group: WgmmaGroup) -> None:
    """Compute the products of a group.

    Consecutive products of one form, each of which accumulates on the one before, are computed as
    one product.
    """
    items, group.items = group.items, []
    start = 0
    for i, (form, _, _, _) in enumerate(items):
        after = items[i + 1] if i + 1 < len(items) else None
        if after is None or after[0] != form or not after[3]:
            _fused(gang, form, items[start : i + 1])
            start = i + 1


def _fused(gang: Gang, form: WgmmaForm, items: list[tuple[WgmmaForm, Any, int, bool]]) -> None:
    """Compute products of one form, each of which accumulates on the one before, as one product."""
    dt, at, _ = form.types
    right = _operand(gang, tuple(x[2] for x in items), (0, form.n), form, 1)
    if form.a_in_registers:
        left = a_operand([gang.R[i] for x in items for i in x[1]], at)
    else:
        left = _operand(gang, tuple(x[1] for x in items), _row_range(gang), form, 0)
        left = left.reshape(-1, 16, left.shape[1])
        if len(left) > len(gang.warps):  # a warp in between has left the gang
            left = left[[w - gang.warps[0] for w in gang.warps]]
    out = left @ right.T
    if form.scale != (1, 1):
        out = out * f4(form.scale[0] * form.scale[1])
    o, acc = to_registers(out), items[0][3]
    if dt == "f32":
        _add_float(gang.R, form.d, o, acc)
        return
    old = accumulators([gang.R[i] for i in form.d], dt)
    total = [(v + o[j].astype(v.dtype)) if acc else o[j] for j, v in enumerate(old)]
    for i, v in zip(form.d, packed_accumulators(total, dt), strict=True):
        gang.R[i] = v.view(gang.R[i].dtype)


def _operand(
    gang: Gang, descriptors: tuple[int, ...], rows: tuple[int, int], form: WgmmaForm, side: int
) -> Lanes:
    """Read an operand from shared memory: [rows, K] in float32, or float64 for 8-bit integers.

    `side` is 0 for A, 1 for B. The operand joins those of all `descriptors` along K.
    """
    kind, mn_major = form.types[1 + side], bool(form.major[side])
    item = ELEMENT_BYTES[kind]
    index, last = _chunks(descriptors, rows, form.k, item, mn_major)
    if (last + 1) * _CHUNK > gang.cta.smem.size:
        at, size = last * _CHUNK, gang.cta.smem.size
        raise Trap("bounds", f"matrix operand at shared {at:+#x}, size {size:#x}")
    raw = gang.cta.view(np.complex128, 1)[index].view(STORAGE[item])
    return to_f32(raw.T if mn_major else raw, kind)


def _add_float(registers: list[Any], d: tuple[int, ...], o: Lanes, acc: bool) -> None:
    """Add the rows of `o` to the float32 registers `d` if `acc` is true; else overwrite these."""
    for i, x in zip(d, o, strict=True):
        old = registers[i]
        if old.dtype == f4:
            registers[i] = old + x if acc else x
        else:
            registers[i] = (old.view(f4) + x if acc else x).view(old.dtype)
