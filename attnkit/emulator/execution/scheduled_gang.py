"""Run a gang: warps of one CTA that execute each instruction together.

Lanes that diverge form groups, and warps that diverge may form a gang of their own. A group is the
set of lanes that continue at the same basic block.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnkit.emulator.execution.generated_kernel import GeneratedKernel
from attnkit.emulator.faults import Finding, Trap
from attnkit.emulator.machine.async_groups import WgmmaGroup
from attnkit.emulator.machine.cluster import Cluster
from attnkit.emulator.machine.cta import Cta
from attnkit.emulator.machine.gang import Gang
from attnkit.emulator.numerics.formats import Lanes
from attnkit.emulator.ops.wgmma import multiply_group

TURN = 50_000  # most basic blocks that a gang runs before the next gang has its turn


class ScheduledGang(Gang):
    """Runs the blocks of a kernel for the warps of a gang.

    Groups that reach the same block merge. The group at the lowest block runs first; if it has to
    wait, the next one runs. A group of whole warps that waits while others run becomes a gang of
    its own, so that warps of different roles are no longer masked against each other.

    Attributes:
        siblings: all gangs of the CTA; a gang that splits off is appended.
    """

    def __init__(
        self,
        cluster: Cluster,
        cta: Cta,
        warps: tuple[int, ...],
        registers: list[Any],
        code: GeneratedKernel,
        siblings: list[ScheduledGang],
    ) -> None:
        super().__init__(cluster, cta, warps, registers)
        self.siblings = siblings
        self._code = code
        self._functions = code.functions(self.width)

    @classmethod
    def start(
        cls,
        cluster: Cluster,
        cta: Cta,
        warps: tuple[int, ...],
        code: GeneratedKernel,
        siblings: list[ScheduledGang],
    ) -> ScheduledGang:
        """Create a gang at the entry of the kernel."""
        gang = cls(cluster, cta, warps, code.initial_registers(32 * len(warps)), code, siblings)
        mask = gang.thread < cta.threads
        gang.groups = {0: gang.full if mask.all() else mask}
        if gang.launch.recorder is not None:
            gang.events = gang.launch.recorder.stream(cluster.ids, cta.rank, warps)
        gang.race = cluster.race
        if gang.race is not None:
            gang.clock = gang.race.warp(gang.agent_name)
        return gang

    # ---- running
    def run(self) -> bool:
        """Run until all groups wait, the gang yields, or no lane is left; return if any ran."""
        ran = False
        self.polling = False
        try:
            for _ in range(TURN):
                if not self.groups:
                    break
                if len(self.groups) == 1:
                    ((pc, m),) = self.groups.items()
                    if m is self.full:
                        moved, go_on = self._run_full(pc)
                        ran |= moved
                        if not go_on:
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
        """Run while all lanes are at one block; return (whether any ran, whether to go on)."""
        table, bind = self._functions
        functions, registers, full, width = table[0], self.R, self.full, self.width
        count = np.count_nonzero
        executed, seen, warps = self.launch.executed, self.seen, len(self.warps)
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
                self.cta.exited += width
                return True, False
            if self.yielded:
                break
        self.yielded = False
        self.groups = {pc: full}
        return ran, False

    def _run_groups(self) -> bool:
        """Run one block of the first group that can run; return False if none can."""
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
            self.launch.executed[pc] += int(np.count_nonzero(m.reshape(-1, 32).any(1)))
            self.seen.add(pc)
            del self.groups[pc]
            if type(result) is int:
                self._add(result, m)
                if self.yielded and self.polling:  # later blocks of the gang need not wait
                    self._split(result, self.groups[result])
            else:
                p, yes, no = result
                self._add(yes, m & p)
                self._add(no, m & ~p)
            return True
        return False

    def _add(self, pc: int, m: Any) -> None:
        """Let the lanes `m` continue at block `pc`; they exit if `pc` is negative."""
        if pc < 0:
            self.cta.exited += int(np.count_nonzero(m))
            return
        if not m.any():
            return
        if pc in self.groups:
            if pc in self.bar_waits:
                raise Trap("barrier", "lanes of one warp reach a barrier at different times")
            m = self.groups[pc] | m
        self.groups[pc] = self.full if m.all() else m

    # ---- splitting
    def _shed(self, pc: int, m: Any) -> bool:
        """Move the rest to a narrower gang if whole warps have exited; return whether any have."""
        rows = m.reshape(-1, 32)
        some = rows.any(1)
        if some.all():
            return False
        self._part(pc, m, some)
        return True

    def _part_roles(self, pc: int, target: int) -> None:
        """Split off the warps that branch to block `target`, if events are recorded.

        This is done only if block `pc` sends whole warps to different code that shares no later
        work. In one gang, the one part would run only while the other waits, and the recorded
        events would contain that false dependence.
        """
        if self.events is None or len(self.groups) < 2 or not self._code.post_dominators.parts(pc):
            return
        rows = self.groups[target].reshape(-1, 32)
        if (rows.all(1) == rows.any(1)).all():
            self._part(target, self.groups[target], rows.any(1))

    def _leave(self, pc: int) -> bool:
        """Split off the warps in `leaving`, which must run block `pc` apart; return if any."""
        if self.leaving is None:
            return False
        lanes, self.leaving = self.leaving, None
        m, some = self.groups[pc], np.asarray(lanes.reshape(-1, 32).any(1))
        self._part(pc, m & lanes, some, m & ~lanes)
        return True

    def _split(self, pc: int, m: Any) -> None:
        """Split off the lanes `m`, which wait at `pc`, if they are whole warps and others run."""
        rows = m.reshape(-1, 32)
        some = rows.any(1)
        if len(self.groups) > 1 and (rows.all(1) == some).all() and not some.all():
            self._part(pc, m, some)

    def _part(self, pc: int, m: Any, some: Lanes, staying: Any = None) -> None:
        """Move the warps `some`, with lanes `m` at block `pc`, to a new gang.

        Args:
            staying: lanes that stay at block `pc`.
        """
        # compute the products now, while all warps that issued them are in one gang
        multiply_group(self, self.wgmma_current)
        lanes = np.flatnonzero(np.repeat(some, 32))
        warps = tuple(w for w, s in zip(self.warps, some.tolist(), strict=True) if s)
        registers = [r[lanes] for r in self.R]
        part = ScheduledGang(self.cluster, self.cta, warps, registers, self._code, self.siblings)
        mask = m[lanes]
        part.groups = {pc: part.full if mask.all() else mask}
        part.why, part.line, part.seen = self.why, self.line, set(self.seen)
        part.cluster_wait_for = self.cluster_wait_for
        part.last_polls = dict(self.last_polls)
        part.tmem_clocks = dict(self.tmem_clocks)
        if recorder := self.launch.recorder:
            part.events = recorder.part(self.events, warps)
        if pc in self.bar_waits:
            part.bar_waits[pc] = self.bar_waits.pop(pc)
        part.wgmma_groups = list(self.wgmma_groups)
        part.wgmma_current.lines = list(self.wgmma_current.lines)
        self.siblings.append(part)
        del self.groups[pc]
        if staying is not None:
            self._add(pc, staying)
        if not self.groups:  # no warp is left here; the new gangs wait for unfinished products
            self.wgmma_current, self.wgmma_groups = WgmmaGroup(), []

    # ---- reports
    def block_line(self, pc: int) -> int:
        """Return the PTX line at which a block begins."""
        return self.launch.kernel.blocks[pc][0].line

    def exit_checks(self) -> None:
        """Report wgmma and tcgen05.st of these warps for which they did not wait."""
        left = [g for g in [*self.wgmma_groups, self.wgmma_current] if g.lines]
        if left:
            text = "wgmma not waited for at exit"
            self.launch.note(Finding("unfinished", text, self.place(left[0].lines[0])))
        if self.st_pending:
            self.launch.note(
                Finding("unfinished", "tcgen05.st without wait::st at exit", self.place(0))
            )
