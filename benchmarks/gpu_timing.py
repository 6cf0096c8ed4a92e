"""Measure device times of several functions round-robin, each with its SM clock.

A GPU that is limited by its power slows down the longer it works. Therefore all functions of a case
are measured round-robin in one process, either with a pause before each short measurement (burst)
or without (sustained). Compare only times of the same run; cycles vary least from run to run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from timing import Times, spread, uncertainty
from torch import Tensor

Function = Callable[[], Any]

UNCERTAIN = 0.03  # of the median of times, and of ratios; a case above it gets more rounds
NOISY = 3  # the exit status of a program that had rows too noisy to save
LEAST, MOST = 0.1, 4.0  # GHz; a clock outside this range means that a counter was reset in between


@dataclass(frozen=True)
class Mode:
    """Describe how one measurement is taken.

    Attributes:
        rest: seconds of idle time before the measurement.
        settle: milliseconds of untimed launches before the timed ones. They let the host run ahead
            of the device, and the clock settle at the function's own power.
        length: milliseconds of timed launches.
    """

    rest: float
    settle: float
    length: float


MODES = {"burst": Mode(0.12, 4, 10), "sustained": Mode(0, 40, 40)}


@dataclass(frozen=True)
class Reading:
    """Hold one measurement: milliseconds per launch, and the SM clock in GHz if known."""

    ms: float
    ghz: float | None


@dataclass(frozen=True)
class Series:
    """Hold the measurements of one function."""

    readings: tuple[Reading, ...]

    @property
    def times(self) -> Times:
        return Times(tuple(r.ms for r in self.readings))

    @property
    def ghz(self) -> float | None:
        """Return the median SM clock in GHz, or None if it is unknown."""
        known = [r.ghz for r in self.readings if r.ghz is not None]
        return statistics.median(known) if known else None

    @property
    def cycles(self) -> float | None:
        """Return the SM cycles per launch: the median of time x clock over the measurements."""
        known = [1e6 * r.ms * r.ghz for r in self.readings if r.ghz is not None]
        return statistics.median(known) if known else None

    def spreads(self, ours: Series | None) -> dict[str, float]:
        """Return the spread of the times, and of the ratios to `ours`, as fields of a row."""
        found = {"spread": self.times.spread}
        if ours is not None:
            found["ratio_spread"] = spread(self.times.ratios(ours.times))
        return found

    def uncertainties(self, ours: Series | None) -> dict[str, float]:
        """Return `timing.uncertainty` of the times, and of the ratios to `ours`, as fields."""
        found = {"uncertainty": uncertainty(self.times.rounds)}
        if ours is not None:
            found["ratio_uncertainty"] = uncertainty(self.times.ratios(ours.times))
        return found


class Timer(Protocol):
    """Take measurements of functions.

    `prepare` must be called once for each function before `measure`.
    """

    def prepare(self, function: Function) -> Any: ...

    def measure(self, function: Function, prepared: Any) -> Reading: ...


@dataclass(frozen=True)
class Launches:
    """Describe how many launches one measurement of a function takes.

    Attributes:
        timed, settling: number of timed calls, and of untimed calls before them.
        lead: cycles for which the device first waits, so that a slow host can run ahead of it.
    """

    timed: int
    settling: int
    lead: int


class CudaTimer:
    """Time many launches between two CUDA events, and read the SM clock before and after.

    Args:
        mode: length of a measurement, and of the pause before it.
        device: a CUDA device.
    """

    def __init__(self, mode: Mode, device: torch.device) -> None:
        import gpu_clock  # needs Triton, which a machine without CUDA may lack

        self.mode, self.device, self.stamp = mode, device, gpu_clock.stamp
        self.stamp(device)

    def prepare(self, function: Function, calls: int = 3) -> Launches:
        """Run `function` a few times and return the number of launches for one measurement."""
        function()
        torch.cuda.synchronize(self.device)
        start, end = _events()
        start.record()
        began = time.perf_counter()
        for _ in range(calls):
            function()
        host = 1000 * (time.perf_counter() - began) / calls
        end.record()
        end.synchronize()
        ms = max(start.elapsed_time(end) / calls, 1e-3)
        timed = max(1, round(self.mode.length / ms))
        # If the device waited for the host, `ms` is the host's time, and the host may need that
        # much lead. A call that itself waits for the device never runs ahead.
        late = timed * host if host > 0.8 * ms else 0.0
        cycles = int(min(late, 200.0) * 2e6)  # at most 2 GHz
        return Launches(timed, round(self.mode.settle / ms), cycles)

    def measure(self, function: Function, prepared: Launches) -> Reading:
        """Take one measurement of `function` with the launches that `prepare` returned."""
        torch.cuda.synchronize(self.device)
        time.sleep(self.mode.rest)
        for _ in range(prepared.settling):
            function()
        if prepared.lead:
            torch.cuda._sleep(prepared.lead)
        start, end = _events()
        before = self.stamp(self.device)
        start.record()
        for _ in range(prepared.timed):
            function()
        end.record()
        after = self.stamp(self.device)
        torch.cuda.synchronize(self.device)
        ms = start.elapsed_time(end) / prepared.timed
        return Reading(ms, gigahertz(before, after))


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def gigahertz(before: Tensor, after: Tensor) -> float | None:
    """Return the median SM clock in GHz between two results of `gpu_clock.stamp`, or None."""
    first = {sm: (cycles, ns) for sm, cycles, ns in before.tolist()}
    rates = []
    for sm, cycles, ns in after.tolist():
        if sm in first and ns > first[sm][1]:
            rates.append((cycles - first[sm][0]) / (ns - first[sm][1]))
    sensible = [rate for rate in rates if LEAST < rate < MOST]
    return statistics.median(sensible) if sensible else None


def in_turn(
    functions: Mapping[str, Function],
    timer: Timer,
    *,
    rounds: int,
    seconds: float = float("inf"),
    least_rounds: int = 3,
) -> dict[str, Series]:
    """Measure functions round-robin, in alternating order, after one warm-up round.

    Args:
        functions: functions to measure, by name.
        timer: takes the measurements.
        rounds: number of rounds; each measures every function once.
        seconds: time after which no further round begins.
        least_rounds: number of rounds that are measured regardless of `seconds`.
    """
    prepared = {name: timer.prepare(function) for name, function in functions.items()}
    found: dict[str, list[Reading]] = {name: [] for name in functions}
    for name, function in functions.items():
        timer.measure(function, prepared[name])
    began = time.perf_counter()
    for turn in range(rounds):
        if turn >= least_rounds and time.perf_counter() - began > seconds:
            break
        for name in list(functions)[:: 1 if turn % 2 == 0 else -1]:
            found[name].append(timer.measure(functions[name], prepared[name]))
    return {name: Series(tuple(readings)) for name, readings in found.items()}


def number_from(least: int) -> Callable[[str], int]:
    """Return an argparse `type` that accepts integers of at least `least`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}; expected a number from {least} on")
        return int(text)

    return parse


