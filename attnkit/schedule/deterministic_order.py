"""Turns that make a backward reproducible: who adds to dQ, and to shared dK and dV, after whom.

Floating-point sums depend on their order, so in deterministic mode each dQ tile (b, h, q) takes
the contributions of its kv tiles in one fixed order: that of the schedule, "ascending" or
"descending" in kv. It holds one int32 semaphore, the number of the kv tile whose turn it is.

    wait until semaphore[b, h, q] == n        # n: my kv tile
    dQ[b, h, q] += contribution
    semaphore[b, h, q] = after(q, n)          # released with a fence

Semaphores start as `first`, and the last contributor leaves `first` behind, so the buffer serves
the next launch as it is. `after` is n + 1 (n - 1) but at the end of a kept run, so a kernel looks
into `kept` only there.

Why this cannot deadlock, for any number of workers. (1) A piece waits only for pieces before it in
the list: pieces of one head are listed by kv tile in the order of the turns, and the pieces of one
kv tile, if it is split, visit different q tiles. (2) Workers take pieces in list order from one
counter, or each a fixed ascending subset of the list, and finish a piece before they take the next;
so when a piece is running, every earlier piece has been taken, or will be taken by a worker that is
only waiting for pieces before that one. Suppose that some pieces never end, and let p be the first
of them in the list. All pieces before p end. Then the worker that is to take p reaches it, as it
has only earlier pieces before it; and each of p's waits ends, as it is for an earlier piece only.
So p ends, a contradiction. The argument needs workers that, once started, keep running, and loads
that run ahead must not wait for a turn. Fixed subsets need all workers resident too, as does a first
piece that does not come from the counter; where all do, what has not begun has taken nothing. The last
contribution of a piece may leave when the next piece has begun, as that waits for nothing before.
Pieces should begin in list order: one that is taken early and begins late makes others wait.

The same rule serves any other sum with several contributors: dK and dV of a kv head that several
query heads share, or of a split kv tile, take turns in list order (`group`). The order of dQ does
not depend on the number of workers; that of dK and dV only through the splits (`split=False`).

For causal, windowed and document masks "descending" is the better order: all kv tiles start at
their diagonal, each q tile then meets them in descending order, and nobody waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnkit.errors import OptionError, ShapeError
from attnkit.schedule.scheduler import MONOTONE, Schedule
from attnkit.sparsity.block_runs import BlockRuns, Runs
from attnkit.util.csr import owners, searched


@dataclass(frozen=True, eq=False)
class Turns:
    """The order of accumulation of a backward schedule.

    Attributes:
        first: int32 [runs.batch * runs.heads * q blocks], the kv tile that adds first; -1 where
            none does.
        last: the same of the kv tile that adds last.
        kept: the FULL and PARTIAL runs of each such row joined.
        step: 1 if turns ascend in kv, -1 if they descend.
        group: int32 [pieces, 2], turn (from 0) at dK and dV of (b, kv head, kv tile) of each piece
            of the schedule, and how many turns there are; the last resets the counter to 0. Pieces
            that visit nothing have none: (0, 0).
    """

    first: Tensor
    last: Tensor
    kept: Runs
    step: int
    group: Tensor

    def after(self, row: Tensor, column: Tensor) -> Tensor:
        """int64: whose turn it is after kv tile `column` at row `row`; at the end, `first`."""
        ends = (self.kept.start + self.kept.length).to(torch.int64)
        width = int(ends.max()) + 1
        pointers = self.kept.row_ptr.to(torch.int64)
        keys = owners(pointers.diff()) * width + self.kept.start
        run = searched(keys, row * width + column) - 1
        edge = (ends[run] - 1 if self.step > 0 else self.kept.start[run]).to(torch.int64)
        other = run + self.step
        outside = (other < pointers[row]) | (other >= pointers[row + 1])
        other = other.clamp(0, ends.numel() - 1)
        jump = self.kept.start[other].to(torch.int64) if self.step > 0 else ends[other] - 1
        jump = torch.where(outside, self.first[row].to(torch.int64), jump)
        return torch.where(column == edge, jump, column + self.step)


def turns(runs: BlockRuns, schedule: Schedule) -> Turns:
    """The turns that belong to a monotone backward schedule of these runs.

    Raises:
        OptionError: the schedule is a forward, or its order is neither ascending nor descending.
        ShapeError: it was made for other runs.
    """
    if not schedule.backward or schedule.order not in MONOTONE:
        raise OptionError(
            "turns need a schedule_backward with order='ascending' or 'descending', got "
            f"{'backward' if schedule.backward else 'forward'} {schedule.order!r}"
        )
    if schedule.blocks != runs.kv_blocks:
        raise ShapeError(
            f"the schedule has {schedule.blocks} kv tiles a head, the runs have {runs.kv_blocks}"
        )
    step = 1 if schedule.order == "ascending" else -1
    kept = joined(runs.full, runs.partial, runs.kv_blocks)
    return Turns(_first(kept, step), _first(kept, -step), kept, step, _groups(schedule))


def joined(full: Runs, partial: Runs, columns: int) -> Runs:
    """Union of the runs of two disjoint kinds, touching runs made one."""
    width = columns + 1
    keys, lengths = [], []
    for kind in (full, partial):
        counts = kind.row_ptr.to(torch.int64).diff()
        keys.append(owners(counts) * width + kind.start)
        lengths.append(kind.length)
    begin, order = torch.sort(torch.cat(keys))
    end = begin + torch.cat(lengths)[order]
    opens = torch.ones_like(begin, dtype=torch.bool)
    opens[1:] = begin[1:] != end[:-1]
    closes = opens.roll(-1)  # the last run closes as the first one opens
    row = begin[opens] // width
    counts = torch.bincount(row, minlength=full.rows)
    pointers = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    length = end[closes] - begin[opens]
    start = begin[opens] - row * width
    return Runs(pointers.to(torch.int32), start.to(torch.int32), length.to(torch.int32))


def _first(kept: Runs, step: int) -> Tensor:
    pointers = kept.row_ptr.to(torch.int64)
    first = kept.row_ptr.new_full((kept.rows,), -1)
    some = pointers.diff() > 0
    if step > 0:
        first[some] = kept.start[pointers[:-1][some]]
    else:
        last = pointers[1:][some] - 1
        first[some] = kept.start[last] + kept.length[last] - 1
    return first


def _groups(schedule: Schedule) -> Tensor:
    """int32 [pieces, 2]: rank in list order among the pieces that add to one (b, kv head, tile)."""
    shape = schedule.shape
    heads = shape.kv_heads or shape.heads
    b = schedule.b.to(torch.int64) * (shape.kv_batch != 1)
    key = (b * heads + schedule.h // (shape.heads // heads)) * schedule.blocks + schedule.tile
    live = (schedule.partial[:, 2] + schedule.full[:, 2] > 0).nonzero().squeeze(1)
    key = key[live]
    counts = torch.bincount(key)
    order = torch.argsort(key, stable=True)
    key = key[order]
    place = torch.arange(key.numel(), device=key.device)
    rank = torch.empty_like(key)
    rank[order] = place - (counts.cumsum(0) - counts)[key]
    groups = torch.zeros(schedule.pieces, 2, dtype=torch.int32, device=key.device)
    groups[live] = torch.stack([rank, counts[key][order.argsort()]], 1).to(torch.int32)
    return groups
