"""Detect races on shared and tensor memory by happens-before, with vector clocks.

Shared memory is tracked in granules of 4 bytes (fewer if the kernel has smaller stores). In tensor
memory a granule is a column in one quarter of the lanes. A granule without a writer is
uninitialised. `knowledge` defines agents and their vector clocks. Accesses of different lanes of a
warp are ordered by bar.warp.sync and by barriers, not by the order of their instructions (PTX ISA,
bar.warp.sync). Waits for mbarriers that may miss their phase are found with the same clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnkit.emulator.machine.knowledge import (
    ALWAYS,
    HANDED,
    KNOWN,
    ROWS,
    SHARED,
    TENSOR,
    Clock,
    Knowledge,
    lane_of,
)

Index = Any
Lane = NDArray[Any] | int | None
TMEM_GRANULES = 512 * 4
ACCESSORS = 8  # most agents for the accesses of one warp, see `Clock.accessors`
COLLECTIVE = -1  # lane of an access that a whole warp makes
SEVERAL = -2  # lane of a granule that several lanes read
ANY = -3  # lane of a granule that several lanes wrote at once


@dataclass(frozen=True)
class Conflict:
    """Describes a finding about an access and an earlier access or mbarrier.init.

    Attributes:
        kind: kind of the finding: "race", "fence" or "uninitialised".
        first, second: (name of the agent, PTX line) of the earlier and of the later access; the
            first name is empty if nothing has written there.
        where: location in shared or tensor memory, or "mbarrier".
    """

    kind: str
    text: str
    first: tuple[str, int]
    second: tuple[str, int]
    where: str


class RaceDetector:
    """Detects races on the shared and tensor memory of one cluster; holds a record of accesses.

    The arrays have one element for each granule: for each CTA by rank, those of its shared memory,
    then those of its tensor memory.

    Attributes:
        grain: bytes of a granule of shared memory.
        cluster: number of the cluster in the stream of calls.
        strict_order: whether only bar.warp.sync and barriers order accesses of lanes of a warp, and
            only tcgen05.fence those to tensor memory. Otherwise, other instructions that order them
            on known hardware count too.
        words: number of granules of the shared memory of a CTA.
        stride: number of granules of a CTA.
        writer, written, write_lane, write_line: agent, time, lane and PTX line of the last write.
        generic, by_atomic: whether the last write was of the generic proxy; whether by an atomic.
        reader, read_time, read_lane: agent, time and lane of the last read by lanes of a warp.
        read_line: PTX line of the last read.
        reads: time of the last read by each agent, in the order of `readers`.
        atomics: knowledge that atomics release to later atomics.
        names: names of the agents, by number.
        index: numbers of the agents, by key.
        units: clock of the last operation of each asynchronous unit.
        conflicts: findings, by text and the PTX lines of the two accesses.
        counts: how often each conflict was found.
    """

    def __init__(
        self,
        ctas: int,
        size: int,
        agents: int,
        grain: int = 4,
        *,
        cluster: int = 0,
        strict_order: bool = False,
    ) -> None:
        self.grain = grain
        self.cluster = cluster
        self.strict_order = strict_order
        self.words = words = size // grain
        self.stride = words + TMEM_GRANULES
        n = self.stride * ctas
        self.agents = agents
        self.writer = np.full(n, -1, np.int16)
        self.written = np.zeros(n, np.int32)
        self.write_lane = np.full(n, COLLECTIVE, np.int8)
        self.generic = np.zeros(n, bool)
        self.write_line = np.zeros(n, np.int32)
        self.reader = np.full(n, -1, np.int16)
        self.read_time = np.zeros(n, np.int32)
        self.read_lane = np.full(n, COLLECTIVE, np.int8)
        self.read_line = np.zeros(n, np.int32)
        self.reads = np.zeros((agents, n), np.int32)  # a row for each agent of `readers`
        self.readers: list[int] = []
        self.row: dict[int, int] = {}
        self._granules: dict[tuple[int, int, int], tuple[Any, Index]] = {}
        self.by_atomic = np.zeros(n, bool)
        self.atomics: Knowledge | None = None
        self.names: list[str] = []
        self.index: dict[str, int] = {}
        self.units: dict[str, Clock] = {}
        self.conflicts: dict[tuple[str, int, int], Conflict] = {}
        self.counts: dict[tuple[str, int, int], int] = {}

    def agent(self, key: str, name: str = "") -> int:
        """Return the number of the agent of `key`; add the agent if it is new.

        Its name in reports is `name`, or the key.
        """
        if key not in self.index:
            # When the table is full, later agents share one clock, and fewer races are found.
            self.index[key] = min(len(self.names), self.agents - 1)
            if len(self.names) < self.agents:
                self.names.append(name or key)
        return self.index[key]

    def warp(self, name: str) -> Clock:
        """Create the clock of a warp that starts."""
        a = self.agent(name)
        table = np.zeros((ROWS, self.agents), np.int32)
        table[KNOWN, a] = 1
        return Clock(
            a, Knowledge(self.cluster, table), common=np.full(self.agents, ALWAYS, np.int32)
        )

    def agent_of(self, who: Clock, lanes: Lane, *, write: bool) -> int:
        """Return the agent of an access by `lanes` of a warp, or by an asynchronous unit.

        A warp has at most ACCESSORS agents for its accesses. Accesses beyond that have the agent of
        the warp itself, whose accesses an arrival of any lane releases.
        """
        if who.common is None:
            return who.agent
        lane = lane_of(lanes) if isinstance(lanes, np.ndarray) else None
        if (lane, write) not in who.accessors:
            if len(who.accessors) == ACCESSORS:
                return who.agent
            name = self.names[who.agent] + ("" if lane is None else f" lane {lane}")
            a = self.agent(f"{name}, {'writes' if write else 'reads'}", name)
            who.accessors[lane, write] = a
            who.common[a] = 0
        a = who.accessors[lane, write]
        who.known[a] = who.now
        return a

    def issue(
        self, by: Clock, unit: str, line: int, *, ordered: bool, lane: int | None = None
    ) -> Clock:
        """Create the clock of an asynchronous operation.

        Args:
            by: the warp that issues it.
            unit: name of the unit that executes it.
            line: PTX line of the instruction.
            ordered: whether it runs after earlier operations of its unit.
            lane: the lane that issues it; None if several do.
        """
        a = self.agent(unit)
        last = self.units.get(unit)
        op = Clock(a, by.seen_by(lane), line)
        if last is not None and ordered:
            op.complete(last)
        op.knows.table[[KNOWN, TENSOR], a] = (last.now if last is not None else 0) + 1
        self.units[unit] = op
        by.tick()
        return op

    # ---- accesses
    def shared(self, rank: int, byte: int | NDArray[Any], size: int) -> Index:
        """Return the granules of `size` bytes from offset(s) `byte` of a CTA's shared memory."""
        first = self.stride * rank
        if isinstance(byte, int):
            return slice(first + byte // self.grain, first + -(-(byte + size) // self.grain))
        base = first + byte.astype(np.int64) // self.grain
        n = max(1, size // self.grain)
        return base if n == 1 else (base[:, None] + np.arange(n)).ravel()

    def granules(self, rank: int, offsets: NDArray[Any], size: int) -> Index:
        """Return the granules of the elements of `size` bytes at `offsets`, each once."""
        key = (id(offsets), size, rank)
        if key not in self._granules:
            steps = range(0, size, self.grain)
            inside = [np.unique((offsets + step) // self.grain) for step in steps]
            granules = self.stride * rank + np.unique(np.concatenate(inside))
            self._granules[key] = (offsets, granules)  # keeps `offsets` and its id alive
        return self._granules[key][1]

    def tensor(self, rank: int, column: int, columns: int, quarter: int | None = None) -> Index:
        """Return the granules of columns of a CTA's tensor memory, of one quarter or all lanes."""
        base = self.stride * rank + self.words + 4 * column
        if quarter is None:
            return slice(base, base + 4 * columns)
        return slice(base + quarter, base + 4 * columns, 4)

    def repeated(self, lanes: NDArray[Any], size: int) -> NDArray[np.int8]:
        """Return the lane of each granule, for accesses of `size` bytes by these lanes."""
        return np.repeat(lanes.astype(np.int8), max(1, size // self.grain))

    def read(
        self, i: Index, who: Clock, *, asynchronous: bool, line: int, lanes: Lane = None
    ) -> None:
        """Record a read, and report it if it is not ordered after the last write.

        Args:
            i: granules that are read.
            who: clock of the warp or asynchronous operation.
            asynchronous: whether the read is of the asynchronous proxy.
            line: PTX line.
            lanes: the lane of each granule, or COLLECTIVE; None for asynchronous units.
        """
        a, t = self.writer[i], self.written[i]
        if (a < 0).any():
            self._report(
                "uninitialised", "read of memory that nothing has written", i, a < 0, who, line
            )
        bad = t > who.known[a]
        if bad.any():
            self._report("race", "read not ordered after write", i, bad, who, line)
        elif asynchronous:
            bad = self.generic[i] & (t > who.knows.table[SHARED][a])
            if bad.any():
                text = "asynchronous read of a generic write without fence.proxy.async"
                self._report("fence", text, i, bad, who, line)
        elif who.common is not None and lanes is not None:
            self._check_lanes(i, who, lanes, line)
        agent = self.agent_of(who, lanes, write=False)
        self.reads[self._row(agent), i] = who.now
        self.read_line[i] = line
        if who.common is not None and lanes is not None:
            self._record_lanes(i, who, lanes, agent)

    def _row(self, agent: int) -> int:
        """Return the row of an agent in `reads`; a new agent gets a new row."""
        if agent not in self.row:
            self.row[agent] = len(self.readers)
            self.readers.append(agent)
        return self.row[agent]

    def _check_lanes(self, i: Index, who: Clock, lanes: Lane, line: int) -> None:
        """Report an access to what another lane of the warp wrote since their last sync."""
        assert who.common is not None
        late = self.written[i] > who.common[self.writer[i]]
        if late.any():
            lane = self.write_lane[i]
            bad = late & (lane != lanes) & (lane != ANY)
            if bad.any():
                text = "access not ordered after write by another lane of the warp (bar.warp.sync)"
                self._report("race", text, i, bad, who, line)

    def _check_lanes_read(self, i: Index, who: Clock, lanes: Lane, line: int) -> None:
        """Report a write to what another lane of the warp read since their last sync."""
        assert who.common is not None
        reader = self.reader[i]
        late = self.read_time[i] > who.common[reader]
        if late.any():
            bad = late & (self.read_lane[i] != lanes)
            if bad.any():
                text = "write not ordered after read by another lane of the warp (bar.warp.sync)"
                other = int(np.ravel(reader)[int(np.flatnonzero(bad)[0])])
                self._report("race", text, i, bad, who, line, other)

    def _record_lanes(self, i: Index, who: Clock, lanes: NDArray[Any] | int, agent: int) -> None:
        """Record the lane of a warp that has read each granule; SEVERAL if more than one has."""
        assert who.common is not None
        before, reader = self.read_lane[i], self.reader[i]
        old = (reader == agent) & (self.read_time[i] > who.common[agent])
        self.read_lane[i] = lanes
        several = (self.read_lane[i] != lanes) | (old & (before != lanes))
        if several.any():
            self.read_lane[i] = np.where(several, SEVERAL, self.read_lane[i])
        self.reader[i] = agent
        self.read_time[i] = who.now

    def write(self, i: Index, who: Clock, *, generic: bool, line: int, lanes: Lane = None) -> None:
        """Record a write, and report it if it is not ordered after earlier accesses.

        Args:
            i: granules that are written.
            who: clock of the warp or asynchronous operation.
            generic: whether the write is of the generic proxy.
            line: PTX line.
            lanes: the lane of each granule, or COLLECTIVE; None for asynchronous units.
        """
        a, t = self.writer[i], self.written[i]
        bad = t > who.known[a]
        if bad.any():
            self._report("race", "write not ordered after write", i, bad, who, line)
        late = self.reads[: len(self.readers), i] > who.known[self.readers, None]
        if late.any():
            first = int(np.flatnonzero(late.any(1))[0])
            other, bad = self.readers[first], late[first]
            self._report("race", "write not ordered after read", i, bad, who, line, other)
        if who.common is not None and lanes is not None:
            self._check_lanes(i, who, lanes, line)
            self._check_lanes_read(i, who, lanes, line)
        self.writer[i] = self.agent_of(who, lanes, write=True)
        self.written[i] = who.now
        self.generic[i] = generic
        self.write_line[i] = line
        self.by_atomic[i] = False
        self.write_lane[i] = COLLECTIVE if lanes is None else lanes
        if isinstance(lanes, np.ndarray):
            several = self.write_lane[i] != lanes
            if several.any():
                self.write_lane[i] = np.where(several, ANY, self.write_lane[i])

    def atomic(self, i: Index, who: Clock, *, line: int) -> None:
        """Record an atomic. It can race with plain accesses, but is ordered after other atomics."""
        if self.atomics is None:
            self.atomics = who.knows.copy()
        if self.by_atomic[i].all():
            who.join(self.atomics)
        self.write(i, who, generic=True, line=line)
        self.by_atomic[i] = True
        self.atomics.join(who.knows)
        who.tick()

    def check_initialised(self, barrier: Any, who: Clock, line: int, asynchronous: bool) -> None:
        """Report the use of an mbarrier whose mbarrier.init is not visible to `who`.

        Args:
            barrier: the MBarrier.
            who: clock of the warp or asynchronous operation.
            line: PTX line of the use.
            asynchronous: whether an asynchronous operation arrives at it.
        """
        if barrier.initialised is None:
            return
        agent, time = barrier.initialised
        if time > who.known[agent]:
            text = f"use of {barrier.name} not ordered after its mbarrier.init"
            self._note("race", text, (agent, barrier.line), (who.agent, line), "mbarrier")
        elif asynchronous and time > who.knows.table[SHARED][agent]:
            text = f"asynchronous arrival at {barrier.name} without fence.mbarrier_init"
            self._note("fence", text, (agent, barrier.line), (who.agent, line), "mbarrier")

    def check_seen(self, barrier: Any) -> None:
        """Report each warp that may miss the last completed phase of an mbarrier.

        The next phase completes now. A wait for parity p fails while the parity of the last completed
        phase is not p (PTX ISA, mbarrier.test_wait). So each wait that has seen the last phase must be
        ordered before an arrival in the next one. Otherwise that warp may come too late in another
        execution, and wait forever.
        """
        known = None if barrier.released is None else barrier.released.table[KNOWN]
        for agent, time, line in barrier.seen:
            if known is None or known[agent] < time:
                text = f"the next phase of {barrier.name} may complete before this wait has seen the last one"
                self._note("race", text, (agent, line), (agent, line), "mbarrier")

    def check_tensor(self, i: Index, who: Clock, line: int, *, write: bool) -> None:
        """Report a tcgen05 access that no tcgen05.fence orders after earlier accesses.

        Accesses are checked only with `strict_order`.
        """
        if not self.strict_order:
            return
        seen, known = who.knows.table[TENSOR], who.known
        a, t = self.writer[i], self.written[i]
        bad = (t <= known[a]) & (t > seen[a])
        readers = self.readers if write else []
        reads = self.reads[: len(readers), i]
        late = (reads <= known[readers, None]) & (reads > seen[readers, None])
        if not bad.any() and not late.any():
            return
        other = -1
        times, agents = t, a
        if not bad.any():
            row = int(np.flatnonzero(late.any(1))[0])
            other, bad, times = readers[row], late[row], reads[row]
            agents = np.full(bad.shape, other)
        handed = who.knows.table[HANDED][agents[bad][0]] >= times[bad][0]
        missing = "after_thread_sync" if handed else "before_thread_sync"
        text = f"tensor memory: not ordered by tcgen05.fence::{missing}"
        self._report("fence", text, i, bad, who, line, other)

    def _report(
        self, kind: str, text: str, i: Index, bad: Any, who: Clock, line: int, other: int = -1
    ) -> None:
        """Add a conflict at the first granule in `bad`.

        Args:
            i: granules of the access.
            bad: mask of the granules in `i` with a conflict.
            who: clock of the later access.
            line: PTX line of the later access.
            other: agent of the earlier read; -1 if the earlier access is the last write.
        """
        j = int(np.flatnonzero(bad)[0])
        g = int(i.start + j * (i.step or 1) if isinstance(i, slice) else np.ravel(i)[j])
        lines = self.read_line if other >= 0 else self.write_line
        agent = other if other >= 0 else int(self.writer[g])
        self._note(kind, text, (agent, int(lines[g])), (who.agent, line), self.where(g))

    def _note(
        self, kind: str, text: str, first: tuple[int, int], second: tuple[int, int], where: str
    ) -> None:
        """Add a conflict of two (agent, PTX line); increment its count if an equal one is known."""
        name = self.names[first[0]] if first[0] >= 0 else ""
        key = (text, first[1], second[1])
        if key not in self.conflicts:
            end = (self.names[second[0]], second[1])
            self.conflicts[key] = Conflict(kind, text, (name, first[1]), end, where)
        self.counts[key] = self.counts.get(key, 0) + 1

    def where(self, granule: int) -> str:
        """Return the location of a granule as text for a report."""
        rank, off = divmod(granule, self.stride)
        if off < self.words:
            return f"shared memory +{self.grain * off:#x} of CTA rank {rank}"
        column, quarter = divmod(off - self.words, 4)
        lanes = f"{32 * quarter}-{32 * quarter + 31}"
        return f"tensor memory column {column}, lanes {lanes}, CTA rank {rank}"
