"""Add the bias of each score by initialising the accumulator of S to it, in the Hopper backward.

A full bias has an element for each score, which is read once. If a thread reads it when it computes
P, it waits for memory in every q block. Here the bias of the next q block is loaded while the MMAs of
dV, dQ and dK run: the registers of S are free then. The MMAs of S accumulate onto the bias, so it is
divided by the factor of the scores first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import cutlass
from cutlass import Int32, cute

from attnkit.templates.common import device
from attnkit.templates.sm90.backward_softmax import KvBlock, QBlock, SoftmaxBackward

if TYPE_CHECKING:
    from typing import Any


class BiasFirst:
    """Loads the bias of a q block into the accumulator of S.

    Args:
        softmax: computes P from S, with the same hooks.
    """

    def __init__(self, softmax: SoftmaxBackward) -> None:
        self.softmax = softmax

    def load(self, block: QBlock, tile: KvBlock, scores: cute.Tensor) -> None:
        """Set `scores`, f32 in the layout of S, to the bias divided by the factor of the scores."""
        softmax, first = self.softmax, self.softmax.first_row(block)
        tile = fresh(tile, block.word)
        hooks, along = softmax.hooks, softmax.hooks.bias_is_along_rows(tile.site)
        (left, *_), (right, *_) = tile.columns
        for g in range(cute.size(scores) // 4):
            rows, places = softmax.group(True, tile, first, g, scores)
            known = None
            if along:
                loaded = [
                    hooks.bias_row(tile.site, q, left, (Int32(0), right - left), False)
                    for q, _ in rows
                ]
                known = [loaded[r][c] for r, c, _ in places]
            values = hooks.initial_scores(
                tile.site, tile.head, rows, tile.columns, [(r, c) for r, c, _ in places], known
            )
            for i, x in enumerate(values):
                scores[4 * g + i] = x


@cute.jit
def wait_unless(last: cutlass.Boolean, full: cute.Pointer, phase: cutlass.Int32):
    """Wait for `phase` of the mbarrier `full` unless `last` is set."""
    if not last:
        cute.arch.mbarrier_wait(full, phase)


def fresh(tile: KvBlock, changing: Any) -> KvBlock:
    """Return a copy of `tile` from which addresses are computed anew where `changing` changes.

    Addresses that a loop keeps would take registers.
    """
    site = tile.site
    b, h = (device.recomputed(x, changing) for x in (site.b, site.h))
    columns = tuple((device.recomputed(kv, changing), *rest) for kv, *rest in tile.columns)
    first_column = device.recomputed(tile.first_column, changing)
    return replace(tile, site=replace(site, b=b, h=h), columns=columns, first_column=first_column)
