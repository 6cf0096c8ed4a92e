"""Gradients of captured tensors whose bits depend on no order: integers that kernels add to.

See `attnkit.templates.common.exact_sums` for what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STEP, BINS = 8, 33
_BIAS = 150  # a float is a whole number times 2**(exponent - 150)
_ADDED = 1 << 32  # numbers that a bin can take
_BYTES = 64 << 20  # that are always granted


def fit(query: Tensor, key: Tensor, learned: Sequence[Tensor]) -> bool:
    """Whether sums for these tensors' gradients cannot overflow, and take little memory.

    Little: up to twice the float32 sums of the query's gradient.
    """
    scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    size = 8 * BINS * sum(t.numel() for t in learned)
    return scores <= _ADDED and size <= max(_BYTES, 8 * query.numel())


def empty_sums(shape: Sequence[int], device: torch.device) -> Tensor:
    """int64 [*shape, BINS], nothing added yet; of a number [1, BINS]."""
    return torch.zeros((*(shape or (1,)), BINS), dtype=torch.int64, device=device)


def round_sums(sums: Tensor, shape: Sequence[int]) -> Tensor:
    """float32 of a shape: what was added, rounded once."""
    flat = sums.view(-1, BINS)
    power = torch.arange(BINS - 1, device=sums.device) * STEP - _BIAS
    weight = ((power + 1023) << 52).view(torch.float64)  # 2**power, from its bits
    total = flat[:, :-1].to(torch.float64).mul_(weight).sum(1)
    seen = flat[:, -1]
    total = torch.where(seen == 1, torch.inf, total)
    total = torch.where(seen == 2, -torch.inf, total)
    return torch.where(seen > 2, torch.nan, total).to(torch.float32).view(tuple(shape))