ROUNDS = number_from(6)  # the median of fewer has no confidence interval
ATTEMPTS = number_from(1)


@dataclass(frozen=True)
class Steady:
    """Hold the measurements of a case.

    Attributes:
        series: measurements by function name, over all attempts.
        attempts: number of attempts; each adds rounds.
        noisy: whether a median is still more uncertain than `UNCERTAIN`.
    """

    series: dict[str, Series]
    attempts: int
    noisy: bool


def steady(
    functions: Mapping[str, Function],
    timer: Timer,
    *,
    base: str,
    rounds: int,
    seconds: float = float("inf"),
    attempts: int = 5,
) -> Steady:
    """Measure functions round-robin; add rounds while a median is too uncertain.

    Every round counts, so the result does not depend on which rounds happened to be quiet.

    Args:
        functions: functions to measure, by name.
        timer: takes the measurements.
        base: name of the function that ratios refer to; it may be missing.
        rounds: number of rounds of an attempt, as in `in_turn`.
        seconds: as in `in_turn`, for each attempt.
        attempts: largest number of attempts.
    """
    series: dict[str, Series] = {name: Series(()) for name in functions}
    attempt, noisy = 0, True
    while noisy and attempt < attempts:
        attempt += 1
        for name, more in in_turn(functions, timer, rounds=rounds, seconds=seconds).items():
            series[name] = Series(series[name].readings + more.readings)
        ours = series.get(base)
        noisy = any(max(own.uncertainties(ours).values()) > UNCERTAIN for own in series.values())
    return Steady(series, attempt, noisy)
