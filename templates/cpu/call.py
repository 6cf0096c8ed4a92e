"""Hold the inputs of one call, iterate over its chunks, and compute their raw scores."""

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

ROWS = 128  # queries per strip: fewer waste less at the mask's edges, more amortise each operator
STACKED = 1024  # maximum rows per unit, over all its (b, h)
PAIRS = 16  # maximum number of (b, h) per unit
COLUMNS = 1 << 23  # maximum elements of key and value that a chunk copies
CONVERTED = 1 << 26  # maximum elements of key and value that are converted as a whole


class Workspace:
    """Holds one buffer that all chunks reuse for their scores.

    Reuse avoids page faults on fresh memory, which cost more than the arithmetic.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._flat = like.new_empty(0, dtype=dtype)

    def take(self, *shape: int) -> Tensor:
        """Return an uninitialised contiguous tensor, which overwrites the previous one."""
        count = math.prod(shape)
        if self._flat.numel() < count:  # rounded up, as strips of a causal mask grow slowly
            self._flat = self._flat.new_empty(1 << (count - 1).bit_length())
        return self._flat[:count].view(shape)


@dataclass(frozen=True, slots=True)
class Call:
    """Holds the inputs of a call and the dtype of its arithmetic.

    `key` and `value` may have that dtype already. `index` is an int32 arange, from which positions
    are sliced.
    """

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
        """Return the record of a call, with its compute dtype chosen and `index` allocated."""
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        longest = max(*query.shape[:3], key.shape[2], ROWS, WIDTH)
        index = torch.arange(longest, dtype=torch.int32, device=query.device)
        if query.shape[2] > ROWS and key.numel() + value.numel() <= CONVERTED:
            # once, because several strips read a column
            own_value = None if value is key else value.to(dtype)
            key = key.to(dtype)
            value = key if own_value is None else own_value
        return Call(query, key, value, runs, hooks, scale, dtype, index)

    def walk(self, scores: int, pairs: int = PAIRS) -> Iterator[tuple[Unit, Chunk, list[Keep]]]:
        """Yield (unit, chunk, masks) for each chunk, in the order of computation.

        Args:
            scores: maximum number of scores per chunk.
            pairs: maximum number of (b, h) per unit.
        """
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
        """Return the factor that the results of `scores` still lack, 1 if they include the scale.

        Without a score function, a positive scale is applied in the exponential at no extra cost.
        """
        in_exponential = self.hooks.has_softmax and not self.hooks.has_score and self.scale > 0
        return self.scale if in_exponential else 1.0

    def scores(self, q: Tensor, k: Tensor, space: Workspace) -> Tensor:
        """Compute q k^T * scale / `factor` as [lanes, rows, width] in the workspace."""
        s = space.take(*q.shape[:2], k.shape[1])
        if self.factor == self.scale:
            return torch.bmm(q, k.mT, out=s)
        if self.scale == 0:  # the product below would be 0 where a score is infinite or NaN
            return torch.bmm(q, k.mT, out=s).mul_(self.scale)
        return s.baddbmm_(q, k.mT, beta=0, alpha=self.scale)  # no pass over the scores to scale

    def survivors(self, unit: Unit, chunk: Chunk, like: Tensor) -> Tensor | None:
        """Return which elements of a chunk dropout keeps, in the shape of `like`; None for all."""
        if self.hooks.survivor_scale is None:
            return None
        b, h = self.index[unit.batch][:, None], self.index[unit.head]
        rows = chunk.rows.start, chunk.rows.stop
        parts = [
            self.hooks.survivors(b, h, rows, (span.start, span.stop)) for span, _ in chunk.places()
        ]
        return torch.cat(parts, dim=-1).view(like.shape)

    def tile(self, unit: Unit, chunk: Chunk, span: Span) -> Tile:
        """Return the positions of one span of a chunk, for the score hooks."""
        return Tile(
            b=self.index[unit.batch].view(-1, 1, 1, 1),
            h=self.index[unit.head].view(1, -1, 1, 1),
            q=self.index[chunk.rows].view(1, 1, -1, 1),
            kv=self.index[span.start : span.stop].view(1, 1, 1, -1),
        )


def exponential(s: Tensor, shift: Tensor, factor: float) -> Tensor:
    """Compute exp((s - shift) * factor) in place and return `s`.

    It uses torch's exp2, which is faster than exp. Results below tiny / eps are 0, far below the
    rounding error of a row. Their products with values and gradients would be subnormal numbers,
    which slow down a matrix product several times on most CPUs.
    """
    limit = torch.finfo(s.dtype)
    s.sub_(shift).mul_(factor * math.log2(math.e))
    return torch.threshold_(s, math.log2(limit.tiny / limit.eps), -math.inf).exp2_()


def finite(peak: Tensor) -> Tensor:
    """Return the row maxima `peak` clamped to finite values, which `exponential` subtracts.

    A row whose scores are all -inf then has weights of 0. A row with +inf has a sum and an LSE of
    +inf. NaN stays.
    """
    limit = torch.finfo(peak.dtype)
    return peak.clamp(limit.min, limit.max)


def with_sink(total: Tensor, peak: Tensor, sink: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add the logit `sink` to the denominators of softmax rows.

    Args:
        total: sums of exp(score - peak).
        peak: row maxima; -inf for a row without keys.
        sink: one more logit of each row, broadcastable to `peak`.

    Returns:
        A factor and a divisor of exp(score - peak), which give the softmax, 0 for a row without
        keys; and the LSE.
    """
    base = torch.maximum(peak, sink)
    base = base.masked_fill(base == -math.inf, 0)
    decay = torch.exp(peak - base)
    total = total * decay + torch.exp(sink - base)
    empty = peak == -math.inf  # the sum over no keys is 0, whatever the sink
    lse = torch.where(empty, sink, base + torch.log(total))
    return decay.masked_fill_(empty, 0), total.masked_fill_(empty, 1), lse
