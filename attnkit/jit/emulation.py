"""Running compiled kernels in the emulator: what `backend="emulate"` calls instead of a GPU.

A `session` says how kernels run within it, and keeps their reports; outside of one they run once,
in eager order. A run that would take longer than the limit is refused.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from attnkit import emulator
from attnkit.emulator import Timeline, Undefined, picture
from attnkit.emulator.host.host_function import compiler
from attnkit.emulator.timing.cycles import busy, rates_of
from attnkit.errors import OptionError, UnsupportedError

# The emulator's names that rooms above use: they import them from here.
__all__ = [
    "LIMIT_VARIABLE",
    "MINUTES",
    "MODES",
    "RATES",
    "Kernel",
    "Session",
    "Timeline",
    "Undefined",
    "attention_work",
    "busy",
    "compiler",
    "ctas",
    "limit",
    "picture",
    "rates_of",
    "refuse_long",
    "seconds",
    "session",
]

MODES = ("check", "eager", "adversarial", "race")
MINUTES = 10.0
LIMIT_VARIABLE = "ATTNKIT_EMULATE_MINUTES"

# Warp instructions per second of forward kernels on a core that others use too; an idle one does two
# to three times as many.
RATES = {"eager": 5e5, "adversarial": 2.5e5, "race": 1.8e5}
# Measured on forward kernels (64 and 128 columns of heads, plain, causal, ALiBi): 4400 to 5600 warp
# instructions per block of 128 x 128 scores with two products, 3800 to 5200 per tile of 128 rows.
_PER_PRODUCT = 5 / 32  # of one score
_PER_ROW = 40


class Kernel(Protocol):
    """What can be emulated: a compiled kernel with PTX and host code."""

    name: str

    def executable(self) -> emulator.Executable:
        """The kernel for the emulator."""
        ...


@dataclass(eq=False)
class Session:
    """How kernels run, and what came of it.

    Attributes:
        mode: "eager", "adversarial", "race", or "check" for all of them from the same inputs.
        seeds: adversarial orders of a check; a single adversarial run takes order `seeds - 1`.
        minutes: limit of the estimate of one kernel; None: that of the environment, or 10.
        timeline: whether to predict the cycles of each kernel.
        deterministic: a check demands the same bits in every order.
        execute: whether kernels run at all; without, outputs stay undefined.
        ctas: how many persistent CTAs a kernel has, None: as few as show faults.
        reports: (name of the kernel, report) of each run, in order.
        timelines: (name of the kernel, timeline) of each run, if wanted.
    """

    mode: str = "eager"
    seeds: int = 3
    minutes: float | None = None
    timeline: bool = False
    deterministic: bool = True
    execute: bool = True
    ctas: int | None = None
    reports: list[tuple[str, emulator.Report | emulator.CheckReport]] = field(default_factory=list)
    timelines: list[tuple[str, emulator.Timeline]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise OptionError(f"mode={self.mode!r}: expected one of {', '.join(MODES)}")
        if self.seeds < 1:
            raise OptionError(f"seeds={self.seeds}: expected 1 or more")
        if self.ctas is not None and self.ctas < 1:
            raise OptionError(f"ctas={self.ctas}: expected 1 or more")

    @property
    def runs(self) -> list[str]:
        """The modes that one kernel goes through."""
        if self.mode != "check":
            return [self.mode]
        return ["eager", *["adversarial"] * self.seeds, "race"]

    @property
    def ok(self) -> bool:
        """No kernel had an error."""
        return all(report.ok for _, report in self.reports)


_session: ContextVar[Session | None] = ContextVar("attnkit emulation session", default=None)
_executables: weakref.WeakKeyDictionary[Any, emulator.Executable] = weakref.WeakKeyDictionary()


@contextmanager
def session(**options: Any) -> Iterator[Session]:
    """Run the kernels of the block as the options of `Session` say; yields the session."""
    own = Session(**options)
    token = _session.set(own)
    try:
        yield own
    finally:
        _session.reset(token)


def ctas(few: int) -> int:
    """How many persistent CTAs a kernel has: what the session in force says, else `few`."""
    current = _session.get()
    return few if current is None or current.ctas is None else current.ctas


def attention_work(
    blocks: int, tiles: int, *, block: tuple[int, int] = (128, 128), products: int = 2
) -> float:
    """About how many warp instructions an attention kernel executes.

    Args:
        blocks: (q, kv) blocks that are computed, over all heads and batch elements.
        tiles: q tiles (kv tiles of a backward pass), over all heads and batch elements.
        block: rows and columns of a block.
        products: matrix products per block: 2 forward, 5 backward.
    """
    scores = blocks * block[0] * block[1]
    return scores * products * _PER_PRODUCT + tiles * block[0] * _PER_ROW


def seconds(work: float, modes: Iterable[str]) -> float:
    """The estimated time of `work` warp instructions in each of the modes, one after another."""
    return sum(work / RATES[mode] for mode in modes)


def limit() -> float:
    """The limit in minutes that the environment sets, or the default.

    Raises:
        OptionError: ATTNKIT_EMULATE_MINUTES is not a positive number.
    """
    text = os.environ.get(LIMIT_VARIABLE, "")
    try:
        minutes = float(text) if text else MINUTES
    except ValueError:
        minutes = -1.0
    if not minutes > 0:
        raise OptionError(f"{LIMIT_VARIABLE}={text!r}: expected a positive number of minutes")
    return minutes


def refuse_long(name: str, work: float, how: Session) -> None:
    """Refuse work that would take longer than the limit.

    Raises:
        UnsupportedError: it would.
    """
    allowed = limit() if how.minutes is None else how.minutes
    need = seconds(work, how.runs) / 60
    if need > allowed:
        raise UnsupportedError(
            f"{name}: about {work:.2g} warp instructions, {need:.1f} minutes in the emulator "
            f"({how.mode} mode); the limit is {allowed:g}. Take shorter sequences, fewer heads or "
            f"one mode, or raise the limit: {LIMIT_VARIABLE}, minutes= of emulation.session, or "
            "--minutes of `attnkit emulate`"
        )


def _executable(kernel: Kernel) -> emulator.Executable:
    """The kernel for the emulator, its host code linked once."""
    found = _executables.get(kernel)
    if found is None:
        compiler()  # says what is missing, before anything else is tried
        found = _executables[kernel] = kernel.executable()
    return found


def run_emulated(
    kernel: Kernel,
    arguments: Sequence[Any],
    *,
    work: float = 0.0,
    barriers: Mapping[int, str] | None = None,
    roles: Mapping[str, Iterable[int]] | None = None,
) -> emulator.Report | emulator.CheckReport:
    """Execute a kernel on the CPU, as the session in force says.

    Args:
        kernel: for example what `compiled.kernel` returns.
        arguments: those of a call of the kernel: torch CPU tensors and numbers, the stream left
            out; `emulator.Undefined(t)` for an output that must not be read before it is written.
        work: estimated warp instructions, see `attention_work`; 0 is never refused.
        barriers: names of mbarriers by offset in shared memory, in bytes, for reports.
        roles: numbers of warps by role, for reports.

    Returns:
        The report; outputs are in the tensors.

    Raises:
        UnsupportedError: no C compiler, an instruction that is not implemented, or too much work.
        KernelFault: the kernel faulted, and there is no session to keep the report.
    """
    current = _session.get()
    how = current or Session()
    if not how.execute:
        return emulator.Report((), (), how.mode)
    refuse_long(kernel.name, work, how)
    target = _executable(kernel).describe(names=barriers, roles=roles)
    if how.timeline:
        before = emulator.snapshot(arguments)
        how.timelines.append((kernel.name, emulator.timeline(target, *arguments)))
        emulator.restore(arguments, before)
    report: emulator.Report | emulator.CheckReport
    if how.mode == "check":
        report = emulator.check(
            target, *arguments, seeds=how.seeds, deterministic=how.deterministic
        )
    else:
        seed = how.seeds - 1 if how.mode == "adversarial" else 0
        report = emulator.run(target, *arguments, mode=how.mode, seed=seed, raises=current is None)
    how.reports.append((kernel.name, report))
    return report
