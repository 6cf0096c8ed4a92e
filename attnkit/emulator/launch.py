"""A launch: the grid of a kernel, its parameters, how it is to be run, and what was found."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from attnkit.emulator.cluster import Cluster
from attnkit.emulator.faults import Finding, KernelFault, Place
from attnkit.emulator.memory import GlobalMemory
from attnkit.emulator.program import Program
from attnkit.emulator.ptx import Source
from attnkit.emulator.recorder import Recorder
from attnkit.errors import OptionError

MODES = ("eager", "adversarial", "race")
LIMIT = 200_000_000  # blocks times warps of a launch, by default
EARLY = 0.2  # of the requests for another cluster fail early
RESIDENT = 264  # clusters that run together at most, when they wait for each other


@dataclass(frozen=True)
class Mode:
    """How to schedule. `late`: asynchronous work waits until nothing else can run, unless a draw
    below `prompt` lets it go at once. `race`: watch memory for accesses without an order.
    `together`: clusters that run side by side from the start."""

    name: str = "eager"
    seed: int = 0
    late: bool = False
    race: bool = False
    prompt: float = 0.0
    strict_loads: bool = False
    together: int = 8

    @classmethod
    def of(cls, name: str, seed: int = 0, *, strict_loads: bool = False) -> Mode:
        """The mode by its name; seed 0 of the adversarial mode puts everything off, others mix."""
        if name not in MODES:
            raise OptionError(f"mode={name!r}: expected one of {', '.join(MODES)}")
        rng, late = random.Random(seed), name == "adversarial"
        prompt = 0.0 if seed == 0 else rng.choice((0.0, 0.1, 0.5))
        together = rng.choice((1, 2, 4)) if late else 2 if name == "race" else cls.together
        return cls(
            name,
            seed,
            late,
            name == "race",
            prompt,
            strict_loads and name == "race",
            together,
        )


@dataclass(frozen=True)
class Stats:
    """What a launch executed; `covered` is the part of the kernel's instructions that any warp
    reached, and `missed` has the lines of the PTX of the others."""

    warp_instructions: int
    seconds: float
    ctas: int
    opcodes: Counter[str]
    work: Counter[str]
    covered: float = 1.0
    missed: frozenset[int] = frozenset()


@dataclass(eq=False)
class Launch:
    """One launch of one kernel. `names`: mbarriers by offset in shared memory; `roles`: warps by
    word. `shared` is the size of the dynamic shared memory in bytes."""

    program: Program
    memory: GlobalMemory
    params: bytes
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    mode: Mode = field(default_factory=Mode)
    names: Mapping[int, str] = field(default_factory=dict)
    roles: Mapping[str, Iterable[int]] = field(default_factory=dict)
    sms: int = 132
    limit: int = LIMIT
    recorder: Recorder | None = None
    findings: dict[tuple[str, str, int], Finding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
            raise OptionError(f"grid {self.grid} is no multiple of the cluster {self.cluster}")
        want = self.program.kernel.threads
        if want is not None and want != self.threads:
            raise OptionError(f"block {self.block}: the kernel requires {want} threads")
        self.executed = [0] * len(self.program.kernel.blocks)
        self._sources = {c.line: c.source for c in self.program.kernel.instructions()}
        x, y, z = (g // c for g, c in zip(self.grid, self.cluster, strict=True))
        self._pending = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
        self.work: Counter[str] = Counter()

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @cached_property
    def together(self) -> int:
        """Clusters that run side by side; one where a cluster may take over those that wait, so
        that there are some (in the adversarial mode as many as the seed says)."""
        ops = (c.parts[0] for c in self.program.kernel.instructions())
        alone = "clusterlaunchcontrol" in ops and not self.mode.late
        return 1 if alone else self.mode.together

    @property
    def grain(self) -> int:
        """Bytes of the smallest store to shared memory, 4 at most."""
        sizes = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2}
        found = [4]
        for c in self.program.kernel.instructions():
            if c.parts[0] == "st" and any(p.startswith("shared") for p in c.parts):
                wide = next((int(p[1:]) for p in c.parts if p in ("v2", "v4", "v8")), 1)
                found.append(sizes.get(c.parts[-1], 4) * wide)
        return min(found)

    # ---- reports
    def source_of(self, line: int) -> Source | None:
        """The line of the program that a line of the PTX comes from."""
        return self._sources.get(line)

    def source(self, line: int) -> str:
        return str(self.source_of(line) or "")

    def role(self, warps: tuple[int, ...]) -> str:
        for word, members in self.roles.items():
            if set(warps) <= set(members):
                return word
        return ""

    def note(self, finding: Finding) -> None:
        """Adds a finding; the same at the same line is counted."""
        key = (finding.kind, finding.text, finding.place.line)
        old = self.findings.get(key)
        self.findings[key] = replace(old, count=old.count + 1) if old else finding

    # ---- running
    def cancel(self, rng: random.Random) -> tuple[int, int, int] | None:
        """Takes the next cluster off the queue (cluster launch control): its first CTA.

        In the adversarial mode, but for seed 0, some requests fail although clusters wait; these are
        then launched.
        """
        early = self.mode.late and self.mode.seed > 0 and rng.random() < EARLY
        if early or not self._pending:
            return None
        c = self._pending.pop(0)
        return self._first(c)

    def _first(self, c: tuple[int, int, int]) -> tuple[int, int, int]:
        x, y, z = (i * n for i, n in zip(c, self.cluster, strict=True))
        return x, y, z

    def _start(self, c: tuple[int, int, int], rng: random.Random) -> Cluster:
        x, y, z = self._first(c)
        sx, sy, sz = self.cluster
        ids = [(x + i, y + j, z + k) for k in range(sz) for j in range(sy) for i in range(sx)]
        return Cluster(self, ids, rng)

    def run(self) -> Stats:
        """Runs the grid: some clusters side by side, more of them when these wait for others.

        Raises:
            KernelFault: the kernel cannot go on.
        """
        begin = time.perf_counter()
        for name, data in self.program.globals:
            self.memory.add(name, data)
        rng = random.Random(self.mode.seed)
        active: list[Cluster] = []
        done = 0
        try:
            with np.errstate(all="ignore"):
                while active or self._pending:
                    done += self._round(active, rng)
        except KernelFault:
            for c in active:
                self._report_races(c)
            raise
        return self._stats(time.perf_counter() - begin, done)

    def _round(self, active: list[Cluster], rng: random.Random) -> int:
        """One turn of every active cluster; the number of CTAs that ended."""
        while self._pending and len(active) < self.together:
            active.append(self._start(self._pending.pop(0), rng))
        if sum(self.executed) > self.limit:
            text = f"more than {self.limit} blocks of instructions executed: an endless loop?"
            raise KernelFault(Finding("runaway", text, active[0].gangs()[0].place(0)))
        moved = [c.step() for c in list(active)]
        over = [c for c in active if c.done]
        for c in over:
            c.finish()
            self.work.update(c.work)
            self._report_races(c)
            active.remove(c)
        if not over and not any(moved):
            self._wake(active, rng)
        return sum(len(c.ctas) for c in over)

    def _wake(self, active: list[Cluster], rng: random.Random) -> None:
        """Nothing moves: start one more cluster, for which the others may be waiting."""
        if not self._pending or len(active) >= RESIDENT:
            raise active[0].deadlock()
        polling = any(g.polling for c in active for g in c.gangs())
        if not polling:
            raise active[0].deadlock()
        for c in active:
            c.stalled = 0
        active.append(self._start(self._pending.pop(0), rng))

    def _report_races(self, c: Cluster) -> None:
        if c.race is None:
            return
        for key, conflict in c.race.conflicts.items():
            (other, a), (who, b) = conflict.first, conflict.second
            first = f"{c.with_role(other) or 'nobody'}" + (f" at PTX line {a}" if a else "")
            source = self.source(a)
            first += f" ({source})" if source else ""
            text = f"{conflict.text}: {c.with_role(who)} against {first}; {conflict.where}"
            at = Place(c.ids[c.rank_of(who)], (), "", b, self.source(b))
            self.note(Finding(conflict.kind, text, at, "error", c.race.counts[key]))

    def _stats(self, seconds: float, ctas: int) -> Stats:
        ops: Counter[str] = Counter()
        missed: list[int] = []
        for block, n in zip(self.program.kernel.blocks, self.executed, strict=True):
            for c in block:
                if n:
                    ops[c.op] += n
                elif c.line:  # not the return that the parser adds at the end
                    missed.append(c.line)
        total = sum(len(block) for block in self.program.kernel.blocks)
        covered = 1 - len(missed) / total
        return Stats(sum(ops.values()), seconds, ctas, ops, self.work, covered, frozenset(missed))
