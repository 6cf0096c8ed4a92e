"""Runs a kernel in one of three modes, or checks it in all of them: the public entry."""

from __future__ import annotations

import struct
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from attnkit.emulator.execution.generated_kernel import GeneratedKernel
from attnkit.emulator.execution.grid import Grid, LaunchStats
from attnkit.emulator.faults import Finding, KernelFault
from attnkit.emulator.host.arguments import pack_all
from attnkit.emulator.host.host_function import Captured, HostFunction, host_function
from attnkit.emulator.machine.event_recorder import Recorder
from attnkit.emulator.machine.global_memory import GlobalMemory, Undefined, restore, snapshot
from attnkit.emulator.machine.launch import LIMIT, Launch, Mode
from attnkit.emulator.ptx.cta_groups import mixed_cta_groups
from attnkit.emulator.ptx.kernel import PtxKernel
from attnkit.emulator.ptx.parser import parse
from attnkit.emulator.ptx.wgmma_fences import missing_fences
from attnkit.errors import ArgumentError, OptionError

Dim = tuple[int, int, int]


@dataclass(frozen=True)
class Report:
    """Reports what a run did, and what is wrong with the kernel.

    Attributes:
        findings: empty for a kernel with which nothing is wrong.
        launches: what each launch executed.
        mode, seed: how the kernel ran.
    """

    findings: tuple[Finding, ...]
    launches: tuple[LaunchStats, ...]
    mode: str
    seed: int = 0

    @property
    def ok(self) -> bool:
        """Whether there are no errors; there may be warnings."""
        return not any(f.severity == "error" for f in self.findings)

    @property
    def warp_instructions(self) -> int:
        """Count the instructions of all launches, each once for every warp."""
        return sum(s.warp_instructions for s in self.launches)

    @property
    def seconds(self) -> float:
        """Sum the seconds that the emulator took."""
        return sum(s.seconds for s in self.launches)

    def __str__(self) -> str:
        head = f"{self.mode}: {self.warp_instructions} warp instructions, {self.seconds:.3f} s"
        if self.launches:
            part = ", ".join(f"{100 * s.covered:.0f} %" for s in self.launches)
            head += f", {part} of the kernel's instructions reached"
        return "\n".join([head, *(str(f) for f in self.findings)])


class Launchable(ABC):
    """Turns call arguments into launches of kernels; base of what can be run.

    Attributes:
        ptx: the text of the device code.
        kernels: the kernels in it, by name.
        names, roles: see `describe`.
        sms: how many SMs the GPU says it has.
    """

    ptx: str

    def __init__(self, kernels: dict[str, PtxKernel]) -> None:
        self.kernels = kernels
        self._generated: dict[str, GeneratedKernel] = {}
        self.names: Mapping[int, str] = {}
        self.roles: Mapping[str, Iterable[int]] = {}
        self.sms = 132

    @abstractmethod
    def captured(self, args: Sequence[Any], memory: GlobalMemory) -> list[Captured]:
        """Return the launches that a call with these arguments makes."""

    def generated(self, kernel: PtxKernel) -> GeneratedKernel:
        """Return the generated code of a kernel; check it when it is first asked for."""
        if kernel.name not in self._generated:
            self._generated[kernel.name] = GeneratedKernel(kernel)
            self._generated[kernel.name].check()
        return self._generated[kernel.name]

    def describe(
        self,
        *,
        names: Mapping[int, str] | None = None,
        roles: Mapping[str, Iterable[int]] | None = None,
    ) -> Launchable:
        """Set words for reports: mbarriers by offset in shared memory, warps by role."""
        self.names, self.roles = names or self.names, roles or self.roles
        return self


class Ptx(Launchable):
    """Runs a kernel given as PTX text, with a launch of its own.

    Arguments are arrays (passed as pointers), Python ints and floats (as the parameter's size says)
    and bytes (a structure or tensor map).
    """

    def __init__(
        self,
        text: str,
        *,
        grid: Dim = (1, 1, 1),
        block: Dim = (32, 1, 1),
        cluster: Dim = (1, 1, 1),
        shared: int = 0,
        kernel: str | None = None,
    ) -> None:
        super().__init__(parse(text))
        self.ptx = text
        if kernel is None and len(self.kernels) > 1:
            raise OptionError(f"kernel=None: the text has several, {sorted(self.kernels)}")
        self.kernel = self.kernels[kernel] if kernel else next(iter(self.kernels.values()))
        self.shape = (grid, block, cluster)
        self.shared = shared

    def captured(self, args: Sequence[Any], memory: GlobalMemory) -> list[Captured]:
        """Return the one launch, with the arguments packed into its parameters."""
        params = self.kernel.params
        if len(args) != len(params):
            raise ArgumentError(f"{len(args)} arguments: the kernel has {len(params)} parameters")
        blob = bytearray(self.kernel.param_bytes)
        for i, (p, a) in enumerate(zip(params, args, strict=True)):
            blob[p.offset : p.offset + p.size] = _parameter(a, p.size, memory, f"argument {i}")
        grid, block, cluster = self.shape
        return [Captured(self.kernel, grid, block, cluster, self.shared, bytes(blob))]


