"""Split attention over [B, Hq] into units: sets of (b, h) that are computed together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnkit.sparsity.block_runs import BlockRuns
from attnkit.templates.cpu.strips import Chunk, Strip, dense, plan


@dataclass(frozen=True, slots=True)
class Unit:
    """Describes batch elements and heads that share strips and one batched matrix product.

    A lane is one (batch element, kv head). The query heads of a lane are stacked along its rows.
    Two units have either the same kv_batch and kv_head, or disjoint ones.

    Attributes:
        batch: batch elements of the query.
        head: query heads.
        kv_batch: batch elements of key and value; slice(0, 1) if all batch elements share them.
        kv_head: kv heads.
        strips: the strips to compute.
    """

    batch: slice
    head: slice
    kv_batch: slice
    kv_head: slice
    strips: tuple[Strip, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Return (nb, nh), the numbers of batch elements and of query heads."""
        return self.batch.stop - self.batch.start, self.head.stop - self.head.start

    @property
    def lanes(self) -> int:
        """Return the number of lanes, nb times the number of kv heads."""
        kv_heads: int = self.kv_head.stop - self.kv_head.start
        return self.shape[0] * kv_heads

    def rows(self, t: Tensor, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        """Return the chunk's rows of `t` [B, Hq, Sq, n] as [lanes, stacked rows, n] in `dtype`."""
        part = t[self.batch, self.head, chunk.rows].to(dtype)
        return part.reshape(self.lanes, -1, t.shape[-1])

    def columns(self, t: Tensor, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        """Return the chunk's columns of `t` [B or 1, Hkv, Skv, n] as [lanes, width, n]."""
        mine = t[self.kv_batch, self.kv_head]
        parts = [mine[:, :, span.start : span.stop] for span in chunk.spans]
        part = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return part.to(dtype).reshape(self.lanes, -1, t.shape[-1])

    def spread(self, stacked: Tensor, chunk: Chunk) -> Tensor:
        """Return a view of `stacked` [lanes, stacked rows, n] as [nb, nh, rows, n]."""
        return stacked.view(*self.shape, chunk.height, -1)


def units(
    query: Tensor, key: Tensor, runs: BlockRuns | None, rows: int, pairs: int
) -> Iterator[Unit]:
    """Yield the units of a call; units that share keys are consecutive.

    Args:
        query: [B, Hq, Sq, D].
        key: [B or 1, Hkv, Skv, D].
        runs: block runs of the mask; None for no mask.
        rows: approximate number of queries per strip.
        pairs: maximum number of (b, h) per unit.
    """
    batch, heads, q_len = query.shape[:3]
    group = heads // key.shape[1]
    plans = dense(q_len, key.shape[2], rows) if runs is None else plan(runs, rows)
    own_batch, own_heads = (False, False) if runs is None else (runs.batch > 1, runs.heads > 1)
    head_step = 1 if own_heads else _head_step(heads, group, pairs)
    shared_keys = key.shape[0] < batch
    together = head_step == heads and not own_batch and not shared_keys
    batch_step = max(1, pairs // heads) if together else 1
    starts = itertools.product(range(0, batch, batch_step), range(0, heads, head_step))
    for kv_head, b, head in sorted((head // group, b, head) for b, head in starts):
        here = slice(b, min(b + batch_step, batch))
        stop = min(head + head_step, heads)
        yield Unit(
            batch=here,
            head=slice(head, stop),
            kv_batch=slice(0, 1) if shared_keys else here,
            kv_head=slice(kv_head, (stop - 1) // group + 1),
            strips=plans[own_batch * b * (heads if own_heads else 1) + own_heads * head],
        )


def _head_step(heads: int, group: int, pairs: int) -> int:
    """Return the number of query heads per unit, at most `pairs`.

    A unit has all query heads of one or more kv heads, or an equal part of those of one kv head.
    """
    if pairs >= group:
        return min(heads, pairs // group * group)
    return max(n for n in range(1, pairs + 1) if group % n == 0)
