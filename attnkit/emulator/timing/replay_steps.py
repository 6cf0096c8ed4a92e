"""Cut recorded streams into steps; a step is straight-line code and the event after it.

An event belongs to a PTX line of its basic block. The code up to that line is a segment, whose time
`instruction_schedule` computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from attnkit.emulator.machine.event_recorder import Event, Stream
from attnkit.emulator.ptx.kernel import Instr, PtxKernel
from attnkit.emulator.timing.cycles import Rates
from attnkit.emulator.timing.instruction_schedule import KernelFacts, Pace, Segment, segment

_EVENTFUL = ("mbarrier", "bar", "barrier", "cp", "wgmma", "tcgen05", "st")


class Step(NamedTuple):
    """Holds straight-line code, and the event after it.

    Attributes:
        seen: number of events of the stream up to and including this step.
        block: basic block that ends with the step, or -1.
    """

    code: Segment | None
    event: Event | None
    seen: int
    block: int


class Steps:
    """Converts the recorded streams of one kernel to steps."""

    def __init__(self, kernel: PtxKernel, rates: Rates, contended: Pace) -> None:
        self.kernel = kernel
        self.rates = rates
        self.contended = contended
        self.facts = KernelFacts.of(kernel)
        self._segments: dict[tuple[int, int, int], Segment] = {}

    def of(self, stream: Stream) -> Iterator[Step]:
        """Yield the steps of a stream in order."""
        pending: list[tuple[int, Event]] = []
        for seen, event in enumerate(stream.events, 1):
            if event.kind == "block":
                yield from self._block(int(event.amount), pending, seen)
                pending = []
            else:
                pending.append((seen, event))
        for seen, event in pending:
            yield Step(None, event, seen, -1)

    def _block(self, number: int, events: list[tuple[int, Event]], last: int) -> Iterator[Step]:
        """Yield the steps of one execution of a basic block."""
        code = self.kernel.blocks[number]
        at = 0
        for seen, event in events:
            stop = _position(code, event.line, at)
            yield Step(self._segment(number, at, stop), event, seen, -1)
            at = stop
        yield Step(self._segment(number, at, len(code)), None, last, number)

    def _segment(self, block: int, start: int, stop: int) -> Segment | None:
        """Return the time of a part of a basic block, or None if the part is empty."""
        if start >= stop:
            return None
        key = (block, start, stop)
        if key not in self._segments:
            code = self.kernel.blocks[block][start:stop]
            self._segments[key] = segment(code, self.rates, self.facts, self.contended)
        return self._segments[key]


def _position(code: list[Instr], line: int, at: int) -> int:
    """Return the index after the instruction at `line` that caused an event.

    Return `at` if the instruction is not in this block.
    """
    for i in range(max(at - 1, 0), len(code)):
        if code[i].line == line and code[i].parts[0] in _EVENTFUL:
            return max(i + 1, at)
    return at
