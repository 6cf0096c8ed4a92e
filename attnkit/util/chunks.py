"""Choose how many elements to process at a time, so that torch does not start its threads.

torch runs an operator on several threads from 32768 elements on. For operators as light as those
that classify tiles, threads gain little on an idle machine. On a busy one every operator waits for
the slowest thread and takes fifty times as long. Smaller chunks run on the calling thread, and
their intermediate values stay in its cache.
"""

from __future__ import annotations

import torch

_GRAIN = (1 << 15) - 1  # below at::internal::GRAIN_SIZE
_MAX_CHUNKS = 1024  # beyond that the overhead of many small operators would show


def chunk_size(total: int, device: torch.device) -> int:
    """Return how many of `total` elements to process at a time: all of them on a GPU."""
    if device.type != "cpu":
        return max(1, total)
    return max(_GRAIN, -(-total // _MAX_CHUNKS))
