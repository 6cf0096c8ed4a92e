"""Count the kv tiles that visit each q tile, for a backward that sums dQ in the order of arrival.

Where a q tile meets few kv tiles, clearing float32 sums of dQ before the main kernel and rounding
them after it take a large part of the time. If the order of the work list does not say which kv
tile is the first at a q tile, and which the last, the kernel counts them
(`attnkit.templates.sm90.backward_arrivals`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from attnkit.schedule.first_writer import visited_q_tiles
from attnkit.sparsity.block_runs import BlockRuns

# Most kv tiles per q tile, on average. A kv tile may wait for others at the same q tile. On one H200
# that pays with 3.8 kv tiles, and saves nothing with 4.5 (docs/notes/hopper.md, "Order of arrival").
MOST = 4
LIMIT = 1 << 15  # kv tiles at any q tile: the kernel counts them in half of an int32


def few_visits(runs: BlockRuns, batch: int, heads: int) -> Tensor | None:
    """Return how many kv tiles visit each q tile, int32 [batch * heads * q tiles].

    Args:
        runs: the mask's tiles.
        batch, heads: sizes of the call, or of its packed heads.

    Returns:
        The numbers on the host. None if they are above `MOST` on average, or one is not below
        `LIMIT`.
    """
    count = int(runs.full_t.length.sum()) + int(runs.partial_t.length.sum())
    if count > MOST * runs.batch * runs.heads * runs.q_blocks:
        return None
    ends, q = visited_q_tiles(runs)
    kv_rows = np.repeat(np.arange(ends.size), np.diff(ends, prepend=0))
    rows = kv_rows // runs.kv_blocks * runs.q_blocks + q
    size = runs.batch, runs.heads, runs.q_blocks
    visits = np.bincount(rows, minlength=int(np.prod(size))).astype(np.int32).reshape(size)
    if visits.max(initial=0) >= LIMIT:
        return None
    b, h = np.arange(batch) % runs.batch, np.arange(heads) % runs.heads
    return torch.from_numpy(np.ascontiguousarray(visits[b[:, None], h])).view(-1)
