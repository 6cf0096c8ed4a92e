"""Simulate a schedule without a GPU: the start of each work tile, idle time, and L2 hits.

Workers take work tiles in list order as they become free. The cost model gives the duration of each
work tile. L2 is modelled with LRU replacement.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from attnkit.errors import OptionError
from attnkit.schedule.scheduler import L2_BYTES, Schedule
from attnkit.sparsity.block_runs import BlockRuns, Runs
from attnkit.util.csr import row_indices, searchsorted_right

_VISITS = 1 << 16  # if there are more, a sample of the tiles is simulated
_SAMPLED_TILES = 64  # the fewest tiles of the sample that the scaled L2 must hold


@dataclass(frozen=True, eq=False)
class Timeline:
    """Holds the start, the end and the worker of every work tile.

    Attributes:
        start, end: int64 [work tiles], cycles; the time between includes waits for semaphores.
        worker: int32 [work tiles].
        workers: number of workers.
        work: cycles of all work tiles, without waits.
    """

    start: Tensor
    end: Tensor
    worker: Tensor
    workers: int
    work: int

    @property
    def makespan(self) -> int:
        """Return the cycle in which the last work tile ends."""
        return int(self.end.max())

    @property
    def idle(self) -> float:
        """Return the fraction of the workers' time in which they do no work, 0 to 1."""
        return 1 - self.work / (self.workers * max(1, self.makespan))

    def feed(self) -> tuple[Tensor, Tensor]:
        """List the work tiles of each worker, for kernels that assign work tiles statically.

        Returns:
            int32 [workers + 1], pointers into the second result; int32 [work tiles], the indices of
            each worker's work tiles, ascending.
        """
        order = torch.argsort(self.worker, stable=True)
        counts = torch.bincount(self.worker, minlength=self.workers)
        pointers = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return pointers.to(torch.int32), order.to(torch.int32)


@dataclass(frozen=True)
class Report:
    """Summarizes the simulation of a schedule.

    Attributes:
        workers: persistent CTAs.
        work_tile_count, split: number of work tiles, and of rows that were split.
        makespan, bound: cycles; no schedule of these work tiles ends before `bound`.
        idle: share of the workers' time that is not work.
        reuse: share of the visited tiles that L2 still held.
    """

    workers: int
    work_tile_count: int
    split: int
    makespan: int
    bound: float
    idle: float
    reuse: float

    def __str__(self) -> str:
        return (
            f"{self.workers} workers, {self.work_tile_count} work tiles ({self.split} rows split): "
            f"{self.makespan} cycles, {self.makespan / self.bound:.3f} x the lower bound, "
            f"idle {self.idle:.1%}, L2 reuse {self.reuse:.1%}"
        )


def report(
    schedule: Schedule, runs: BlockRuns, workers: int | None = None, l2_bytes: int = L2_BYTES
) -> Report:
    """Simulate a schedule and return its makespan, idle time and L2 reuse.

    See `simulate` and `l2_reuse`.
    """
    timeline = simulate(schedule, workers)
    return Report(
        workers=timeline.workers,
        work_tile_count=schedule.work_tile_count,
        split=schedule.split.shape[0],
        makespan=timeline.makespan,
        bound=max(schedule.unsplit / timeline.workers, int(schedule.cost.max())),
        idle=timeline.idle,
        reuse=l2_reuse(schedule, runs, timeline, l2_bytes),
    )


def simulate(schedule: Schedule, workers: int | None = None) -> Timeline:
    """Simulate a schedule: the first free worker takes the next work tile of the list.

    This takes one heap operation per work tile, about a second for a million.

    Args:
        schedule: the schedule.
        workers: number of workers; None for that of the schedule.
    """
    count = _positive(schedule.workers if workers is None else workers)
    free = [(0, i) for i in range(count)]
    starts, assigned = [], []
    costs = schedule.cost.tolist()
    for cost in costs:
        now, worker = free[0]
        starts.append(now)
        assigned.append(worker)
        heapq.heapreplace(free, (now + cost, worker))
    start, cost = _column(starts), schedule.cost.cpu()
    return Timeline(start, start + cost, _column(assigned).to(torch.int32), count, sum(costs))


