"""Order the work tiles of an attention call for persistent workers (CTAs), and split long rows.

A row of work computes one output tile. In the forward that is a (b, h, q block), which visits kv
blocks; in the backward a (b, h, kv block), which visits q blocks by the transposed runs. Rows are
ordered longest processing time first (Graham 1969) inside sections whose keys and values fit L2,
and heads that share keys and values are neighbours. Rows that cost more than a worker's share are
split; in the forward a combine kernel merges their partial results
(`attnkit.templates.common.combine`). Workers take work tiles in list order from one counter, so a
long row does not delay others. The schedule is computed by torch operators on the runs' device,
without a loop over rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnkit.errors import OptionError, ShapeError
from attnkit.schedule.l2_sections import apart, sections, unit_of_rows, units_in_order
from attnkit.schedule.split_kv import (
    GRAIN,
    Cost,
    Rows,
    WorkTiles,
    fill_shares,
    keep_whole,
    predict_makespan,
    split_evenly,
    wrap_around,
)
from attnkit.sparsity.block_runs import BlockRuns, Runs
from attnkit.util.csr import searchsorted_right

# Measured on one H200 with a Hopper prototype, tiles of 128 x 128, D = 128, bfloat16: 2209 cycles
# for a block and about 4000 for a work tile (fitted over lengths 2048, 8192 and 16384). Evaluating
# a causal mask on 488 interior blocks took 0.117 M cycles more, 240 for each. `merge` is an
# estimate: 64 KB of float32 written and read once at the card's 5.5 TB/s from L2, shared by 132
# SMs.
FORWARD = Cost(full=2209, partial=2450, tile=4000, merge=4600)

# The Hopper backward on one H200 without a mask, D = 128, fitted over lengths 2048 and 8192. A tile
# is two of its blocks of 64 x 128. `tile` is the cost of a part of a row without its blocks. The
# cost of the mask is an estimate.
BACKWARD = Cost(full=6060, partial=6360, tile=9500, merge=6500)

# The H200 has 50 MB of L2, which also holds Q and the results.
L2_BYTES = 32 << 20

ORDERS = ("longest", "grid", "ascending", "descending", "falling")
MONOTONE = ("ascending", "descending")


@dataclass(frozen=True)
class Shape:
    """Holds the sizes of the tensors that determine a schedule.

    Attributes:
        batch, heads: of the query.
        tile_bytes: memory that one visited tile takes: K and V of a kv tile in the forward; Q, dO
            and float32 dQ of a q tile in the backward.
        kv_heads: heads of key and value, a divisor of `heads`; 0 means `heads`.
        kv_batch: batch of key and value, `batch` or 1; 0 means `batch`.
        batch_together: whether work tiles that differ in their batch element alone run together,
            because they read the same elements of a captured tensor.
    """

    batch: int
    heads: int
    tile_bytes: int
    kv_heads: int = 0
    kv_batch: int = 0
    batch_together: bool = False

    def __post_init__(self) -> None:
        if min(self.batch, self.heads, self.tile_bytes) < 1:
            raise ShapeError(f"batch, heads and tile_bytes must be at least 1, got {self}")
        if self.heads % (self.kv_heads or self.heads):
            raise ShapeError(f"kv_heads must divide heads, got {self}")
        if self.kv_batch not in (0, 1, self.batch):
            raise ShapeError(f"kv_batch must be the batch or 1, got {self}")


class Schedule(NamedTuple):
    """Lists work tiles in the order in which workers start them.

    A work tile visits a part of the PARTIAL and of the FULL runs of one row. A cursor describes
    such a part: begin `skip` tiles into run number `run`, and go on through the row's following
    runs for `count` tiles.

    Attributes:
        shape, prices, workers, order, backward: the arguments that the schedule was computed for;
            `prices` is their `cost`.
        blocks: number of output tiles of a head.
        b, h, tile: int32 [work tiles], the output tile of each work tile.
        partial, full: int32 [work tiles, 3], the cursors (run, skip, count); (0, 0, 0) if empty.
        slot: int32 [work tiles], -1 for a whole row, else the index at which the partial result is
            stored; the work tiles of a row have neighbouring slots.
        split: int32 [split rows, 3], the (b, h, tile) whose partial results must be merged.
        split_ptr: int32 [split rows + 1], the first slot of each split row, then the number of
            slots.
        cost: int64 [work tiles], cost of each work tile in cycles.
        unsplit: cost of all rows if none were split, in cycles.
    """

    shape: Shape
    prices: Cost
    workers: int
    order: str
    backward: bool
    blocks: int
    b: Tensor
    h: Tensor
    tile: Tensor
    partial: Tensor
    full: Tensor
    slot: Tensor
    split: Tensor
    split_ptr: Tensor
    cost: Tensor
    unsplit: int

    @property
    def work_tile_count(self) -> int:
        """Return the number of work tiles."""
        return self.b.numel()

    @property
    def bound(self) -> float:
        """Return a lower bound of the makespan of these work tiles, in cycles.

        It is the larger of the longest work tile and a worker's share of the total cost.
        """
        return max(self.unsplit / self.workers, int(self.cost.max()))

    def reordered(self, order: Tensor) -> Schedule:
        """Return a copy with the work tiles in the given order, int64 [work tiles]."""
        names = ("b", "h", "tile", "partial", "full", "slot", "cost")
        return self._replace(**{name: getattr(self, name)[order] for name in names})

    def table(self) -> Tensor:
        """Pack the schedule into the table that kernels read, int32 [work tiles, 12].

        The columns are b, h, tile, slot, the PARTIAL cursor, the FULL cursor, the index in `split`
        of the row (-1 for a whole row), and the number of parts of the row.
        """
        head = torch.stack([self.b, self.h, self.tile, self.slot], 1)
        row = searchsorted_right(self.split_ptr, self.slot) - 1
        parts = torch.cat([self.split_ptr.diff(), self.split_ptr.new_ones(1)])[row]
        tail = torch.stack([row.to(torch.int32), parts], 1)
        return torch.cat([head, self.partial, self.full, tail], 1)

    def __str__(self) -> str:
        kind = "backward" if self.backward else "forward"
        return (
            f"{kind} schedule, {self.order}, for {self.workers} workers: "
            f"{self.work_tile_count} work tiles of {self.shape.batch} x {self.shape.heads} x "
            f"{self.blocks} tiles, {self.split.shape[0]} split; bound {self.bound:.0f} cycles"
        )


def schedule_forward(
    runs: BlockRuns,
    shape: Shape,
    *,
    workers: int,
    cost: Cost = FORWARD,
    l2_bytes: int = L2_BYTES,
    order: str = "longest",
    split: bool = True,
) -> Schedule:
    """Build the schedule of a forward: a work tile for each q tile, or several for a long row.

    Args:
        runs: the mask's tiles.
        shape: sizes of the tensors. The batch and heads of `runs` must be equal to these, or 1.
        workers: number of persistent CTAs, usually the number of SMs.
        cost: cost model of the work.
        l2_bytes: bytes of K and V that fit L2, see `attnkit.schedule.l2_sections`.
        order: "longest": longest first in each section. "grid": by (b, h, tile) as in a plain
            launch, never split. "ascending" or "descending": by tile in each section. "falling":
            descending, except that the shortest work tiles may come at the end, never split.
        split: whether rows may be split along kv.

    Raises:
        OptionError: an unknown order, or a number that is not positive.
        ShapeError: the runs do not fit the tensors.
    """
    kv_batch, kv_heads = shape.kv_batch or shape.batch, shape.kv_heads or shape.heads
    lists = (runs.full, runs.partial, runs.q_blocks, runs.kv_blocks)
    work = _Work(runs, shape, workers, cost, l2_bytes, order, False, lists, (kv_batch, kv_heads))
    return work.schedule(split)


def schedule_backward(
    runs: BlockRuns,
    shape: Shape,
    *,
    workers: int,
    cost: Cost = BACKWARD,
    l2_bytes: int = L2_BYTES,
    order: str = "longest",
    split: bool = True,
) -> Schedule:
    """Build the schedule of a backward: a work tile for each kv tile, or several for a long row.

    A row computes dK and dV of one kv tile from one query head, and adds to dQ. It visits q tiles
    by the transposed runs. Each work tile of a split row computes a part of the sums dK and dV. A
    deterministic backward needs the order "ascending" or "descending"; see
    `attnkit.schedule.deterministic_order`. Arguments and errors are those of `schedule_forward`.
    """
    lists = (runs.full_t, runs.partial_t, runs.kv_blocks, runs.q_blocks)
    owners = (shape.batch, shape.heads)  # each head reads its own Q and dO
    return _Work(runs, shape, workers, cost, l2_bytes, order, True, lists, owners).schedule(split)


class _Listed(NamedTuple):
    """Holds work tiles, the order in which workers take them, and when the last worker ends.

    Attributes:
        work_tiles: the work tiles in natural order.
        costs: int64 [work tiles], their costs.
        order: int64 [work tiles], the work tiles in list order.
        makespan: predicted makespan in cycles.
    """

    work_tiles: WorkTiles
    costs: Tensor
    order: Tensor
    makespan: int


@dataclass(frozen=True, eq=False)
class _Work:
    """Computes a forward or backward schedule from the arguments of `schedule_forward`."""

    runs: BlockRuns
    shape: Shape
    workers: int
    cost: Cost
    l2_bytes: int
    order: str
    backward: bool
    lists: tuple[Runs, Runs, int, int]  # FULL, PARTIAL, rows of a head, blocks of a row
    owners: tuple[int, int]  # batch and heads of the tensors that work tiles read

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise OptionError(f"order={self.order!r} is not known; expected one of {ORDERS}")
        if min(self.workers, self.l2_bytes) < 1:
            raise OptionError(
                f"workers and l2_bytes must be positive, got {self.workers} and {self.l2_bytes}"
            )
        runs, shape = self.runs, self.shape
        if runs.batch not in (1, shape.batch) or runs.heads not in (1, shape.heads):
            raise ShapeError(
                f"the mask's runs are for batch {runs.batch} and {runs.heads} heads; the tensors "
                f"have batch {shape.batch} and {shape.heads} heads: make runs for these, or for 1"
            )

    def schedule(self, split: bool) -> Schedule:
        """Split the rows, order the work tiles, assign slots, and return the schedule."""
        rows = self._rows()
        work_tiles, costs, order, _ = self._best_sections(rows, split)
        unsplit = int((rows.body + self.cost.tile).sum())
        return self._build(rows, work_tiles, costs, order, unsplit)

    def _mask_rows(self) -> Tensor:
        """Return for every work row the row of the mask's runs that it visits, int64.

        Batch entries and heads that share runs have the same rows.
        """
        runs, blocks = self.runs, self.lists[2]
        size = (runs.batch, runs.heads, blocks)
        grid = torch.arange(runs.batch * runs.heads * blocks, device=runs.device).view(size)
        return grid.expand(self.shape.batch, self.shape.heads, blocks).reshape(-1)

    def _rows(self) -> Rows:
        """Count the FULL and PARTIAL tiles of every work row."""
        full, partial = (_tiles_of(kind)[self._mask_rows()] for kind in self.lists[:2])
        return Rows(partial, full, self.cost)

    def _best_sections(self, rows: Rows, split: bool) -> _Listed:
        """Choose between small sections and sections with a large one at the end.

        Small sections read memory more evenly. They are kept unless a large one at the end, or
        split rows, shorten the makespan by more than 1/250.
        """
        head_rank = self._head_ranks()
        share = int((rows.body + self.cost.tile).sum()) // self.workers
        section, large = self._sections(False), self._sections(True)
        small = None
        if not torch.equal(section, large):
            small = self._best_whole(rows, section, head_rank, share)
            if _near(small.makespan, share):
                return small
        other = self._listed(*self._best_split(rows, large, head_rank, split))
        if small is not None and _near(small.makespan, other.makespan, 250):
            return small
        return other

    def _best_whole(self, rows: Rows, section: Tensor, head_rank: Tensor, share: int) -> _Listed:
        """Order whole rows in these sections, and return the list with the least predicted makespan.

        `share` is the total cost divided by the number of workers.
        """
        work_tiles = keep_whole(rows)
        costs = work_tiles.costs(rows)
        order = self._ordered(work_tiles, costs, section, head_rank, False)
        best = self._listed(work_tiles, costs, order)
        if self.order == "falling" and not _near(best.makespan, share):
            order = self._ordered(work_tiles, costs, section, head_rank, True)
            other = self._listed(work_tiles, costs, order)
            best = other if other.makespan * 100 < best.makespan * 99 else best
        return best

    def _listed(self, work_tiles: WorkTiles, costs: Tensor, order: Tensor) -> _Listed:
        """Return the list with its predicted makespan."""
        return _Listed(work_tiles, costs, order, predict_makespan(costs[order], self.workers))

    def _sections(self, large_end: bool) -> Tensor:
        """Return the section of every work row, int64; see `attnkit.schedule.l2_sections`."""
        full, partial, blocks, columns = self.lists
        batch, heads, units = self.shape.batch, self.shape.heads, self.owners[0] * self.owners[1]
        together = self.shape.batch_together
        unit = unit_of_rows(batch, heads, self.owners, blocks, self.runs.device, together)
        if self.order == "grid":
            return torch.zeros_like(unit)
        capacity = self.l2_bytes // self.shape.tile_bytes
        if self.backward and self.order in MONOTONE:  # sums in a fixed order
            size = units_in_order((full, partial), blocks, capacity, self.workers)
            if not together:  # unit b * heads + h
                owners = self.shape.kv_batch or batch, self.shape.kv_heads or heads
                unit = apart(batch, heads, owners, unit.device)[unit]
            return unit * -(-units // size) // units
        members = unit.numel() // (units * blocks)
        # sections need enough rows to keep the workers busy; other orders cut no head
        least = -(-self.workers // members) if self.order == "longest" else blocks + 1
        most = unit.numel() // self.workers
        # a "falling" list ends unevenly with sections that are a bit too small for all workers
        if self.order != "longest":
            most = -(-units // -(-self.workers // (members * blocks)))
        kinds, size = (full, partial), self.owners[0]
        if together and columns * size <= capacity:  # a section has all batch elements of a head
            units, unit, columns = units // size, unit // size, columns * size
        return sections(kinds, units, unit, blocks, columns, capacity, least, most, large_end)

    def _head_ranks(self) -> Tensor:
        """Return the rank of each row's head: heads that share K and V are adjacent.

        With `batch_together`, a head's batch elements are adjacent too. The result is int64 [work rows].
        """
        batch, heads = self.shape.batch, self.shape.heads
        shared = self.owners[0] == 1 < batch
        pair = torch.arange(batch * heads, device=self.runs.device).view(batch, self.owners[1], -1)
        if self.shape.batch_together:
            pair = pair.permute(1, 2, 0)
        elif shared:
            pair = pair.transpose(0, 1)
        order = pair.reshape(-1)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(batch * heads, device=order.device)
        return rank.repeat_interleave(self.lists[2])

    def _best_split(
        self, rows: Rows, section: Tensor, head_rank: Tensor, split: bool
    ) -> tuple[WorkTiles, Tensor, Tensor]:
        """Return the work tiles with the least predicted makespan, their costs and their order."""
        total = int((rows.body + self.cost.tile).sum())
        share, least = total // self.workers, -1
        options = self._options(rows, max(1, share), split, section, head_rank)
        for work_tiles, shortest_last in options:
            costs = work_tiles.costs(rows)
            order = self._ordered(work_tiles, costs, section, head_rank, shortest_last)
            if least < 0 and int(costs.max()) * GRAIN <= share:
                return work_tiles, costs, order  # all are short: no other option is much better
            makespan = predict_makespan(costs[order], self.workers)
            if least < 0 or makespan * 100 < least * 99:  # more cuts must save at least 1 %
                least, best = makespan, (work_tiles, costs, order)
            if least * 100 <= share * 101:  # within 1 % of the lower bound
                break
        return best

    def _options(
        self, rows: Rows, share: int, split: bool, section: Tensor, head_rank: Tensor
    ) -> Iterator[tuple[WorkTiles, bool]]:
        """Yield candidate splits, few cuts first, and whether the shortest tiles go last."""
        work_tiles = keep_whole(rows)
        yield work_tiles, False
        if self.order in ("longest", "falling"):
            yield work_tiles, True
        split = split and self.order != "falling"
        if split and self.order == "longest":
            order = self._ordered(work_tiles, work_tiles.costs(rows), section, head_rank, False)
            yield fill_shares(rows, order, self.workers), False
        if split and self.order != "grid":
            for limit in (share, share // 2, share // 4):
                yield split_evenly(rows, limit), True
            yield wrap_around(rows, self.workers), True

    def _ordered(
        self,
        work_tiles: WorkTiles,
        costs: Tensor,
        section: Tensor,
        head_rank: Tensor,
        shortest_last: bool,
    ) -> Tensor:
        """Return the order of the work tiles in the list, int64 [work tiles].

        The result is the same on every device.

        Args:
            work_tiles: the work tiles in natural order.
            costs: int64 [work tiles], their costs.
            section, head_rank: int64 [work rows], see `_sections` and `_head_ranks`.
            shortest_last: whether some of the shortest work tiles of all sections come at the end.
        """
        blocks, count = self.lists[2], work_tiles.row.numel()
        if self.order == "grid":
            return torch.arange(count, device=costs.device)
        section, sections = section[work_tiles.row], int(section.max()) + 1
        # sections too small to keep the workers busy run at the same time anyway: join them
        merged = min(sections, max(1, count // self.workers))
        section = section * merged // sections
        tile, most = work_tiles.row % blocks, int(work_tiles.parts.max())
        pairs = self.shape.batch * self.shape.heads
        if self.order in MONOTONE:
            tile = tile if self.order == "ascending" else blocks - 1 - tile
            # the work tiles of a row stay together, because they add to sums in one turn of the row
            return _lexsort(head_rank[work_tiles.row] * most + work_tiles.index, tile, section)
        longest = costs.new_zeros(merged).scatter_reduce(0, section, costs, "amax")
        first = -longest[section]
        if shortest_last:
            # the work tiles at the end of the last section may be too long to fill the gaps between
            # workers: move some of the shortest work tiles of all, which read the least, to the end
            rising, shortest = costs.sort(stable=True)
            fillers = rising.cumsum(0) <= self.workers * int(rising[-1]) // 2
            end = costs < rising[int(fillers.sum().clamp(max=count - 1))]
            if self.order == "falling":  # and some of those that cost as much as the last of them
                end[shortest[fillers]] = True
            section, first = torch.where(end, merged, section), torch.where(end, 1, first)
        rank = -costs
        if self.order == "falling":
            tile, rank = blocks - 1 - tile, torch.where(section < merged, 0, rank)
        # heads that share K and V run the same work tile at the same time
        near = (tile * most + work_tiles.index) * pairs + head_rank[work_tiles.row]
        return _lexsort(near, rank, section, first)

    def _build(
        self, rows: Rows, work_tiles: WorkTiles, costs: Tensor, order: Tensor, unsplit: int
    ) -> Schedule:
        """Number the slots of split rows, and build the schedule with all tables in list order."""
        full, partial, blocks, _ = self.lists
        mask_row = self._mask_rows()[work_tiles.row]
        many = work_tiles.parts > 1
        slot = torch.where(many, many.cumsum(0) - 1, -1).to(torch.int32)
        first = many & (work_tiles.index == 0)
        ends = work_tiles.parts[first].cumsum(0)
        b, h, tile = _coordinates(work_tiles.row, self.shape.heads, blocks)
        return Schedule(
            self.shape, self.cost, self.workers, self.order, self.backward, blocks,
            b[order], h[order], tile[order],
            partial=_cursor(partial, mask_row, *work_tiles.partial(rows))[order],
            full=_cursor(full, mask_row, *work_tiles.full(rows))[order],
            slot=slot[order],
            split=torch.stack([b, h, tile], 1)[first],
            split_ptr=torch.cat([ends.new_zeros(1), ends]).to(torch.int32),
            cost=costs[order],
            unsplit=unsplit,
        )  # fmt: skip


def _tiles_of(runs: Runs) -> Tensor:
    """Count the tiles that the runs of each row cover, int64 [rows]."""
    ends = torch.cat([runs.length.new_zeros(1, dtype=torch.int64), runs.length.cumsum(0)])
    return ends[runs.row_ptr.to(torch.int64)].diff()


def _cursor(runs: Runs, row: Tensor, first: Tensor, count: Tensor) -> Tensor:
    """Return the cursors (run, skip, count) of stretches of tiles in rows, int32 [work tiles, 3].

    Args:
        runs: the FULL or the PARTIAL runs of all rows.
        row, first, count: [work tiles], the row, the first tile of the stretch within it, and the
            number of tiles.
    """
    if not runs.length.numel():
        return torch.zeros(row.numel(), 3, dtype=torch.int32, device=row.device)
    ends = runs.length.cumsum(0)
    begins = ends - runs.length
    begin = torch.cat([begins, ends[-1:]])[runs.row_ptr.to(torch.int64)[row]] + first
    run = searchsorted_right(ends, begin).clamp(max=ends.numel() - 1)
    cursor = torch.stack([run, begin - begins[run], count], 1)
    return torch.where(count[:, None] > 0, cursor, 0).to(torch.int32)


def _coordinates(row: Tensor, heads: int, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return b, h and tile of each work row, int32 each."""
    pair = row // blocks
    b, h, tile = pair // heads, pair % heads, row % blocks
    return b.to(torch.int32), h.to(torch.int32), tile.to(torch.int32)


def _near(makespan: int, other: int, part: int = 150) -> bool:
    """Return whether `makespan` is at most (1 + 1 / `part`) times `other`."""
    return makespan * part <= other * (part + 1)


def _lexsort(*keys: Tensor) -> Tensor:
    """Return the stable sort order by the last key, with ties broken by the keys before it."""
    order = torch.arange(keys[0].numel(), device=keys[0].device)
    for key in keys:
        order = order[torch.argsort(key[order], stable=True)]
    return order
