"""Time several functions in turns, so that a busy machine slows down all of them equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

LEAST_ROUNDS = 5
_ENOUGH = 2e-3  # seconds of GPU work between two events, which hides the host's time


@dataclass(frozen=True)
class Times:
    """Holds the times of one function in seconds, one for each round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Return the median in seconds."""
        return statistics.median(self.rounds)

    @property
    def ends(self) -> tuple[float, float]:
        """Return the 10th and the 90th percentile in seconds."""
        if len(self.rounds) < 2:
            return self.rounds[0], self.rounds[0]
        tenths = statistics.quantiles(self.rounds, n=10, method="inclusive")
        return tenths[0], tenths[-1]

    def __str__(self) -> str:
        low, high = self.ends
        return f"{_text(self.median)} ({_text(low)}-{_text(high)}) ms"


def _text(seconds: float) -> str:
    """Format a time in milliseconds with three significant digits."""
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.0f}" if milliseconds >= 999.5 else f"{milliseconds:.3g}"


def in_turns(
    functions: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int,
    seconds: float,
) -> dict[str, Times]:
    """Time functions in turns: each round runs every function, in alternating order.

    On a CUDA device, CUDA events around several calls in a row give the time of one call. On other
    devices it is the time of a call on the host.

    Args:
        functions: functions to time, by name. Each has run before.
        device: where they run.
        rounds: number of rounds.
        seconds: begin no further round after this time, but at least `LEAST_ROUNDS`.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    repeats = {name: _repeats(function, device) for name, function in functions.items()}
    start = time.perf_counter()
    for turn in range(rounds):
        if turn >= LEAST_ROUNDS and time.perf_counter() - start > seconds:
            break
        for name in list(functions)[:: -1 if turn % 2 else 1]:
            times[name].append(_once(functions[name], device, repeats[name]))
    return {name: Times(tuple(taken)) for name, taken in times.items()}


def _repeats(function: Callable[[], object], device: torch.device) -> int:
    """Return the calls per timing: 1 on a CPU; on a GPU, enough to hide the time of the host."""
    if device.type != "cuda":
        return 1
    return max(1, min(100, round(_ENOUGH / max(_once(function, device, 3), 1e-6))))


def _once(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the seconds of one call, from `repeats` calls in a row."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        return (time.perf_counter() - start) / repeats
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(repeats):
            function()
        end.record()
        torch.cuda.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3 / repeats


def method(device: torch.device) -> str:
    """Return how `in_turns` measures on a device, in a sentence."""
    how = "the time of a call on the host"
    if device.type == "cuda":
        how = "CUDA events around several calls in a row, with warm caches"
    return f"medians of rounds in which all run in turns, with 10th and 90th percentile; {how}"
