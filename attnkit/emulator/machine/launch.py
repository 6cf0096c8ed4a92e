"""Define a launch: kernel, grid, parameters and mode, and the findings of the run."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from attnkit.emulator.faults import Finding
from attnkit.emulator.machine.event_recorder import Recorder
from attnkit.emulator.machine.global_memory import GlobalMemory
from attnkit.emulator.machine.global_races import GlobalRaces
from attnkit.emulator.machine.static_memory import StaticMemory
from attnkit.emulator.ptx.kernel import PtxKernel, Source
from attnkit.errors import OptionError

MODES = ("eager", "adversarial", "race")
LIMIT = 200_000_000  # default limit of basic blocks of a launch, counted per warp
_SMALL = {"b8": 1, "u8": 1, "s8": 1} | dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 2)
_NOT_SHARED = ("global", "local", "param")
EARLY = 0.2  # share of requests for another cluster that fail although clusters wait


@dataclass(frozen=True)
class Mode:
    """Describes how a launch is scheduled, and whether it is checked for races.

    Attributes:
        name: "eager", "adversarial" or "race".
        seed: seed of the adversarial order.
        late: whether asynchronous work is delayed until no warp can run.
        race: whether the race detectors are on.
        prompt: probability that asynchronous work runs at once although `late` is set.
        strict_loads: whether a tcgen05.ld completes only at tcgen05.wait::ld.
        strict_order: whether the race detectors follow the PTX ISA where known hardware orders more
            accesses (of lanes of a warp, and to tensor memory), see `run`.
        together: number of clusters that run side by side from the start.
    """

    name: str = "eager"
    seed: int = 0
    late: bool = False
    race: bool = False
    prompt: float = 0.0
    strict_loads: bool = False
    strict_order: bool = False
    together: int = 8

    @classmethod
    def of(
        cls, name: str, seed: int = 0, *, strict_loads: bool = False, strict_order: bool = False
    ) -> Mode:
        """Return the mode of this name.

        Seed 0 of the adversarial mode delays all asynchronous work. With other seeds, some of it
        may run at once.

        Raises:
            OptionError: there is no such mode.
        """
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
            strict_order and name == "race",
            together,
        )


@dataclass(eq=False)
class Launch:
    """Holds one launch of one kernel, and collects its findings.

    Attributes:
        shared: size of the dynamic shared memory in bytes.
        names: names of mbarriers, by offset in shared memory.
        roles: warps by the name of their role.
        sms: number of SMs that the GPU reports.
        limit: most basic blocks, summed over all warps, that the launch may execute.
        executed: number of executions of each basic block, summed over all warps.
        waiting: indices of the clusters that have not started.
        races: the race detector of global memory, used if `mode.race`.
    """

    kernel: PtxKernel
    static: StaticMemory
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
    races: GlobalRaces = field(default_factory=GlobalRaces)
    findings: dict[tuple[str, str, int], Finding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
            raise OptionError(f"grid {self.grid} is no multiple of the cluster {self.cluster}")
        want = self.kernel.threads
        if want is not None and want != self.threads:
            raise OptionError(f"block {self.block}: the kernel requires {want} threads")
        self.executed = [0] * len(self.kernel.blocks)
        self._sources = {c.line: c.source for c in self.kernel.instructions()}
        x, y, z = (g // c for g, c in zip(self.grid, self.cluster, strict=True))
        self.waiting = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]

    @property
    def threads(self) -> int:
        """Return the number of threads of a CTA."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def grain(self) -> int:
        """Return the size in bytes of the kernel's smallest write to shared memory, at most 4.

        A store or atomic without a state space counts too, because its address may be there.
        """
        sizes_seen = [4]
        for c in self.kernel.instructions():
            if c.parts[0] in ("st", "atom", "red") and not c.has(*_NOT_SHARED):
                wide = next((int(p[1:]) for p in c.parts if p in ("v2", "v4", "v8")), 1)
                sizes_seen.append(_SMALL.get(c.parts[-1], 4) * wide)
        return min(sizes_seen)

    @staticmethod
    def global_grain(kernels: Iterable[PtxKernel]) -> int:
        """Return 1 if these kernels store 1-byte elements outside shared memory, else 2."""
        stores = (c for k in kernels for c in k.instructions() if c.parts[0] == "st")
        small = any(c.parts[-1] in ("b8", "u8", "s8") and "shared" not in c.op for c in stores)
        return 1 if small else 2

    # ---- reports
    def source_of(self, line: int) -> Source | None:
        """Return the source line from which a PTX line was compiled."""
        return self._sources.get(line)

    def source(self, line: int) -> str:
        """Return the source line of a PTX line as "file:line", or "" if it is unknown."""
        return str(self.source_of(line) or "")

    def role(self, warps: tuple[int, ...]) -> str:
        """Return the role of these warps as set by `describe`, or ""."""
        for word, members in self.roles.items():
            if set(warps) <= set(members):
                return word
        return ""

    def note(self, finding: Finding) -> None:
        """Add a finding; increment its count if an equal one at the same line is known."""
        key = (finding.kind, finding.text, finding.place.line)
        old = self.findings.get(key)
        self.findings[key] = replace(old, count=old.count + 1) if old else finding

    # ---- clusters that wait to be launched
    def cancel(self, rng: random.Random) -> tuple[int, int, int] | None:
        """Remove the next cluster from the queue (cluster launch control); return its first CTA.

        Return None if no cluster waits. In the adversarial mode, except with seed 0, some requests
        fail with None although clusters wait. Such clusters are launched later.
        """
        early = self.mode.late and self.mode.seed > 0 and rng.random() < EARLY
        if early or not self.waiting:
            return None
        return self.first_cta(self.waiting.pop(0))

    def first_cta(self, cluster: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the index of the first CTA of a cluster."""
        x, y, z = (i * n for i, n in zip(cluster, self.cluster, strict=True))
        return x, y, z
