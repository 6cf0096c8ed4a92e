"""Model the port of an SM's shared memory, which serves one request at a time."""

from __future__ import annotations


class SharedMemoryPort:
    """Books clocks of shared memory for requests, in the order of the calls.

    Args:
        gaps: whether a booking may take free clocks before an earlier booking. Products into tensor
            memory are booked when a warp issues them, long before they run. Products of a warpgroup
            run soon after, as the warpgroup waits for them.
    """

    def __init__(self, gaps: bool) -> None:
        self._gaps = gaps
        self._taken: list[tuple[float, float]] = []  # (start, end), ascending, disjoint

    def book(self, now: float, at: float, clocks: float) -> float:
        """Book the first free clocks from `at` on, in several pieces if need be; return their end.

        Args:
            now: current clock; later bookings do not begin before it.
            at: earliest clock to book, not before `now`.
            clocks: number of clocks; if 0, nothing is booked and `at` is returned.
        """
        if clocks <= 0:
            return at
        if not self._gaps:
            at = max(at, self._taken[-1][1]) if self._taken else at
            self._taken = [(at, at + clocks)]
            return at + clocks
        spans = [span for span in self._taken if span[1] > now]
        booked: list[tuple[float, float]] = []
        for start, end in spans:
            piece = min(clocks, start - at)
            if piece > 0:
                booked.append((at, at + piece))
                clocks -= piece
                at += piece
            if clocks <= 0:
                break
            at = max(at, end)
        if clocks > 0:
            booked.append((at, at + clocks))
            at += clocks
        self._taken = _joined(sorted(spans + booked))
        return at


def _joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge spans that touch."""
    merged: list[tuple[float, float]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1] + 1e-9:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
