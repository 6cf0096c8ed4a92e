"""Detect races by happens-before, with vector clocks, on shared and tensor memory.

Shared memory is tracked in granules of 4 bytes (fewer if the kernel has smaller stores), tensor
memory by column and quarter of the lanes. Every warp and every asynchronous unit is an agent with a
vector clock: its own time, and for each other agent the time up to which it knows the accesses of
that agent. Barriers hand this knowledge from agents that arrive to agents that wait. A second
vector, `fenced`, holds what a proxy fence has made visible to the asynchronous proxy (PTX ISA,
"Proxies", and fence.proxy). A granule without a writer is uninitialised.

A relaxed arrival hands on only what its agent knew at its last fence. What an agent learns by a
relaxed wait counts from its next fence on (PTX ISA, "Release and Acquire Patterns").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Index = Any
Vector = NDArray[np.int32]
TMEM_GRANULES = 512 * 4


@dataclass(eq=False)
class Clock:
    """Holds the vector clock of an agent: its own time, and what it knows of other agents."""

    agent: int
    known: Vector
    fenced: Vector
    line: int = 0
    published: tuple[Vector, Vector] | None = None
    awaited: tuple[Vector, Vector] | None = None

    @property
    def now(self) -> int:
        """Return the agent's own time."""
        return int(self.known[self.agent])

    def tick(self) -> None:
        """Advance the agent's own time."""
        self.known[self.agent] += 1

    def join(self, known: Vector, fenced: Vector) -> None:
        """Add the knowledge of others."""
        np.maximum(self.known, known, out=self.known)
        np.maximum(self.fenced, fenced, out=self.fenced)

    def handed_on(self, relaxed: bool) -> tuple[Vector, Vector] | None:
        """Return the knowledge that an arrival of this agent hands on."""
        return self.published if relaxed else (self.known, self.fenced)

    def learn(self, knowledge: tuple[Vector, Vector], relaxed: bool) -> None:
        """Add the knowledge that a wait handed on."""
        if relaxed:
            self.awaited = joined(self.awaited, knowledge)
        else:
            self.join(*knowledge)

    def fence(self) -> None:
        """Execute fence.acq_rel, fence.sc or membar."""
        if self.awaited is not None:
            self.join(*self.awaited)
            self.awaited = None
        self.published = (self.known.copy(), self.fenced.copy())
        self.tick()


def joined(
    a: tuple[Vector, Vector] | None, b: tuple[Vector, Vector] | None
) -> tuple[Vector, Vector] | None:
    """Return the union of two pieces of knowledge, in new tuples."""
    if a is None or b is None:
        one = b if a is None else a
        return None if one is None else (one[0].copy(), one[1].copy())
    return (np.maximum(a[0], b[0]), np.maximum(a[1], b[1]))


@dataclass(frozen=True)
class Conflict:
    """Describes two accesses without an order; `first`, `second`: (agent's name, PTX line)."""

    kind: str
    text: str
    first: tuple[str, int]
    second: tuple[str, int]
    where: str


