"""Move short work tiles of a deterministic backward to the end of its list.

Sums in a fixed order need a list in which each head has its kv tiles in one order. "descending" is
the best order of a causal mask (`attnkit.schedule.deterministic_order`), but the longest work tiles
of each head come last. The list then ends unevenly: a worker that has just begun the last work tile
keeps the others waiting.

So kv tiles of the highest indices, which a causal mask visits least, come at the end of the list
and fill the gaps between workers. They descend as well, because an ascending order would let each
one wait for the one before. Only heads that are complete by then give some up, as these work tiles
add to dQ after all others of their head. The order of the sums is the same for all devices if the
list is made for one number of workers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnkit.schedule.deterministic_order import merge_runs
from attnkit.schedule.scheduler import Schedule
from attnkit.schedule.split_kv import predict_makespan
from attnkit.sparsity.block_runs import BlockRuns

_GAIN = 100  # a tail must save more than 1 / _GAIN of the predicted makespan


def with_short_tail(runs: BlockRuns, schedule: Schedule) -> Schedule:
    """Move short work tiles to the end of the list if the backward is predicted to end earlier.

    The result is the same schedule if that saves at most 1 %, if kv tiles are split, or if the mask
    leaves gaps between the kv tiles of a dQ tile.

    Args:
        runs: the tiles that were scheduled.
        schedule: a backward schedule in the order "descending".
    """
    visited = merge_runs(runs.full, runs.partial, runs.kv_blocks)
    if schedule.split.numel() or bool((visited.row_ptr.diff() > 1).any()):
        return schedule
    tail = _tail(schedule)
    if not bool(tail.any()):
        return schedule
    # stable: work tiles of the tail by kv tile, the others before them as they were
    order = torch.argsort(torch.where(tail, schedule.blocks - schedule.tile, 0), stable=True)
    before, after = (
        predict_makespan(costs, schedule.workers) for costs in (schedule.cost, schedule.cost[order])
    )
    if after * _GAIN >= before * (_GAIN - 1):
        return schedule
    return schedule.reordered(order)


def _tail(schedule: Schedule) -> Tensor:
    """Mark the work tiles to move to the end of the list, bool [work tiles].

    They are the kv tiles of the highest indices of all heads that are complete by then. Together
    they take at most half as long as the longest work tile on all workers.
    """
    cost, tile = schedule.cost, schedule.tile
    # kv tiles descend within a section
    section = torch.cat([tile.new_zeros(1), (tile.diff() > 0).cumsum(0)])
    budget = schedule.workers * int(cost.max())
    work = cost.new_zeros(int(section[-1]) + 1).index_add_(0, section, cost)
    # complete: later sections take as long as the longest work tile on all workers
    complete = work.flip(0).cumsum(0).flip(0) - work >= budget
    early = complete[section]
    by_tile = cost.new_zeros(schedule.blocks).index_add_(0, tile[early].long(), cost[early])
    fits = by_tile.flip(0).cumsum(0) <= budget // 2
    return early & (tile >= schedule.blocks - int(fits.sum()))
