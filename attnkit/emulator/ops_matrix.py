"""mma.sync, ldmatrix, stmatrix (PTX ISA 9.7.14.5) and wgmma (9.7.15)."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnkit.emulator.descriptors import Matrix, elements, of_wgmma
from attnkit.emulator.faults import Trap
from attnkit.emulator.formats import ELEMENT_BYTES, STORAGE, Lanes, f4, to_f32, u2, u4
from attnkit.emulator.fragments import (
    a_operand,
    accumulators,
    b_operand,
    packed_accumulators,
    to_registers,
)
from attnkit.emulator.ops_bulk import BulkOps, Group
from attnkit.emulator.spaces import OFFSET_MASK, RANK_SHIFT, SHARED_BASE
from attnkit.emulator.state import Mask

_T = np.arange(32)


class MatrixOps(BulkOps):
    wgmma_current: Group
    wgmma_groups: list[Group]

    # ---- mma.sync
    def mma(
        self,
        shape: tuple[int, int, int],
        types: tuple[str, str, str],
        a: list[Lanes],
        b: list[Lanes],
        c: list[Lanes],
        m: Mask,
    ) -> list[Lanes]:
        """D = A B + C of each warp."""
        dt, at, bt = types
        x, y = a_operand(a, at), b_operand(b, bt)
        if x.shape[2] != shape[2] or y.shape[2] != shape[2]:
            raise Trap("encoding", f"mma of K={shape[2]} with registers for K={x.shape[2]}")
        d = to_registers(np.matmul(x, y.transpose(0, 2, 1)))
        self.cta.cluster.record(
            "tensor", 2 * shape[0] * shape[1] * shape[2] * len(self.warps_of(m))
        )
        acc = accumulators(c, dt)
        total = [v + d[i].astype(v.dtype) for i, v in enumerate(acc)]
        return packed_accumulators(total, dt)

    # ---- ldmatrix, stmatrix
    def _rows(self, a: Lanes, n: int, m: Mask) -> tuple[Any, Lanes, Lanes]:
        """(CTA, offsets [warps, 8 n] of the rows, which warps are active)."""
        rows = a.reshape(-1, 32)[:, : 8 * n].astype(np.int64)
        on = m.reshape(-1, 32).any(1)
        rows = rows[on]
        rank = int(rows[0, 0]) >> RANK_SHIFT
        cta = self.cta.cluster.ctas[rank]
        off = (rows & OFFSET_MASK) - SHARED_BASE
        if (rows & 15).any():
            raise Trap("alignment", f"matrix row at shared +{int(off[(off & 15) != 0][0]):#x}")
        if off.min() < 0 or off.max() + 16 > cta.smem.size:
            raise Trap(
                "bounds", f"matrix row at shared +{int(off.max()):#x}, size {cta.smem.size:#x}"
            )
        return cta, off, on

    def ldmatrix(self, a: Lanes, n: int, trans: bool, m: Mask) -> list[Lanes]:
        cta, off, on = self._rows(a, n, m)
        if self.race is not None and self.clock_ is not None:
            i = self.race.shared(cta.rank, off.ravel(), 16)
            self.race.read(i, self.clock_, asynchronous=False, line=self.line)
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

    def stmatrix(self, a: Lanes, values: list[Lanes], trans: bool, m: Mask) -> None:
        cta, off, on = self._rows(a, len(values), m)
        if self.race is not None and self.clock_ is not None:
            i = self.race.shared(cta.rank, off.ravel(), 16)
            self.race.write(i, self.clock_, generic=True, line=self.line)
        for j, v in enumerate(values):
            row, x = off[:, 8 * j : 8 * j + 8], v.reshape(-1, 32)[on]
            if trans:
                view = cta.view(u2, 1)
                view[row[:, 2 * (_T % 4)] // 2 + _T // 4] = (x & u4(0xFFFF)).astype(u2)
                view[row[:, 2 * (_T % 4) + 1] // 2 + _T // 4] = (x >> u4(16)).astype(u2)
            else:
                cta.view(u4, 1)[row[:, _T // 4] // 4 + _T % 4] = x

    # ---- wgmma
    def wgmma_fence(self, m: Mask) -> None:
        """Orders register accesses; see `fences` for the static check."""

    def wgmma(
        self,
        d: list[int],
        a: Any,
        b: Lanes,
        accumulate: Lanes,
        shape: tuple[int, int],
        types: tuple[str, str, str],
        scale: tuple[int, ...],
        major: tuple[int, int],
        m: Mask,
    ) -> None:
        """The rows of this gang's warps of one warpgroup-wide product."""
        if m is not self.full:
            raise Trap("encoding", "wgmma with inactive lanes")
        first = a if isinstance(a, list) else of_wgmma(self.uniform(a, m))
        second = of_wgmma(self.uniform(b, m))
        clock = self.issue(f"wgmma of {self.agent_name}", ordered=True)
        k, item = shape[1], ELEMENT_BYTES[types[1]]
        if clock is not None:
            self._note(second, (0, shape[0]), k, item, major[1], clock)
            if isinstance(first, Matrix):
                self._note(first, self._row_range(), k, item, major[0], clock)
        acc = bool(self.uniform(accumulate, m))

        def work() -> None:
            self._wgmma(d, first, second, acc, shape, types, scale, major)

        warps = len(self.warps)
        self.cta.cluster.record("tensor", 2 * 16 * shape[0] * k * warps)
        rows = 16 * warps if isinstance(first, Matrix) else 0
        # B is read once for the four warps of the warpgroup.
        self.cta.cluster.record("operands", (rows + shape[0] * warps // 4) * k * item)
        if self.cta.late:
            self.wgmma_current.work.append(work)
        else:
            work()
        self.wgmma_current.lines.append(self.line)
        if clock is not None:
            self.wgmma_current.clocks = [clock]

    def _row_range(self) -> tuple[int, int]:
        first = 16 * (self.warps[0] % 4)
        return first, first + 16 * len(self.warps)

    def _note(
        self, x: Matrix, rows: tuple[int, int], k: int, item: int, major: int, clock: Any
    ) -> None:
        assert self.race is not None
        i = self.race.granules(self.cta.rank, elements(x, rows, k, item, bool(major)))
        self.race.read(i, clock, asynchronous=True, line=self.line)

    def _wgmma(
        self,
        d: list[int],
        a: Any,
        b: Matrix,
        acc: bool,
        shape: tuple[int, int],
        types: tuple[str, str, str],
        scale: tuple[int, ...],
        major: tuple[int, int],
    ) -> None:
        (n, k), (dt, at, bt) = shape, types
        right = self._operand(b, (0, n), k, bt, major[1])
        if isinstance(a, list):
            left = a_operand([self.R[i] for i in a], at).reshape(-1, k)
        else:
            left = self._operand(a, self._row_range(), k, at, major[0])
        out = (left @ right.T).reshape(len(self.warps), 16, n)
        if scale != (1, 1):
            out = out * f4(scale[0] * scale[1])
        o = to_registers(out)
        if dt == "f32":
            _add_float(self.R, d, o, acc)
            return
        old_values = accumulators([self.R[i] for i in d], dt)
        total = [(v + o[j].astype(v.dtype)) if acc else o[j] for j, v in enumerate(old_values)]
        for i, v in zip(d, packed_accumulators(total, dt), strict=True):
            self.R[i] = v.view(self.R[i].dtype)

    def _operand(self, x: Matrix, rows: tuple[int, int], k: int, kind: str, major: int) -> Lanes:
        item = ELEMENT_BYTES[kind]
        index = elements(x, rows, k, item, bool(major))
        view = self.cta.view(STORAGE[item], 1)
        return to_f32(view[self.cta.checked(index) // item], kind)

    def wgmma_commit(self, m: Mask) -> None:
        self.wgmma_groups.append(self.wgmma_current)
        self.wgmma_current = Group()

    def wgmma_wait(self, n: int, m: Mask) -> bool:
        while len(self.wgmma_groups) > n:
            self._finish(self.wgmma_groups.pop(0))
        return True


def _add_float(registers: list[Any], d: list[int], o: Lanes, acc: bool) -> None:
    """Adds the rows of `o` to float32 registers, or replaces them."""
    if all(registers[i].dtype == f4 for i in d):
        for i, x in zip(d, o, strict=True):
            registers[i] = registers[i] + x if acc else x
        return
    for i, x in zip(d, o, strict=True):
        old = registers[i]
        registers[i] = (old.view(f4) + x if acc else x).view(old.dtype)
