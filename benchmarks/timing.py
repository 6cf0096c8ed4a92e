"""Time several functions round-robin, so that a busy machine slows down all of them equally."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

NOISY = 1.25
SPREAD = 0.10  # limit of `Times.spread` of device and host times


def spread(values: Sequence[float]) -> float:
    """Return (p90 - p10) / median with interpolated percentiles; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return (tenths[-1] - tenths[0]) / statistics.median(values)


def uncertainty(values: Sequence[float]) -> float:
    """Return half the width of the 95 % confidence interval of the median, over the median.

    The interval lies between two order statistics: with n independent values, the number of values
    below the true median is binomial (n, 1/2). With fewer than 6 values no such interval exists
    and the result is infinite. Source: H. A. David, Order Statistics, section 7.1.
    """
    n, below, rank = len(values), 0.0, 0
    while (below := below + math.comb(n, rank) / 2**n) <= 0.025:
        rank += 1  # the interval from the rank-th value, from either end, covers at least 95 %
    if rank == 0:
        return math.inf
    ordered = sorted(values)
    return (ordered[n - rank] - ordered[rank - 1]) / 2 / statistics.median(ordered)


@dataclass(frozen=True)
class Times:
    """Hold the times of one function in milliseconds, one per round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def least(self) -> float:
        return min(self.rounds)

    @property
    def spread(self) -> float:
        """Return (p90 - p10) / median of the times."""
        return spread(self.rounds)

    def is_noisy(self, limit: float | None = None) -> bool:
        """Return whether the spread is above `limit`; without a limit, return `noisy`."""
        return self.noisy if limit is None else self.spread > limit

    @property
    def noisy(self) -> bool:
        """Return whether the median exceeds `NOISY` times the least, as on a busy machine."""
        return self.median > NOISY * self.least

    def over(self, other: Times) -> float:
        """Return the median over rounds of this time divided by `other`'s time."""
        return statistics.median(self.ratios(other))

    def ratios(self, other: Times) -> tuple[float, ...]:
        """Return this time divided by `other`'s time for each round."""
        pairs = zip(self.rounds, other.rounds, strict=True)
        return tuple(mine / theirs for mine, theirs in pairs)


def in_turn(
    functions: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    attempts: int = 1,
    least_rounds: int = 7,
    most_rounds: int = 50,
    limit: float | None = None,
) -> dict[str, Times]:
    """Time functions round-robin: each round calls every function once, in alternating order.

    Args:
        functions: functions to time, by name; each is called once before the first round, untimed.
        seconds: begin further rounds until the rounds took this time.
        attempts: largest number of measurements; measure again while a time is noisy.
        least_rounds: least number of rounds.
        most_rounds: largest number of rounds.
        limit: as in `Times.is_noisy`.
    """
    for function in functions.values():
        function()
    for _ in range(attempts):
        times = _rounds(functions, seconds, least_rounds, most_rounds)
        if not any(t.is_noisy(limit) for t in times.values()):
            break
    return times


def _rounds(
    functions: Mapping[str, Callable[[], object]], seconds: float, least: int, most: int
) -> dict[str, Times]:
    milliseconds: dict[str, list[float]] = {name: [] for name in functions}
    begin = time.perf_counter()
    for turn in range(most):
        if turn >= least and time.perf_counter() - begin > seconds:
            break
        for name in list(functions)[:: 1 if turn % 2 == 0 else -1]:
            start = time.perf_counter()
            functions[name]()
            milliseconds[name].append(1000 * (time.perf_counter() - start))
    return {name: Times(tuple(rounds)) for name, rounds in milliseconds.items()}
