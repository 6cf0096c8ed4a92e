"""Models mbarriers, named barriers and the cluster barrier."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnkit.emulator.faults import Trap
from attnkit.emulator.machine.race_detector import Clock, Vector, joined

MAX_TX = (1 << 20) - 1  # PTX ISA, "Contents of the mbarrier object"
MAX_COUNT = (1 << 20) - 1


@dataclass(eq=False)
class MBarrier:
    """Models an mbarrier object (PTX ISA, "mbarrier").

    A phase completes when no arrivals are pending and the transaction count is zero.

    Attributes:
        offset: its address in shared memory.
        count: arrivals that a phase needs; `pending`: those still missing.
        line: the line of the PTX that initialised it.
        tx: the transaction count, in bytes.
        flips: how many phases have completed.
        released: what those who arrived in this phase know, if races are watched.
        done: what those who wait for the last completed phase learn.
        initialised: (agent, time) of its initialisation.
    """

    offset: int
    count: int
    line: int
    name: str
    pending: int = -1
    tx: int = 0
    phase: int = 0
    flips: int = 0
    released: tuple[Vector, Vector] | None = None
    done: tuple[Vector, Vector] | None = None
    initialised: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_COUNT:
            raise Trap("barrier", f"{self.name}: count {self.count} is not in 1..{MAX_COUNT}")
        self.pending = self.count

    def release(self, who: Clock | None, relaxed: bool = False) -> None:
        """Add what `who` knows to what a waiter will learn."""
        if who is not None:
            self.released = joined(self.released, who.handed_on(relaxed))

    def arrive(self, n: int) -> None:
        """Count `n` arrivals."""
        self.pending -= n
        if self.pending < 0:
            raise Trap("barrier", f"more arrivals than expected on {self}")
        self._complete()

    def expect(self, tx: int) -> None:
        """Add `tx` bytes to the transaction count; a negative number completes bytes."""
        self.tx += tx
        if not -MAX_TX <= self.tx <= MAX_TX:
            raise Trap("barrier", f"transaction count out of range on {self}")
        self._complete()

    def _complete(self) -> None:
        """Complete the phase, if nothing is missing."""
        if self.pending == 0 and self.tx == 0:
            self.done = self.released
            self.phase ^= 1
            self.flips += 1
            self.pending = self.count

    def __str__(self) -> str:
        return (
            f"{self.name} (phase {self.phase}, pending {self.pending} of {self.count}, "
            f"tx {self.tx}, completed {self.flips} times)"
        )


@dataclass(eq=False)
class NamedBarrier:
    """Models a barrier of bar.sync and bar.arrive (PTX ISA, bar); it counts threads, in warps."""

    number: int
    threads: int = 0
    name: str = ""
    arrived: int = 0
    generation: int = 0
    waiting: list[int] = field(default_factory=list)
    clocks: dict[int, tuple[Vector, Vector]] = field(default_factory=dict)

    def arrive(self, lanes: int, threads: int, warps: tuple[int, ...]) -> bool:
        """Count `lanes` more threads of `threads`; return whether that completes the barrier."""
        if threads % 32 or threads <= 0:
            raise Trap("barrier", f"barrier {self.number}: {threads} threads is no multiple of 32")
        if self.arrived and self.threads != threads:
            raise Trap(
                "barrier",
                f"barrier {self.number}: thread counts {self.threads} and {threads} disagree",
            )
        self.threads = threads
        self.arrived += lanes
        self.waiting += warps
        if self.arrived > threads:
            raise Trap("barrier", f"barrier {self.number}: {self.arrived} arrivals of {threads}")
        if self.arrived == threads:
            self.arrived = 0
            self.waiting = []
            self.generation += 1
            return True
        return False

    def release(self, who: Clock | None) -> None:
        """Add what `who` knows to what those who wait will learn."""
        if who is not None:
            accumulate(self.clocks, self.generation, who)

    def __str__(self) -> str:
        name = f" {self.name}" if self.name else ""
        return (
            f"barrier {self.number}{name} ({self.arrived} of {self.threads} threads, "
            f"warps {self.waiting})"
        )


@dataclass(eq=False)
class ClusterBarrier:
    """Models barrier.cluster (PTX ISA) over all warps of a cluster."""

    warps: int
    arrived: int = 0
    generation: int = 0
    clocks: dict[int, tuple[Vector, Vector]] = field(default_factory=dict)

    def arrive(self, n: int) -> None:
        """Count the arrival of `n` warps."""
        self.arrived += n
        if self.arrived == self.warps:
            self.arrived = 0
            self.generation += 1
        elif self.arrived > self.warps:
            raise Trap("barrier", "barrier.cluster: a warp arrives twice in one phase")


def accumulate(clocks: dict[int, Any], generation: int, who: Clock, relaxed: bool = False) -> None:
    """Join the clock of `who` into what generation `generation` of a barrier hands on."""
    knowledge = joined(clocks.get(generation), who.handed_on(relaxed))
    if knowledge is not None:
        clocks[generation] = knowledge
