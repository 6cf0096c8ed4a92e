"""Schedule a backward by whole heads: one worker computes all kv tiles of a head, in order.

Then no other worker adds to dQ of that head. The worker knows which kv tile is the first and which
the last to visit a q tile: the first one stores its part, and the last one writes dQ. That saves
the memset before and the rounding after the main kernel
(`attnkit.templates.sm90.backward_whole_heads`). Long sequences mostly have too few heads to keep
all workers busy, and their Q and dO do not stay in the L2 cache from one kv tile to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnkit.schedule.first_writer import BYTES_A_CLOCK, FirstWriters, visited_q_tiles
from attnkit.schedule.scheduler import Schedule, schedule_backward
from attnkit.schedule.simulator import simulate
from attnkit.schedule.split_kv import predict_makespan
from attnkit.sparsity.block_runs import BlockRuns

NO_Q_TILE = 1 << 30  # greater than every q tile
# Most kv tiles per q tile, on average. A worker reads Q, dO and its sums of dQ again for each kv
# tile, and those of all workers together exceed the L2 cache; where workers share heads, they read
# them at the same time. On one H200 that pays with 2.5 kv tiles, and costs with 4.5, where 4 are
# even (docs/notes/hopper.md, "Whole heads").
MOST = 3
ROUND_BYTES = 6  # for each float of dQ: the kernel after the main one reads 4 and writes 2


@dataclass(frozen=True, eq=False)
class WholeHeads:
    """Describes a work list in which the work tiles of a head are neighbours.

    Attributes:
        schedule: the work tiles, the most expensive heads first; last those without q tiles.
        starts: int32 [heads], index of the first work tile of each head, in list order.
        store_begin: int32 [work tiles]. A work tile is the first to visit those of its q tiles
            whose index is at least this.
        finish_end: int32 [work tiles]. It is the last to visit those whose index is below this.
        goes_on: int32 [work tiles], 1 if the next work tile is of the same head, else 0.
        saved: cycles that are predicted to be saved in comparison with the other schedule.
    """

    schedule: Schedule
    starts: Tensor
    store_begin: Tensor
    finish_end: Tensor
    goes_on: Tensor
    saved: int

    def fill(self, table: Tensor) -> None:
        """Write the columns of these attributes to the result of `Schedule.table`."""
        table[:, 3], table[:, 10], table[:, 11] = self.finish_end, self.store_begin, self.goes_on


def choose_whole_heads(
    runs: BlockRuns,
    other: Schedule,
    first: FirstWriters | str,
    floats: int,
    head: BlockRuns | None = None,
) -> WholeHeads | str:
    """Return a schedule by whole heads if it is predicted to be faster than the other schedule.

    Args:
        runs: the mask's tiles.
        other: the schedule that would run otherwise.
        first: its first writers, or the reason why there are none.
        floats: number of floats of dQ.
        head: tiles of one head if `runs` packs several.

    Returns:
        The schedule, or the reason against it.
    """
    if not meets_few_kv_tiles(runs):
        return f"a q tile meets more than {MOST} kv tiles"
    limits = _limits(runs if head is None else head)
    if isinstance(limits, str):
        return limits
    before = 0 if isinstance(first, FirstWriters) else 4 * floats // BYTES_A_CLOCK
    waits = first.cycles if isinstance(first, FirstWriters) else 0
    alternative = simulate(other).makespan + before + waits + ROUND_BYTES * floats // BYTES_A_CLOCK
    schedule, head_cycles = _by_heads(runs, other)
    makespan = predict_makespan(head_cycles, other.workers)
    if makespan >= alternative:
        return f"whole heads would take at least {makespan - alternative} cycles more"
    visited = int((_visits(schedule) > 0).sum())
    own = _heads(schedule)[:visited]
    follows = torch.zeros_like(schedule.tile)
    follows[: visited - 1] = (own[1:] == own[:-1]).to(torch.int32)
    new = torch.cat([own.new_ones(1, dtype=torch.bool), own[1:] != own[:-1]])
    batch, mask_heads, _ = limits[0].shape
    at = schedule.b.long() % batch, schedule.h.long() % mask_heads, schedule.tile.long()
    return WholeHeads(
        schedule,
        starts=new.nonzero()[:, 0].to(torch.int32),
        store_begin=limits[0][at],
        finish_end=limits[1][at],
        goes_on=follows,
        saved=alternative - makespan,
    )


def meets_few_kv_tiles(runs: BlockRuns) -> bool:
    """Return whether the mask keeps at most `MOST` kv tiles for a q tile, on average."""
    count = int(runs.full_t.length.sum()) + int(runs.partial_t.length.sum())
    return count <= MOST * runs.batch * runs.heads * runs.q_blocks


def _by_heads(runs: BlockRuns, other: Schedule) -> tuple[Schedule, Tensor]:
    """Schedule head after head, the most expensive ones first, and return the heads' costs too.

    Work tiles that visit nothing are last. The costs are int64 [heads], in the order of the heads.
    """
    shape, workers, cost = other.shape, other.workers, other.prices
    plain = schedule_backward(runs, shape, workers=workers, cost=cost, order="grid", split=False)
    visited, head = _visits(plain) > 0, _heads(plain)
    cycles = plain.cost.new_zeros(shape.batch * shape.heads)
    cycles.index_add_(0, head, torch.where(visited, plain.cost, 0))
    rank = torch.argsort(cycles, descending=True, stable=True)
    place = torch.where(visited, torch.argsort(rank)[head], cycles.numel())
    order = torch.argsort(place, stable=True)
    return plain.reordered(order), cycles[rank]


def _visits(schedule: Schedule) -> Tensor:
    """Return the number of q tiles that each work tile visits, int32 [work tiles]."""
    return schedule.partial[:, 2] + schedule.full[:, 2]


def _heads(schedule: Schedule) -> Tensor:
    """Return the head of each work tile, b * heads + h, int64 [work tiles]."""
    return schedule.b.long() * schedule.shape.heads + schedule.h


def _limits(runs: BlockRuns) -> tuple[Tensor, Tensor] | str:
    """Return `store_begin` and `finish_end` of each kv tile of the mask, or why there are none.

    Both are int32 [batch, heads, kv tiles] of `runs`.
    """
    ends, q = visited_q_tiles(runs)
    kv_rows = np.repeat(np.arange(ends.size), np.diff(ends, prepend=0))
    kv, row = kv_rows % runs.kv_blocks, kv_rows // runs.kv_blocks * runs.q_blocks + q
    rows = runs.batch * runs.heads * runs.q_blocks
    first, last = np.full(rows, NO_Q_TILE), np.full(rows, -1)
    np.minimum.at(first, row, kv)
    np.maximum.at(last, row, kv)
    if (last < 0).any():
        return "some q tiles meet no kv tile"
    stores, finishes = first[row] == kv, last[row] == kv
    begin, end = np.full(ends.size, NO_Q_TILE), np.zeros(ends.size, np.int64)
    np.minimum.at(begin, kv_rows[stores], q[stores])
    np.maximum.at(end, kv_rows[finishes], q[finishes] + 1)
    apart = (q >= begin[kv_rows]) & ~stores | (q < end[kv_rows]) & ~finishes
    if apart.any():
        return "the first or the last visits of a kv tile are not next to each other"
    size = runs.batch, runs.heads, runs.kv_blocks
    limits = torch.from_numpy(np.stack([begin, end]).astype(np.int32)).to(runs.device)
    return limits[0].view(size), limits[1].view(size)
