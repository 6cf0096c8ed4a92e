"""Model a gang: warps of one CTA that run in lockstep, with the state that instructions use.

The term comes from the ISPC compiler. Registers are vectors with one element per thread of the gang
(32, 64, 96 or 128); instructions work on all elements at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnkit.emulator.faults import Finding, KernelFault, Place, Trap
from attnkit.emulator.machine.async_groups import CopyGroup, WgmmaGroup
from attnkit.emulator.machine.barriers import NamedBarrier, Released
from attnkit.emulator.machine.cluster import Cluster
from attnkit.emulator.machine.cta import Cta
from attnkit.emulator.machine.event_recorder import Stream
from attnkit.emulator.machine.knowledge import CLUSTER, Clock, Knowledge
from attnkit.emulator.machine.race_detector import RaceDetector
from attnkit.emulator.numerics.formats import Lanes, u4
from attnkit.emulator.ptx.warp_roles import role_of

Mask = Any  # bool vector of lanes; the object `full` if all lanes are active


class Gang:
    """Holds registers, special registers and unfinished work of warps that run in lockstep.

    Attributes:
        warps: numbers of the warps in the CTA.
        width: number of lanes of these warps.
        R: registers, each a vector of lanes.
        full: mask of all lanes; every mask of all lanes is this object.
        line: PTX line that is being executed.
        seen: indices of the basic blocks that these warps have executed.
        why: description of what the gang waits for, for reports.
        yielded: whether the gang ends its turn, so that other gangs run before it continues.
        polling: whether a test or load in this turn has to be repeated until others change memory
            or a barrier.
        groups: mask of the lanes that execute each basic block next, by its index. Lanes that have
            exited are in no group.
        lane_waits: lanes that wait at bar.warp.sync, by basic block.
        lanes_released: lanes whose wait at bar.warp.sync is over, by basic block.
        leaving: lanes of warps that must leave the gang before its basic block can run, or None.
        race, clock: the race detector and the gang's clock, if races are watched.
        events: stream that records events; None if there is no recorder.
        bar_waits: the named barrier at which lanes wait, its generation, and what arrivals in that
            generation release, by basic block.
        cluster_wait_for: generation of the cluster barrier in which it arrived without a wait so
            far, or -1.
        last_polls: bytes that the last poll of global memory read, by basic block.
        cp_current, cp_groups: cp.async since the last commit, and committed groups.
        wgmma_current, wgmma_groups: the same for wgmma.
        st_pending: delayed tcgen05.st.
        tmem_clocks: clock of the last tcgen05.ld (False) and tcgen05.st (True).
    """

    def __init__(self, cluster: Cluster, cta: Cta, warps: tuple[int, ...], registers: list[Any]):
        self.cluster = cluster
        self.cta = cta
        self.launch = cluster.launch
        self.mode = cluster.launch.mode
        self.memory = cluster.launch.memory
        self.warps = warps
        self.width = 32 * len(warps)
        self.R = registers
        self.full = np.ones(self.width, bool)
        self.full.setflags(write=False)
        self.line = 0
        self.seen: set[int] = set()
        self.why = ""
        self.yielded = self.polling = False
        self.leaving: Lanes | None = None
        self.groups: dict[int, Any] = {}
        self.lane_waits: dict[int, Lanes] = {}
        self.lanes_released: dict[int, Lanes] = {}
        self.race: RaceDetector | None = None
        self.clock: Clock | None = None
        self.events: Stream | None = None
        self.bar_waits: dict[int, tuple[NamedBarrier, int, Released]] = {}
        self.cluster_wait_for = -1
        self.last_polls: dict[int, bytes] = {}
        self.cp_current = CopyGroup()
        self.cp_groups: list[CopyGroup] = []
        self.wgmma_current = WgmmaGroup()
        self.wgmma_groups: list[WgmmaGroup] = []
        self.st_pending: list[Callable[[], None]] = []
        self.tmem_clocks: dict[bool, Clock] = {}
        self._set_special_registers()

    def _set_special_registers(self) -> None:
        """Set the special registers of PTX, as vectors of lanes."""
        n, cta, launch = self.width, self.cta, self.launch
        one = np.arange(32, dtype=u4)
        self.lane = np.tile(one, len(self.warps))
        self.warp_start = np.repeat(32 * np.arange(len(self.warps)), 32)
        self.warpid = np.repeat(np.array(self.warps, u4), 32)
        self.thread = (self.warpid * u4(32) + self.lane).astype(np.int64)
        self.first_lane = self.lane == 0
        bx, by, _ = launch.block
        t = self.thread.astype(u4)
        self.tid = (t % u4(bx), t // u4(bx) % u4(by), t // u4(bx * by))

        def full(values: tuple[int, ...]) -> tuple[Lanes, ...]:
            return tuple(np.full(n, v, u4) for v in values)

        shape, grid, at = launch.cluster, launch.grid, cta.ctaid
        self.ntid, self.nctaid, self.ctaid = full(launch.block), full(grid), full(at)
        self.cluster_ctaid = full(tuple(x % c for x, c in zip(at, shape, strict=True)))
        self.cluster_nctaid = full(shape)
        self.clusterid = full(tuple(x // c for x, c in zip(at, shape, strict=True)))
        self.nclusterid = full(tuple(g // c for g, c in zip(grid, shape, strict=True)))
        size = shape[0] * shape[1] * shape[2]
        linear = at[0] + grid[0] * (at[1] + grid[1] * at[2])
        self.cluster_rank, self.cluster_size, self.smid, self.nsmid = full(
            (cta.rank, size, linear % launch.sms, launch.sms)
        )
        self.nwarpid, self.warp_size = full((64, 32))
        total = launch.shared + launch.static.shared_bytes
        self.dynamic_smem_size, self.total_smem_size = full((launch.shared, total))
        self.rank_bits = np.full(n, cta.rank << 24, u4)

    # ---- masks
    def active(self, m: Mask) -> Lanes:
        """Return the indices of the active lanes."""
        return np.flatnonzero(m)

    def warps_of(self, m: Mask) -> tuple[int, ...]:
        """Return the numbers of the warps with an active lane."""
        if m is self.full:
            return self.warps
        some = m.reshape(-1, 32).any(1)
        return tuple(w for w, s in zip(self.warps, some.tolist(), strict=True) if s)

    def uniform(self, x: Lanes, m: Mask) -> int:
        """Return the value of `x` in the first active lane."""
        return int(x[0]) if m is self.full else int(x[m.argmax()])

    def alive(self) -> Lanes:
        """Return the mask of the lanes that have not exited."""
        out: Lanes = np.logical_or.reduce(list(self.groups.values()))
        return out

    def narrowed(self, m: Mask, p: Lanes) -> Mask | None:
        """Return `m & p`; None if no lane is in it, the object `full` if all lanes are."""
        n = np.count_nonzero(p)
        if m is self.full and n == self.width:
            return m
        if n == 0:
            return None
        out = m & p
        return out if out.any() else None

    # ---- races
    @property
    def agent_name(self) -> str:
        """Return the gang's name in the race detector."""
        return f"warp {self.cta.rank}.{self.warps[0]}"

    def single(self, m: Mask) -> int | None:
        """Return the number of the active lane in its warp; None if several lanes are active."""
        if m is self.full or np.count_nonzero(m) > 1:
            return None
        return int(self.lane[m.argmax()])

    def issue(self, unit: str, *, ordered: bool, m: Mask | None = None) -> Clock | None:
        """Return the clock of an asynchronous operation that starts here, if races are watched.

        Args:
            unit: name of the unit that executes it.
            ordered: whether it runs after earlier operations of its unit.
            m: the lanes that issue it; None if the whole warp issues it.
        """
        if self.race is None or self.clock is None:
            return None
        lane = None if m is None else self.single(m)
        return self.race.issue(self.clock, unit, self.line, ordered=ordered, lane=lane)

    def meet_lanes(self, m: Mask) -> None:
        """Record an instruction at which all lanes of a warp wait for each other.

        It orders their earlier reads before later accesses. It has no effect if races are not
        watched, with `strict_order`, or if a lane of the gang that has not exited is not in `m`.
        """
        if self.clock is None or self.race is None or self.race.strict_order:
            return
        if m is self.full or (m == self.alive()).all():
            self.clock.meet_lanes()

    def handed_on(self, m: Mask, relaxed: bool = False, scope: int = CLUSTER) -> Knowledge | None:
        """Return the knowledge that an arrival of the lanes `m` releases, if races are watched.

        Args:
            relaxed: whether the arrival is relaxed; it then releases only what the gang knew at its
                last fence.
            scope: smallest scope that this fence must have had.
        """
        if self.clock is None:
            return None
        return self.clock.published[scope] if relaxed else self.clock.seen_by(self.single(m))

    # ---- reports
    def place(self, line: int) -> Place:
        """Return the place of a PTX line, with CTA, warps and role of this gang, for a report."""
        launch = self.launch
        role = launch.role(self.warps) or role_of(launch.kernel, self.seen)
        return Place(self.cta.ctaid, self.warps, role, line, launch.source(line))

    def fault(self, trap: Trap, line: int) -> KernelFault:
        """Return the fault to raise for an instruction of these warps at a PTX line."""
        return KernelFault(Finding(trap.kind, trap.text, self.place(line)))
