"""Gather entries of tables [b or 1, h or 1, length] for tiles, on the calling thread.

Two arguments select the tiles: `index`, indices into the last axis of shape [...], and `lead`,
indices into the first two axes that broadcast with `index`. If `lead` is None, the tiles of every
(b, h) are selected.
"""

from __future__ import annotations

from torch import Tensor

Lead = tuple[Tensor, Tensor]


def entries(table: Tensor, index: Tensor, lead: Lead | None) -> Tensor:
    """Return the entries at int64 indices: [...], or without `lead` [b or 1, h or 1, ...]."""
    b, h, length = table.shape
    if lead is None:
        gathered = table.reshape(-1, length).index_select(1, index.reshape(-1))
        return gathered.view(b, h, *index.shape)
    for size, place, stride in ((b, lead[0], h * length), (h, lead[1], length)):
        if size > 1:
            index = index + place * stride
    return table.reshape(-1).index_select(0, index.reshape(-1)).view(index.shape)
