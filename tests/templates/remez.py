"""Compute minimax polynomials for 2**f by Remez exchange, in float64."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.polynomial.polynomial import polyval


def exp2_polynomial(degree: int, low: float, high: float, exact_at_zero: bool) -> np.ndarray:
    """Return the coefficients of a minimax polynomial for 2**f, lowest power first.

    Args:
        degree: degree of the polynomial, at least 1.
        low, high: interval of f.
        exact_at_zero: require the value 1 at 0. The error then has a factor f, so that its signs
            at the extremes alternate up to the sign of f.
    """
    powers = range(exact_at_zero, degree + 1)
    count = len(powers) + 1  # the error is largest, with changing sign, at so many points
    middle, half = (low + high) / 2, (high - low) / 2
    at_end = exact_at_zero and low == 0  # the error is 0 there, which is no extreme
    angles = (np.arange(count) + at_end) / (count - 1 + at_end)
    points = middle - half * np.cos(np.pi * angles)
    grid = np.linspace(low, high, 1 << 16)
    for _ in range(50):
        exact = 2.0**points
        signs = (-1.0) ** np.arange(count) * (np.sign(points) if exact_at_zero else 1)
        columns = [points**k / exact for k in powers] + [signs]
        wanted = 1 - 1 / exact if exact_at_zero else np.ones(count)
        found = np.linalg.solve(np.column_stack(columns), wanted)[:-1]
        coefficients = np.concatenate([[1.0], found]) if exact_at_zero else found
        error = polyval(grid, coefficients) / 2.0**grid - 1
        peaks = _peaks(error * np.sign(grid) if exact_at_zero else error)
        assert len(peaks) == count, "the error must change its sign as often as there are points"
        if np.allclose(grid[peaks], points, rtol=0, atol=1e-9):
            return coefficients
        points = grid[peaks]
    raise AssertionError("no convergence")


def _peaks(error: np.ndarray) -> list[int]:
    """Return the index of the largest error between each two changes of its sign."""
    changes = np.flatnonzero(np.sign(error[:-1]) * np.sign(error[1:]) < 0) + 1
    edges = [int(error[0] == 0), *changes.tolist(), len(error)]
    return [a + int(np.argmax(np.abs(error[a:b]))) for a, b in pairwise(edges)]
