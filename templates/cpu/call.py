"""One call of the template: its tensors, and the walk over what has to be computed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnkit.sparsity.block_runs import BlockRuns
from attnkit.templates.cpu.hooks import Hooks, Tile
from attnkit.templates.cpu.masks import WIDTH, Keep, masked
from attnkit.templates.cpu.strips import Chunk, Span, chunks
from attnkit.templates.cpu.units import Unit, units

ROWS = 128  # queries of a strip: fewer waste less at the mask's edges, more amortise each operator
STACKED = 1024  # rows of all (b, h) of a unit
PAIRS = 16  # (b, h) of a unit, at most
COLUMNS = 1 << 23  # elements of key and value that a chunk may copy


class Workspace:
    """A block of memory lent for scores again and again: fresh pages cost more than the sums."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._flat = like.new_empty(0, dtype=dtype)

    def take(self, *shape: int) -> Tensor:
        """An uninitialised contiguous tensor; the one taken before is overwritten."""
        count = math.prod(shape)
        if self._flat.numel() < count:
            self._flat = self._flat.new_empty(count)
        return self._flat[:count].view(shape)


@dataclass(frozen=True, slots=True)
class Call:
    """The inputs of a call, and the dtype of all arithmetic."""

    query: Tensor
    key: Tensor
    value: Tensor
    runs: BlockRuns | None
    hooks: Hooks
    scale: float
    dtype: torch.dtype
    index: Tensor

    @staticmethod
    def of(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        runs: BlockRuns | None,
        hooks: Hooks,
        scale: float,
    ) -> Call:
        """Complete the arguments of a call."""
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        longest = max(*query.shape[:3], key.shape[2], ROWS, WIDTH)
        index = torch.arange(longest, dtype=torch.int32, device=query.device)
        return Call(query, key, value, runs, hooks, scale, dtype, index)

    def walk(self, scores: int, pairs: int = PAIRS) -> Iterator[tuple[Unit, Chunk, list[Keep]]]:
        """Everything to compute, in order: chunks of at most `scores` scores, with their masks."""
        rows = max(1, min(ROWS, self.query.shape[2]))
        kv_len, widths = self.key.shape[2], self.key.shape[3] + self.value.shape[3]
        pairs = max(1, min(pairs, STACKED // rows))
        for unit in units(self.query, self.key, self.runs, rows, pairs):
            limit = min(scores // (math.prod(unit.shape) * rows), COLUMNS // (unit.lanes * widths))
            todo = (chunks(strip, max(1, limit)) for strip in unit.strips)
            for chunk, keeps in masked(
                itertools.chain.from_iterable(todo),
                *(unit, self.hooks, self.index, kv_len, self.dtype),
            ):
                yield unit, chunk, keeps

    @property
    def factor(self) -> float:
        """What raw scores still have to be multiplied with: 1 once `scores` has applied the scale.

        A positive scale waits for the exponential, where it costs nothing.
        """
        return 1.0 if self.hooks.has_score or self.scale <= 0 else self.scale

    def scores(self, q: Tensor, k: Tensor, space: Workspace) -> Tensor:
        """q k^T [lanes, rows, width], but for `factor`, in borrowed memory."""
        s = torch.bmm(q, k.mT, out=space.take(*q.shape[:2], k.shape[1]))
        return s if self.factor == self.scale else s.mul_(self.scale)

    def tile(self, unit: Unit, chunk: Chunk, span: Span) -> Tile:
        """The positions of a span of a chunk, for the score's hooks."""
        return Tile(
            b=self.index[unit.batch].view(-1, 1, 1, 1),
            h=self.index[unit.head].view(1, -1, 1, 1),
            q=self.index[chunk.rows].view(1, 1, -1, 1),
            kv=self.index[span.start : span.stop].view(1, 1, 1, -1),
        )


def exponential(s: Tensor, shift: Tensor, factor: float) -> Tensor:
    """exp((s - shift) * factor) in place; torch's loop for exp2 is faster than that for exp."""
    return s.sub_(shift).mul_(factor * math.log2(math.e)).exp2_()


def finite(peak: Tensor) -> Tensor:
    """What to take off the scores before `exponential`, given the largest of each row.

    Finite also where the row holds only -inf, whose weights are then 0, or holds +inf, whose sum
    and LSE are then +inf; NaN stays.
    """
    limit = torch.finfo(peak.dtype)
    return peak.clamp(limit.min, limit.max)
