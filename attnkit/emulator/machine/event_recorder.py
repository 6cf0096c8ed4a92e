"""Record the events of the warps of one cluster, in program order, as input of the timeline.

Events are recorded only if the launch has a recorder. They refer to barriers by object and phase,
so that a replay knows which arrivals end a wait, whatever the order in which the emulator ran them.
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
    "store wait",  # wait for all but the latest groups; amount: number of the latest groups
    "product",  # wgmma; amount: FLOP; what: whether A is in registers, operand bytes
    "product commit",
    "product wait",  # wait for all but the latest groups; amount: number of the latest groups
    "tensor product",  # into tensor memory; amount: FLOP; what: number of CTAs, operand bytes
    "tensor commit",  # arrival at a phase of a barrier when earlier tensor products are complete
]


class Event(NamedTuple):
    """Describes one event at a PTX line.

    `what` is a barrier unless `Kind` says otherwise; `phase` is a phase of that barrier.
    """

    kind: Kind
    line: int
    amount: float = 0.0
    what: Any = None
    phase: int = 0


@dataclass(eq=False)
class Stream:
    """Holds the events of warps that run in lockstep.

    `parent` is the stream of the gang from which these warps split off, or None.
    """

    cta: tuple[int, int, int]
    rank: int
    warps: tuple[int, ...]
    parent: Stream | None = None
    start: int = 0  # number of the parent's events before the split
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
        cta: position in the grid of a CTA of the cluster to record.
        launch: index of the launch to record within the call.
        kernel: kernel of that launch; None until the launch starts.
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
