"""Define the fixed order in which a deterministic backward adds to dQ, and to shared dK and dV.

Floating-point sums depend on their order. So in deterministic mode each dQ tile (b, h, q) adds the
contributions of its kv tiles in one fixed order: the order of the schedule, "ascending" or
"descending" in kv. In a descending order, the kv tiles with the highest indices may come after the
others (`attnkit.schedule.short_tail`). Each dQ tile has one int32 semaphore: the number of the kv
tile that may add next.

    wait until semaphore[b, h, q] == n        # n: my kv tile
    dQ[b, h, q] += contribution
    semaphore[b, h, q] = after(q, n)          # released with a fence

Semaphores start as `first`, and the last contributor sets `first` again, so the next launch can use
the same buffer. `after` is n + 1 (n - 1 for "descending") except at the end of a run of visited
tiles, so a kernel reads `visited` only there, and where kv tiles come at the end.

Why this cannot deadlock, for any number of workers:

1. A work tile waits only for work tiles before it in the list. The list has the work tiles of one
   head in this order of their kv tiles. If a kv tile is split, its work tiles visit different q
   tiles.
2. Workers take work tiles in list order from one counter, or each a fixed ascending subset of the
   list, and finish one before they take the next. So when a work tile is running, every earlier one
   has been taken, or will be taken by a worker that waits only for work tiles before that one.

Suppose that some work tiles never end, and let p be the first of them in the list. All work tiles
before p end. So the worker that takes p reaches p, because it takes only earlier work tiles before.
And each wait of p ends, because p waits only for earlier work tiles. So p ends: a contradiction.

The argument needs workers that keep running once they have started, and prefetched loads must not
wait for a semaphore. All workers must be resident at once if they take fixed subsets, or if the
first work tile of each does not come from the counter. The last contribution of a work tile may be
sent after the next one has begun, because the next one has not waited for anything yet. Work tiles
should begin in list order: one that is taken early and begins late makes others wait.

The same rule serves dK and dV where several work tiles contribute to one tile, because several
query heads share a kv head or because a kv tile is split. These work tiles add in list order
(`group`).

The order of all these sums follows from the list. A list that is made for one number of workers,
with `split=False`, has the same order on all devices.

For causal, windowed and document masks "descending" is the better order: all kv tiles start at
their diagonal, and each q tile then meets them in descending order. They need not wait if the kv
tiles of a head begin far enough apart (`attnkit.schedule.l2_sections.units_in_order`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnkit.errors import OptionError, ShapeError
from attnkit.schedule.scheduler import MONOTONE, Schedule
from attnkit.sparsity.block_runs import BlockRuns, Runs
from attnkit.util.csr import row_indices, searchsorted_right


@dataclass(frozen=True, eq=False)
class DeterministicOrder:
    """Defines the order in which the work tiles of a backward schedule add to shared sums.

    Attributes:
        first: int32 [batch * heads * q blocks], the kv tile that adds first to each dQ tile
            (b, h, q block); -1 if no kv tile visits it.
        last: the same for the kv tile that adds last.
        mask_row: int64, the row of `visited` of each dQ tile.
        visited: the FULL and PARTIAL runs of each q tile of the mask, merged.
        step: 1 if the order ascends in kv, -1 if it descends. If the last kv tile of a dQ tile is
            above its first in a descending order, the dQ tile has one run, and the order goes on
            from its lowest to its highest kv tile.
        group: int32 [work tiles, 2], (position, size). Work tiles that add to dK and dV of the same
            (b, kv head, kv tile) form a group of this size, and add in order of their positions,
            from 0. The last one resets the group's counter to 0. Work tiles that visit no tile are
            in no group and have (0, 0).
    """

    first: Tensor
    last: Tensor
    mask_row: Tensor
    visited: Runs
    step: int
    group: Tensor

    def after(self, row: Tensor, column: Tensor) -> Tensor:
        """Return the kv tile that adds to dQ tile `row` next after kv tile `column`.

        After the last kv tile, the result is `first`.

        Args:
            row: int64 [n], indices in `first`.
            column: int64 [n], kv tiles that visit these rows.

        Returns:
            int64 [n].
        """
        first, last = (t[row].to(torch.int64) for t in (self.first, self.last))
        row = self.mask_row[row]
        ends = (self.visited.start + self.visited.length).to(torch.int64)
        width = int(ends.max()) + 1
        keys = row_indices(self.visited.row_ptr.diff()) * width + self.visited.start
        run = searchsorted_right(keys, row * width + column) - 1
        edge = (ends[run] - 1 if self.step > 0 else self.visited.start[run]).to(torch.int64)
        other = (run + self.step).clamp(0, ends.numel() - 1)
        jump = self.visited.start[other].to(torch.int64) if self.step > 0 else ends[other] - 1
        if self.step < 0:
            jump = torch.where(last > first, ends[run].to(torch.int64) - 1, jump)
        following = torch.where(column == edge, jump, column + self.step)
        return torch.where(column == last, first, following)


def deterministic_order(runs: BlockRuns, schedule: Schedule) -> DeterministicOrder:
    """Compute the accumulation order of a backward schedule of `runs`.

    Raises:
        OptionError: the schedule is a forward, or its order is neither ascending nor descending.
        ShapeError: the schedule is not one of these runs.
    """
    if not schedule.backward or schedule.order not in MONOTONE:
        raise OptionError(
            "a fixed order of sums needs a schedule_backward with order='ascending' or "
            f"'descending', got {'backward' if schedule.backward else 'forward'} {schedule.order!r}"
        )
    if schedule.blocks != runs.kv_blocks:
        raise ShapeError(
            f"the schedule has {schedule.blocks} kv tiles a head, the runs have {runs.kv_blocks}"
        )
    step = 1 if schedule.order == "ascending" else -1
    visited = merge_runs(runs.full, runs.partial, runs.kv_blocks)
    shape, size = schedule.shape, (runs.batch, runs.heads, runs.q_blocks)
    row = torch.arange(visited.rows, device=runs.device).view(size)
    row = row.expand(shape.batch, shape.heads, -1).reshape(-1)
    first, last = _first(visited, step)[row], _first(visited, -step)[row]
    if step < 0:
        first, last = _with_tail(first, last, _highest(schedule), runs.q_blocks)
    return DeterministicOrder(first, last, row, visited, step, _groups(schedule))


def merge_runs(full: Runs, partial: Runs, columns: int) -> Runs:
    """Merge two disjoint lists of runs into one, and join runs that touch."""
    width = columns + 1
    keys, lengths = [], []
    for kind in (full, partial):
        keys.append(row_indices(kind.row_ptr.diff()) * width + kind.start)
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


def _first(visited: Runs, step: int) -> Tensor:
    """Return each row's first visited tile (its last if `step` is -1), or -1 if it has none."""
    pointers = visited.row_ptr.to(torch.int64)
    first = visited.row_ptr.new_full((visited.rows,), -1)
    some = pointers.diff() > 0
    if step > 0:
        first[some] = visited.start[pointers[:-1][some]]
    else:
        last = pointers[1:][some] - 1
        first[some] = visited.start[last] + visited.length[last] - 1
    return first


