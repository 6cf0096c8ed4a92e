"""Compute P of a Hopper forward without a softmax."""

from __future__ import annotations

import math
import os
from typing import Any

import cutlass
from cutlass import Float32, cute

from attnkit.templates.common import device

# With a = 1 + 2**-x the sigmoid of x is 1 / a. The MUFU unit has no time for a reciprocal of every
# score besides the power, so that elements share one: 1 / a = b * (1 / (a * b)). This needs products
# whose reciprocals are not subnormal. Otherwise each element has a reciprocal of its own.
SHARING = int(os.environ.get("SHARING", "2"))  # elements that share a reciprocal
LARGEST_PRODUCT = 2.0**125
CHAINS = 4  # independent dependency chains of sums, to hide latency


def write_scores(acc_s: cute.Tensor, factor: Float32 | None) -> None:
    """Multiply the scores, which are P, by `factor` in place; None for 1."""
    for i in range(cute.size(acc_s)):
        acc_s[i] = device.shifted(acc_s[i], factor, None)


@cute.jit
def write_sigmoids(acc_s: cute.Tensor, factor: Float32):
    """Write 1 / (1 + 2**-x) with x = score * factor over the scores, f32."""
    count = cute.size(acc_s)
    for i in cutlass.range_constexpr(count):
        acc_s[i] = Float32(1.0) + device.exp2(-(acc_s[i] * factor))
    sums = _products(acc_s)
    # the comparison is false for NaN too
    safe = sums <= Float32(LARGEST_PRODUCT)
    if cute.arch.vote_all_sync(safe):
        for i in cutlass.range_constexpr(0, count, SHARING):
            group = [acc_s[i + k] for k in range(SHARING)]
            for k, x in enumerate(_reciprocals(group)):
                acc_s[i + k] = x
    else:
        for i in cutlass.range_constexpr(count):
            acc_s[i] = cute.arch.rcp_approx(acc_s[i])


def _products(values: cute.Tensor) -> Any:
    """Return the sum of the products of groups that share a reciprocal; all values are positive."""
    sums: list[Any] = [Float32(0.0)] * CHAINS
    for i in range(0, cute.size(values), SHARING):
        group = [values[i + k] for k in range(SHARING)]
        first, last = math.prod(group[1 : SHARING // 2], start=group[0]), group[SHARING // 2]
        last = math.prod(group[SHARING // 2 + 1 :], start=last)
        c = i // SHARING % CHAINS
        sums[c] = cute.math.fma(first, last, sums[c])
    return sums[0] + sums[1] + (sums[2] + sums[3])


def _reciprocals(values: list[Any], of_all: Any = None) -> list[Any]:
    """Return the reciprocals of a power of two of values, from that of their product."""
    if len(values) == 1:
        return [of_all]
    half = len(values) // 2
    parts = values[:half], values[half:]
    low, high = (math.prod(part[1:], start=part[0]) for part in parts)
    if of_all is None:
        of_all = cute.arch.rcp_approx(low * high)
    return _reciprocals(parts[0], of_all * high) + _reciprocals(parts[1], of_all * low)