def simulate_turns(schedule: Schedule, runs: BlockRuns, workers: int | None = None) -> Timeline:
    """Simulate a deterministic backward, where work tiles wait for the semaphores of dQ tiles.

    A work tile visits its q tiles in ascending order, FULL and PARTIAL ones mixed, and adds to dQ
    at the end of each visit. Its worker waits until the semaphore allows that. Work tiles wait only
    for earlier work tiles of the list (`attnkit.schedule.deterministic_order`), so one pass in list
    order is enough.
    """
    work_tile, tile, partial = visits(schedule, runs)
    order = torch.argsort(work_tile * (runs.q_blocks + 1) + tile)
    counts = torch.bincount(work_tile, minlength=schedule.work_tile_count)
    b, h = schedule.b.cpu(), schedule.h.cpu()
    head = ((b * schedule.shape.heads + h) * runs.q_blocks)[work_tile]
    place, partial = (head + tile)[order], partial[order]
    spent = torch.where(partial, schedule.prices.partial, schedule.prices.full)
    count = _positive(schedule.workers if workers is None else workers)
    free = [(0, i) for i in range(count)]
    rows = schedule.shape.batch * schedule.shape.heads * runs.q_blocks
    ready = torch.zeros(rows, dtype=torch.int64, device="cpu")
    starts, ends, assigned = [], [], []
    parts = zip(place.split(counts.tolist()), spent.split(counts.tolist()), strict=True)
    visiting = torch.zeros_like(counts).index_add(0, work_tile[order], spent)
    overheads = schedule.cost.cpu() - visiting
    for (where, cost), overhead in zip(parts, overheads.tolist(), strict=True):
        now, worker = free[0]
        # end of tile i = max(end of tile i - 1 + cost, ready), in closed form
        sums = cost.cumsum(0)
        late = torch.cummax(ready[where] - sums, 0).values if sums.numel() else sums
        done = sums + late.clamp(min=now)
        ready[where] = done
        end = (int(done[-1]) if sums.numel() else now) + overhead
        starts.append(now)
        ends.append(end)
        assigned.append(worker)
        heapq.heapreplace(free, (end, worker))
    work = int(schedule.cost.sum())
    return Timeline(_column(starts), _column(ends), _column(assigned).to(torch.int32), count, work)


def _column(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, device="cpu")


def _positive(workers: int) -> int:
    """Check a number of workers, and return it."""
    if workers < 1:
        raise OptionError(f"workers must be positive, got {workers}")
    return workers


