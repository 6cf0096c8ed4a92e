"""Decide whether a backward sums dQ in the order in which its parts arrive, and count these parts.

If each q tile meets few kv tiles, two small kernels take a large part of the time: one clears the
float32 sums of dQ, the other rounds them. Often the work list does not say which kv tile reaches a q
tile first, and which last. Then the main kernel counts them
(`attnkit.templates.sm90.backward_arrivals`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from attnkit.schedule.first_writer import visited_q_tiles
from attnkit.sparsity.block_runs import BlockRuns

# Most kv tiles per q tile, on average. A kv tile may wait for others at the same q tile. On one H200
# counting is faster with 3.8 kv tiles, and makes no difference with 4.5 (docs/notes/hopper.md, "Order
# of arrival").
MOST = 4
# Most kv tiles at any q tile. Rows that see all keys, such as global tokens, were not measured.
MOST_AT_ONE = 16


def few_visits(runs: BlockRuns, batch: int, heads: int) -> Tensor | None:
    """Return how many kv tiles visit each q tile, int32 [batch * heads * q tiles].

    Args:
        runs: the mask's tiles.
        batch, heads: sizes of the call, or of its packed heads.

    Returns:
        The numbers on the host. None if their average exceeds `MOST`, or one of them `MOST_AT_ONE`.
    """
    count = int(runs.full_t.length.sum()) + int(runs.partial_t.length.sum())
    if count > MOST * runs.batch * runs.heads * runs.q_blocks:
        return None
    ends, q = visited_q_tiles(runs)
    kv_rows = np.repeat(np.arange(ends.size), np.diff(ends, prepend=0))
    rows = kv_rows // runs.kv_blocks * runs.q_blocks + q
    size = runs.batch, runs.heads, runs.q_blocks
    visits = np.bincount(rows, minlength=int(np.prod(size))).astype(np.int32).reshape(size)
    if visits.max(initial=0) > MOST_AT_ONE:
        return None
    b, h = np.arange(batch) % runs.batch, np.arange(heads) % runs.heads
    return torch.from_numpy(np.ascontiguousarray(visits[b[:, None], h])).view(-1)
