"""Run a cluster: let gangs take turns, complete asynchronous work, check the state at exit.

A gang is a set of warps of one CTA that execute each instruction together.
"""

from __future__ import annotations

import random
import re

from attnkit.emulator.execution.generated_kernel import GeneratedKernel
from attnkit.emulator.execution.scheduled_gang import ScheduledGang
from attnkit.emulator.faults import Finding, KernelFault, Place
from attnkit.emulator.machine.cluster import Cluster
from attnkit.emulator.machine.cta import Cta
from attnkit.emulator.machine.launch import Launch

_AGENT = re.compile(r"warp (\d+)\.(\d+)")  # matches the `agent_name` of a gang
STALLED_ROUNDS = 64  # rounds in which gangs only poll, until the cluster counts as deadlocked


class ClusterRun:
    """Runs the gangs of one cluster.

    Attributes:
        cluster: state of the cluster.
        stalled: number of consecutive rounds in which no gang did more than poll.
    """

    def __init__(
        self,
        launch: Launch,
        code: GeneratedKernel,
        ids: list[tuple[int, int, int]],
        rng: random.Random,
    ) -> None:
        self.launch = launch
        self.cluster = Cluster(launch, ids, rng)
        self.stalled = 0
        self._gangs: list[list[ScheduledGang]] = [[] for _ in ids]  # gangs by rank of their CTA
        self._finished: list[list[ScheduledGang]] = [[] for _ in ids]
        warps = self.cluster.warps
        width = 1 if launch.mode.race or launch.mode.late else 4
        for cta, gangs in zip(self.cluster.ctas, self._gangs, strict=True):
            for w in range(0, warps, width):
                members = tuple(range(w, min(w + width, warps)))
                gangs.append(ScheduledGang.start(self.cluster, cta, members, code, gangs))

    def gangs(self) -> list[ScheduledGang]:
        """Return the gangs that have not exited, in order of the ranks of their CTAs."""
        return [g for gangs in self._gangs for g in gangs]

    def step(self) -> bool:
        """Let every gang run until it waits; return whether the cluster may still make progress.

        If no gang could run, complete one asynchronous operation. If there is none either, gangs
        that poll may still see a change by another cluster, for up to `STALLED_ROUNDS` rounds.
        """
        cluster = self.cluster
        before, moved = cluster.events, False
        order = self.gangs()
        if self.launch.mode.late:
            cluster.rng.shuffle(order)
        for gang in order:
            cluster.actor = gang.cta.rank
            ran = gang.run()
            moved |= ran and not gang.polling
        for gangs, finished in zip(self._gangs, self._finished, strict=True):
            finished += [g for g in gangs if not g.groups]
            gangs[:] = [g for g in gangs if g.groups]
        if moved or cluster.events != before:
            self.stalled = 0
            return True
        if cluster.release_one():
            return True
        self.stalled += 1
        return self.stalled < STALLED_ROUNDS and any(g.polling for g in self.gangs())

    @property
    def done(self) -> bool:
        """Return whether every gang has exited."""
        return not any(self._gangs)

    def finish(self) -> None:
        """Complete the remaining asynchronous work, and report what the kernel left undone."""
        while self.cluster.release_one():
            pass
        for cta in self.cluster.ctas:
            for gang in self._finished[cta.rank]:
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
                    # Expected bytes that nobody copies are harmless: a producer announces them for
                    # a stage that it does not fill. Bytes that nobody expected are an error.
                    severity = "warning" if b.tx > 0 else "error"
                    at = self._finished[cta.rank][0].place(b.line)
                    self.launch.note(Finding("unfinished", text, at, severity))

    def _uneven_products(self, cta: Cta) -> None:
        """Report warpgroups whose warps executed different numbers of wgmma instructions."""
        for first in sorted({w // 4 * 4 for w in cta.products}):
            counts = [cta.products[w] for w in range(first, first + 4)]
            if len(set(counts)) > 1:
                text = f"wgmma executed {counts} times by warps {first} to {first + 3}"
                self.launch.note(Finding("convergence", text, Place(cta.ctaid, (first,))))

    def _uneven_allocations(self, cta: Cta) -> None:
        """Report a CTA whose allocations of cta_group::2 differ from those of its peer CTA."""
        ctas = self.cluster.ctas
        peer = ctas[cta.rank ^ 1] if cta.rank ^ 1 < len(ctas) else None
        mine = cta.tmem.collective
        if mine and (peer is None or peer.tmem.collective != mine):
            other = peer.tmem.collective if peer else "no peer"
            text = f"cta_group::2 with (operation, column, columns) {mine}; peer CTA: {other}"
            self.launch.note(Finding("tensor-memory", text, Place(cta.ctaid)))

    def _unfinished_bulk(self, cta: Cta) -> None:
        """Report bulk stores for which no thread waited, and complete them."""
        self.cluster.actor = cta.rank
        for thread, state in cta.bulk.items():
            left = [g for g in [*state.committed, state.current] if g.lines]
            for group in left:
                how = "waited for" if group is not state.current else "committed"
                text = f"bulk store not {how} at exit, by thread {thread}"
                gang = next(g for g in self._finished[cta.rank] if thread // 32 in g.warps)
                place = gang.place(group.lines[0])
                self.launch.note(Finding("unfinished", text, place))
                for work in group.work:
                    work()

    # ---- names of the agents of the race detector
    def rank_of(self, agent: str) -> int:
        """Return the rank of the CTA in an agent's name, or 0 if the name has none."""
        match = _AGENT.search(agent)
        return int(match.group(1)) if match else 0

    def with_role(self, agent: str) -> str:
        """Return an agent's name, with the rank of its CTA and the role of its warp added."""

        def worded(m: re.Match[str]) -> str:
            rank, warp = int(m.group(1)), int(m.group(2))
            gangs = (*self._gangs[rank], *self._finished[rank])
            gang = next(g for g in gangs if warp in g.warps)
            role = gang.place(0).role
            where = f" of CTA rank {rank}" if len(self.cluster.ctas) > 1 else ""
            return f"warp {warp}{where}" + (f" ({role})" if role else "")

        return _AGENT.sub(worded, agent)

    def deadlock(self) -> KernelFault:
        """Return the fault to raise for a cluster in which no warp can continue."""
        lines = []
        for g in self.gangs():
            for pc in sorted(g.groups):
                lines.append(f"    {g.place(g.block_line(pc))}: {g.why or 'ready'}")
        text = "all live warps wait:\n" + "\n".join(lines)
        return KernelFault(Finding("deadlock", text, self.gangs()[0].place(0)))
