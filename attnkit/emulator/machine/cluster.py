"""Model a cluster of CTAs: asynchronous work, shared memory across CTAs, and barriers."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import NamedTuple, Protocol

import numpy as np

from attnkit.emulator.faults import KernelFault, Trap
from attnkit.emulator.machine.address_spaces import OFFSET_MASK, RANK_SHIFT, SHARED_BASE
from attnkit.emulator.machine.async_groups import Work
from attnkit.emulator.machine.barriers import ClusterBarrier, MBarrier
from attnkit.emulator.machine.cta import Cta
from attnkit.emulator.machine.knowledge import Clock
from attnkit.emulator.machine.launch import Launch
from attnkit.emulator.machine.race_detector import ACCESSORS, RaceDetector
from attnkit.emulator.machine.tensor_maps import Box, TensorMap
from attnkit.emulator.numerics.formats import Lanes, u1


class Issuer(Protocol):
    """Represents the warps that issued an asynchronous operation."""

    cta: Cta
    line: int

    def fault(self, trap: Trap, line: int) -> KernelFault:
        """Return the fault to raise for an operation that these warps issued at a PTX line."""
        ...


class Pending(NamedTuple):
    """Holds a delayed asynchronous operation, which PTX line `line` issued."""

    work: Work
    issuer: Issuer
    line: int


class Cluster:
    """Holds the CTAs of a cluster, and the queues of their unfinished asynchronous work.

    Attributes:
        ids: position of each CTA in the grid, by rank.
        events: number of changes of state that may end the wait of a warp.
        ticks: value of %clock, the number of times that it was read.
        actor: rank of the CTA whose warps or asynchronous work are being executed.
        queues: delayed work, by the unit that executes it.
        work: FLOP or bytes that each unit has executed.
        race: the race detector of shared and tensor memory, if races are watched.
    """

    def __init__(self, launch: Launch, ids: list[tuple[int, int, int]], rng: random.Random) -> None:
        self.launch = launch
        self.rng = rng
        self.ids = ids
        self.events = 0
        self.ticks = 0
        self.actor = 0
        self.queues: dict[str, list[Pending]] = defaultdict(list)
        self.work: dict[str, int] = defaultdict(int)
        self.ctas = [Cta(launch, ctaid, rank) for rank, ctaid in enumerate(ids)]
        self.warps = self.ctas[0].threads_in_warps // 32
        self.barrier = ClusterBarrier(self.warps * len(ids))
        self.race: RaceDetector | None = None
        if launch.mode.race:
            agents = len(ids) * ((ACCESSORS + 8) * self.warps + 40)
            self.race = RaceDetector(
                len(ids),
                self.ctas[0].smem.size,
                agents,
                launch.grain,
                cluster=launch.races.next_cluster,
                strict_order=launch.mode.strict_order,
            )
            launch.races.begin_cluster(self.race.names, ids)

    # ---- asynchronous work
    def submit(self, unit: str, work: Work, issuer: Issuer) -> None:
        """Run `work` now, or delay it in the adversarial mode.

        Delayed work of a tcgen05 unit runs in the order of issue, other work in any order.
        """
        mode = self.launch.mode
        if mode.late and (self.queues[unit] or self.rng.random() >= mode.prompt):
            self.queues[unit].append(Pending(work, issuer, issuer.line))
            return
        work()
        self.events += 1

    def record(self, unit: str, amount: int) -> None:
        """Add FLOP or bytes to the work of `unit`."""
        self.work[unit] += amount

    def release_one(self) -> bool:
        """Complete one delayed asynchronous operation, at random; return False if there is none."""
        ready = [name for name, q in self.queues.items() if q]
        if not ready:
            return False
        name = self.rng.choice(ready)
        queue = self.queues[name]
        work, issuer, line = queue.pop(
            0 if name.startswith("tcgen05") else self.rng.randrange(len(queue))
        )
        self.actor = issuer.cta.rank
        try:
            work()
        except Trap as trap:
            raise issuer.fault(trap, line) from None
        self.events += 1
        return True

    # ---- shared memory of any CTA of the cluster
    def reached(self, rank: int) -> Cta:
        """Return the CTA of `rank`, for an access to its shared memory; fault if it has exited.

        A CTA may access the shared memory of another CTA only while that CTA runs (PTX ISA, "Shared
        State Space" and barrier.cluster).
        """
        cta = self.ctas[rank]
        if rank != self.actor and not cta.alive:
            text = f"CTA rank {self.actor} reaches shared memory of rank {rank}, which has exited"
            raise Trap("exited", text)
        return cta

    def _at(self, address: int, size: int) -> tuple[Cta, int]:
        """Return the CTA and the byte offset of `size` bytes at an address of shared::cluster."""
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
        """Write bytes to the shared memory of any CTA of the cluster."""
        cta, off = self._at(address, data.size)
        cta.smem[off : off + data.size] = data
        if clock is not None and self.race is not None:
            i = self.race.shared(cta.rank, off, data.size)
            self.race.write(i, clock, generic=generic, line=line)

    def read_shared(self, address: int, size: int, clock: Clock | None, line: int) -> Lanes:
        """Return a copy of `size` bytes of the shared memory of any CTA of the cluster."""
        cta, off = self._at(address, size)
        if clock is not None and self.race is not None:
            i = self.race.shared(cta.rank, off, size)
            self.race.read(i, clock, asynchronous=True, line=line)
        return cta.smem[off : off + size].copy()

    def _chunks(self, address: int, tm: TensorMap) -> tuple[Cta, Lanes]:
        """Return the CTA, and the index in its shared memory of each 16-byte chunk of a box.

        The chunks are in the order of the dense box; the indices include the swizzle.
        """
        if address % 128:
            raise Trap("alignment", f"TMA box at shared address {address:#x}: 128 bytes needed")
        cta, off = self._at(address, tm.box_bytes)
        c = tm.chunks + (off + SHARED_BASE) // 16
        return cta, (c ^ ((c >> 3) & tm.swizzle)) - SHARED_BASE // 16

    def write_swizzled(
        self, address: int, data: Lanes, tm: TensorMap, clock: Clock | None, line: int
    ) -> None:
        """Write a dense box of a tensor map to shared memory, with the swizzle of the map."""
        cta, i = self._chunks(address, tm)
        cta.view(u1, 16)[i] = data.reshape(-1, 16)
        if clock is not None and self.race is not None:
            g = self.race.shared(cta.rank, (address & OFFSET_MASK) - SHARED_BASE, tm.box_bytes)
            self.race.write(g, clock, generic=False, line=line)

    def read_swizzled(self, address: int, tm: TensorMap) -> Lanes:
        """Return a box of a tensor map from shared memory as dense bytes, without the swizzle."""
        cta, i = self._chunks(address, tm)
        return cta.view(u1, 16)[i].reshape(-1)

    def note_swizzled_read(
        self, address: int, tm: TensorMap, box: Box, clock: Clock, line: int
    ) -> None:
        """Report the read of a box to the race detector, except its part outside the tensor."""
        assert self.race is not None
        cta, i = self._chunks(address, tm)
        byte = (16 * i[:, None] + np.arange(16)).reshape((*tm.box[::-1], tm.item))
        g = np.unique(byte[box.slices] // self.race.grain) + self.race.stride * cta.rank
        self.race.read(g, clock, asynchronous=True, line=line)

    # ---- barriers
    def mbarrier(self, address: int) -> MBarrier:
        """Return the mbarrier at an address of shared::cluster."""
        rank, off = address >> RANK_SHIFT, address & OFFSET_MASK
        b = self.reached(rank).mbarriers.get(off) if rank < len(self.ctas) else None
        if b is None:
            raise Trap(
                "barrier", f"mbarrier at shared {off - SHARED_BASE:+#x} of rank {rank}: no init"
            )
        return b

    def complete_tx(self, address: int, size: int, clock: Clock | None) -> None:
        """Execute complete-tx of `size` bytes on the mbarrier at `address`.

        Waiters for its phase acquire the knowledge of `clock`, the clock of the copy.
        """
        b = self.mbarrier(address)
        b.release(clock.knows if clock is not None else None)
        b.expect(-size)
