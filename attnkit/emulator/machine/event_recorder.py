"""Record what the warps of one cluster did, in order, as input of the timeline.

Events are recorded only if the launch has a recorder. They refer to barriers by object and phase,
so that a replay knows what waits for what, in whatever order the emulator ran it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from attnkit.emulator.ptx.kernel import PtxKernel

Kind = Literal[
    "block",  # a basic block ended; amount: its number
    "arrive",  # arrival at a phase of a barrier
    "wait",  # wait for a phase of a barrier
    "load",  # bulk copy to shared memory; amount: bytes; phase: the phase that it completes
    "store",  # bulk copy from shared memory; amount: bytes
    "store commit",
    "store wait",  # for all but the latest groups; amount: how many those are
    "product",  # of a warpgroup; amount: FLOP; what: whether A is in registers, operand bytes
    "product commit",
    "product wait",  # for all but the latest groups; amount: how many those are
    "tensor product",  # into tensor memory; amount: FLOP; what: number of CTAs, operand bytes
    "tensor commit",  # arrives at a phase of a barrier once earlier products are complete
]


class Event(NamedTuple):
    """Records one event at a PTX line.

    `what` is a barrier unless `Kind` says otherwise; `phase` is a phase of that barrier.
    """

    kind: Kind
    line: int
    amount: float = 0.0
    what: Any = None
    phase: int = 0


@dataclass(eq=False)
class Stream:
    """Holds the events of warps that run together. A stream may branch off from another one."""

    cta: tuple[int, int, int]
    rank: int
    warps: tuple[int, ...]
    parent: Stream | None = None
    start: int = 0  # number of the parent's events that come before
    events: list[Event] = field(default_factory=list)

    def add(
        self, kind: Kind, line: int, amount: float = 0.0, what: Any = None, phase: int = 0
    ) -> None:
        """Append an event."""
        self.events.append(Event(kind, line, amount, what, phase))

    def part(self, warps: tuple[int, ...]) -> Stream:
        """Create the stream of warps that split off from the warps of this stream."""
        return Stream(self.cta, self.rank, warps, self, len(self.events))


class Recorder:
    """Records the streams of one cluster in one launch of a call.

    Attributes:
        cta: a CTA; its cluster is recorded.
        launch: index of the launch within the call.
        kernel: kernel of that launch, once it has run.
        streams: the streams that were recorded.
    """

    def __init__(self, cta: tuple[int, int, int] = (0, 0, 0), launch: int = 0) -> None:
        self.cta = cta
        self.launch = launch
        self.kernel: PtxKernel | None = None
        self.streams: list[Stream] = []

    def stream(
        self, ids: list[tuple[int, int, int]], rank: int, warps: tuple[int, ...]
    ) -> Stream | None:
        """Create a stream for warps of CTA ids[rank]; None if the cluster is not recorded."""
        if self.cta not in ids:
            return None
        self.streams.append(Stream(ids[rank], rank, warps))
        return self.streams[-1]

    def part(self, of: Stream | None, warps: tuple[int, ...]) -> Stream | None:
        """Create the stream of warps that split off from those of `of`; None if `of` is None."""
        if of is None:
            return None
        self.streams.append(of.part(warps))
        return self.streams[-1]
