"""Records what the warps of one cluster did, in order: the input of the timeline.

Only with a recorder in the launch are events kept. They name barriers by object and phase, so that
a replay knows what waits for what, whatever the order in which the emulator ran it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from attnkit.emulator.ptx.kernel import PtxKernel

Kind = Literal[
    "block",  # a basic block ended: number of the block
    "arrive",  # at a phase of a barrier
    "wait",  # for a phase of a barrier
    "load",  # a bulk copy to shared memory: bytes, and the phase that it completes
    "store",  # a bulk copy from shared memory: bytes
    "store commit",
    "store wait",  # but for the latest groups: their number
    "product",  # a warpgroup's: FLOP; `what`: whether A is in registers, bytes of operands read
    "product commit",
    "product wait",  # but for the latest groups: their number
    "tensor product",  # into tensor memory: FLOP; `what`: number of CTAs, bytes of operands read
    "tensor commit",  # arrives at a phase of a barrier when earlier products are done
]


class Event(NamedTuple):
    """Records one event at `line` of the PTX.

    `what` is a barrier (or as said at `Kind`), `phase` its phase.
    """

    kind: Kind
    line: int
    amount: float = 0.0
    what: Any = None
    phase: int = 0


@dataclass(eq=False)
class Stream:
    """Holds the events of warps that run together. A stream may begin within another one."""

    cta: tuple[int, int, int]
    rank: int
    warps: tuple[int, ...]
    parent: Stream | None = None
    start: int = 0  # how many of the parent's events come before
    events: list[Event] = field(default_factory=list)

    def add(
        self, kind: Kind, line: int, amount: float = 0.0, what: Any = None, phase: int = 0
    ) -> None:
        """Append an event."""
        self.events.append(Event(kind, line, amount, what, phase))

    def part(self, warps: tuple[int, ...]) -> Stream:
        """Return the stream of warps that leave this one."""
        return Stream(self.cta, self.rank, warps, self, len(self.events))


class Recorder:
    """Keeps the streams of the cluster that holds a CTA, in one launch of a call.

    Attributes:
        cta: the CTA to watch.
        launch: which launch of the call.
        kernel: its kernel, once it ran.
        streams: what was recorded.
    """

    def __init__(self, cta: tuple[int, int, int] = (0, 0, 0), launch: int = 0) -> None:
        self.cta = cta
        self.launch = launch
        self.kernel: PtxKernel | None = None
        self.streams: list[Stream] = []

    def stream(
        self, ids: list[tuple[int, int, int]], rank: int, warps: tuple[int, ...]
    ) -> Stream | None:
        """Return a new stream, if the cluster of CTAs `ids` is the one that is watched."""
        if self.cta not in ids:
            return None
        self.streams.append(Stream(ids[rank], rank, warps))
        return self.streams[-1]

    def part(self, of: Stream | None, warps: tuple[int, ...]) -> Stream | None:
        """Return the stream of warps that leave another."""
        if of is None:
            return None
        self.streams.append(of.part(warps))
        return self.streams[-1]
