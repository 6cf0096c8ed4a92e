"""Load a full bias to the accumulator of S before S = K Q^T is computed, in the Hopper backward.

A full bias has one element for each score. A thread that loads an element when it computes P waits
for memory in every q block. Instead, the bias of the next q block is loaded while the MMAs of dK run,
when the registers of S are free. The MMAs of S then add K Q^T to it. The bias is first divided by the
factor of the scores, because S is multiplied by this factor later.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
from cutlass import Int32, cute

from attnkit.templates.common import device
from attnkit.templates.sm90.backward_softmax import KvBlock, QBlock, SoftmaxBackward


class BiasFirst:
    """Loads the bias of a q block into the accumulator of S.

    Args:
        softmax: computes P from S, with the same hooks.
    """

    def __init__(self, softmax: SoftmaxBackward) -> None:
        self.softmax = softmax

    def set(self, block: QBlock, tile: KvBlock, biases: list[Any], scores: cute.Tensor) -> None:
        """Write biases that are in registers to `scores`, divided by the factor of the scores.

        `biases` are in the order of `scores`. The other arguments are those of `load`.
        """
        softmax, first = self.softmax, self.softmax.first_row(block)
        for g in range(cute.size(scores) // 4):
            rows, places = softmax.group(True, tile, first, g, scores)
            values = softmax.hooks.scores_of_biases(
                tile.site, tile.head, rows, tile.columns, [(r, c) for r, c, _ in places],
                biases[4 * g : 4 * g + 4],
            )  # fmt: skip
            for i, x in enumerate(values):
                scores[4 * g + i] = x

    def load(self, block: QBlock, tile: KvBlock, scores: cute.Tensor) -> None:
        """Load the bias of a q block, divided by the factor of the scores, to `scores`.

        Args:
            block: the q block.
            tile: values of the kv block.
            scores: f32, accumulator of S.
        """
        softmax, first = self.softmax, self.softmax.first_row(block)
        tile = recompute_addresses(tile, block.word)
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


def recompute_addresses(tile: KvBlock, changing: Any) -> KvBlock:
    """Make the compiler compute the addresses of a kv block inside the loop over q blocks.

    The compiler would otherwise compute them before the loop, and they would occupy registers.

    Args:
        tile: values of the kv block.
        changing: an Int32 that changes in the loop.

    Returns:
        A copy of `tile` with the same values.
    """
    site = tile.site
    b, h = (device.recomputed(x, changing) for x in (site.b, site.h))
    columns = tuple((device.recomputed(kv, changing), *rest) for kv, *rest in tile.columns)
    first_column = device.recomputed(tile.first_column, changing)
    return replace(tile, site=replace(site, b=b, h=h), columns=columns, first_column=first_column)
