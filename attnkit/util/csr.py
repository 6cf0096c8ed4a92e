"""Rows of different lengths, one after another: whose each entry is, and where a place lies.

torch's own operators for this wake all cores of a CPU for however few numbers, and wait for them:
4 to 15 ms each where other processes have the cores. NumPy's stay where they are.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def owners(counts: Tensor) -> Tensor:
    """Index i repeated counts[i] times, int64."""
    if counts.is_cpu:
        return torch.from_numpy(np.repeat(np.arange(counts.numel()), counts.numpy()))
    return torch.arange(counts.numel(), device=counts.device).repeat_interleave(counts)


def searched(ends: Tensor, at: Tensor) -> Tensor:
    """How many of `ends`, which ascend, are not above each of `at`, int64."""
    if ends.is_cpu:
        return torch.from_numpy(np.searchsorted(ends.numpy(), at.numpy(), side="right"))
    return torch.searchsorted(ends, at, right=True)
