"""Choose the fastest setting of each contender of a GPU case.

Every setting is checked against float64. The settings that pass are timed briefly, round-robin, and
the fastest represents the contender in the case.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from gpu_check import SEED, Check
from gpu_contenders import OURS, Builder, Sweep, skipped
from gpu_timing import Function, Timer, in_turn
from gpu_variants import Problem

WRONG = 0.05  # a peer further than this from float64 computes something else
PROBES = 3  # rounds that choose a setting
Row = dict[str, Any]


class OutOfTime(BaseException):
    """Raised by `limited` to interrupt a setting.

    Not a subclass of Exception, so that exception handlers inside a compiler do not catch it.
    """


@contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """Raise `OutOfTime` inside the `with` block after `seconds`; without limit if None.

    Signals reach the main thread only, so in other threads the block runs to its end.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    # repeat each second: an exception inside a finalizer is swallowed
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class _Tried:
    """Hold the outcome of each setting of one contender: passed functions, errors, and reasons."""

    passed: dict[str, Function] = field(default_factory=dict)
    errors: dict[str, Row] = field(default_factory=dict)
    left_out: dict[str, Row] = field(default_factory=dict)


@dataclass(frozen=True)
class Sweeper:
    """Choose the setting of each contender of one case.

    Attributes:
        p: the problem.
        check: compares results with float64.
        timer: takes the measurements that decide.
        seconds: time limit per contender. After it no further setting is tried, and one in progress
            is stopped. The first setting always runs to its end.
    """

    p: Problem
    check: Check
    timer: Timer
    seconds: float

    def prepare(
        self, contenders: Mapping[str, Sweep]
    ) -> tuple[dict[str, Function], dict[str, Row]]:
        """Return two dictionaries by contender: the functions to time, and fields of their rows.

        A contender that cannot be timed is missing from the first; its row gives the reason in the
        field "skipped". The field "failed" is set for attnkit if it was wrong or raised an error
        other than UnsupportedError.
        """
        runs: dict[str, Function] = {}
        known: dict[str, Row] = {}
        for name, settings in contenders.items():
            tried = self._try(name, settings)
            if not tried.passed:
                known[name] = next(iter(tried.left_out.values()))
                continue
            found = self._probe(tried.passed)
            best = min(found, key=lambda label: found[label]) if found else next(iter(tried.passed))
            runs[name] = tried.passed[best]
            known[name] = tried.errors[best] | {"setting": best, "settings": found}
            if tried.left_out:
                reasons = {label: row["skipped"] for label, row in tried.left_out.items()}
                known[name]["settings_left_out"] = reasons
        return runs, known

    def _try(self, name: str, settings: Mapping[str, Builder]) -> _Tried:
        tried, began = _Tried(), time.perf_counter()
        for i, (label, build) in enumerate(settings.items()):
            left = self.seconds - (time.perf_counter() - began) if i else None
            if left is not None and left <= 0:
                tried.left_out[label] = {"skipped": f"not tried within {self.seconds:g} s"}
                continue
            try:
                with limited(left):
                    function, error = self._checked(name, build)
            except OutOfTime:
                tried.left_out[label] = {"skipped": f"not ready within {self.seconds:g} s"}
                torch.compiler.reset()  # clear what the interrupt left; ready settings recompile
            except Exception as refusal:
                tried.left_out[label] = skipped(name, refusal)
            else:
                if "skipped" in error:
                    tried.left_out[label] = error
                else:
                    tried.passed[label], tried.errors[label] = function, error
                continue
            alive(f"{name}, {label}", self.p.query.device)
        return tried

    def _checked(self, name: str, build: Builder) -> tuple[Function, Row]:
        """Build one setting and compare its result with float64.

        With dropout only attnkit's result is compared: the others drop other elements.

        Returns:
            The function to time, and the errors as fields of a row; with "skipped" if the result is
            wrong.
        """
        run = build(self.p)
        if self.p.dropout_p:
            torch.manual_seed(SEED)  # `Check` draws the same bits
        function = run.directed(self.p.grad if self.check.backward else None)
        found = function()
        if self.p.dropout_p and not name.startswith(OURS):
            return function, {"error": None, "error_allowed": None}
        verdict = self.check([run.shown(t) for t in found[:3]] + found[3:])
        row: Row = {"error": verdict.error, "error_allowed": verdict.allowed}
        own = name.startswith(OURS)
        limit = verdict.allowed if own else WRONG
        if not verdict.error <= limit:
            row["skipped"] = f"wrong: {verdict.error:.1e} off, {limit:.1e} allowed"
            row |= {"failed": True} if own else {}
        return function, row

    def _probe(self, functions: Mapping[str, Function]) -> dict[str, float]:
        """Return the median milliseconds of each setting, or nothing if there is only one."""
        if len(functions) < 2:
            return {}
        series = in_turn(functions, self.timer, rounds=PROBES)
        return {label: own.times.median for label, own in series.items()}


def alive(name: str, device: torch.device) -> None:
    """Exit if contender `name` broke the CUDA context, because later results would be invalid."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise SystemExit(f"{name} broke the CUDA context: {error}") from None
