"""Asynchronous copies: cp.async, bulk copies and TMA (PTX ISA, "Asynchronous copy")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnkit.emulator.faults import Trap
from attnkit.emulator.formats import Lanes, u1
from attnkit.emulator.ops_atomic import reduced
from attnkit.emulator.ops_barrier import BarrierOps
from attnkit.emulator.race import Clock
from attnkit.emulator.spaces import OFFSET_MASK, RANK_SHIFT
from attnkit.emulator.state import Mask
from attnkit.emulator.tensormap import TensorMap, select

Work = Callable[[], None]
_KINDS = {"f16": "f2", "s32": "i4", "u32": "u4", "s64": "i8", "u64": "u8", "f32": "f4", "f64": "f8"}
_KINDS |= {"b32": "u4", "b64": "u8"}


@dataclass(eq=False)
class Group:
    """Bulk stores between two commits, and the clock of the last."""

    work: list[Work] = field(default_factory=list)
    clocks: list[Clock] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)


@dataclass(eq=False)
class BulkState:
    """The bulk async-groups of one thread."""

    current: Group = field(default_factory=Group)
    groups: list[Group] = field(default_factory=list)


class BulkOps(BarrierOps):
    cp_current: Group
    cp_groups: list[Group]

    # ---- cp.async (non-bulk)
    def cp_async(self, dst: Lanes, src: Lanes, n: int, valid: Lanes, m: Mask) -> None:
        """Copies `valid` bytes per lane and fills with zeros up to n."""
        lanes = self.active(m).tolist()
        for lane in lanes:
            if int(dst[lane]) % n or (int(valid[lane]) and int(src[lane]) % n):
                raise Trap("alignment", f"cp.async of {n} bytes from {int(src[lane]):#x}")
        args = [(int(dst[i]), int(src[i]), int(valid[i])) for i in lanes]
        clock = self.issue(f"cp.async of {self.agent_name}", ordered=False)

        def work(line: int = self.line) -> None:
            for d, s, k in args:
                data = np.zeros(n, u1)
                if k:
                    b = self.cta.memory.find(s, s + k)
                    self.cta.memory.check_defined(b, s - b.base, k)
                    data[:k] = b.data[s - b.base : s - b.base + k]
                self.cta.cluster.write_shared(d, data, clock, line, generic=True)

        if self.cta.late:
            self.cp_current.work.append(work)
        else:
            work()
        if clock is not None:
            self.cp_current.clocks.append(clock)

    def cp_async_commit(self, m: Mask) -> None:
        self.cp_groups.append(self.cp_current)
        self.cp_current = Group()

    def cp_async_wait(self, n: int, m: Mask) -> bool:
        """wait_group n, or wait_all for n < 0."""
        if n < 0:
            self.cp_async_commit(m)
            n = 0
        while len(self.cp_groups) > n:
            self._finish(self.cp_groups.pop(0))
        return True

    def _finish(self, group: Group) -> None:
        for work in group.work:
            work()
        for clock in group.clocks:
            if self.clock_ is not None:
                self.clock_.join(clock.known, clock.fenced)

    def cp_async_arrive(self, a: Lanes, m: Mask, noinc: bool) -> None:
        """The mbarrier is told once all earlier cp.async of the threads are done."""
        groups = [*self.cp_groups, self.cp_current]
        work = [w for g in groups for w in g.work]
        for g in groups:
            g.work = []
        clocks = [c for g in groups for c in g.clocks]
        targets = self._lanes(a, m)
        for address, n in targets:
            if not noinc:
                self._find(address).pending += n

        def done() -> None:
            for w in work:
                w()
            for address, n in targets:
                b = self._find(address)
                for c in clocks:
                    b.release(c)
                b.release(self.clock_)
                b.arrive(n)

        self.cta.cluster.submit("copy", done, self)

    # ---- TMA
    def _map(self, address: int) -> TensorMap:
        return self.cta.tensor_map(address)

    def tma_load(
        self, dst: Lanes, desc: Lanes, at: list[Lanes], bar: Lanes, m: Mask, mask: Lanes | None
    ) -> None:
        """cp.async.bulk.tensor to shared memory; with `mask`, to the same offset of many CTAs."""
        for lane in self.active(m).tolist():
            tm = self._map(int(desc[lane]))
            coords = [int(c[lane]) for c in at]
            if len(coords) != len(tm.dims):
                raise Trap(
                    "descriptor", f"{len(coords)} coordinates for a map of rank {len(tm.dims)}"
                )
            d, b = int(dst[lane]), int(bar[lane])
            for x, y in self._targets(d, b, mask, lane):
                clock = self.issue(f"TMA load to {self._find(y).name}", ordered=False)
                work = self._load_work(tm, coords, x, y, clock)
                self._loading(tm.box_bytes, y)
                self.cta.cluster.submit("copy", work, self)
            self.cta.cluster.record("tma", tm.box_bytes)

    def _loading(self, size: int, bar: int) -> None:
        """Records a copy that will complete on the barrier at `bar`."""
        if self.events is not None:
            b = self._find(bar)
            self.events.add("load", self.line, size, b, b.flips)

    def _targets(self, d: int, b: int, mask: Lanes | None, lane: int) -> list[tuple[int, int]]:
        if mask is None:
            return [(d, b)]
        ranks = [r for r in range(16) if int(mask[lane]) >> r & 1]
        if any(r >= len(self.cta.cluster.ctas) for r in ranks):
            raise Trap("bounds", f"multicast to ranks {ranks} of a smaller cluster")
        return [
            (d & OFFSET_MASK | r << RANK_SHIFT, b & OFFSET_MASK | r << RANK_SHIFT) for r in ranks
        ]

    def _load_work(
        self, tm: TensorMap, at: list[int], dst: int, bar: int, clock: Clock | None
    ) -> Work:
        def work(line: int = self.line) -> None:
            dt = np.dtype(f"u{tm.item}")
            dense = np.zeros(tm.box[::-1], dt)
            box = select(tm, at)
            if box is not None:
                b = self.cta.memory.find(box.address, box.address + box.size)
                self.cta.memory.check_defined(b, box.address - b.base, box.size)
                view: Lanes = np.ndarray(
                    box.shape, dt, b.data.data, box.address - b.base, box.strides
                )
                dense[box.slices] = view
            self.cta.cluster.write_swizzled(dst, dense.reshape(-1).view(u1), tm, clock, line)
            self.cta.cluster.complete_tx(bar, tm.box_bytes, clock)

        return work

    def tma_store(self, desc: Lanes, at: list[Lanes], src: Lanes, m: Mask, how: str | None) -> None:
        """cp.async.bulk.tensor or cp.reduce.async.bulk.tensor from shared to global memory.

        The compiler leaves out elect.sync before plain stores: the machine instruction is one per
        warp. Lanes of a warp that ask for the same are therefore one store.
        """
        lanes = self.active(m)
        if how is None and lanes.size > 1:
            lanes = self._distinct(lanes, [desc, src, *at])
        for lane in lanes.tolist():
            tm, s = self._map(int(desc[lane])), int(src[lane])
            coords = [int(c[lane]) for c in at]
            clock = self.issue(f"TMA store of {self.agent_name}", ordered=False)
            box = select(tm, coords)
            if clock is not None and box is not None:
                self.cta.cluster.note_swizzled_read(s, tm, box, clock, self.line)
            self._bulk(lane, self._store_work(tm, coords, s, how), clock, tm.box_bytes)
            self.cta.cluster.record("tma", tm.box_bytes)

    def _distinct(self, lanes: Lanes, fields: list[Lanes]) -> Lanes:
        keys = np.stack([self.warp_start[lanes], *(f[lanes].astype(np.int64) for f in fields)])
        _, first = np.unique(keys, axis=1, return_index=True)
        return lanes[np.sort(first)]

    warp_start: Lanes

    def _store_work(self, tm: TensorMap, at: list[int], src: int, how: str | None) -> Work:
        def work() -> None:
            raw = self.cta.cluster.read_swizzled(src, tm)
            box = select(tm, at)
            if box is None:
                return
            dt = np.dtype(f"u{tm.item}")
            dense = raw.view(dt).reshape(tm.box[::-1])[box.slices]
            b = self.cta.memory.find(box.address, box.address + box.size)
            out: Lanes = np.ndarray(box.shape, dt, b.data.data, box.address - b.base, box.strides)
            if how is None:
                out[...] = dense
            else:
                fmt = tm.kind if tm.kind in ("f16", "bf16") else None
                arith = dt if fmt else np.dtype(tm.kind)
                new = reduced(how, fmt, out.view(arith), dense.view(arith))
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
        self, dst: Lanes, src: Lanes, n: Lanes, bar: Lanes, m: Mask, mask: Lanes | None
    ) -> None:
        for lane in self.active(m).tolist():
            s, size = int(src[lane]), _checked(int(dst[lane]), int(src[lane]), int(n[lane]))
            for d, b in self._targets(int(dst[lane]), int(bar[lane]), mask, lane):
                clock = self.issue(f"bulk load to {self._find(b).name}", ordered=False)
                self._loading(size, b)
                self.cta.cluster.submit("copy", self._bulk_work(d, s, size, b, clock), self)
            self.cta.cluster.record("tma", size)

    def _bulk_work(self, dst: int, src: int, size: int, bar: int, clock: Clock | None) -> Work:
        def work(line: int = self.line) -> None:
            b = self.cta.memory.find(src, src + size)
            self.cta.memory.check_defined(b, src - b.base, size)
            data = b.data[src - b.base : src - b.base + size]
            self.cta.cluster.write_shared(dst, data, clock, line, generic=False)
            self.cta.cluster.complete_tx(bar, size, clock)

        return work

    def bulk_remote(
        self, dst: Lanes, src: Lanes, n: Lanes, bar: Lanes, m: Mask, how: str | None, kind: str
    ) -> None:
        """Shared memory to the shared memory of another CTA of the cluster."""
        for lane in self.active(m).tolist():
            d, s, b = int(dst[lane]), int(src[lane]), int(bar[lane])
            size = _checked(d, s, int(n[lane]))
            clock = self.issue(f"copy to {self._find(b).name}", ordered=False)
            self._loading(size, b)
            work = self._remote_work(d, s, size, b, clock, (how, kind))
            self.cta.cluster.submit("copy", work, self)
            self.cta.cluster.record("tma", size)

    def _remote_work(
        self,
        dst: int,
        src: int,
        size: int,
        bar: int,
        clock: Clock | None,
        how: tuple[str | None, str],
    ) -> Work:
        def work(line: int = self.line) -> None:
            cluster = self.cta.cluster
            data = cluster.read_shared(src, size, clock, line)
            if how[0] is not None:
                dt = _KINDS[how[1]]
                old = cluster.read_shared(dst, size, None, line)
                data = reduced(how[0], None, old.view(dt), data.view(dt)).view(u1)
            cluster.write_shared(dst, data, clock, line, generic=False)
            cluster.complete_tx(bar, size, clock)

        return work

    def bulk_store(
        self, dst: Lanes, src: Lanes, n: Lanes, m: Mask, how: str | None, kind: str
    ) -> None:
        for lane in self.active(m).tolist():
            d, s = int(dst[lane]), int(src[lane])
            size = _checked(d, s, int(n[lane]))
            clock = self.issue(f"bulk store of {self.agent_name}", ordered=False)
            if clock is not None:
                self.cta.cluster.read_shared(s, size, clock, self.line)

            def work(d: int = d, s: int = s, size: int = size) -> None:
                data = self.cta.cluster.read_shared(s, size, None, 0)
                b = self.cta.memory.find(d, d + size)
                out = b.data[d - b.base : d - b.base + size]
                if how is None:
                    out[:] = data
                else:
                    fmt = kind if kind in ("f16", "bf16") else None
                    dt = "u2" if fmt else _KINDS[kind]
                    out.view(dt)[:] = reduced(how, fmt, out.view(dt), data.view(dt))
                self.cta.memory.mark(b, d - b.base, size)

            self._bulk(lane, work, clock, size)
            self.cta.cluster.record("tma", size)

    def _bulk(self, lane: int, work: Work, clock: Clock | None, size: int) -> None:
        if self.events is not None:
            self.events.add("store", self.line, size)
        state = self.cta.bulk.setdefault(int(self.thread[lane]), BulkState())
        state.current.work.append(work)
        state.current.lines.append(self.line)
        if clock is not None:
            state.current.clocks.append(clock)

    thread: Lanes

    def _bulk_states(self, m: Mask) -> list[BulkState]:
        if not self.cta.bulk:
            return []
        mine = [self.cta.bulk.get(t) for t in self.thread[m].tolist()]
        return [s for s in mine if s is not None]

    def bulk_commit(self, m: Mask) -> None:
        if self.events is not None:
            self.events.add("store commit", self.line)
        for s in self._bulk_states(m):
            if not self.cta.late:
                for work in s.current.work:
                    work()
                s.current.work = []
            s.groups.append(s.current)
            s.current = Group()

    def bulk_wait(self, n: int, read: bool, m: Mask) -> bool:
        """wait_group: completes all but the n latest groups (`read`: of their sources)."""
        if self.events is not None:
            self.events.add("store wait", self.line, n)
        for s in self._bulk_states(m):
            while len(s.groups) > n:
                self._finish(s.groups.pop(0))
        return True

    # ---- st.async
    def st_async(self, a: Lanes, values: list[Lanes], bar: Lanes, m: Mask, dt: Any) -> None:
        for lane in self.active(m).tolist():
            data = np.array([v[lane] for v in values], dt).view(u1)
            d, b = int(a[lane]), int(bar[lane])
            clock = self.issue(f"st.async to {self._find(b).name}", ordered=False)
            self._loading(data.size, b)

            def work(d: int = d, b: int = b, data: Lanes = data, c: Clock | None = clock) -> None:
                self.cta.cluster.write_shared(d, data, c, self.line, generic=False)
                self.cta.cluster.complete_tx(b, data.size, c)

            self.cta.cluster.submit("copy", work, self)


def _checked(dst: int, src: int, size: int) -> int:
    if dst % 16 or src % 16 or size % 16:
        raise Trap("alignment", f"bulk copy of {size} bytes from {src:#x} to {dst:#x}: 16 needed")
    return size
