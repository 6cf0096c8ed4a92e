"""Compute P of a Hopper forward without a softmax."""

from __future__ import annotations

import struct
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Uint32, cute

from attnkit.templates.common import device
from attnkit.templates.common.sigmoid import SMALL, sigmoid, sigmoid_pair, small_sigmoid

(SMALL_BITS,) = struct.unpack("<I", struct.pack("<f", SMALL))
CHAINS = 4  # independent dependency chains of minima, to hide latency


def write_scores(acc_s: cute.Tensor, factor: Float32 | None) -> None:
    """Multiply the scores, which are P, by `factor` in place; None for 1."""
    for i in range(cute.size(acc_s)):
        acc_s[i] = device.shifted(acc_s[i], factor, None)


def write_sigmoids(acc_s: cute.Tensor, factor: Float32, modified: bool) -> None:
    """Replace the scores, f32, by sigmoids 1 / (1 + 2**-x) with x = score * factor.

    A score_mod often subtracts the logarithm of the row length, as Ramapuram et al. (2024) do, so
    that most weights are small. If all weights of a warp are, they take 5 instructions and not 8.

    Args:
        acc_s: scores, overwritten.
        factor: factor of the scores, which converts them to log2 units.
        modified: whether a score_mod may make most weights small; otherwise they are not tested.
    """
    for i in range(cute.size(acc_s)):
        acc_s[i] = acc_s[i] * factor
    if modified:
        _write_small_or_any(acc_s)
    else:
        _write_mixed(acc_s)


@cute.jit
def _write_small_or_any(acc_s: cute.Tensor):
    """Replace x by its sigmoid, by the formula for small weights if a whole warp's are small."""
    if cute.arch.vote_all_sync(_all_small(acc_s)):
        for i in cutlass.range_constexpr(cute.size(acc_s)):
            acc_s[i] = small_sigmoid(acc_s[i])
    else:
        for i in cutlass.range_constexpr(cute.size(acc_s)):
            acc_s[i] = sigmoid(acc_s[i])


def _all_small(acc_s: cute.Tensor) -> Boolean:
    """Return whether all of a thread's x are at most `SMALL`; NaN may count as either.

    The bits of negative numbers, as unsigned integers, grow with their magnitude, and those of
    other numbers are less. One instruction takes the least of three integers.
    """
    bits = cute.recast_tensor(acc_s, Uint32)  # same elements
    chains: list[Any] = [bits[i] for i in range(CHAINS)]
    for i in range(CHAINS, cute.size(bits)):
        c = i // 2 % CHAINS  # two neighbours to a chain, which become one instruction
        chains[c] = cutlass.min(chains[c], bits[i])
    least = chains[0]
    for x in chains[1:]:
        least = cutlass.min(least, x)
    return least >= Uint32(SMALL_BITS)


def _write_mixed(acc_s: cute.Tensor) -> None:
    """Replace x by its sigmoid in place; every second pair shares one reciprocal of the MUFU unit.

    The MUFU unit has time for some reciprocals besides the powers, and the FMA units for the others.
    """
    for i in range(0, cute.size(acc_s), 2):
        x, y = acc_s[i], acc_s[i + 1]
        pair = sigmoid_pair(x, y) if i // 2 % 2 else (sigmoid(x), sigmoid(y))
        acc_s[i], acc_s[i + 1] = pair
