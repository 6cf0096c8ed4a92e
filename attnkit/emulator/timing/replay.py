"""Replay recorded events in a model of time: the units, queues and waits of an SM.

Each set of warps goes through its steps. Straight-line code takes the time of its schedule, and
longer if warps on the same part of the SM need the same unit, or while tensor cores are busy.
Matrix products queue for the tensor cores and for shared memory, which provides their operands and
also serves loads, stores and copies. Copies queue for the memory system. A wait at a barrier ends
when all arrivals and copies of its phase are done.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from attnkit.emulator.faults import EmulatorError
from attnkit.emulator.machine.barriers import MBarrier, NamedBarrier
from attnkit.emulator.machine.event_recorder import Event, Stream
from attnkit.emulator.ptx.kernel import PtxKernel
from attnkit.emulator.timing.cycles import Rates
from attnkit.emulator.timing.instruction_schedule import PARTS, Pace, Segment
from attnkit.emulator.timing.replay_steps import Step, Steps
from attnkit.emulator.timing.shared_memory_port import SharedMemoryPort


@dataclass(frozen=True)
class Constants:
    """Holds constants of the model that no data sheet gives, in clocks unless said otherwise.

    Most were measured on an H200 (docs/emulator.md).

    Attributes:
        step, hold: pace of instructions while tensor cores access accumulators in the register file
            and take a share of its bandwidth, see `Pace`. Fitted to four kernels.
        product_issue: time that a warp takes to issue a product with operands in shared memory. A
            product with A in registers takes as long as the product itself. Both measured by
            reading the clock in a kernel.
        product_latency: from the end of a product to the end of a wait for it. Measured in the same
            way.
        barrier: from the last arrival at a barrier to the next instruction of a warp that waits.
            Measured in the same way.
        copy_latency: from the issue of a copy from global memory to its arrival. Assumed.
        copy_bytes: bytes per clock and SM from the L2 cache when all SMs read: 5120 over 132 SMs.
            The A100's whitepaper gives 5120; assumed to hold for Hopper.
    """

    step: float = 3.5
    hold: float = 2.0
    product_issue: float = 18.0
    product_latency: float = 60.0
    barrier: float = 30.0
    copy_latency: float = 700.0
    copy_bytes: float = 5120 / 132


@dataclass(frozen=True)
class Interval:
    """Describes what a warp or a unit did from one clock to another."""

    start: float
    end: float
    kind: str  # "code", "issue", "wait" or "busy"
    text: str = ""

    @property
    def clocks(self) -> float:
        """Return the length in clocks."""
        return self.end - self.start


@dataclass(eq=False)
class Process:
    """Holds the state of a set of warps during the replay of its steps."""

    stream: Stream
    steps: Iterator[Step]
    seen: int = 0
    left: float = 0.0  # remaining clocks of the current segment, if it ran alone
    code: Segment | None = None
    event: Event | None = None
    until: float | None = None  # end of the current step, if it is known
    waits: tuple[Any, int] | None = None
    began: float = 0.0
    why: str = ""
    done: bool = False
    after: Step | None = None
    groups: list[float] = field(default_factory=list)  # times at which committed products end
    current: float = 0.0
    stores: list[float] = field(default_factory=list)
    storing: float = 0.0
    intervals: list[Interval] = field(default_factory=list)
    marks: list[tuple[int, float]] = field(default_factory=list)  # (block, when it ended)


class ClusterReplay:
    """Replays one cluster of CTAs, alone on its SMs."""

    def __init__(
        self, streams: list[Stream], kernel: PtxKernel, rates: Rates, constants: Constants
    ) -> None:
        self.rates, self.constants = rates, constants
        steps = Steps(kernel, rates, Pace(constants.step, constants.hold))
        self.processes = [Process(s, steps.of(s)) for s in streams]
        self._of = {id(p.stream): p for p in self.processes}
        self.now = 0.0
        self.steps_taken = 0
        self.pipe: defaultdict[int, float] = defaultdict(float)
        # clock at which the last product that uses the register file ends, by CTA rank
        self.file: defaultdict[int, float] = defaultdict(float)
        self.pipe_work: defaultdict[int, list[Interval]] = defaultdict(list)
        early = kernel.arch.startswith("sm_100")  # products are booked long before they run
        self.shared: defaultdict[int, SharedMemoryPort] = defaultdict(
            lambda: SharedMemoryPort(early)
        )
        self.copies: defaultdict[int, float] = defaultdict(float)
        self.copy_work: defaultdict[int, list[Interval]] = defaultdict(list)
        self.units: defaultdict[str, float] = defaultdict(float)
        self.expected: Counter[tuple[int, int]] = Counter()
        self.complete: dict[tuple[int, int], float] = {}
        self._partial: dict[tuple[int, int], float] = {}
        for s in streams:
            for e in s.events:
                if e.kind in ("arrive", "load", "tensor commit"):
                    self.expected[id(e.what), e.phase] += 1

    # ---- running
    def run(self) -> None:
        """Replay until every warp has finished.

        Raises:
            EmulatorError: warps wait for something that was not recorded.
        """
        while True:
            self._settle()
            if all(p.done for p in self.processes):
                return
            speeds = self._speeds()
            ends = [self.now + p.left / v for p, v in speeds]
            ends += [p.until for p in self.processes if p.until is not None]
            if not ends:
                names = sorted({p.why for p in self.processes if not p.done})
                raise EmulatorError(f"the timeline cannot go on: warps wait for {', '.join(names)}")
            ends += [t for t in self.file.values() if t > self.now]
            then = min(ends)
            for p, v in speeds:
                p.left -= (then - self.now) * v
            self.now = then

    def _settle(self) -> None:
        """Advance every process as far as possible at the current clock, until none can advance."""
        before = -1
        while self.steps_taken != before:
            before = self.steps_taken
            for p in self.processes:
                self._advance(p)

    def _speeds(self) -> list[tuple[Process, float]]:
        """Return the processes that run code, and the speed of each relative to running alone."""
        running = [p for p in self.processes if p.code is not None]
        load: defaultdict[tuple[int, int, str], float] = defaultdict(float)
        for p in running:
            assert p.code is not None
            for unit, clocks in p.code.units.items():
                for w in p.stream.warps:
                    load[p.stream.rank, w % PARTS, unit] += clocks / p.code.clocks
        out = []
        for p in running:
            assert p.code is not None
            keys = {(p.stream.rank, w % PARTS, u) for w in p.stream.warps for u in p.code.units}
            crowd = max((load[k] for k in keys), default=1.0)
            speed = 1 / max(1.0, crowd)
            if self.file[p.stream.rank] > self.now:
                speed = min(speed, p.code.clocks / p.code.contended)
            out.append((p, speed))
        return out

    def _advance(self, p: Process) -> None:
        """Advance `p` as far as possible at the current clock."""
        while not p.done:
            if p.code is not None:
                if p.left > 1e-6:
                    return
                self._note(p, "code")
                for unit, clocks in p.code.units.items():
                    self.units[unit] += clocks * len(p.stream.warps) / PARTS
                self._access(p, p.code.units.get("shared", 0.0) * len(p.stream.warps) / PARTS)
                p.code = None
            if p.event is not None:
                event, p.event = p.event, None
                self._happen(p, event)
            if p.waits is not None:
                at = self.complete.get(p.waits)
                if at is None and self.expected[p.waits]:
                    return
                p.waits = None
                p.until = max(self.now, at or 0.0) + self.constants.barrier
            if p.until is not None:
                if p.until > self.now + 1e-6:
                    return
                self._note(p, "issue" if p.why == "issue" else "wait")
                p.until = None
            if not self._next(p):
                return

    def _next(self, p: Process) -> bool:
        """Fetch the next step; return False if `p` must first wait for its parent stream."""
        parent = p.stream.parent
        if parent is not None and not p.seen and not p.began:
            other = self._of[id(parent)]
            if other.seen < p.stream.start and not other.done:
                p.why = "start"
                return False
        if p.after is not None:
            p.seen = max(p.seen, p.after.seen)
            if p.after.block >= 0:
                p.marks.append((p.after.block, self.now))
        self.steps_taken += 1
        p.after = step = next(p.steps, None)
        if step is None:
            p.done = True
            return True
        p.began = self.now
        p.code, p.event = step.code, step.event
        p.left = step.code.clocks if step.code else 0.0
        if p.code is not None and p.left <= 0:
            p.code = None
        return True

    def _note(self, p: Process, kind: str) -> None:
        """Append an interval of the given kind to `p`, from `began` until now."""
        if self.now - p.began > 1e-6:
            text = p.why if kind == "wait" else ""
            last = p.intervals[-1] if p.intervals else None
            if last and last.kind == kind and last.text == text and last.end >= p.began - 1e-6:
                p.intervals[-1] = Interval(last.start, self.now, kind, text)
            else:
                p.intervals.append(Interval(p.began, self.now, kind, text))
        p.began = self.now

    # ---- events
    def _happen(self, p: Process, e: Event) -> None:
        """Start the operation that an event describes."""
        p.began = self.now
        if e.kind == "arrive":
            self._contribute(e, self.now)
        elif e.kind == "wait":
            p.waits, p.why = (id(e.what), e.phase), _name(e.what)
        elif e.kind == "load":
            self._contribute(e, self._copy(p, e.amount) + self.constants.copy_latency)
        elif e.kind == "store":
            p.storing = self._copy(p, e.amount)
        elif e.kind == "store commit":
            p.stores.append(p.storing)
        elif e.kind == "product":
            self._product(p, e)
        elif e.kind == "product commit":
            p.groups.append(p.current)
        elif e.kind == "tensor product":
            self._tensor_product(p, e)
        elif e.kind == "tensor commit":
            self._contribute(e, self.pipe[p.stream.rank] + self.constants.product_latency)
        elif e.kind == "product wait":
            left = p.groups[: len(p.groups) - int(e.amount)]
            self._until(p, max(left, default=0.0), "products")
        elif e.kind == "store wait":
            left = p.stores[: len(p.stores) - int(e.amount)]
            self._until(p, max(left, default=0.0), "stores")

    def _until(self, p: Process, at: float, why: str) -> None:
        """Let `p` wait until clock `at`."""
        if at > self.now:
            p.until, p.why = at, why

    def _contribute(self, e: Event, at: float) -> None:
        """Count an arrival at clock `at` in a phase of a barrier; the last completes the phase."""
        key = (id(e.what), e.phase)
        self.expected[key] -= 1
        self._partial[key] = max(self._partial.get(key, 0.0), at)
        if not self.expected[key]:
            self.steps_taken += 1
            self.complete[key] = self._partial[key]

    def _access(self, p: Process, clocks: float) -> None:
        """Book `clocks` of shared memory from now on; reads of operands by products come later."""
        self.shared[p.stream.rank].book(self.now, self.now, clocks)

    def _copy(self, p: Process, size: float) -> float:
        """Queue a bulk copy; return the clock at which it ends."""
        rank = p.stream.rank
        self._access(p, size / self.rates.shared)
        start = max(self.now, self.copies[rank])
        end = start + size / self.constants.copy_bytes
        self.copies[rank] = end
        self.copy_work[rank].append(Interval(start, end, "busy"))
        return end

    def _busy(self, rank: int, flop: float, operands: float, text: str) -> float:
        """Queue a product that reads `operands` bytes of shared memory; return when it ends."""
        start = max(self.now, self.pipe[rank])
        early = max(self.now, start - flop / self.rates.tensor)  # may overlap the product before
        read = self.shared[rank].book(self.now, early, operands / self.rates.shared)
        end = max(start + flop / self.rates.tensor, read)
        self.pipe[rank] = end
        work = self.pipe_work[rank]
        if work and work[-1].text == text and work[-1].end >= start - 1e-6:
            work[-1] = Interval(work[-1].start, end, "busy", text)
        else:
            work.append(Interval(start, end, "busy", text))
        self.units["tensor"] += flop / self.rates.tensor
        return end

    def _product(self, p: Process, e: Event) -> None:
        """Issue a product of a warpgroup (wgmma)."""
        c = self.constants
        in_registers, operands = e.what
        text = f"warps {p.stream.warps[0]}-{p.stream.warps[-1]}"
        end = self._busy(p.stream.rank, e.amount, operands, text)
        self.file[p.stream.rank] = end
        p.current = end + c.product_latency
        p.until = self.now + (e.amount / self.rates.tensor if in_registers else c.product_issue)
        p.why = "issue"

    def _tensor_product(self, p: Process, e: Event) -> None:
        """Issue a product into tensor memory (tcgen05.mma), on each CTA of its cta_group."""
        group, operands = e.what
        ranks = [p.stream.rank] if group == 1 else [p.stream.rank & ~1, p.stream.rank | 1]
        for rank in ranks:
            share = e.amount / group, operands / group
            self._busy(rank, *share, f"warp {p.stream.warps[0]}")


def _name(barrier: Any) -> str:
    """Return the name of a barrier, as the reason of a wait."""
    if isinstance(barrier, MBarrier):
        return barrier.name
    return f"barrier {barrier.number}" if isinstance(barrier, NamedBarrier) else "cluster barrier"
