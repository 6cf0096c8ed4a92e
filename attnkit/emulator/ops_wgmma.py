"""Warpgroup-wide asynchronous products, wgmma (PTX ISA, wgmma.mma_async).

Products are collected until their group is committed; there, or at the wait in the adversarial
mode, those that accumulate in the same registers one after another are one product of larger K.
Every warp's 16 rows are a product of their own, so that the bits of a result do not depend on how
many warps run together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from attnkit.emulator.descriptors import elements, of_wgmma
from attnkit.emulator.faults import Trap
from attnkit.emulator.formats import ELEMENT_BYTES, STORAGE, Lanes, f4, to_f32
from attnkit.emulator.fragments import a_operand, accumulators, packed_accumulators, to_registers
from attnkit.emulator.ops_matrix import MatrixOps
from attnkit.emulator.race import Clock
from attnkit.emulator.state import Mask

_CHUNK = 16  # bytes that every canonical layout keeps together


@dataclass(frozen=True)
class Form:
    """What products must share to be one: accumulator registers, shape, types, signs, layouts."""

    d: tuple[int, ...]
    n: int
    k: int
    types: tuple[str, str, str]
    scale: tuple[int, int]
    major: tuple[int, int]
    a_in_registers: bool


@dataclass(eq=False)
class Products:
    """A wgmma group: products in order as (form, A, B, accumulate), where they stand, and the
    clock of the last. A is a tuple of registers or a descriptor, B a descriptor."""

    items: list[tuple[Form, Any, int, bool]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    clock: Clock | None = None


@lru_cache(maxsize=2048)
def _chunks(
    descriptors: tuple[int, ...], rows: tuple[int, int], k: int, item: int, mn_major: bool
) -> tuple[Lanes, int]:
    """Numbers of the 16-byte chunks of operands that follow each other along K, and the largest.

    [rows, chunks along K], or [K, chunks along the rows] for operands that are MN-major.
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


