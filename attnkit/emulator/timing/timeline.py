"""Predict the time of a kernel, and what each set of warps and each unit does at each clock."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from statistics import median
from typing import Any

from attnkit.emulator.api import run
from attnkit.emulator.execution.grid import LaunchStats
from attnkit.emulator.launchables import Launchable
from attnkit.emulator.machine.event_recorder import Recorder
from attnkit.emulator.ptx.kernel import PtxKernel
from attnkit.emulator.ptx.warp_roles import role_of
from attnkit.emulator.timing.cycles import rates_of
from attnkit.emulator.timing.replay import ClusterReplay, Constants, Interval, Process
from attnkit.errors import ArgumentError, UnsupportedError

TURNS = 8  # fewest iterations of a loop for which a period is reported


@dataclass(frozen=True)
class TimelineRow:
    """Holds what one set of warps, or one unit, did over time.

    Attributes:
        marks: (number of a basic block of the PTX, clock at which it ended).
    """

    name: str
    warps: tuple[int, ...]
    intervals: tuple[Interval, ...]
    marks: tuple[tuple[int, float], ...] = ()

    def clocks(self, kind: str) -> float:
        """Return the total clocks of a kind of intervals: "code", "issue", "wait" or "busy"."""
        return sum(i.clocks for i in self.intervals if i.kind == kind)


@dataclass(frozen=True)
class Timeline:
    """Holds the predicted clocks of one CTA on its SM, without the latency of the launch.

    Attributes:
        kernel: name of the kernel.
        arch: architecture, such as "sm_90a".
        clocks: time from the first instruction to the last.
        warps: rows of the sets of warps; a set is the warps that ran together.
        tensor, copies: rows of the tensor cores and of the bulk copies.
        units: clocks for which each unit was busy.
        stats: counts of what the whole launch executed.
    """

    kernel: str
    arch: str
    clocks: float
    warps: tuple[TimelineRow, ...]
    tensor: TimelineRow
    copies: TimelineRow
    units: dict[str, float]
    stats: LaunchStats

    @property
    def limit(self) -> str:
        """Return the name of the unit that was busy longest."""
        return max(self.units, key=lambda u: self.units[u], default="")

    @property
    def period(self) -> float:
        """Return the median clocks of an iteration of the busiest loop; 0 if there is no loop."""
        row = max(self.warps, key=lambda r: r.clocks("code") + r.clocks("issue"))
        return row_period(row)

    @property
    def bubbles(self) -> tuple[Interval, ...]:
        """Return the idle intervals of the tensor cores between the first and the last product."""
        work = self.tensor.intervals
        gaps = [Interval(a.end, b.start, "wait", b.text) for a, b in itertools.pairwise(work)]
        return tuple(g for g in gaps if g.clocks > 0.5)

    def __str__(self) -> str:
        lines = [f"{self.arch}: {self.clocks:.0f} clocks predicted for one CTA"]
        if self.period:
            lines.append(f"a turn of the busiest loop: {self.period:.0f} clocks")
        share = ", ".join(
            f"{u} {100 * x / self.clocks:.0f} %"
            for u, x in sorted(self.units.items(), key=lambda ux: -ux[1])
        )
        lines.append(f"limit: {self.limit} ({share})")
        idle = sum(b.clocks for b in self.bubbles)
        if self.tensor.intervals:
            lines.append(f"tensor cores idle between products: {idle:.0f} clocks")
        for row in self.warps:
            parts = ", ".join(f"{k} {row.clocks(k):.0f}" for k in ("code", "issue", "wait"))
            lines.append(f"{row.name}: {parts}")
            lines += [f"    {clocks:8.0f} waiting for {why}" for why, clocks in _waits(row)[:4]]
        return "\n".join(lines)


def row_period(row: TimelineRow) -> float:
    """Return the median clocks between ends of the most frequent block; 0 if it ends too rarely."""
    ends: dict[int, list[float]] = {}
    for block, at in row.marks:
        ends.setdefault(block, []).append(at)
    most = max((len(x) for x in ends.values()), default=0)
    if most < TURNS:
        return 0.0
    times = next(x for x in ends.values() if len(x) == most)
    return median(b - a for a, b in itertools.pairwise(times))


def _waits(row: TimelineRow) -> list[tuple[str, float]]:
    """Return (reason of a wait, total clocks), longest first."""
    total: dict[str, float] = {}
    for i in row.intervals:
        if i.kind == "wait":
            total[i.text] = total.get(i.text, 0.0) + i.clocks
    return sorted(total.items(), key=lambda x: -x[1])


def timeline(
    target: Launchable,
    *args: Any,
    cta: tuple[int, int, int] = (0, 0, 0),
    launch: int = 0,
    constants: Constants | None = None,
) -> Timeline:
    """Run a kernel in the eager mode, and predict the time of one CTA.

    The kernel writes its results to the arrays in `args`.

    Args:
        target: an `Executable` or `Ptx`.
        args: as for `run`.
        cta: index of the CTA; its cluster is modelled.
        launch: index of the launch within the call.
        constants: constants of the model; None for those of Hopper.

    Raises:
        ArgumentError: there is no such launch or CTA.
        UnsupportedError: the kernel's architecture is not modelled.
        KernelFault: the kernel faulted.
    """
    recorder = Recorder(cta, launch)
    report = run(target, *args, recorder=recorder)
    kernel = recorder.kernel
    if kernel is None:
        raise ArgumentError(f"launch={launch}: the call makes {len(report.launches)}")
    if not kernel.arch.startswith(("sm_90", "sm_100")):
        raise UnsupportedError(f"timeline for {kernel.arch}: only sm_90 and sm_100 are modelled")
    if not recorder.streams:
        raise ArgumentError(f"cta={cta}: no such CTA in the grid of the launch")
    replay = ClusterReplay(
        recorder.streams, kernel, rates_of(kernel.arch), constants or Constants()
    )
    replay.run()
    ids = [s.cta for s in recorder.streams]
    rank = next(s.rank for s in recorder.streams if s.cta == cta)
    rows = [
        TimelineRow(_role(target, kernel, p), p.stream.warps, tuple(p.intervals), tuple(p.marks))
        for p in replay.processes
        if p.stream.rank == rank and p.intervals
    ]
    return Timeline(
        kernel.name,
        kernel.arch,
        replay.now,
        tuple(sorted(rows, key=lambda r: r.warps)),
        TimelineRow("tensor cores", (), tuple(replay.pipe_work[rank])),
        TimelineRow("copies", (), tuple(replay.copy_work[rank])),
        {u: x / len(set(ids)) for u, x in replay.units.items()},
        report.launches[launch],
    )


def _role(target: Launchable, kernel: PtxKernel, p: Process) -> str:
    """Return the name of a row: its warps and their role."""
    warps = set(p.stream.warps)
    words = [word for word, members in target.roles.items() if warps <= set(members)]
    role = words[0] if words else role_of(kernel, {b for b, _ in p.marks})
    first, last = p.stream.warps[0], p.stream.warps[-1]
    which = f"warp {first}" if first == last else f"warps {first}-{last}"
    return f"{which} ({role})" if role else which
