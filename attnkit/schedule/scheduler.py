"""Order the work tiles of an attention for persistent workers (CTAs), and split long rows.

A row of work computes one output tile: in the forward a (b, h, q block), visiting kv blocks; in the
backward a (b, h, kv block), visiting q blocks by the transposed runs. Rows are ordered longest
processing time first (Graham 1969), inside sections whose keys and values fit L2, with heads that
share keys and values side by side. Rows that cost more than a worker's share are split; in the
forward a combine kernel merges their partial results (`attnkit.templates.common.combine`). Workers
take work tiles in list order from one counter, so a long row does not delay others. All of it is
torch operators on the runs' device, without a loop over rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnkit.errors import OptionError, ShapeError
from attnkit.schedule.l2_sections import sections, unit_of_rows
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

# Measured on one H200 with a Hopper prototype, tiles of 128 x 128, D = 128, bfloat16: 2209 cycles a
# block and about 4000 a tile (fitted over lengths 2048, 8192 and 16384); a causal mask on 488
# interior blocks took 0.117 M cycles, so 240 more each. `merge` is an estimate: 64 KB of float32
# written and read once at the card's 5.5 TB/s from L2, shared by 132 SMs.
FORWARD = Cost(full=2209, partial=2450, tile=4000, merge=4600)

# The Hopper backward on one H200, full, D = 128: two of its blocks of 64 x 128, fitted over lengths
# 2048 and 8192, and what a part of a row takes without its blocks; the mask's share is an estimate.
BACKWARD = Cost(full=6060, partial=6360, tile=9500, merge=6500)

L2_BYTES = 32 << 20  # of the H200's 50 MB: 8 heads at 8192 were as fast as 4, 16 were slower

ORDERS = ("longest", "grid", "ascending", "descending", "falling")
MONOTONE = ("ascending", "descending")


@dataclass(frozen=True)
class Shape:
    """The facts about the tensors on which a schedule depends.

    Attributes:
        batch, heads: of the query.
        tile_bytes: memory that one visited tile takes: K and V of a kv tile in the forward; Q, dO
            and float32 dQ of a q tile in the backward.
        kv_heads: heads of key and value, a divisor of `heads`; 0 means `heads`.
        kv_batch: batch of key and value, `batch` or 1; 0 means `batch`.
    """

    batch: int
    heads: int
    tile_bytes: int
    kv_heads: int = 0
    kv_batch: int = 0

    def __post_init__(self) -> None:
        if min(self.batch, self.heads, self.tile_bytes) < 1:
            raise ShapeError(f"batch, heads and tile_bytes must be at least 1, got {self}")
        if self.heads % (self.kv_heads or self.heads):
            raise ShapeError(f"kv_heads must divide heads, got {self}")
        if self.kv_batch not in (0, 1, self.batch):
            raise ShapeError(f"kv_batch must be the batch or 1, got {self}")


@dataclass(frozen=True, eq=False)
class Schedule:
    """Work tiles in the order in which they are to be started.

    A work tile is a part of the PARTIAL and of the FULL runs of one row. Each part is a cursor:
    begin `skip` tiles into run number `run`, and go on through the row's following runs for `count`
    tiles.

    Attributes:
        shape, prices, workers, order, backward: what it was made for.
        blocks: output tiles of a head.
        b, h, tile: int32 [work tiles], the output tile.
        partial, full: int32 [work tiles, 3], the cursors (run, skip, count); (0, 0, 0) if empty.
        slot: int32 [work tiles], -1 for a whole row, else where the partial result goes; the work
            tiles of a row have neighbouring slots.
        split: int32 [split rows, 3], the (b, h, tile) whose slots are to be merged.
        split_ptr: int32 [split rows + 1], their slots.
        cost: int64 [work tiles], in cycles.
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
        """Number of work tiles."""
        return self.b.numel()

    @property
    def bound(self) -> float:
        """Lower bound of the makespan of these work tiles, in cycles.

        The larger of the longest work tile and a worker's share of the total cost.
        """
        return max(self.unsplit / self.workers, int(self.cost.max()))

    def table(self) -> Tensor:
        """Pack the schedule for a kernel: int32 [work tiles, 12], 48 bytes a work tile.

        b, h, tile, slot, then the PARTIAL and the FULL cursor, then the number among `split` of the
        row that it is a part of, -1 for a whole row, and how many parts that has.
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
    """Order the q tiles of a forward.

    Args:
        runs: the mask's tiles.
        shape: the tensors; the runs' batch and heads must be theirs or 1.
        workers: persistent CTAs, as a rule the number of SMs.
        cost: of the work, see `Cost`.
        l2_bytes: how much K and V a section may hold.
        order: "longest" first in sections; "grid", (b, h, tile) as a plain launch does, never
            split; "ascending" or "descending" by tile in sections; "falling", descending except
            that the shortest work tiles may come at the end, never split.
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
    """Order the kv tiles of a backward, each of which visits q tiles by the transposed runs.

    A row computes dK and dV of one kv tile from one query head, and adds to dQ. Work tiles of a
    split row each hold a part of the sums dK and dV. Deterministic runs take "ascending" or
    "descending" and `attnkit.schedule.deterministic_order`. Arguments and errors are those of
    `schedule_forward`.
    """
    lists = (runs.full_t, runs.partial_t, runs.kv_blocks, runs.q_blocks)
    owners = (shape.batch, shape.heads)  # each head reads its own Q and dO
    return _Work(runs, shape, workers, cost, l2_bytes, order, True, lists, owners).schedule(split)


