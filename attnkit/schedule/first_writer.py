"""Choose the first writers of dQ: the first kv tile to visit a q tile stores instead of adding.

Then dQ needs no memset. A memset would write all of dQ in float32 before the main kernel of a
backward, and the first addition would read it again. If the work list determines which of the kv
tiles that visit a q tile comes first, that kv tile can store. It sets a flag when its store has
arrived. The other kv tiles wait for the flag before they add.

No work tile waits for one that comes after it in the list, so this cannot deadlock; the argument is
in `attnkit.schedule.deterministic_order`. Sums in a fixed order use the semaphores of that module
and need no flags. Waiting costs time, however. With the order "falling" and a band, a causal mask
or documents, the first kv tile to visit a q tile is the one on the diagonal, which begins with that
q tile, and all others come later. There nearly every flag is set before a work tile reads it.

NumPy computes this on the host, because torch would load the code of every operator at the first
backward on a GPU. It takes some heads at a time, because the visits of all heads together may
exceed the caches, or memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnkit.schedule.scheduler import Schedule, schedule_backward
from attnkit.schedule.simulator import simulate
from attnkit.sparsity.block_runs import BlockRuns

# Measured on one H200: 134 MB of zeros take 28 us at 1.6 GHz.
BYTES_A_CLOCK = 3000
ARRIVAL = 4000  # clocks from a q tile's last product until others can see its flag, an estimate
MOST = 128  # most kv tiles per q tile, on average; with more, a memset costs comparatively little

_AT_ONCE = 1 << 16  # visits; a dozen arrays of that size fit a cache

_Numbers: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class FirstWriters:
    """Says at which q tiles each work tile is the first writer of dQ.

    Attributes:
        stop: int32 [work tiles]. A work tile is the first writer of those q tiles that it visits
            and whose index in their head is below `stop`.
        cycles: predicted wait for flags in cycles, on average over the workers.
        saved: cycles that first writers are predicted to save in comparison with a memset.
    """

    stop: Tensor
    cycles: int = 0
    saved: int = 0


@dataclass(frozen=True, eq=False)
class _Visits:
    """Lists the visits of kv tiles to q tiles in some heads, as int64 arrays.

    Attributes:
        work_tiles: indices of the work tiles of these heads, in list order within a head.
        counts: [work tiles], number of visits of each work tile.
        number: [visits], index into `work_tiles` of the work tile that makes the visit.
        at: [visits], number of earlier visits of the same work tile.
        q: [visits], the q tile, ascending within a work tile.
        row: [visits], the q tile, numbered over all these heads.
        rows: number of q tiles of these heads.
    """

    work_tiles: _Numbers
    counts: _Numbers
    number: _Numbers
    at: _Numbers
    q: _Numbers
    row: _Numbers
    rows: int


def choose_first_writers(
    runs: BlockRuns, schedule: Schedule, floats: int, head: BlockRuns | None = None
) -> tuple[Schedule, FirstWriters] | str:
    """Choose a backward schedule with first writers if it is predicted to be faster than a memset.

    Args:
        runs: the mask's tiles.
        schedule: the backward schedule that would run after a memset of dQ.
        floats: number of floats of dQ.
        head: tiles of one head if `runs` packs several; the first writers are the same in each.

    Returns:
        The schedule and its first writers, or the reason why there are none.
    """
    head = runs if head is None else head
    obstacle = _obstacle(head)
    if obstacle:
        return obstacle
    workers, cost = schedule.workers, schedule.prices
    other = schedule_backward(runs, schedule.shape, workers=workers, cost=cost, order="falling")
    timeline = simulate(other)
    gain = simulate(schedule).makespan + 4 * floats // BYTES_A_CLOCK - timeline.makespan
    if gain <= 0:
        return _slower_by(-gain)
    heads = runs.q_blocks // head.q_blocks
    writers = first_writers(head, other, (timeline.start, gain), heads)
    if isinstance(writers, str):
        return writers
    return other, replace(writers, saved=gain - writers.cycles)


def first_writers(
    runs: BlockRuns, schedule: Schedule, flags: tuple[Tensor, int] | None = None, heads: int = 1
) -> FirstWriters | str:
    """Find the first writers of a schedule, or return the reason why it can have none.

    Args:
        runs: the tiles that were scheduled.
        schedule: a backward schedule. If it splits kv tiles, there are no first writers.
        flags: the start of each work tile, int64 [work tiles], and the wait for flags, on average
            over the workers, from which a memset is faster, both in cycles; None if semaphores
            replace the flags.
        heads: packed query heads of a work tile; `runs` are the tiles of one.
    """
    if schedule.split.numel():
        return "kv tiles are split"
    obstacle = _obstacle(runs)
    if obstacle:
        return obstacle
    stop = np.zeros(schedule.work_tile_count, np.int32)
    cycles = 0
    for visits in _visits(runs, schedule):
        first = np.empty(visits.rows, np.int64)
        # with repeated indices NumPy keeps the last value, so reversed the first visit stays
        first[visits.row[::-1]] = visits.number[::-1]
        is_first = first[visits.row] == visits.number
        firsts = np.bincount(visits.number[is_first], minlength=visits.work_tiles.size)
        if (is_first & (visits.at >= firsts[visits.number])).any():
            return "a kv tile is first at q tiles that are not the first of its own"
        last = visits.at == firsts[visits.number] - 1
        stop[visits.work_tiles[visits.number[last]]] = visits.q[last] + 1
        if flags is not None:
            begin = _array(flags[0])[visits.work_tiles]
            cycles += _waits(visits, is_first, firsts, begin, schedule.prices.full, heads)
            if cycles // schedule.workers >= flags[1]:  # other heads wait too
                return _slower_by(cycles // schedule.workers - flags[1])
    return FirstWriters(torch.from_numpy(stop).to(runs.device), cycles // schedule.workers)


def _slower_by(cycles: int) -> str:
    return f"without them the work would take at least {cycles} cycles more"


def _obstacle(runs: BlockRuns) -> str:
    """Return why no order of the work tiles has first writers, or "" if there is no reason."""
    count = int(runs.full_t.length.sum()) + int(runs.partial_t.length.sum())
    if count > MOST * runs.batch * runs.heads * runs.q_blocks:
        return f"a q tile meets more than {MOST} kv tiles"
    met = runs.full.row_ptr.diff() + runs.partial.row_ptr.diff()
    return "" if bool((met > 0).all()) else "some q tiles meet no kv tile"


def _waits(
    visits: _Visits,
    is_first: NDArray[np.bool_],
    firsts: _Numbers,
    begin: _Numbers,
    block: int,
    heads: int,
) -> int:
    """Predict the sum of all waits of work tiles for flags, in cycles.

    Args:
        visits: visits of some heads.
        is_first: [visits], whether the work tile is first at the q tile.
        firsts: [work tiles], number of q tiles at which each work tile is first.
        begin: [work tiles], the cycle in which each work tile begins.
        block: cycles of one visit.
        heads: packed query heads of a work tile.
    """
    # `done`: when each work tile has added to each of its q tiles if it never waits for a flag. A
    # store must arrive before the next one is sent.
    slower = max(0, ARRIVAL - block)
    work_tile, nth = visits.number, visits.at + 1
    done = begin[work_tile] + nth * block + np.minimum(nth, firsts[work_tile]) * slower
    stored = np.empty(visits.rows, np.int64)
    stored[visits.row[is_first]] = done[is_first]
    late = stored[visits.row] + ARRIVAL - done
    late[is_first] = 0
    # the products of one block hide a wait of that length
    waits = (slower * firsts - block).clip(min=0)
    some = visits.counts > 0
    longest = np.maximum.reduceat(late, (visits.counts.cumsum() - visits.counts)[some])
    waits[some] = np.maximum(waits[some], longest)
    # in each head anew, because the work tiles drift apart meanwhile
    return heads * int(waits.sum())


def _visits(runs: BlockRuns, schedule: Schedule) -> Iterator[_Visits]:
    """Yield the visits of kv tiles to q tiles, for some heads at a time."""
    ends, tiles = visited_q_tiles(runs)
    begins, blocks = np.concatenate([[0], ends[:-1]]), runs.kv_blocks
    b, h, tile = map(_array, (schedule.b, schedule.h, schedule.tile))
    head, heads = b * schedule.shape.heads + h, schedule.shape.batch * schedule.shape.heads
    mask_row = (b % runs.batch * runs.heads + h % runs.heads) * blocks + tile
    order = np.argsort(head, kind="stable")
    many = max(1, _AT_ONCE * runs.batch * runs.heads // max(1, tiles.size))
    for some in range(0, heads, many):
        work_tiles = order[some * blocks : (some + many) * blocks]
        first = begins[mask_row[work_tiles]]
        counts = ends[mask_row[work_tiles]] - first
        number = np.repeat(np.arange(work_tiles.size), counts)
        at = np.arange(number.size) - np.repeat(counts.cumsum() - counts, counts)
        q = tiles[np.repeat(first, counts) + at]
        row = np.repeat(head[work_tiles] - some, counts) * runs.q_blocks + q
        rows = min(many, heads - some) * runs.q_blocks
        yield _Visits(work_tiles, counts, number, at, q, row, rows)


def visited_q_tiles(runs: BlockRuns) -> tuple[_Numbers, _Numbers]:
    """List the q tiles that each kv tile of the mask visits, in ascending order.

    Returns:
        The end of each kv tile's list; the q tiles, one kv tile after another.
    """
    keys = []
    for kind in (runs.full_t, runs.partial_t):
        pointers, start, length = map(_array, (kind.row_ptr, kind.start, kind.length))
        row = np.repeat(np.arange(kind.rows), np.diff(pointers))
        begin = row * runs.q_blocks + start - (length.cumsum() - length)
        keys.append(np.repeat(begin, length) + np.arange(length.sum()))
    row, q = np.divmod(np.sort(np.concatenate(keys)), runs.q_blocks)
    return np.bincount(row, minlength=runs.full_t.rows).cumsum(), q


def _array(t: Tensor) -> _Numbers:
    return t.cpu().numpy().astype(np.int64)
