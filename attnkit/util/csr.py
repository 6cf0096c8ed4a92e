"""Search and expand the row pointers of CSR lists, on one thread.

torch's `searchsorted` and `repeat_interleave` start all threads of a CPU even for a few numbers:
4 to 15 ms each where other processes use the cores. NumPy's run on the calling thread.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def row_indices(counts: Tensor) -> Tensor:
    """Return the row of every entry, int64: index i repeated counts[i] times.

    Args:
        counts: int [rows], entries of each row.
    """
    if counts.is_cpu:
        return torch.from_numpy(np.repeat(np.arange(counts.numel()), counts.numpy()))
    return torch.arange(counts.numel(), device=counts.device).repeat_interleave(counts)


def searchsorted_right(ends: Tensor, values: Tensor) -> Tensor:
    """Return how many of `ends` are at most each value: `torch.searchsorted(..., right=True)`.

    Args:
        ends: [n], ascending.
        values: [m].

    Returns:
        int64 [m].
    """
    if ends.is_cpu:
        return torch.from_numpy(np.searchsorted(ends.numpy(), values.numpy(), side="right"))
    return torch.searchsorted(ends, values, right=True)