@dataclass(frozen=True, eq=False)
class _Work:
    """Arguments of a schedule, forward or backward."""

    runs: BlockRuns
    shape: Shape
    workers: int
    cost: Cost
    l2_bytes: int
    order: str
    backward: bool
    lists: tuple[Runs, Runs, int, int]  # FULL, PARTIAL, rows of a head, blocks of a row
    owners: tuple[int, int]  # batch and heads of what is read

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
        """Split the rows, order the work tiles, and assign slots."""
        rows = self._rows()
        section, place = self._sections(), self._places()
        work_tiles, costs, order = self._best_split(rows, section, place, split)
        unsplit = int((rows.body + self.cost.tile).sum())
        return self._build(rows, work_tiles, costs, order, unsplit)

    def _mask_rows(self) -> Tensor:
        """Return the row of the runs of every work row, int64; shared batches and heads repeat."""
        runs, blocks = self.runs, self.lists[2]
        size = (runs.batch, runs.heads, blocks)
        grid = torch.arange(runs.batch * runs.heads * blocks, device=runs.device).view(size)
        return grid.expand(self.shape.batch, self.shape.heads, blocks).reshape(-1)

    def _rows(self) -> Rows:
        full, partial = (_tiles_of(kind)[self._mask_rows()] for kind in self.lists[:2])
        return Rows(partial, full, self.cost)

    def _sections(self) -> Tensor:
        full, partial, blocks, columns = self.lists
        batch, heads, units = self.shape.batch, self.shape.heads, self.owners[0] * self.owners[1]
        unit = unit_of_rows(batch, heads, self.owners, blocks, self.runs.device)
        if self.order == "grid":
            return torch.zeros_like(unit)
        capacity = self.l2_bytes // self.shape.tile_bytes
        members = unit.numel() // (units * blocks)
        # enough rows to keep the workers busy; a fixed order of a head's tiles is not cut
        least = -(-self.workers // members) if self.order == "longest" else blocks + 1
        return sections((full, partial), units, unit, blocks, columns, capacity, least)

    def _places(self) -> Tensor:
        """Rank the heads so that those that share K and V are neighbours: int64 [work rows]."""
        batch, heads = self.shape.batch, self.shape.heads
        shared = self.owners[0] == 1 < batch
        pair = torch.arange(batch * heads, device=self.runs.device).view(batch, self.owners[1], -1)
        order = (pair.transpose(0, 1) if shared else pair).reshape(-1)
        place = torch.empty_like(order)
        place[order] = torch.arange(batch * heads, device=order.device)
        return place.repeat_interleave(self.lists[2])

    def _best_split(
        self, rows: Rows, section: Tensor, place: Tensor, split: bool
    ) -> tuple[WorkTiles, Tensor, Tensor]:
        """Return the work tiles with the least predicted makespan, their costs and their order."""
        total = int((rows.body + self.cost.tile).sum())
        share, least = total // self.workers, -1
        for work_tiles, level in self._options(rows, max(1, share), split, section, place):
            costs = work_tiles.costs(rows)
            order = self._ordered(work_tiles, costs, section, place, level)
            if least < 0 and int(costs.max()) * GRAIN <= share:
                return work_tiles, costs, order  # any order is good
            makespan = predict_makespan(costs[order], self.workers)
            if least < 0 or makespan * 100 < least * 99:  # each cut must pay
                least, best = makespan, (work_tiles, costs, order)
            if least * 100 <= share * 101:  # within 1 % of what is possible
                break
        return best

    def _options(
        self, rows: Rows, share: int, split: bool, section: Tensor, place: Tensor
    ) -> Iterator[tuple[WorkTiles, bool]]:
        """Yield ways to split, few cuts first, and whether the shortest work tiles come last."""
        work_tiles = keep_whole(rows)
        yield work_tiles, False
        if self.order in ("longest", "falling"):
            yield work_tiles, True
        split = split and self.order != "falling"
        if split and self.order == "longest":
            order = self._ordered(work_tiles, work_tiles.costs(rows), section, place, False)
            yield fill_shares(rows, order, self.workers), False
        if split and self.order != "grid":
            for limit in (share, share // 2, share // 4):
                yield split_evenly(rows, limit), True
            yield wrap_around(rows, self.workers), True

    def _ordered(
        self, work_tiles: WorkTiles, costs: Tensor, section: Tensor, place: Tensor, level: bool
    ) -> Tensor:
        """Return the list order, int64 [work tiles]; ties keep the natural order on any device."""
        blocks, count = self.lists[2], work_tiles.row.numel()
        if self.order == "grid":
            return torch.arange(count, device=costs.device)
        section, sections = section[work_tiles.row], int(section.max()) + 1
        # sections too small to keep the workers busy run side by side anyway: join them
        merged = min(sections, max(1, count // self.workers))
        section = section * merged // sections
        tile, most = work_tiles.row % blocks, int(work_tiles.parts.max())
        pairs = self.shape.batch * self.shape.heads
        if self.order in MONOTONE:
            tile = tile if self.order == "ascending" else blocks - 1 - tile
            # work tiles of a row stay together: its turn comes once
            return _lexsort(place[work_tiles.row] * most + work_tiles.index, tile, section)
        longest = costs.new_zeros(merged).scatter_reduce(0, section, costs, "amax")
        first = -longest[section]
        if level:
            # the end of the last section may be too coarse to fill the gaps: move some of the
            # shortest work tiles of all, which read the least, to the end
            rising, shortest = costs.sort(stable=True)
            fillers = rising.cumsum(0) <= self.workers * int(rising[-1]) // 2
            end = costs < rising[int(fillers.sum().clamp(max=count - 1))]
            if self.order == "falling":  # and some of equal ones
                end[shortest[fillers]] = True
            section, first = torch.where(end, merged, section), torch.where(end, 1, first)
        rank = -costs
        if self.order == "falling":
            tile, rank = blocks - 1 - tile, torch.where(section < merged, 0, rank)
        # heads that share K and V run the same work tile side by side
        near = (tile * most + work_tiles.index) * pairs + place[work_tiles.row]
        return _lexsort(near, rank, section, first)

    def _build(
        self, rows: Rows, work_tiles: WorkTiles, costs: Tensor, order: Tensor, unsplit: int
    ) -> Schedule:
        """Number the slots of split rows, and put all tables in list order."""
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
    """Count the tiles of each row, int64 [rows]."""
    ends = torch.cat([runs.length.new_zeros(1, dtype=torch.int64), runs.length.cumsum(0)])
    return ends[runs.row_ptr.to(torch.int64)].diff()


def _cursor(runs: Runs, row: Tensor, first: Tensor, count: Tensor) -> Tensor:
    """Return the cursors (run, skip, count) of stretches of the rows' tiles, int32 [work tiles, 3].

    Args:
        runs: of all rows.
        row, first, count: [work tiles], the row, and the stretch of its tiles.
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
    """Return b, h and tile of work rows, int32 each."""
    pair = row // blocks
    b, h, tile = pair // heads, pair % heads, row % blocks
    return b.to(torch.int32), h.to(torch.int32), tile.to(torch.int32)


def _lexsort(*keys: Tensor) -> Tensor:
    """Sort stably by the last key, then by the one before, and so on; return the order."""
    order = torch.arange(keys[0].numel(), device=keys[0].device)
    for key in keys:
        order = order[torch.argsort(key[order], stable=True)]
    return order
