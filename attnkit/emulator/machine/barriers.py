"""Model mbarriers, named barriers and the cluster barrier."""

from __future__ import annotations

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
        flips: number of phases that have completed.
        released: knowledge of the agents that arrived in this phase, if races are watched.
        done: knowledge that a wait for the last completed phase hands on.
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
    released: Knowledge | None = None
    done: Knowledge | None = None
    initialised: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_COUNT:
            raise Trap("barrier", f"{self.name}: count {self.count} is not in 1..{MAX_COUNT}")
        self.pending = self.count

    def release(self, knowledge: Knowledge | None) -> None:
        """Hand knowledge to agents that wait for this phase."""
        if knowledge is not None:
            self.released = joined(self.released, knowledge)

    def arrive(self, n: int) -> None:
        """Count `n` arrivals, and complete the phase if it was waiting for them alone."""
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
        """Complete the phase if no arrivals and no bytes are missing."""
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
    """Models a barrier of bar.sync and bar.arrive (PTX ISA, bar), which counts whole warps."""

    number: int
    threads: int = 0
    name: str = ""
    arrived: int = 0
    generation: int = 0
    waiting: list[int] = field(default_factory=list)
    clocks: dict[int, Knowledge] = field(default_factory=dict)

    def arrive(self, lanes: int, threads: int, warps: tuple[int, ...]) -> bool:
        """Count `lanes` of `threads` expected threads; return whether the barrier completes."""
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

    def release(self, knowledge: Knowledge | None) -> None:
        """Hand knowledge to agents that wait for this generation."""
        if knowledge is not None:
            accumulate(self.clocks, self.generation, knowledge)

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
    clocks: dict[int, Knowledge] = field(default_factory=dict)

    def arrive(self, n: int) -> None:
        """Count the arrival of `n` warps."""
        self.arrived += n
        if self.arrived == self.warps:
            self.arrived = 0
            self.generation += 1
        elif self.arrived > self.warps:
            raise Trap("barrier", "barrier.cluster: a warp arrives twice in one phase")


def accumulate(clocks: dict[int, Knowledge], generation: int, knowledge: Knowledge) -> None:
    """Add to what a barrier hands on for one of its generations."""
    both = joined(clocks.get(generation), knowledge)
    assert both is not None
    clocks[generation] = both
