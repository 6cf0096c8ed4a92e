"""Add slope * (kv - q) (ALiBi) to the exponents of the Hopper backward.

A thread has two columns and many rows. If the MMAs include the part that depends on the row
(`backward_lse_in_mma`), the thread adds one number per column and block. Otherwise it adds one
number to all elements of equal q - kv, which costs one FMA per number. Either number is the addend
of the FMA that applies the scale. The terms are relative to a block, and rounded to float32 at that
magnitude. The slope is read once per kv block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutlass import Float32, cute

from attnkit.templates.common.hooks import BackwardHooks

if TYPE_CHECKING:
    from attnkit.templates.sm90.backward_softmax import KvBlock, QBlock

Term = Callable[[int, int], Any]


@dataclass(frozen=True)
class Alibi:
    """Computes the terms of the exponents that are linear in kv - q.

    Attributes:
        hooks: hooks of the variant.
        block_q: rows of a q block.
        rows_in_mma: whether the MMAs include the part that depends on the row.
    """

    hooks: BackwardHooks
    block_q: int
    rows_in_mma: bool

    def terms(self, block: QBlock, tile: KvBlock) -> Term | None:
        """Return the distance terms of a block's exponents that the MMAs do not include.

        Returns:
            A function of an element's step (its q - kv minus that of the thread's first element)
            and its column (0 or 1 of the thread); None if there is no term.
        """
        slope = self.hooks.distance_term(tile.site, tile.head)
        if slope is None:
            return None
        begin = (block.word >> 2) * self.block_q
        kv = tile.first_column
        if self.rows_in_mma:
            first = slope * Float32(kv - begin)
            columns = first, cute.math.fma(slope, Float32(8.0), first)
            return lambda step, column: columns[column]
        first = slope * Float32(kv - (begin + block.row0))
        by_step: dict[int, Any] = {0: first}

        def term(step: int, column: int) -> Any:
            if step not in by_step:
                by_step[step] = cute.math.fma(slope, Float32(float(-step)), first)
            return by_step[step]

        return term
