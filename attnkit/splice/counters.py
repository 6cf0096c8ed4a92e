"""Allocate the global-memory counters of kernels; all launches on a stream share them.

Every kernel expects its counters to be zero and resets them to zero before it ends.
"""

from __future__ import annotations

from threading import get_ident

import torch
from torch import Tensor

from attnkit.util import caches
from attnkit.util.torch_private import stream_of

# Keys: device index and stream (-1 and the thread for the CPU), and whether the caller requested
# more than one counter.
_counters: dict[tuple[int, int, bool], Tensor] = {}
caches.register(_counters.clear)


def zero_counters(device: torch.device, capturing: bool, count: int = 1) -> Tensor:
    """Return an int32 tensor of zeroed counters for a launch on the current stream.

    Kernels of one stream run one after the other and share counters. Kernels of two streams may
    overlap, so each stream has its own. Emulated kernels run in the thread that launches them, so
    each thread has its own. A CUDA graph may be replayed on any stream, so a capture gets new
    counters in the graph's memory.

    Args:
        device: device of the kernel.
        capturing: whether a CUDA graph is being captured on the current stream.
        count: number of counters needed. If it is above 1, the result may have more.

    Returns:
        int32 [count or more]. Keep the tensor for as long as its address is in use.
    """
    if capturing:
        return torch.zeros(count, dtype=torch.int32, device=device)
    if device.index is None:  # the CPU
        key = -1, get_ident(), count > 1
    else:
        key = device.index, stream_of(device.index), count > 1
    known = _counters.get(key)
    if known is None or known.numel() < count:
        known = _counters[key] = torch.zeros(count, dtype=torch.int32, device=device)
    return known