class RaceDetector:
    """Holds the shadow state of the shared and tensor memory of one cluster, and its conflicts."""

    def __init__(self, ctas: int, size: int, agents: int, grain: int = 4) -> None:
        self.grain = grain
        self.words = words = size // grain
        self.stride = words + TMEM_GRANULES
        n = self.stride * ctas
        self.agents = agents
        self.writer = np.full(n, -1, np.int16)
        self.written = np.zeros(n, np.int32)
        self.generic = np.zeros(n, bool)
        self.write_line = np.zeros(n, np.int32)
        self.read_line = np.zeros(n, np.int32)
        self.reads = np.zeros((agents, n), np.int32)
        self._granules: dict[tuple[int, int], tuple[Any, Index]] = {}
        self.by_atomic = np.zeros(n, bool)
        self.atomics: dict[str, Clock] = {}
        self.names: list[str] = []
        self.index: dict[str, int] = {}
        self.units: dict[str, Clock] = {}
        self.conflicts: dict[tuple[str, int, int], Conflict] = {}
        self.counts: dict[tuple[str, int, int], int] = {}

    def agent(self, name: str) -> int:
        """Return the number of an agent; a new name gets a new number."""
        if name not in self.index:
            # When the table is full, later agents share one clock, and fewer races are found.
            self.index[name] = min(len(self.names), self.agents - 1)
            if len(self.names) < self.agents:
                self.names.append(name)
        return self.index[name]

    def warp(self, name: str) -> Clock:
        """Create the clock of a warp that starts."""
        a = self.agent(name)
        known = np.zeros(self.agents, np.int32)
        known[a] = 1
        return Clock(a, known, np.zeros(self.agents, np.int32))

    def issue(self, by: Clock, unit: str, line: int, *, ordered: bool) -> Clock:
        """Create the clock of an asynchronous operation; `ordered`: after others of its unit."""
        a = self.agent(unit)
        last = self.units.get(unit)
        op = Clock(a, by.known.copy(), by.fenced.copy(), line)
        if last is not None and ordered:
            op.join(last.known, last.fenced)
        op.known[a] = (last.now if last is not None else 0) + 1
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

    def granules(self, rank: int, offsets: NDArray[Any]) -> Index:
        """Return the granules of the bytes at `offsets`, each once."""
        key = (id(offsets), rank)
        if key not in self._granules:
            granules = self.stride * rank + np.unique(offsets // self.grain)
            self._granules[key] = (offsets, granules)  # keeps `offsets` and its id alive
        return self._granules[key][1]

    def tensor(self, rank: int, column: int, columns: int, quarter: int | None = None) -> Index:
        """Return the granules of columns of a CTA's tensor memory."""
        base = self.stride * rank + self.words + 4 * column
        if quarter is None:
            return slice(base, base + 4 * columns)
        return slice(base + quarter, base + 4 * columns, 4)

    def read(self, i: Index, who: Clock, *, asynchronous: bool, line: int) -> None:
        """Record a read, and report it if it is not ordered after the last write."""
        a, t = self.writer[i], self.written[i]
        if (a < 0).any():
            self._report(
                "uninitialised", "read of memory that nothing has written", i, a < 0, who, line
            )
        bad = t > who.known[a]
        if bad.any():
            self._report("race", "read not ordered after write", i, bad, who, line)
        elif asynchronous:
            bad = self.generic[i] & (t > who.fenced[a])
            if bad.any():
                text = "asynchronous read of a generic write without fence.proxy.async"
                self._report("fence", text, i, bad, who, line)
        self.reads[who.agent, i] = who.now
        self.read_line[i] = line

    def write(self, i: Index, who: Clock, *, generic: bool, line: int) -> None:
        """Record a write, and report it if it is not ordered after earlier accesses."""
        a, t = self.writer[i], self.written[i]
        bad = t > who.known[a]
        if bad.any():
            self._report("race", "write not ordered after write", i, bad, who, line)
        used = len(self.names)
        late = self.reads[:used, i] > who.known[:used, None]
        if late.any():
            other = int(np.flatnonzero(late.any(1))[0])
            bad = late[other]
            self._report("race", "write not ordered after read", i, bad, who, line, other)
        self.writer[i] = who.agent
        self.written[i] = who.now
        self.generic[i] = generic
        self.write_line[i] = line
        self.by_atomic[i] = False

    def atomic(self, i: Index, who: Clock, *, line: int) -> None:
        """Record an atomic. It races with plain accesses, but is ordered after other atomics."""
        shared = self.atomics.setdefault(
            "all", Clock(who.agent, who.known.copy(), who.fenced.copy())
        )
        by_atomic = self.by_atomic[i]
        who.join(
            np.where(by_atomic.all(), shared.known, 0), np.where(by_atomic.all(), shared.fenced, 0)
        )
        self.write(i, who, generic=True, line=line)
        self.by_atomic[i] = True
        shared.join(who.known, who.fenced)
        who.tick()

    def ordered(self, agent: int, time: int, who: Clock, text: str, line: int, first: int) -> None:
        """Report a race unless `who` knows `agent` up to `time` (used for mbarrier.init)."""
        if time > who.known[agent]:
            key = (text, first, line)
            a, b = (self.names[agent], first), (self.names[who.agent], line)
            self.conflicts.setdefault(key, Conflict("race", text, a, b, "mbarrier"))
            self.counts[key] = self.counts.get(key, 0) + 1

    def _report(
        self, kind: str, text: str, i: Index, bad: Any, who: Clock, line: int, other: int = -1
    ) -> None:
        """Add a conflict, or count it if there is an equal one."""
        j = int(np.flatnonzero(bad)[0])
        g = int(i.start + j * (i.step or 1) if isinstance(i, slice) else np.ravel(i)[j])
        lines = self.read_line if other >= 0 else self.write_line
        first = int(lines[g])
        agent = other if other >= 0 else int(self.writer[g])
        name = self.names[agent] if agent >= 0 else ""
        key = (text, first, line)
        if key not in self.conflicts:
            end = (self.names[who.agent], line)
            self.conflicts[key] = Conflict(kind, text, (name, first), end, self.where(g))
        self.counts[key] = self.counts.get(key, 0) + 1

    def where(self, granule: int) -> str:
        """Describe the location of a granule."""
        rank, off = divmod(granule, self.stride)
        if off < self.words:
            return f"shared memory +{self.grain * off:#x} of CTA rank {rank}"
        column, quarter = divmod(off - self.words, 4)
        lanes = f"{32 * quarter}-{32 * quarter + 31}"
        return f"tensor memory column {column}, lanes {lanes}, CTA rank {rank}"