def visits(schedule: Schedule, runs: BlockRuns, every: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """List the tiles that each work tile visits, as CPU tensors.

    Args:
        schedule: the schedule.
        runs: the tiles that were scheduled.
        every: list only tiles whose index is a multiple of `every`.

    Returns:
        The work tile and the tile of each visit, int64 [visits] each, and whether the tile is
        PARTIAL, bool [visits]. A work tile's PARTIAL tiles come first, as in kernels.
    """
    pairs = [(schedule.partial, runs.partial), (schedule.full, runs.full)]
    if schedule.backward:
        pairs = [(schedule.partial, runs.partial_t), (schedule.full, runs.full_t)]
    lists = [_walk(cursor.cpu().to(torch.int64), kind.to("cpu"), every) for cursor, kind in pairs]
    work_tile = torch.cat([p for p, _ in lists])
    tile = torch.cat([t for _, t in lists])
    partial = torch.arange(work_tile.numel(), device="cpu") < lists[0][0].numel()
    order = torch.argsort(work_tile, stable=True)
    return work_tile[order], tile[order], partial[order]


def _walk(cursor: Tensor, runs: Runs, every: int) -> tuple[Tensor, Tensor]:
    """List the tiles that cursors (run, skip, count) visit, as pairs (work tile, tile)."""
    run, skip, count = cursor.unbind(1)
    if not runs.length.numel():
        return run[:0], run[:0]
    ends = runs.length.cumsum(0)
    begins = ends - runs.length
    low = begins[run] + skip
    last = searchsorted_right(ends, low + count - 1)
    work_tile, local = _expand(torch.where(count > 0, last - run + 1, 0))
    run = run[work_tile] + local
    first = torch.maximum(begins[run], low[work_tile])
    length = torch.minimum(ends[run], (low + count)[work_tile]) - first
    block = runs.start[run] + first - begins[run]
    sample = -(-block // every)
    part, local = _expand(-(-(block + length) // every) - sample)
    return work_tile[part], (sample[part] + local) * every


def _expand(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return each index i repeated `counts[i]` times, and 0, 1, ... within each repetition."""
    owner = row_indices(counts)
    return owner, torch.arange(owner.numel(), device="cpu") - (counts.cumsum(0) - counts)[owner]


def l2_reuse(
    schedule: Schedule, runs: BlockRuns, timeline: Timeline, l2_bytes: int = L2_BYTES
) -> float:
    """Return the fraction of tile visits, 0 to 1, that hit an L2 with LRU replacement.

    The result is exact for that model up to 65536 visits. For more, only every n-th tile is
    simulated, in an L2 of an n-th of the size (Waldspurger et al. 2015).
    """
    shape, capacity = schedule.shape, l2_bytes // schedule.shape.tile_bytes
    total = int((schedule.partial[:, 2] + schedule.full[:, 2]).sum())
    every = max(1, min(-(-total // _VISITS), capacity // _SAMPLED_TILES))
    work_tile, tile, _ = visits(schedule, runs, every)
    if not work_tile.numel():
        return 0.0
    # assume that a work tile visits its tiles at equal intervals between its start and its end
    place = torch.arange(work_tile.numel(), device="cpu")
    counts = torch.bincount(work_tile, minlength=schedule.work_tile_count)
    rank = (place - (counts.cumsum(0) - counts)[work_tile] + 0.5) / counts[work_tile]
    length = (timeline.end - timeline.start)[work_tile]
    order = torch.argsort(timeline.start[work_tile] + rank * length, stable=True)
    heads = shape.heads if schedule.backward else shape.kv_heads or shape.heads
    b, h = schedule.b.cpu().to(torch.int64), schedule.h.cpu() // (shape.heads // heads)
    if not schedule.backward and shape.kv_batch == 1:
        b = torch.zeros_like(b)
    columns = runs.q_blocks if schedule.backward else runs.kv_blocks
    item = (b * heads + h)[work_tile] * columns + tile
    return float(lru_hits(item[order], capacity // every).double().mean())


def lru_hits(items: Tensor, capacity: int) -> Tensor:
    """Return for each access whether it hits an LRU cache of `capacity` items.

    An access hits if fewer than `capacity` different items were accessed since the last access of
    the same item (Mattson et al. 1970). To count different items, count the accesses in between
    whose item was not accessed earlier in between.

    Args:
        items: int64 [n], the accessed items in order of access.

    Returns:
        bool [n].
    """
    order = torch.argsort(items, stable=True)
    before = torch.full_like(items, -1)
    same = items[order][1:] == items[order][:-1]
    before[order[1:][same]] = order[:-1][same]
    different = _smaller_before(before) - (before + 1)
    return (before >= 0) & (different < capacity)


def _smaller_before(values: Tensor) -> Tensor:
    """Count for each value the earlier values that are not larger, int64 [n], in O(n log^2 n)."""
    count = values.numel()
    size = 1 << max(0, count - 1).bit_length()
    padded = torch.nn.functional.pad(values, (0, size - count), value=size)
    smaller = torch.zeros_like(padded)
    half = 1
    while half < size:
        left, right = padded.view(-1, 2, half).unbind(1)
        ranks = torch.searchsorted(left.sort(1).values, right.contiguous(), right=True)
        smaller.view(-1, 2, half)[:, 1] += ranks
        half *= 2
    return smaller[:count]