class WgmmaOps(MatrixOps):
    wgmma_current: Products
    wgmma_groups: list[Products]

    def wgmma_fence(self, m: Mask) -> None:
        """Orders register accesses; see `fences` for the static check."""

    def wgmma(self, form: Form, a: Any, b: Lanes, accumulate: Lanes, m: Mask) -> None:
        """The rows of this gang's warps of one warpgroup-wide product."""
        if m is not self.full:
            raise Trap("encoding", "wgmma with inactive lanes")
        first = a if form.a_in_registers else self.uniform(a, m)
        second = self.uniform(b, m)
        of_wgmma(second)
        clock = self.issue(f"wgmma of {self.agent_name}", ordered=True)
        if clock is not None:
            self._note(second, (0, form.n), form, 1, clock)
            if not form.a_in_registers:
                self._note(first, self._row_range(), form, 0, clock)
        self._record(form)
        if self.events is not None:
            flop = 2 * 16 * len(self.warps) * form.n * form.k
            operands = self._operand_bytes(form)
            self.events.add("product", self.line, flop, (form.a_in_registers, operands))
        for w in self.warps:
            self.cta.products[w] += 1
        group = self.wgmma_current
        group.items.append((form, first, second, bool(self.uniform(accumulate, m))))
        group.lines.append(self.line)
        group.clock = clock

    def _record(self, form: Form) -> None:
        record = self.cta.cluster.record
        record("tensor", 2 * 16 * form.n * form.k * len(self.warps))
        record("operands", self._operand_bytes(form))

    def _operand_bytes(self, form: Form) -> int:
        """What the gang's part of a product reads from shared memory; B is read once for the four
        warps of the warpgroup."""
        warps = len(self.warps)
        rows = 0 if form.a_in_registers else 16 * warps
        return (rows + form.n * warps // 4) * form.k * ELEMENT_BYTES[form.types[1]]

    def _row_range(self) -> tuple[int, int]:
        """The rows of the tile from the gang's first warp to its last."""
        return 16 * (self.warps[0] % 4), 16 * (self.warps[-1] % 4) + 16

    def _note(
        self, descriptor: int, rows: tuple[int, int], form: Form, side: int, clock: Clock
    ) -> None:
        assert self.race is not None
        item, mn_major = ELEMENT_BYTES[form.types[1 + side]], bool(form.major[side])
        bytes_ = elements(of_wgmma(descriptor), rows, form.k, item, mn_major)
        i = self.race.granules(self.cta.rank, bytes_)
        self.race.read(i, clock, asynchronous=True, line=self.line)

    # ---- groups
    def wgmma_commit(self, m: Mask) -> None:
        if self.events is not None:
            self.events.add("product commit", self.line)
        if not self.cta.late:
            self._multiply(self.wgmma_current)
        self.wgmma_groups.append(self.wgmma_current)
        self.wgmma_current = Products()

    def wgmma_wait(self, n: int, m: Mask) -> bool:
        if self.events is not None:
            self.events.add("product wait", self.line, n)
        while len(self.wgmma_groups) > n:
            group = self.wgmma_groups.pop(0)
            self._multiply(group)
            if group.clock is not None and self.clock_ is not None:
                self.clock_.join(group.clock.known, group.clock.fenced)
        return True

    def _multiply(self, group: Products) -> None:
        items, group.items = group.items, []
        start = 0
        for i, (form, _, _, _) in enumerate(items):
            after = items[i + 1] if i + 1 < len(items) else None
            if after is None or after[0] != form or not after[3]:
                self._fused(form, items[start : i + 1])
                start = i + 1

    def _fused(self, form: Form, items: list[tuple[Form, Any, int, bool]]) -> None:
        """Products of one form whose accumulators follow from each other, as one."""
        dt, at, _ = form.types
        right = self._operand(tuple(x[2] for x in items), (0, form.n), form, 1)
        if form.a_in_registers:
            left = a_operand([self.R[i] for x in items for i in x[1]], at)
        else:
            left = self._operand(tuple(x[1] for x in items), self._row_range(), form, 0)
            left = left.reshape(-1, 16, left.shape[1])
            if len(left) > len(self.warps):  # a warp between has gone its own way
                left = left[[w - self.warps[0] for w in self.warps]]
        out = left @ right.T
        if form.scale != (1, 1):
            out = out * f4(form.scale[0] * form.scale[1])
        o, acc = to_registers(out), items[0][3]
        if dt == "f32":
            _add_float(self.R, form.d, o, acc)
            return
        old = accumulators([self.R[i] for i in form.d], dt)
        total = [(v + o[j].astype(v.dtype)) if acc else o[j] for j, v in enumerate(old)]
        for i, v in zip(form.d, packed_accumulators(total, dt), strict=True):
            self.R[i] = v.view(self.R[i].dtype)

    def _operand(
        self, descriptors: tuple[int, ...], rows: tuple[int, int], form: Form, side: int
    ) -> Lanes:
        """[rows, K] float32 (float64 for 8-bit integers) from shared memory."""
        kind, mn_major = form.types[1 + side], bool(form.major[side])
        item = ELEMENT_BYTES[kind]
        index, last = _chunks(descriptors, rows, form.k, item, mn_major)
        if (last + 1) * _CHUNK > self.cta.smem.size:
            at, size = last * _CHUNK, self.cta.smem.size
            raise Trap("bounds", f"matrix operand at shared {at:+#x}, size {size:#x}")
        raw = self.cta.view(np.complex128, 1)[index].view(STORAGE[item])
        return to_f32(raw.T if mn_major else raw, kind)


def _add_float(registers: list[Any], d: tuple[int, ...], o: Lanes, acc: bool) -> None:
    """Adds the rows of `o` to float32 registers, or replaces them."""
    for i, x in zip(d, o, strict=True):
        old = registers[i]
        if old.dtype == f4:
            registers[i] = old + x if acc else x
        else:
            registers[i] = (old.view(f4) + x if acc else x).view(old.dtype)
