"""A gang: warps of one CTA that run in lockstep, with divergence as groups of lanes by block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnkit.emulator.faults import Finding, KernelFault, Place, Trap
from attnkit.emulator.formats import Lanes, u4
from attnkit.emulator.ops_atomic import AtomicOps
from attnkit.emulator.ops_bulk import Group
from attnkit.emulator.ops_clc import LaunchControlOps
from attnkit.emulator.ops_tcgen05 import TcgenOps
from attnkit.emulator.ops_warp import WarpOps
from attnkit.emulator.ops_wgmma import Products
from attnkit.emulator.roles import role_of

if TYPE_CHECKING:
    from attnkit.emulator.cta import Cta


TURN = 50_000  # blocks that a gang runs before others have their turn


class Gang(WarpOps, AtomicOps, LaunchControlOps, TcgenOps):
    """`groups` maps the next block of each group of lanes to its mask; exited lanes are in none.

    Groups at the same block merge; the group at the lowest block runs first, and another one if
    that has to wait. A group of whole warps that waits while others do not becomes a gang of its
    own, so that warps of different roles stop sharing masks.
    """

    def __init__(self, cta: Cta, warps: tuple[int, ...], registers: list[Any]) -> None:
        self.cta = cta
        self.warps = warps
        self.width = n = 32 * len(warps)
        self.R = registers
        self.full = np.ones(n, bool)
        self.full.setflags(write=False)
        self.groups: dict[int, Any] = {}
        self.seen: set[int] = set()
        self.line = 0
        self.why = ""
        self.yielded = self.polling = False
        self.leaving = None
        self.bar_waits = {}
        self.cluster_wait_for = -1
        self.last_polls = {}
        self.cp_current, self.cp_groups = Group(), []
        self.wgmma_current, self.wgmma_groups = Products(), []
        self.st_pending = []
        self.tmem_clocks = {}
        self.race, self.clock_ = None, None
        self.events = None
        self._functions = cta.program.functions(n)
        self._identity()

    @classmethod
    def start(cls, cta: Cta, warps: tuple[int, ...]) -> Gang:
        """A gang at the entry of the kernel."""
        gang = cls(cta, warps, cta.program.initial_registers(32 * len(warps)))
        mask = gang.thread < cta.threads
        gang.groups = {0: gang.full if mask.all() else mask}
        if cta.launch.recorder is not None:
            gang.events = cta.launch.recorder.stream(cta.cluster.ids, cta.rank, warps)
        gang.race = cta.cluster.race
        if gang.race is not None:
            gang.clock_ = gang.race.warp(gang.agent_name)
        return gang

    def _identity(self) -> None:
        """Special registers, as vectors of lanes."""
        n, cta, launch = self.width, self.cta, self.cta.launch
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
        total = launch.shared + cta.program.static_shared
        self.dynamic_smem_size, self.total_smem_size = full((launch.shared, total))
        self.rank_bits = np.full(n, cta.rank << 24, u4)

    # ---- running
    def run(self) -> bool:
        """Runs until every group waits, yields or is gone; whether anything ran."""
        ran = False
        self.polling = False
        try:
            for _ in range(TURN):
                if not self.groups:
                    break
                if len(self.groups) == 1:
                    ((pc, m),) = self.groups.items()
                    if m is self.full:
                        moved, again = self._run_full(pc)
                        ran |= moved
                        if not again:
                            return ran
                        continue
                    if self._shed(pc, m):
                        return True
                if not self._run_groups():
                    return ran
                ran = True
                if self.yielded:
                    self.yielded = False
                    return ran
        except Trap as trap:
            raise self.fault(trap, self.line) from None
        return ran

    def _run_full(self, pc: int) -> tuple[bool, bool]:
        """Runs with all lanes together; (whether anything ran, whether to go on)."""
        table, bind = self._functions
        functions, registers, full, width = table[0], self.R, self.full, self.width
        count = np.count_nonzero
        executed, seen, warps = self.cta.launch.executed, self.seen, len(self.warps)
        events = self.events
        ran = False
        for _ in range(TURN):
            f = functions[pc] or bind(pc, False)
            result = f(self, registers, full)
            if result is None:
                self.groups = {pc: full}
                return self._leave(pc) or ran, False
            if events is not None:
                events.add("block", 0, pc)
            if type(result) is int:
                after = result
            else:
                p, yes, no = result
                n = count(p)
                if n != width and n:
                    executed[pc] += warps
                    seen.add(pc)
                    self.groups = {}
                    self._add(yes, p)
                    self._add(no, ~p)
                    self._part_roles(pc, yes)
                    return True, True
                after = yes if n else no
            ran = True
            executed[pc] += warps
            seen.add(pc)
            pc = after
            if pc < 0:
                self.groups = {}
                return True, False
            if self.yielded:
                break
        self.yielded = False
        self.groups = {pc: full}
        return ran, False

    def _run_groups(self) -> bool:
        """Runs one block of the first group that can; False if none can."""
        table, bind = self._functions
        for pc in sorted(self.groups):
            m = self.groups[pc]
            f = table[1][pc] or bind(pc, True)
            result = f(self, self.R, m)
            if result is None:
                if self._leave(pc):
                    return True
                self._split(pc, m)
                continue
            if self.events is not None:
                self.events.add("block", 0, pc)
            self.cta.launch.executed[pc] += int(np.count_nonzero(m.reshape(-1, 32).any(1)))
            self.seen.add(pc)
            del self.groups[pc]
            if type(result) is int:
                self._add(result, m)
            else:
                p, yes, no = result
                self._add(yes, m & p)
                self._add(no, m & ~p)
            return True
        return False

    def _add(self, pc: int, m: Any) -> None:
        if pc < 0 or not m.any():
            return
        if pc in self.groups:
            if pc in self.bar_waits:
                raise Trap("barrier", "lanes of one warp reach a barrier at different times")
            m = self.groups[pc] | m
        self.groups[pc] = self.full if m.all() else m

    # ---- splitting
    def _shed(self, pc: int, m: Any) -> bool:
        """When whole warps have exited, the rest goes on as a narrower gang."""
        rows = m.reshape(-1, 32)
        some = rows.any(1)
        if some.all():
            return False
        self._part(pc, m, some)
        return True

    def _part_roles(self, pc: int, target: int) -> None:
        """In a recorded run, warps that branch at block `pc` to meet no more go their own way, so
        that neither waits for the other."""
        if self.events is None or len(self.groups) < 2 or not self.cta.program.flow.parts(pc):
            return
        rows = self.groups[target].reshape(-1, 32)
        if (rows.all(1) == rows.any(1)).all():
            self._part(target, self.groups[target], rows.any(1))

    def _leave(self, pc: int) -> bool:
        """Warps that the block at `pc` found to differ leave the gang; whether there were any."""
        if self.leaving is None:
            return False
        lanes, self.leaving = self.leaving, None
        m, some = self.groups[pc], np.asarray(lanes.reshape(-1, 32).any(1))
        self._part(pc, m & lanes, some, m & ~lanes)
        return True

    def _split(self, pc: int, m: Any) -> None:
        """Whole warps that wait while others run leave the gang."""
        rows = m.reshape(-1, 32)
        some = rows.any(1)
        if len(self.groups) > 1 and (rows.all(1) == some).all() and not some.all():
            self._part(pc, m, some)

    def _part(self, pc: int, m: Any, some: Lanes, rest: Any = None) -> None:
        """The warps `some` go on with lanes `m` at block `pc` as a gang of their own; `rest`: lanes
        that stay there."""
        self._multiply(self.wgmma_current)  # by all the warps that issued it, while they are here
        lanes = np.flatnonzero(np.repeat(some, 32))
        warps = tuple(w for w, s in zip(self.warps, some.tolist(), strict=True) if s)
        part = Gang(self.cta, warps, [r[lanes] for r in self.R])
        mask = m[lanes]
        part.groups = {pc: part.full if mask.all() else mask}
        part.why, part.line, part.seen = self.why, self.line, set(self.seen)
        part.cluster_wait_for = self.cluster_wait_for
        part.last_polls = dict(self.last_polls)
        part.tmem_clocks = dict(self.tmem_clocks)
        if recorder := self.cta.launch.recorder:
            part.events = recorder.part(self.events, warps)
        if pc in self.bar_waits:
            part.bar_waits[pc] = self.bar_waits.pop(pc)
        part.wgmma_groups = list(self.wgmma_groups)
        part.wgmma_current.lines = list(self.wgmma_current.lines)
        self.cta.gangs.append(part)
        del self.groups[pc]
        if rest is not None:
            self._add(pc, rest)
        if not self.groups:  # the parts have to wait for what is under way
            self.wgmma_current, self.wgmma_groups = Products(), []

    # ---- reports
    def block_line(self, pc: int) -> int:
        return self.cta.program.kernel.blocks[pc][0].line

    def place(self, line: int) -> Place:
        launch = self.cta.launch
        role = launch.role(self.warps) or role_of(self.cta.program.kernel, self.seen)
        return Place(self.cta.ctaid, self.warps, role, line, launch.source(line))

    def fault(self, trap: Trap, line: int) -> KernelFault:
        return KernelFault(Finding(trap.kind, trap.text, self.place(line)))

    def exit_checks(self) -> None:
        """Asynchronous work of a warp that nobody waited for."""
        launch = self.cta.launch
        left = [g for g in [*self.wgmma_groups, self.wgmma_current] if g.lines]
        if left:
            text = "wgmma not waited for at exit"
            launch.note(Finding("unfinished", text, self.place(left[0].lines[0])))
        if self.st_pending:
            launch.note(Finding("unfinished", "tcgen05.st without wait::st at exit", self.place(0)))
