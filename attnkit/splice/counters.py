"""Share counters among all launches on a stream; kernels leave them at zero."""

from __future__ import annotations

import torch
from torch import Tensor

from attnkit.util import caches
from attnkit.util.torch_private import stream_of

# By device index, stream, and whether there are several.
_counters: dict[tuple[int, int, bool], Tensor] = {}
caches.register(_counters.clear)


def zero_counters(device: torch.device, capturing: bool, count: int = 1) -> Tensor:
    """Return counters for a launch on the current stream.

    Kernels of one stream follow each other; those of two streams may overlap, and so have counters
    of their own. A CUDA graph may be replayed on any stream: while one is captured, counters are
    new tensors, in the graph's memory.

    Args:
        device: of the kernel.
        capturing: whether a CUDA graph is captured on the current stream.
        count: how many are needed; more may be given if it is above 1.

    Returns:
        int32 [count or more]. Who keeps its address must keep the tensor.
    """
    if device.index is None or capturing:
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = device.index, stream_of(device.index), count > 1
    known = _counters.get(key)
    if known is None or known.numel() < count:
        known = _counters[key] = torch.zeros(count, dtype=torch.int32, device=device)
    return known
