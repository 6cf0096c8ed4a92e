"""Choose chunk sizes that keep torch's CPU operators on one thread.

torch runs an operator on several threads if it has at least 32768 elements. For operators as cheap
as those that classify tiles, threads gain little on an idle machine. On a busy machine every
operator waits for the slowest thread and takes fifty times as long. Smaller chunks run on the
calling thread, and their intermediate values stay in its cache.
"""

from __future__ import annotations

import torch

_GRAIN = (1 << 15) - 1  # below at::internal::GRAIN_SIZE
_MAX_CHUNKS = 1024  # more chunks would add noticeable overhead per operator


def chunk_size(total: int, device: torch.device) -> int:
    """Return how many of `total` elements to process per chunk; on a GPU this is all of them."""
    if device.type != "cpu":
        return max(1, total)
    return max(_GRAIN, -(-total // _MAX_CHUNKS))
