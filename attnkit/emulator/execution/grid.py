"""Run a launch: the clusters of its grid, a few at a time."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np

from attnkit.emulator.execution.cluster_run import ClusterRun
from attnkit.emulator.execution.generated_kernel import GeneratedKernel
from attnkit.emulator.faults import Finding, KernelFault, Place
from attnkit.emulator.machine.launch import Launch

RESIDENT = 264  # most clusters that are active at once, when they wait for clusters not yet started


@dataclass(frozen=True)
class LaunchStats:
    """Counts what a launch executed.

    Attributes:
        warp_instructions: instructions, each counted once for every warp.
        seconds: time that the emulator took.
        ctas: number of CTAs that ran.
        opcodes: warp instructions by opcode.
        work: FLOP and bytes by unit.
        covered: share of the kernel's instructions that any warp reached, 0 to 1.
        missed: PTX lines of the instructions that no warp reached.
    """

    warp_instructions: int
    seconds: float
    ctas: int
    opcodes: Counter[str]
    work: Counter[str]
    covered: float = 1.0
    missed: frozenset[int] = frozenset()


class Grid:
    """Runs the clusters of one launch."""

    def __init__(self, launch: Launch, code: GeneratedKernel) -> None:
        self.launch = launch
        self.code = code
        self.work: Counter[str] = Counter()
        self._rng = random.Random(launch.mode.seed)
        self._active: list[ClusterRun] = []
        self._together = _together(launch)

    def run(self) -> LaunchStats:
        """Run all clusters: a few at a time, and more when the active ones wait for others.

        Raises:
            KernelFault: the kernel faulted, is deadlocked, or exceeds the limit of blocks.
        """
        begin = time.perf_counter()
        for name, data in self.launch.static.globals:
            self.launch.memory.add(name, data)
        ctas = 0
        try:
            with np.errstate(all="ignore"):
                while self._active or self.launch.waiting:
                    ctas += self._round()
        except KernelFault:
            for c in self._active:
                self._report_races(c)
            self._report_global_races()
            raise
        self._report_global_races()
        return self._stats(time.perf_counter() - begin, ctas)

    def _start_next(self) -> None:
        """Start the next cluster of the grid."""
        launch = self.launch
        x, y, z = launch.first_cta(launch.waiting.pop(0))
        sx, sy, sz = launch.cluster
        ids = [(x + i, y + j, z + k) for k in range(sz) for j in range(sy) for i in range(sx)]
        self._active.append(ClusterRun(launch, self.code, ids, self._rng))

    def _round(self) -> int:
        """Give every active cluster a turn; return the number of CTAs that finished."""
        launch, active = self.launch, self._active
        while launch.waiting and len(active) < self._together:
            self._start_next()
        if sum(launch.executed) > launch.limit:
            text = f"more than {launch.limit} blocks of instructions executed: an endless loop?"
            raise KernelFault(Finding("runaway", text, active[0].gangs()[0].place(0)))
        moved = [c.step() for c in list(active)]
        over = [c for c in active if c.done]
        for c in over:
            c.finish()
            self.work.update(c.cluster.work)
            self._report_races(c)
            active.remove(c)
        if not over and not any(moved):
            self._wake()
        return sum(len(c.cluster.ctas) for c in over)

    def _wake(self) -> None:
        """Start one more cluster when no active one can continue, as they may poll for its results.

        Raises:
            KernelFault: no gang polls, or no cluster can be started: this is a deadlock.
        """
        active = self._active
        if not self.launch.waiting or len(active) >= RESIDENT:
            raise active[0].deadlock()
        if not any(g.polling for c in active for g in c.gangs()):
            raise active[0].deadlock()
        for c in active:
            c.stalled = 0
        self._start_next()

    def _report_races(self, c: ClusterRun) -> None:
        """Add the races of a cluster to the findings."""
        launch, race = self.launch, c.cluster.race
        if race is None:
            return
        for key, conflict in race.conflicts.items():
            (other, a), (who, b) = conflict.first, conflict.second
            first = f"{c.with_role(other) or 'nobody'}" + (f" at PTX line {a}" if a else "")
            source = launch.source(a)
            first += f" ({source})" if source else ""
            text = f"{conflict.text}: {c.with_role(who)} against {first}; {conflict.where}"
            at = Place(c.cluster.ids[c.rank_of(who)], (), "", b, launch.source(b))
            launch.note(Finding(conflict.kind, text, at, "error", race.counts[key]))

    def _report_global_races(self) -> None:
        """Add the races on global memory to the findings."""
        launch = self.launch
        for key, conflict in launch.races.conflicts.items():
            (other, a), (who, b) = conflict.first, conflict.second
            first = other + (f" at PTX line {a}" if a else "")
            source = launch.source(a)
            first += f" ({source})" if source else ""
            text = f"global memory: {conflict.text}: {who} against {first}; {conflict.where}"
            at = Place(conflict.cta, (), "", b, launch.source(b))
            launch.note(Finding(conflict.kind, text, at, "error", launch.races.counts[key]))
        launch.races.conflicts.clear()
        launch.races.counts.clear()

    def _stats(self, seconds: float, ctas: int) -> LaunchStats:
        """Return the counts of what was executed."""
        ops: Counter[str] = Counter()
        missed: list[int] = []
        blocks = self.launch.kernel.blocks
        for block, n in zip(blocks, self.launch.executed, strict=True):
            for c in block:
                if n:
                    ops[c.op] += n
                elif c.line:  # leave out the return that the parser adds at the end
                    missed.append(c.line)
        covered = 1 - len(missed) / sum(len(block) for block in blocks)
        total = sum(ops.values())
        return LaunchStats(total, seconds, ctas, ops, self.work, covered, frozenset(missed))


def _together(launch: Launch) -> int:
    """Return how many clusters run at a time.

    It is one if the kernel uses cluster launch control, so that clusters are left for the running
    one to take over. In the adversarial mode it depends on the seed instead.
    """
    ops = (c.parts[0] for c in launch.kernel.instructions())
    alone = "clusterlaunchcontrol" in ops and not launch.mode.late
    return 1 if alone else launch.mode.together
