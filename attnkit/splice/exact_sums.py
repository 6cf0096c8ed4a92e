"""Accumulate gradients of captured tensors exactly, so that the order does not change the bits.

The sums are int64 bins. `attnkit.templates.common.exact_sums` explains the format.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STEP, BINS = 8, 33
_BIAS = 150  # a float32 is an integer times 2**(biased exponent - 150)
_MAX_TERMS = 1 << 32  # number of terms that a bin can sum without overflow
_FREE_BYTES = 64 << 20  # bytes of sums that are always allowed


def fit(query: Tensor, key: Tensor, learned: Sequence[Tensor]) -> bool:
    """Return whether exact sums for the gradients of `learned` cannot overflow and fit in memory.

    The limit is 64 MiB, or twice the bytes of a float32 gradient of `query` if that is more.
    Without learned tensors there are no sums.
    """
    if not learned:
        return True
    scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    size = 8 * BINS * sum(t.numel() for t in learned)
    return scores <= _MAX_TERMS and size <= max(_FREE_BYTES, 8 * query.numel())


def empty_sums(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return zeroed sums for a gradient of `shape`: int64 [*shape, BINS], [1, BINS] for 0-d."""
    return torch.zeros((*(shape or (1,)), BINS), dtype=torch.int64, device=device)


def round_sums(sums: Tensor, shape: Sequence[int]) -> Tensor:
    """Convert exact sums to a float32 tensor of `shape`, rounding each element once."""
    flat = sums.view(-1, BINS)
    power = torch.arange(BINS - 1, device=sums.device) * STEP - _BIAS
    weight = ((power + 1023) << 52).view(torch.float64)  # 2.0**power, from its bits
    total = flat[:, :-1].to(torch.float64).mul_(weight).sum(1)
    special = flat[:, -1]  # bits: 1 for inf, 2 for -inf, 4 for NaN among the terms
    total = torch.where(special == 1, torch.inf, total)
    total = torch.where(special == 2, -torch.inf, total)
    return torch.where(special > 2, torch.nan, total).to(torch.float32).view(tuple(shape))
