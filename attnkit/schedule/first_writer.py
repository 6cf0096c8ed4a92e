"""First-writer dQ: the first kv tile at a q tile stores its part instead of adding it.

So the sums of dQ need no memset. Zeros would be written before the main kernel of a backward, as
much memory as dQ in float32, and be read again by the first addition. Where the work list says
beforehand which of the kv tiles that visit a q tile is first, that one can store. It sets a flag
when what it stored has arrived, and the others add once they have seen the flag.

No work tile waits for one that comes after it in the list, so that this cannot deadlock, by the
argument of `attnkit.schedule.deterministic_order`; sums in a fixed order have its semaphores, and
need no flags. But to wait costs time. In the order "falling" of a band, a causal mask or documents
the first kv tile at a q tile is the one on the diagonal, which begins with it, and all others come
later; there nearly every flag is set when it is looked at.

NumPy computes all this on the host, some heads at a time: a device would load the code of each
operator at a first backward, and the visits of all heads may be more than a cache holds, or memory.
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
ARRIVAL = 4000  # clocks from a q tile's last product until its flag can be seen, an estimate
MOST = 128  # kv tiles that a q tile may meet on average; beyond, zeros are little against the work

_AT_ONCE = 1 << 16  # visits, of which a dozen arrays fit a cache

_Numbers: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class FirstWriters:
    """Which work tile is first at each q tile.

    Attributes:
        stop: int32 [work tiles]: a work tile is first at those of its q tiles that are below this.
        cycles: what work tiles are predicted to wait for flags, on average over the workers.
        saved: cycles that all this is predicted to save.
    """

    stop: Tensor
    cycles: int = 0
    saved: int = 0


@dataclass(frozen=True, eq=False)
class _Visits:
    """Visits of the kv tiles of some heads to q tiles; the attributes are int64 arrays.

    Attributes:
        work_tiles: of these heads, those of a head in list order.
        counts: how many visits each of them makes.
        number: of each visit, by work tile: which of `work_tiles` makes it.
        at: how many that has made before.
        q: the q tile, ascending within a work tile.
        row: the q tile among those of all these heads.
        rows: how many q tiles they have.
    """

    work_tiles: _Numbers
    counts: _Numbers
    number: _Numbers
    at: _Numbers
    q: _Numbers
    row: _Numbers
    rows: int


def choose_first_writers(
    runs: BlockRuns, schedule: Schedule, floats: int
) -> tuple[Schedule, FirstWriters] | str:
    """Make a schedule in which the first at each q tile stores, if that is predicted to save time.

    Args:
        runs: the mask's tiles.
        schedule: a backward's, in which sums are cleared before.
        floats: of the sums of dQ.

    Returns:
        The schedule and its first writers, or why the sums must be cleared.
    """
    obstacle = _obstacle(runs)
    if obstacle:
        return obstacle
    workers, cost = schedule.workers, schedule.prices
    other = schedule_backward(runs, schedule.shape, workers=workers, cost=cost, order="falling")
    timeline = simulate(other)
    gain = simulate(schedule).makespan + 4 * floats // BYTES_A_CLOCK - timeline.makespan
    if gain <= 0:
        return _slower_by(-gain)
    found = first_writers(runs, other, (timeline.start, gain))
    return found if isinstance(found, str) else (other, replace(found, saved=gain - found.cycles))


def first_writers(
    runs: BlockRuns, schedule: Schedule, flags: tuple[Tensor, int] | None = None
) -> FirstWriters | str:
    """The first writers of a schedule of whole kv tiles, or why there can be none.

    Args:
        runs: what was scheduled.
        schedule: a backward's.
        flags: int64 [work tiles], when each begins, and how long workers may wait for flags to gain
            by them, in cycles; None where none waits.
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
        first[visits.row[::-1]] = visits.number[::-1]  # of several the last one stays
        own = first[visits.row] == visits.number
        owned = np.bincount(visits.number[own], minlength=visits.work_tiles.size)
        if (own & (visits.at >= owned[visits.number])).any():
            return "a kv tile is first at q tiles that are not the first of its own"
        last = visits.at == owned[visits.number] - 1
        stop[visits.work_tiles[visits.number[last]]] = visits.q[last] + 1
        if flags is not None:
            begin = _array(flags[0])[visits.work_tiles]
            cycles += _waits(visits, own, owned, begin, schedule.prices.full)
            if cycles // schedule.workers >= flags[1]:  # other heads wait too
                return _slower_by(cycles // schedule.workers - flags[1])
    return FirstWriters(torch.from_numpy(stop).to(runs.device), cycles // schedule.workers)


def _slower_by(cycles: int) -> str:
    return f"without them the work would take at least {cycles} cycles more"


def _obstacle(runs: BlockRuns) -> str:
    """Why sums of these tiles are to be cleared in any order; "" if nothing speaks for that."""
    count = int(runs.full_t.length.sum()) + int(runs.partial_t.length.sum())
    if count > MOST * runs.batch * runs.heads * runs.q_blocks:
        return f"a q tile meets more than {MOST} kv tiles"
    met = runs.full.row_ptr.diff() + runs.partial.row_ptr.diff()
    return "" if bool((met > 0).all()) else "some q tiles meet no kv tile"


def _waits(
    visits: _Visits, own: NDArray[np.bool_], owned: _Numbers, begin: _Numbers, block: int
) -> int:
    """How long work tiles wait for flags, in cycles.

    Args:
        visits: of some heads.
        own: of each visit, whether its work tile is first there.
        owned: of each work tile, how many of these it makes.
        begin: when each work tile begins.
        block: cycles of a visit.
    """
    # when each work tile has added to each of its q tiles, were there nothing to wait for; what it
    # stores arrives before the next leaves
    slower = max(0, ARRIVAL - block)
    work_tile, made = visits.number, visits.at + 1
    done = begin[work_tile] + made * block + np.minimum(made, owned[work_tile]) * slower
    stored = np.empty(visits.rows, np.int64)
    stored[visits.row[own]] = done[own]
    late = stored[visits.row] + ARRIVAL - done
    late[own] = 0
    # a block's products hide what the sums are behind
    waits = (slower * owned - block).clip(min=0)
    some = visits.counts > 0
    longest = np.maximum.reduceat(late, (visits.counts.cumsum() - visits.counts)[some])
    waits[some] = np.maximum(waits[some], longest)
    return int(waits.sum())


def _visits(runs: BlockRuns, schedule: Schedule) -> Iterator[_Visits]:
    """The visits of some heads after another."""
    ends, tiles = _q_tiles(runs)
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


def _q_tiles(runs: BlockRuns) -> tuple[_Numbers, _Numbers]:
    """The q tiles of every kv tile of the mask, ascending, one kv tile after another.

    Returns:
        For each kv tile where its own end; the q tiles.
    """
    found = []
    for kind in (runs.full_t, runs.partial_t):
        pointers, start, length = map(_array, (kind.row_ptr, kind.start, kind.length))
        row = np.repeat(np.arange(kind.rows), np.diff(pointers))
        begin = row * runs.q_blocks + start - (length.cumsum() - length)
        found.append(np.repeat(begin, length) + np.arange(length.sum()))
    row, q = np.divmod(np.sort(np.concatenate(found)), runs.q_blocks)
    return np.bincount(row, minlength=runs.full_t.rows).cumsum(), q


def _array(t: Tensor) -> _Numbers:
    return t.cpu().numpy().astype(np.int64)
