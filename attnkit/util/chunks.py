"""How many elements to handle at once.

torch spreads an operator over its threads when it has 32768 elements or more. For work as light
as the building of masks that gains little on a quiet machine, and on a busy one, where every
operator waits for the slowest thread, it costs fifty times as much. Chunks of that size run on the
calling thread, and their intermediate values stay in its cache.
"""

from __future__ import annotations

import torch

_GRAIN = (1 << 15) - 1  # below at::internal::GRAIN_SIZE
_MAX_CHUNKS = 1024  # beyond that the overhead of many small operators would show


def at_once(total: int, device: torch.device) -> int:
    """Elements of a chunk for work on `total` elements."""
    if device.type != "cpu":
        return max(1, total)
    return max(_GRAIN, -(-total // _MAX_CHUNKS))
