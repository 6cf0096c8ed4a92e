"""Compute P of a Hopper forward without a softmax.

With a = 1 + 2**-x, the sigmoid of x is 1 / a. The MUFU unit has no time for a reciprocal of every
score besides the power, so that two elements share one: 1 / a = b / (a b). If a product is so large
that its reciprocal would be subnormal, each element of the block has a reciprocal of its own.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, cute

from attnkit.templates.common import device

LARGEST_PRODUCT = 2.0**125
CHAINS = 4  # independent dependency chains of sums, to hide latency


def write_scores(acc_s: cute.Tensor, factor: Float32 | None) -> None:
    """Multiply the scores, which are P, by `factor` in place; None for 1."""
    for i in range(cute.size(acc_s)):
        acc_s[i] = device.shifted(acc_s[i], factor, None)


@cute.jit
def write_sigmoids(acc_s: cute.Tensor, factor: Float32):
    """Write 1 / (1 + 2**-x) with x = score * factor over the scores, f32; all lanes must call it.

    The relative error is that of float32. The result is exactly 0 for -inf, 1 for inf, and NaN for
    NaN.
    """
    count = cute.size(acc_s)
    for i in cutlass.range_constexpr(count):
        acc_s[i] = Float32(1.0) + device.exp2(-(acc_s[i] * factor))
    # no product is larger than their sum; the comparison is false for NaN too
    if cute.arch.vote_all_sync(_sum_of_products(acc_s) <= Float32(LARGEST_PRODUCT)):
        for i in cutlass.range_constexpr(0, count, 2):
            low, high = acc_s[i], acc_s[i + 1]
            reciprocal = cute.arch.rcp_approx(low * high)
            acc_s[i], acc_s[i + 1] = reciprocal * high, reciprocal * low
    else:
        for i in cutlass.range_constexpr(count):
            acc_s[i] = cute.arch.rcp_approx(acc_s[i])


def _sum_of_products(values: cute.Tensor) -> Any:
    """Return the sum of the products of the pairs of positive values."""
    sums: list[Any] = [Float32(0.0)] * CHAINS
    for i in range(0, cute.size(values), 2):
        c = i // 2 % CHAINS
        sums[c] = cute.math.fma(values[i], values[i + 1], sums[c])
    return sums[0] + sums[1] + (sums[2] + sums[3])
