"""Configure how kernels run in the emulator: the mode, the time limit and time estimates.

A `session` sets the mode for the kernels that its `with` block runs, and collects their reports.
Without a session, each kernel runs once, in eager mode. A kernel whose estimated time is above the
limit is refused.

This module does not import the emulator, so that a call on a GPU can look up the current session
cheaply. `emulator_runs` imports the emulator and runs kernels in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attnkit.errors import OptionError, UnsupportedError
from attnkit.util import environment

if TYPE_CHECKING:
    from attnkit import emulator

MODES = ("check", "eager", "adversarial", "race")
MINUTES = 10.0
LIMIT_VARIABLE = "ATTNKIT_EMULATE_MINUTES"
LINES_VARIABLE = "ATTNKIT_EMULATE_LINES"

# Emulated warp instructions per second, for forward kernels on a busy core. An idle core executes
# two to three times as many.
RATES = {"eager": 5e5, "adversarial": 2.5e5, "race": 1.8e5}
# Measured on forward kernels (head_dim 64 and 128; plain, causal and ALiBi): 4400 to 5600 warp
# instructions per 128 x 128 block of scores with two matrix products, and 3800 to 5200 per tile of
# 128 rows.
_PER_PRODUCT = 5 / 32  # warp instructions for one score and one matrix product
_PER_ROW = 40


@dataclass(eq=False)
class Session:
    """Options for running kernels in the emulator, and the reports of the kernels that ran.

    Attributes:
        mode: "eager", "adversarial" or "race"; "check" runs all three from the same inputs.
        seeds: number of adversarial orders in mode "check". Mode "adversarial" runs only the order
            `seeds - 1`.
        minutes: limit on the estimated time of one kernel; None means `limit()`.
        timeline: whether to predict the cycles of each kernel.
        deterministic: whether mode "check" requires bitwise equal results in every order.
        execute: whether to compile and execute kernels; if False, outputs stay undefined, and
            `kernel.requested_sources` collects what a caller may compile.
        ctas: number of persistent CTAs per kernel; None means the kernel's own small default.
        reports: (name of the kernel, report) of each run, in order.
        timelines: (name of the kernel, timeline) of each run; empty if `timeline` is False.
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
        """Return the modes of the runs of each kernel, in order."""
        if self.mode != "check":
            return [self.mode]
        return ["eager", *["adversarial"] * self.seeds, "race"]

    @property
    def ok(self) -> bool:
        """Return whether all reports are free of errors."""
        return all(report.ok for _, report in self.reports)


_session: ContextVar[Session | None] = ContextVar("attnkit emulation session", default=None)


@contextmanager
def session(**options: Any) -> Iterator[Session]:
    """Set the emulation options for kernels that run in the `with` block; yield the `Session`.

    >>> from attnkit.jit import emulation
    >>> with emulation.session(mode="check", seeds=2) as session:
    ...     session.runs
    ['eager', 'adversarial', 'adversarial', 'race']

    Args:
        options: fields of `Session`.

    Raises:
        OptionError: a value is not allowed.
    """
    entered = Session(**options)
    token = _session.set(entered)
    try:
        yield entered
    finally:
        _session.reset(token)


def current_session() -> Session | None:
    """Return the session of the innermost `with session(...)` block, or None."""
    return _session.get()


def ctas(default: int) -> int:
    """Return the number of persistent CTAs per emulated kernel: `Session.ctas`, else `default`."""
    current = _session.get()
    return default if current is None or current.ctas is None else current.ctas


def attention_work(
    blocks: int, tiles: int, *, block: tuple[int, int] = (128, 128), products: int = 2
) -> float:
    """Estimate how many warp instructions an attention kernel executes.

    Args:
        blocks: number of (q, kv) blocks that are computed, over all heads and batch elements.
        tiles: number of q tiles (kv tiles in the backward), over all heads and batch elements.
        block: rows and columns of a block.
        products: matrix products per block: 2 in the forward, 5 in the backward.
    """
    scores = blocks * block[0] * block[1]
    return scores * products * _PER_PRODUCT + tiles * block[0] * _PER_ROW


def seconds(work: float, modes: Iterable[str]) -> float:
    """Estimate the seconds for `work` warp instructions, executed once in each of `modes`."""
    return sum(work / RATES[mode] for mode in modes)


def limit() -> float:
    """Return the time limit per kernel in minutes, from ATTNKIT_EMULATE_MINUTES or the default.

    Raises:
        OptionError: ATTNKIT_EMULATE_MINUTES is not a positive number.
    """
    text = environment.read(LIMIT_VARIABLE)
    try:
        minutes = float(text) if text else MINUTES
    except ValueError:
        minutes = -1.0
    if not minutes > 0:
        raise OptionError(f"{LIMIT_VARIABLE}={text!r}: expected a positive number of minutes")
    return minutes


def with_lines() -> bool:
    """Return whether emulated kernels are compiled with line numbers, for the places in reports.

    Without them a kernel compiles faster.

    Raises:
        OptionError: ATTNKIT_EMULATE_LINES is not 0 or 1.
    """
    text = environment.read(LINES_VARIABLE) or "1"
    if text not in ("0", "1"):
        raise OptionError(f"{LINES_VARIABLE}={text!r}: expected 0 or 1")
    return text == "1"


def refuse_long(name: str, work: float, session: Session) -> None:
    """Raise if the estimated emulation time of a kernel is above the limit.

    Args:
        name: name of the kernel, for the error message.
        work: estimated warp instructions; 0 is never refused.
        session: the session, which gives the modes and the limit.

    Raises:
        UnsupportedError: the estimate is above the limit.
    """
    allowed = limit() if session.minutes is None else session.minutes
    need = seconds(work, session.runs) / 60
    if need > allowed:
        raise UnsupportedError(
            f"{name}: about {work:.2g} warp instructions, {need:.1f} minutes in the emulator "
            f"({session.mode} mode); the limit is {allowed:g}. Take shorter sequences, fewer heads "
            f"or one mode, or raise the limit: {LIMIT_VARIABLE}, minutes= of emulation.session, or "
            "--minutes of `attnkit emulate`"
        )
