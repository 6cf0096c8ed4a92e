"""Model mbarriers, named barriers and the cluster barrier.

If races are watched, an arrival releases knowledge and a wait acquires it; see `knowledge`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from attnkit.emulator.faults import Trap
from attnkit.emulator.machine.knowledge import Knowledge, joined

MAX_TX = (1 << 20) - 1  # PTX ISA, "Contents of the mbarrier object"
MAX_COUNT = (1 << 20) - 1


@dataclass(eq=False)
class MBarrier:
    """Models an mbarrier object (PTX ISA, "mbarrier").

    A phase completes when no arrivals are pending and the transaction count is zero.

    Attributes:
        offset: its address in shared memory.
        count, pending: arrivals that a phase needs, and how many of them are missing.
        line: PTX line that initialised it.
        tx: the transaction count, in bytes.
        phase: parity of the current phase, 0 or 1.
        flips: number of phases that have completed.
        released: knowledge that arrivals in this and earlier phases release, if races are watched.
        done: knowledge that a wait for the last completed phase acquires.
        initialised: (agent, time) of its initialisation, if races are watched.
        seen: (agent, time, PTX line) of each wait that has seen the last completed phase, if races
            are watched.
        check_seen: reports those of them that the phase which completes now may have overtaken.
    """

    offset: int
    count: int
    line: int
    name: str
    pending: int = -1
    tx: int = 0
    phase: int = 0
    flips: int = 0
    released: Knowledge | None = None
    done: Knowledge | None = None
    initialised: tuple[int, int] | None = None
    seen: list[tuple[int, int, int]] = field(default_factory=list)
    check_seen: Callable[[MBarrier], None] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_COUNT:
            raise Trap("barrier", f"{self.name}: count {self.count} is not in 1..{MAX_COUNT}")
        self.pending = self.count

    def release(self, knowledge: Knowledge | None) -> None:
        """Add `knowledge` to what a wait for the current phase acquires."""
        if knowledge is not None:
            self.released = joined(self.released, knowledge)

    def arrive(self, n: int) -> None:
        """Count `n` arrivals; complete the phase if it needs no more arrivals and no bytes."""
        self.pending -= n
        if self.pending < 0:
            raise Trap("barrier", f"more arrivals than expected on {self}")
        self._complete()

    def expect(self, tx: int) -> None:
        """Add `tx` bytes to the transaction count (expect-tx); negative bytes are a complete-tx."""
        self.tx += tx
        if not -MAX_TX <= self.tx <= MAX_TX:
            raise Trap("barrier", f"transaction count out of range on {self}")
        self._complete()

    def _complete(self) -> None:
        """Complete the phase if no arrivals and no bytes are missing."""
        if self.pending == 0 and self.tx == 0:
            if self.check_seen is not None:
                self.check_seen(self)
                self.seen = []
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
class Released:
    """Holds what the arrivals in one generation of a barrier release, if races are watched."""

    knowledge: Knowledge | None = None

    def add(self, knowledge: Knowledge | None) -> None:
        """Add the knowledge that one arrival releases."""
        if knowledge is not None:
            self.knowledge = joined(self.knowledge, knowledge)


@dataclass(eq=False)
class NamedBarrier:
    """Models a barrier of bar.sync and bar.arrive (PTX ISA, bar), which counts whole warps.

    Attributes:
        threads: number of threads that the current generation expects.
        arrived: number of threads that have arrived in the current generation.
        generation: number of times that the barrier has completed.
        waiting: numbers of the warps that have arrived in the current generation.
        released: what arrivals in the current generation release. A gang that waits holds on to it.
    """

    number: int
    threads: int = 0
    name: str = ""
    arrived: int = 0
    generation: int = 0
    waiting: list[int] = field(default_factory=list)
    released: Released = field(default_factory=Released)

    def arrive(self, lanes: int, threads: int, warps: tuple[int, ...]) -> bool:
        """Count `lanes` of `threads` expected arrivals; return whether the barrier completes."""
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
            self.released = Released()
            return True
        return False

    def __str__(self) -> str:
        name = f" {self.name}" if self.name else ""
        return (
            f"barrier {self.number}{name} ({self.arrived} of {self.threads} threads, "
            f"warps {self.waiting})"
        )


@dataclass(eq=False)
class ClusterBarrier:
    """Models barrier.cluster (PTX ISA), at which all warps of a cluster arrive.

    Attributes:
        warps: number of warps of the cluster.
        arrived: number of warps that have arrived in the current generation.
        generation: number of times that the barrier has completed.
        released: what arrivals in the current generation release.
        done: what arrivals in the last completed generation released. All warps wait for it before
            the next generation completes, as every warp arrives in each.
    """

    warps: int
    arrived: int = 0
    generation: int = 0
    released: Released = field(default_factory=Released)
    done: Released = field(default_factory=Released)

    def arrive(self, n: int) -> None:
        """Count the arrival of `n` warps; complete the barrier if all have arrived."""
        self.arrived += n
        if self.arrived == self.warps:
            self.arrived = 0
            self.generation += 1
            self.done, self.released = self.released, Released()
        elif self.arrived > self.warps:
            raise Trap("barrier", "barrier.cluster: a warp arrives twice in one phase")
