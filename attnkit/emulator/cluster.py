"""A cluster of CTAs: asynchronous work, shared memory across CTAs, and scheduling of its gangs."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from attnkit.emulator.barriers import ClusterBarrier, MBarrier, accumulate
from attnkit.emulator.cta import Cta
from attnkit.emulator.faults import Finding, KernelFault, Place, Trap
from attnkit.emulator.formats import Lanes, u1
from attnkit.emulator.gang import Gang
from attnkit.emulator.race import Clock, RaceDetector
from attnkit.emulator.spaces import OFFSET_MASK, RANK_SHIFT, SHARED_BASE
from attnkit.emulator.tensormap import Box, TensorMap

if TYPE_CHECKING:
    from attnkit.emulator.launch import Launch

Work = Callable[[], None]
_AGENT = re.compile(r"warp (\d+)\.(\d+)")  # `agent_name` of a gang
STALLED_ROUNDS = 64  # rounds of nothing but polling before a deadlock is declared


class Cluster:
    """The CTAs that run together, and the queues of what they started but did not wait for."""

    def __init__(self, launch: Launch, ids: list[tuple[int, int, int]], rng: random.Random) -> None:
        self.launch = launch
        self.rng = rng
        self.ids = ids
        self.events = 0
        self.ticks = 0
        self.stalled = 0
        self.actor = 0  # rank of the CTA for which something is being done
        self.queues: dict[str, list[tuple[Work, Gang, int]]] = defaultdict(list)
        self.work: dict[str, int] = defaultdict(int)
        self.ctas: list[Cta] = []
        for rank, ctaid in enumerate(ids):
            self.ctas.append(Cta(self, launch, ctaid, rank))
        warps = self.ctas[0].threads_in_warps // 32
        self.barrier = ClusterBarrier(warps * len(ids))
        self.race: RaceDetector | None = None
        if launch.mode.race:
            agents = len(ids) * (3 * warps + 40)
            self.race = RaceDetector(len(ids), self.ctas[0].smem.size, agents, launch.grain)
        width = 1 if launch.mode.race or launch.mode.late else 4
        for cta in self.ctas:
            groups = [range(w, min(w + width, warps)) for w in range(0, warps, width)]
            cta.gangs = [Gang.start(cta, tuple(g)) for g in groups]

    # ---- asynchronous work
    def submit(self, unit: str, work: Work, gang: Any) -> None:
        """Runs `work` now, or puts it off: copies in any order, tensor-core work in its order."""
        mode = self.launch.mode
        if mode.late and (self.queues[unit] or self.rng.random() >= mode.prompt):
            self.queues[unit].append((work, gang, gang.line))
            return
        work()
        self.events += 1

    def record(self, unit: str, amount: int) -> None:
        self.work[unit] += amount

    def release_one(self) -> bool:
        """Completes one asynchronous operation that was put off."""
        ready = [name for name, q in self.queues.items() if q]
        if not ready:
            return False
        name = self.rng.choice(ready)
        queue = self.queues[name]
        work, gang, line = queue.pop(
            0 if name.startswith("tcgen05") else self.rng.randrange(len(queue))
        )
        self.actor = gang.cta.rank
        try:
            work()
        except Trap as trap:
            raise gang.fault(trap, line) from None
        self.events += 1
        return True

    # ---- shared memory of any CTA of the cluster
    def reached(self, rank: int) -> Cta:
        """The CTA of `rank`, whose shared memory another one may use only while it runs (PTX ISA,
        "Shared State Space" and barrier.cluster)."""
        cta = self.ctas[rank]
        if rank != self.actor and not cta.alive:
            text = f"CTA rank {self.actor} reaches shared memory of rank {rank}, which has exited"
            raise Trap("exited", text)
        return cta

    def _at(self, address: int, size: int) -> tuple[Cta, int]:
        rank, off = address >> RANK_SHIFT, (address & OFFSET_MASK) - SHARED_BASE
        if rank >= len(self.ctas):
            raise Trap(
                "bounds", f"shared address {address:#x}: no CTA of rank {rank} in the cluster"
            )
        cta = self.reached(rank)
        if off < 0 or off + size > cta.smem.size:
            raise Trap(
                "bounds", f"copy of {size} bytes at shared {off:+#x}, size {cta.smem.size:#x}"
            )
        return cta, off

    def write_shared(
        self, address: int, data: Lanes, clock: Clock | None, line: int, *, generic: bool
    ) -> None:
        cta, off = self._at(address, data.size)
        cta.smem[off : off + data.size] = data
        if clock is not None and self.race is not None:
            i = self.race.shared(cta.rank, off, data.size)
            self.race.write(i, clock, generic=generic, line=line)

    def read_shared(self, address: int, size: int, clock: Clock | None, line: int) -> Lanes:
        cta, off = self._at(address, size)
        if clock is not None and self.race is not None:
            i = self.race.shared(cta.rank, off, size)
            self.race.read(i, clock, asynchronous=True, line=line)
        return cta.smem[off : off + size].copy()

    def _chunks(self, address: int, tm: TensorMap) -> tuple[Cta, Lanes]:
        """Numbers of the 16-byte chunks of shared memory that a box fills, in order."""
        need = 128 if tm.swizzle or tm.item else 16
        if address & (need - 1):
            raise Trap("alignment", f"TMA box at shared address {address:#x}: {need} bytes needed")
        cta, off = self._at(address, tm.box_bytes)
        c = tm.chunks + (off + SHARED_BASE) // 16
        return cta, (c ^ ((c >> 3) & tm.swizzle)) - SHARED_BASE // 16

    def write_swizzled(
        self, address: int, data: Lanes, tm: TensorMap, clock: Clock | None, line: int
    ) -> None:
        cta, i = self._chunks(address, tm)
        cta.view(u1, 16)[i] = data.reshape(-1, 16)
        if clock is not None and self.race is not None:
            g = self.race.shared(cta.rank, (address & OFFSET_MASK) - SHARED_BASE, tm.box_bytes)
            self.race.write(g, clock, generic=False, line=line)

    def read_swizzled(self, address: int, tm: TensorMap) -> Lanes:
        cta, i = self._chunks(address, tm)
        return cta.view(u1, 16)[i].reshape(-1)

    def note_swizzled_read(
        self, address: int, tm: TensorMap, box: Box, clock: Clock, line: int
    ) -> None:
        """Tells the race detector of the read of the part of a box that is inside the tensor."""
        assert self.race is not None
        cta, i = self._chunks(address, tm)
        byte = (16 * i[:, None] + np.arange(16)).reshape((*tm.box[::-1], tm.item))
        g = np.unique(byte[box.slices] // self.race.grain) + self.race.stride * cta.rank
        self.race.read(g, clock, asynchronous=True, line=line)

    # ---- barriers
    def mbarrier(self, address: int) -> MBarrier:
        rank, off = address >> RANK_SHIFT, address & OFFSET_MASK
        b = self.reached(rank).mbarriers.get(off) if rank < len(self.ctas) else None
        if b is None:
            raise Trap(
                "barrier", f"mbarrier at shared {off - SHARED_BASE:+#x} of rank {rank}: no init"
            )
        return b

    def complete_tx(self, address: int, size: int, clock: Clock | None) -> None:
        b = self.mbarrier(address)
        b.release(clock)
        b.expect(-size)

    def release_cluster(self, clock: Clock | None, relaxed: bool) -> None:
        if clock is not None:
            accumulate(self.barrier.clocks, self.barrier.generation, clock, relaxed)
            clock.tick()

    # ---- running
    def gangs(self) -> list[Gang]:
        return [g for cta in self.ctas for g in cta.gangs]

    def step(self) -> bool:
        """Lets every gang run until it waits; False if nothing moved."""
        before, moved = self.events, False
        order = self.gangs()
        if self.launch.mode.late:
            self.rng.shuffle(order)
        for gang in order:
            self.actor = gang.cta.rank
            ran = gang.run()
            moved |= ran and not gang.polling
        for cta in self.ctas:
            cta.finished += [g for g in cta.gangs if not g.groups]
            cta.gangs = [g for g in cta.gangs if g.groups]
        if moved or self.events != before:
            self.stalled = 0
            return True
        if self.release_one():
            return True
        self.stalled += 1
        return self.stalled < STALLED_ROUNDS and any(g.polling for g in self.gangs())

    @property
    def done(self) -> bool:
        return not any(cta.gangs for cta in self.ctas)

    def finish(self) -> None:
        """Completes what is left, and reports what must not be left at exit."""
        while self.release_one():
            pass
        for cta in self.ctas:
            for gang in cta.finished:
                gang.exit_checks()
            self._uneven_products(cta)
            self._uneven_allocations(cta)
            self._unfinished_bulk(cta)
            if cta.tmem.live:
                text = f"tensor memory not deallocated at exit: {cta.tmem.live} (column: columns)"
                self.launch.note(Finding("tensor-memory", text))
            for b in cta.mbarriers.values():
                if b.tx:
                    text = f"transactions outstanding at exit: {b}"
                    # Expected bytes that nobody copies are harmless: the producer's last turn of a
                    # ring announces them. Bytes that nobody expected are not.
                    severity = "warning" if b.tx > 0 else "error"
                    at = cta.finished[0].place(b.line)
                    self.launch.note(Finding("unfinished", text, at, severity))

    def _uneven_products(self, cta: Cta) -> None:
        """The four warps of a warpgroup must execute the same wgmma."""
        for first in sorted({w // 4 * 4 for w in cta.products}):
            counts = [cta.products[w] for w in range(first, first + 4)]
            if len(set(counts)) > 1:
                text = f"wgmma executed {counts} times by warps {first} to {first + 3}"
                self.launch.note(Finding("convergence", text, Place(cta.ctaid, (first,))))

    def _uneven_allocations(self, cta: Cta) -> None:
        """Both CTAs of a pair allocate and free tensor memory of cta_group::2 alike."""
        peer = self.ctas[cta.rank ^ 1] if cta.rank ^ 1 < len(self.ctas) else None
        mine = cta.tmem.collective
        if mine and (peer is None or peer.tmem.collective != mine):
            other = peer.tmem.collective if peer else "no peer"
            text = f"cta_group::2 with (operation, column, columns) {mine}; peer CTA: {other}"
            self.launch.note(Finding("tensor-memory", text, Place(cta.ctaid)))

    def _unfinished_bulk(self, cta: Cta) -> None:
        self.actor = cta.rank
        for thread, state in cta.bulk.items():
            left = [g for g in [*state.groups, state.current] if g.lines]
            for group in left:
                how = "waited for" if group is not state.current else "committed"
                text = f"bulk store not {how} at exit, by thread {thread}"
                gang = next(g for g in cta.finished if thread // 32 in g.warps)
                place = gang.place(group.lines[0])
                self.launch.note(Finding("unfinished", text, place, "warning"))
                for work in group.work:
                    work()

    # ---- words for agents of the race detector
    def rank_of(self, agent: str) -> int:
        """The rank of the CTA that an agent's name gives, or 0."""
        found = _AGENT.search(agent)
        return int(found.group(1)) if found else 0

    def with_role(self, agent: str) -> str:
        """An agent's name with the rank and role of the warp in it."""

        def worded(m: re.Match[str]) -> str:
            rank, warp = int(m.group(1)), int(m.group(2))
            cta = self.ctas[rank]
            gang = next(g for g in (*cta.gangs, *cta.finished) if warp in g.warps)
            role = gang.place(0).role
            where = f" of CTA rank {rank}" if len(self.ctas) > 1 else ""
            return f"warp {warp}{where}" + (f" ({role})" if role else "")

        return _AGENT.sub(worded, agent)

    def deadlock(self) -> KernelFault:
        """The fault of a cluster in which nothing can move."""
        lines = []
        for g in self.gangs():
            for pc in sorted(g.groups):
                lines.append(f"    {g.place(g.block_line(pc))}: {g.why or 'ready'}")
        text = "all live warps wait:\n" + "\n".join(lines)
        return KernelFault(Finding("deadlock", text, self.gangs()[0].place(0)))
