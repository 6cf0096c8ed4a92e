"""Define the public functions: `run` executes a kernel in one mode, `check` in all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnkit.emulator.execution.grid import Grid, LaunchStats
from attnkit.emulator.faults import EmulatorError, Finding, KernelFault
from attnkit.emulator.launchables import Launchable
from attnkit.emulator.machine.event_recorder import Recorder
from attnkit.emulator.machine.global_memory import GlobalMemory, array_names, restore, snapshot
from attnkit.emulator.machine.global_races import GlobalRaces
from attnkit.emulator.machine.launch import LIMIT, Launch, Mode
from attnkit.emulator.ptx.cta_groups import mixed_cta_groups
from attnkit.emulator.ptx.wgmma_fences import missing_fences

SHARED_BYTES = 227 * 1024  # dynamic shared memory that a launch may request


@dataclass(eq=False)
class Stream:
    """Holds the memory accesses of successive calls, for the race detector.

    A kernel that is launched as a programmatic dependent may start before the preceding kernel is
    complete. Pass the same `Stream` to `run` or `check` for all calls of one CUDA stream, so that
    race mode also reports conflicts with accesses of earlier calls.
    """

    races: GlobalRaces = field(default_factory=GlobalRaces)


@dataclass(frozen=True)
class Report:
    """Holds what a run executed, and what it found wrong with the kernel.

    Attributes:
        findings: errors and warnings; empty if the run found nothing wrong.
        launches: what each launch executed.
        mode, seed: mode and seed of the run, see `run`.
    """

    findings: tuple[Finding, ...]
    launches: tuple[LaunchStats, ...]
    mode: str
    seed: int = 0

    @property
    def ok(self) -> bool:
        """Return whether there are no errors; there may be warnings."""
        return not any(f.severity == "error" for f in self.findings)

    @property
    def warp_instructions(self) -> int:
        """Return the number of instructions of all launches, each counted once for every warp."""
        return sum(s.warp_instructions for s in self.launches)

    @property
    def seconds(self) -> float:
        """Return the wall-clock seconds that the emulator took for all launches."""
        return sum(s.seconds for s in self.launches)

    def __str__(self) -> str:
        head = f"{self.mode}: {self.warp_instructions} warp instructions, {self.seconds:.3f} s"
        if self.launches:
            part = ", ".join(f"{100 * s.covered:.0f} %" for s in self.launches)
            head += f", {part} of the kernel's instructions reached"
        return "\n".join([head, *(str(f) for f in self.findings)])


def run(
    target: Launchable,
    *args: Any,
    mode: str = "eager",
    seed: int = 0,
    strict_loads: bool = False,
    strict_order: bool = False,
    raises: bool = True,
    limit: int = LIMIT,
    recorder: Recorder | None = None,
    stream: Stream | None = None,
) -> Report:
    """Execute every kernel launch of one call of `target`, in place on the arrays in `args`.

    Args:
        target: an `Executable` or `Ptx`.
        args: numpy arrays or torch CPU tensors, and numbers; `Undefined(x)` marks an output,
            `Pointers(x, targets)` an array of addresses.
        mode: "eager" (asynchronous work completes at once), "adversarial" (it completes as late as
            the barriers allow, and warps run in random order), or "race" (eager, with detection of
            races by happens-before).
        seed: seed of the adversarial order.
        strict_loads: whether in race mode a tcgen05.ld completes only at tcgen05.wait::ld.
        strict_order: whether race mode follows the PTX ISA where known hardware orders more than it
            requires. Then reads by other lanes of a warp are ordered only by bar.warp.sync and
            barriers (not, for example, by elect.sync). Accesses of several threads to tensor memory
            are ordered only if tcgen05.fence is on both sides of their barrier.
        raises: whether to raise the fault that ends a kernel; if not, it is the last finding.
        limit: most basic blocks, summed over all warps, that a launch may execute. A launch that
            executes more faults with a finding of kind "runaway".
        recorder: records the events of one cluster, as input of `timeline`.
        stream: the calls before this one, for kernels that are launched as programmatic dependents.

    Raises:
        KernelFault: the kernel faulted (unless `raises` is false).
        UnknownOpcode: the PTX has an instruction that is not implemented.
        EmulatorError: a launch requests more shared memory than a CTA can have.
    """
    memory = GlobalMemory()
    how = Mode.of(mode, seed, strict_loads=strict_loads, strict_order=strict_order)
    races = (stream or Stream()).races
    stats: list[LaunchStats] = []
    findings: list[Finding] = []
    launches = target.captured(args, memory)
    if how.race:
        races.begin_call(memory, Launch.global_grain(target.kernels.values()))
    for number, c in enumerate(launches):
        if c.shared > SHARED_BYTES:
            raise EmulatorError(
                f"shared={c.shared} bytes of kernel {c.kernel.name!r}: expected at most {SHARED_BYTES}"
            )
        if how.race:
            races.begin_kernel(c.dependent)
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
            races=races,
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
    """Holds the results of a check.

    Attributes:
        static: findings of the static checks.
        runs: report of each run, in the order in which they ran.
        differences: findings about results that are wrong or differ between runs.
    """

    static: tuple[Finding, ...]
    runs: tuple[Report, ...]
    differences: tuple[Finding, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return each finding once: of static checks, then of runs, then of results that differ."""
        seen: dict[tuple[str, str, int], Finding] = {}
        for f in (*self.static, *(f for r in self.runs for f in r.findings), *self.differences):
            seen.setdefault((f.kind, f.text, f.place.line), f)
        return tuple(seen.values())

    @property
    def ok(self) -> bool:
        """Return whether there are no errors; there may be warnings."""
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
    strict_order: bool = False,
    stream: Stream | None = None,
) -> CheckReport:
    """Run the static checks, then one eager, `seeds` adversarial and one race run.

    Every run starts from the same inputs. Afterwards the arrays hold the results of the last run.

    Args:
        seeds: number of adversarial runs.
        expect: function to call after every run; it returns what is wrong with the results, or
            None.
        deterministic: whether results must have the same bits in every run. Pass False for a kernel
            with atomics on floats.
        strict_loads, strict_order, stream: as for `run`; they affect only the race run.
    """
    static = tuple(
        f for k in target.kernels.values() for f in (*missing_fences(k), *mixed_cta_groups(k))
    )
    before = snapshot(args)
    first: tuple[str, list[Any]] | None = None
    runs: list[Report] = []
    differences: list[Finding] = []
    modes = [("eager", 0), *(("adversarial", s) for s in range(seeds)), ("race", 0)]
    for mode, seed in modes:
        restore(args, before)
        report = run(
            target,
            *args,
            mode=mode,
            seed=seed,
            strict_loads=strict_loads,
            strict_order=strict_order,
            stream=stream,
            raises=False,
        )
        runs.append(report)
        if not report.ok:
            continue
        wrong = expect() if expect else None
        how = f"{mode} order, seed {seed}"
        if wrong:
            differences.append(Finding("difference", f"wrong results in {how}: {wrong}"))
        now = snapshot(args)
        if first is None:
            first = how, now
        elif deterministic:
            for name, x, y in zip(array_names(args), first[1], now, strict=True):
                if not np.array_equal(x, y):
                    text = f"{name} differs between {first[0]}, and {how}"
                    differences.append(Finding("difference", text))
    return CheckReport(static, tuple(runs), tuple(differences))
