"""slope * (kv - q), as ALiBi adds it, in the Hopper backward.

A thread has two columns and many rows. Where the products have the rows' part (`backward_rows`),
its elements need one number a column and block; otherwise one for all elements of equal q - kv, a
multiply-add each. Either is the addend of the multiply-add by the scale. Terms are relative to a
block, and rounded as float32 of their size. The slope is read once a kv tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cutlass import Float32, cute


class Distances:
    """The part of a backward kernel that adds what is linear in kv - q."""

    hooks: Any
    config: Any
    site: Any  # of `Weights`
    inclined = False  # the products have what depends on the row

    def far(self, mark: Any, tile: Any, row0: Any) -> Callable[[int, int], Any] | None:
        """What the exponents of a block have for their distances, and the products do not.

        Args:
            mark: the block's number and bits.
            tile: of `begin`.
            row0: the thread's first row within the tile.

        Returns:
            A function of an element's step, its q - kv less that of the thread's first, and of
            which of the thread's columns it is in; None for nothing.
        """
        slope = self.hooks.distance(self.site(tile), tile[1])
        if slope is None:
            return None
        begin = (mark >> 2) * self.config.block_q
        kv = tile[4]
        if self.inclined:
            first = slope * Float32(kv - begin)
            both = first, cute.math.fma(slope, Float32(8.0), first)
            return lambda step, column: both[column]
        first = slope * Float32(kv - (begin + row0))
        known: dict[int, Any] = {0: first}

        def of(step: int, column: int) -> Any:
            if step not in known:
                known[step] = cute.math.fma(slope, Float32(float(-step)), first)
            return known[step]

        return of