def _parameter(a: Any, size: int, memory: GlobalMemory, name: str) -> bytes:
    """Return the bytes of a kernel parameter."""
    if isinstance(a, bytes):
        out = a
    elif isinstance(a, float):
        out = struct.pack("<f" if size == 4 else "<d", a)
    elif isinstance(a, int | np.integer):
        out = (int(a) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    elif isinstance(a, Undefined):
        out = struct.pack("<Q", memory.add(name, a.array, undefined=True))
    else:
        out = struct.pack("<Q", memory.add(name, a))
    if len(out) != size:
        raise ArgumentError(f"{name}: {len(out)} bytes, the parameter has {size}")
    return out


class Executable(Launchable):
    """Runs a function compiled by the CuTe DSL (with --keep-ptx) with its own host code.

    `specs` are the arguments of `cute.compile`: stand-ins of tensors, numbers, sequences, streams.
    """

    def __init__(self, compiled: Any, specs: Sequence[Any]) -> None:
        text = getattr(compiled.artifacts, "PTX", None)
        if not text:
            raise OptionError("compiled without PTX: add --keep-ptx to the options of cute.compile")
        super().__init__(parse(text))
        self.ptx = text
        self.cubin: bytes | None = getattr(compiled.artifacts, "CUBIN", None)
        self.specs = tuple(specs)
        self.host: HostFunction = host_function(compiled, self.kernels)

    def captured(self, args: Sequence[Any], memory: GlobalMemory) -> list[Captured]:
        """Return the launches that the host code makes with these arguments."""
        found = self.host.capture(pack_all(self.specs, args, memory))
        return [replace(c, kernel=self.kernels[c.kernel.name]) for c in found]

    @classmethod
    def of(
        cls, text: str, code: bytes, function: str, specs: Sequence[Any], prefix: str
    ) -> Executable:
        """Return a function that was compiled before.

        Args:
            text: its PTX.
            code: its host object, exported with symbols of that prefix.
            function: its name.
            specs: what it takes, flattened: objects with the attributes of fake tensors that
                `arguments` reads, numbers by their `kind`, a stream.
        """
        self = object.__new__(cls)
        Launchable.__init__(self, parse(text))
        self.ptx, self.cubin, self.specs = text, None, tuple(specs)
        self.host = HostFunction(code, function, self.kernels, prefix)
        return self

    def with_ptx(self, text: str) -> Executable:
        """Return the same host code with other device code, for studies of seeded faults."""
        other = object.__new__(Executable)
        Launchable.__init__(other, parse(text))
        other.ptx, other.cubin, other.specs, other.host = text, None, self.specs, self.host
        other.names, other.roles = self.names, self.roles
        return other


def compile(fn: Any, *specs: Any, options: str = "", **kwargs: Any) -> Executable:
    """Compile `cute.compile(fn, *specs)`, and keep what the emulator needs: PTX and source lines.

    The target architecture is that of the DSL (CUTE_DSL_ARCH, or --gpu-arch in `options`).
    """
    import cutlass.cute as cute

    # The DSL keeps PTX by writing it to a file too, by default in the working directory.
    with tempfile.TemporaryDirectory(prefix="attnkit-emulator-") as folder:
        keep = "--keep-ptx --keep-cubin --generate-line-info"
        wanted = f"{keep} --dump-dir={folder} {options}".strip()
        compiled = cute.compile(fn, *specs, options=wanted, **kwargs)
    return Executable(compiled, (*specs, *kwargs.values()))


def run(
    target: Launchable,
    *args: Any,
    mode: str = "eager",
    seed: int = 0,
    strict_loads: bool = False,
    raises: bool = True,
    limit: int = LIMIT,
    recorder: Recorder | None = None,
) -> Report:
    """Run every launch that a call of `target` with `args` makes, on the arrays themselves.

    Args:
        target: an `Executable` or `Ptx`.
        args: numpy arrays or torch CPU tensors, numbers; `Undefined(x)` marks an output.
        mode: "eager" (asynchronous work at once), "adversarial" (as late as the barriers allow,
            warps in random order), or "race" (happens-before detection).
        seed: of the adversarial order.
        strict_loads: in race mode, a tcgen05.ld counts as done only at tcgen05.wait::ld.
        limit: basic blocks, counted per warp, after which a launch is taken for endless.
        raises: raise the fault that ends a kernel; otherwise it is the last finding.
        recorder: keeps what the warps of one cluster did, for `timeline`.

    Raises:
        KernelFault: the kernel faulted (unless `raises` is false).
        UnknownOpcode: the PTX holds an instruction that is not implemented.
    """
    memory = GlobalMemory()
    how = Mode.of(mode, seed, strict_loads=strict_loads)
    stats: list[LaunchStats] = []
    findings: list[Finding] = []
    for number, c in enumerate(target.captured(args, memory)):
        watch = recorder if recorder is not None and recorder.launch == number else None
        if watch is not None:
            watch.kernel = c.kernel
        code = target.generated(c.kernel)
        launch = Launch(
            c.kernel,
            code.static,
            memory,
            c.params,
            c.grid,
            c.block,
            c.shared,
            c.cluster,
            how,
            target.names,
            target.roles,
            target.sms,
            limit=limit,
            recorder=watch,
        )
        try:
            stats.append(Grid(launch, code).run())
        except KernelFault as fault:
            if raises:
                raise
            findings += [*launch.findings.values(), fault.finding]
            break
        findings += launch.findings.values()
    return Report(tuple(findings), tuple(stats), mode, seed)


@dataclass(frozen=True)
class CheckReport:
    """Reports the runs of a check; `findings` has each finding once, the static ones first."""

    static: tuple[Finding, ...]
    runs: tuple[Report, ...]
    differences: tuple[Finding, ...] = ()
    outputs: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return each finding once: those of static checks, of runs, then differing results."""
        seen: dict[tuple[str, str, int], Finding] = {}
        for f in (*self.static, *(f for r in self.runs for f in r.findings), *self.differences):
            seen.setdefault((f.kind, f.text, f.place.line), f)
        return tuple(seen.values())

    @property
    def ok(self) -> bool:
        """Whether there are no errors; there may be warnings."""
        return not any(f.severity == "error" for f in self.findings)

    def __str__(self) -> str:
        lines = [f"{len(self.runs)} runs, {len(self.findings)} findings"]
        lines += [str(r) for r in self.runs[:1] if r.ok]
        return "\n".join([*lines, *(str(f) for f in self.findings)])


def check(
    target: Launchable,
    *args: Any,
    seeds: int = 3,
    expect: Callable[[], str | None] | None = None,
    deterministic: bool = True,
    strict_loads: bool = False,
) -> CheckReport:
    """Run static checks, then eager, adversarial (by seed) and race runs, from the same inputs.

    Args:
        seeds: number of adversarial runs.
        expect: called after every run; returns what is wrong with the results, or None.
        deterministic: results must have the same bits in every run (False: atomics on floats).
        strict_loads: as for `run`, in the race run.

    The arrays hold the results of the last run afterwards.
    """
    static = tuple(
        f for k in target.kernels.values() for f in (*missing_fences(k), *mixed_cta_groups(k))
    )
    before = snapshot(args)
    first: list[Any] | None = None
    runs: list[Report] = []
    differences: list[Finding] = []
    modes = [("eager", 0), *(("adversarial", s) for s in range(seeds)), ("race", 0)]
    for mode, seed in modes:
        restore(args, before)
        report = run(target, *args, mode=mode, seed=seed, strict_loads=strict_loads, raises=False)
        runs.append(report)
        if not report.ok:
            continue
        wrong = expect() if expect else None
        if wrong:
            text = f"wrong results in {mode} order, seed {seed}: {wrong}"
            differences.append(Finding("difference", text))
        now = snapshot(args)
        if first is None:
            first = now
        elif deterministic:
            for i, (x, y) in enumerate(zip(first, now, strict=True)):
                if not np.array_equal(x, y):
                    text = f"argument {i} differs between eager and {mode} order, seed {seed}"
                    differences.append(Finding("difference", text))
    return CheckReport(static, tuple(runs), tuple(differences))
