"""Search and expand the row pointers of CSR lists, on one CPU thread.

torch's `searchsorted` and `repeat_interleave` start all CPU threads even for a few numbers. That
takes 4 to 15 ms per call if other processes use the cores. The functions of NumPy run on the
calling thread.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def row_indices(counts: Tensor) -> Tensor:
    """Return the row index of every CSR entry (int64): row i is repeated `counts[i]` times.

    Args:
        counts: int [rows], number of entries of each row.
    """
    if counts.is_cpu:
        return torch.from_numpy(np.repeat(np.arange(counts.numel()), counts.numpy()))
    return torch.arange(counts.numel(), device=counts.device).repeat_interleave(counts)


def searchsorted_right(ends: Tensor, values: Tensor) -> Tensor:
    """Return `torch.searchsorted(ends, values, right=True)`, computed on one thread on the CPU.

    Args:
        ends: [n], ascending.
        values: [m].

    Returns:
        int64 [m]: for each value, how many of `ends` are less than or equal to it.
    """
    if ends.is_cpu:
        return torch.from_numpy(np.searchsorted(ends.numpy(), values.numpy(), side="right"))
    return torch.searchsorted(ends, values, right=True)