def _highest(schedule: Schedule) -> Tensor:
    """Return the kv tile that each head computes first, int32 [batch * heads]."""
    head = schedule.b.to(torch.int64) * schedule.shape.heads + schedule.h
    place = torch.arange(head.numel(), device=head.device)
    count = schedule.shape.batch * schedule.shape.heads
    first = place.new_full((count,), head.numel()).scatter_reduce(0, head, place, "amin")
    return schedule.tile[first]


def _with_tail(
    first: Tensor, last: Tensor, highest: Tensor, q_blocks: int
) -> tuple[Tensor, Tensor]:
    """Let kv tiles above `highest` add last; return the first and the last kv tile of each dQ tile.

    A dQ tile that has some above and some below must have one run of kv tiles; `with_short_tail`
    checks that.

    Args:
        first, last: int32 [heads * q blocks], the highest and the lowest kv tile; -1 if there is
            none.
        highest: int32 [heads].
        q_blocks: dQ tiles of a head.
    """
    highest = highest.repeat_interleave(q_blocks)
    both = (last <= highest) & (highest < first)
    return torch.where(both, highest, first), torch.where(both, highest + 1, last)


def _groups(schedule: Schedule) -> Tensor:
    """Return `DeterministicOrder.group` of a schedule, int32 [work tiles, 2]."""
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
    groups = torch.zeros(schedule.work_tile_count, 2, dtype=torch.int32, device=key.device)
    groups[live] = torch.stack([rank, counts[key][order.argsort()]], 1).to(torch.int32)
    return groups
