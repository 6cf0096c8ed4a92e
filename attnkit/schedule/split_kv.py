"""Split rows of tiles into work tiles so that no worker gets more than its share.

A row is the work of one output tile: the sequence of its PARTIAL tiles, then its FULL tiles. A cut
is a position in that sequence, at a run's boundary or inside a run. A worker's share is the total
cost divided by the number of workers.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnkit.errors import OptionError
from attnkit.util.csr import row_indices, searchsorted_right

# Costs are compared to a precision of 1 / GRAIN of a worker's share. If the longest work tile costs
# less than that, splitting is not needed: list scheduling exceeds the share by at most one work
# tile.
GRAIN = 32


@dataclass(frozen=True)
class Cost:
    """Models the cost of the work on one output tile as a linear function, in SM clock cycles.

    A row costs `tile + partial * partial tiles + full * full tiles`. Costs are integers, so that
    sums are exact and the same on every device.

    Attributes:
        full: cost of a FULL tile.
        partial: cost of a PARTIAL tile, mask included.
        tile: cost of a work tile besides its tiles (prologue, epilogue).
        merge: additional cost of a work tile of a split row (it writes its partial result, and the
            combine kernel reads it).
    """

    full: int
    partial: int
    tile: int
    merge: int

    def __post_init__(self) -> None:
        values = (self.full, self.partial, self.tile, self.merge)
        if not all(isinstance(v, int) for v in values) or min(values) < 0 or not self.full:
            raise OptionError(f"costs must be integers, none negative and full > 0, got {self}")
        if not self.partial:
            raise OptionError(f"a partial tile cannot be free, got {self}")


class Rows(NamedTuple):
    """Holds the number of PARTIAL and FULL tiles of each row, int64 [rows], and the cost model."""

    partial: Tensor
    full: Tensor
    cost: Cost

    @property
    def body(self) -> Tensor:
        """Return the cycles of each row's tiles, without the cost per work tile, int64 [rows]."""
        return self.partial * self.cost.partial + self.full * self.cost.full

    @property
    def tiles(self) -> Tensor:
        """Return the number of tiles of each row, PARTIAL and FULL together, int64 [rows]."""
        return self.partial + self.full

    def ordinal(self, row: Tensor, offset: Tensor) -> Tensor:
        """Return the position in a row's tile sequence where the cost reaches about `offset`."""
        a, b = self.cost.full, self.cost.partial
        head = self.partial[row] * b
        return torch.where(
            offset < head,
            (2 * offset + b) // (2 * b),
            self.partial[row] + (2 * (offset - head) + a) // (2 * a),
        )


@dataclass(frozen=True, eq=False)
class WorkTiles:
    """Holds work tiles, which are parts of rows, sorted by row and position.

    Each attribute is int64 [work tiles].

    Attributes:
        row: the row that each work tile is a part of.
        first, stop: the half-open stretch of the row's tile sequence that the work tile visits.
        index: number of the work tile within the row, from 0.
        parts: number of work tiles of the row.
    """

    row: Tensor
    first: Tensor
    stop: Tensor
    index: Tensor
    parts: Tensor

    def partial(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the first and the number of the row's PARTIAL tiles that each work tile visits."""
        limit = rows.partial[self.row]
        first = torch.minimum(self.first, limit)
        return first, torch.minimum(self.stop, limit) - first

    def full(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the first and the number of the row's FULL tiles that each work tile visits."""
        skip = rows.partial[self.row]
        first = (self.first - skip).clamp(min=0)
        return first, (self.stop - skip).clamp(min=0) - first

    def costs(self, rows: Rows) -> Tensor:
        """Return the cost of each work tile in cycles, int64 [work tiles]."""
        cost = rows.cost
        body = self.partial(rows)[1] * cost.partial + self.full(rows)[1] * cost.full
        return body + cost.tile + torch.where(self.parts > 1, cost.merge, 0)


def keep_whole(rows: Rows) -> WorkTiles:
    """Make one work tile of every row."""
    none = rows.full.new_empty(0)
    return _cut(rows, none, none)


def split_evenly(rows: Rows, limit: int) -> WorkTiles:
    """Split each row into the fewest equal work tiles whose tiles cost at most `limit`."""
    parts = (-(-rows.body // max(1, limit))).clamp(min=1)
    parts = torch.minimum(parts, rows.tiles.clamp(min=1))
    row = row_indices(parts - 1)
    before = (parts - 1).cumsum(0) - (parts - 1)
    number = torch.arange(row.numel(), device=parts.device) - before[row] + 1
    return _cut(rows, row, rows.ordinal(row, rows.body[row] * number // parts[row]))


def wrap_around(rows: Rows, workers: int) -> WorkTiles:
    """Cut the rows, laid end to end and longest first, into one equal stretch per worker.

    This is McNaughton's wrap-around rule (1959): at most workers - 1 cuts.
    """
    prices, order = torch.sort(rows.body + rows.cost.tile, descending=True, stable=True)
    share = int(prices.sum()) // workers
    return _cut_at_gaps(rows, order, torch.full((workers,), share, device=order.device))


def fill_shares(rows: Rows, order: Tensor, workers: int) -> WorkTiles:
    """Keep rows whole while they fit their workers' shares, and split the others to fill the gaps.

    The other rows are laid end to end and cut where the gaps end. That takes fewer cuts than
    `wrap_around`.

    Args:
        rows: the rows.
        order: int64 [rows], the order in which workers take rows.
        workers: number of workers.
    """
    prices = (rows.body + rows.cost.tile)[order]
    share = int(prices.sum()) // workers
    loads, taken = [0] * workers, 0
    for price in prices.tolist():
        if loads[0] + price > share:
            break
        heapq.heapreplace(loads, loads[0] + price)
        taken += 1
    gaps = share - torch.tensor(loads, device=order.device)
    return _cut_at_gaps(rows, order[taken:], gaps)


def _cut_at_gaps(rows: Rows, order: Tensor, gaps: Tensor) -> WorkTiles:
    """Lay the rows end to end in `order` and the gaps likewise, and cut the rows where gaps end.

    A cut is left out if one of its sides would cost less than the overhead of a work tile.
    """
    cost = rows.cost
    prices = (rows.body + cost.tile)[order]
    ends, at = prices.cumsum(0), gaps.cumsum(0)[:-1]
    at = at[at < int(prices.sum())]
    place = searchsorted_right(ends, at)
    offset = at - (ends[place] - prices[place]) - cost.tile
    row, margin = order[place], cost.tile + cost.merge
    keep = (offset > margin) & (offset + margin < rows.body[row])
    return _cut(rows, row[keep], rows.ordinal(row[keep], offset[keep]))


def _cut(rows: Rows, row: Tensor, place: Tensor) -> WorkTiles:
    """Cut rows at positions of their tile sequences, and return all work tiles.

    Row `row[i]` is cut before position `place[i]`. A position at either end of a row makes no cut.
    """
    device, count = row.device, rows.full.numel()
    inside = (place > 0) & (place < rows.tiles[row])
    width = int(rows.tiles.max()) + 1
    starts = torch.arange(count, device=device) * width
    keys = torch.cat([starts, (row * width + place)[inside]]).unique()
    row = keys // width
    first = keys - row * width
    parts = torch.bincount(row, minlength=count)
    index = torch.arange(row.numel(), device=device) - (parts.cumsum(0) - parts)[row]
    last = index + 1 == parts[row]
    stop = torch.where(last, rows.tiles[row], first.roll(-1))
    return WorkTiles(row, first, stop, index, parts[row])


def predict_makespan(costs: Tensor, workers: int) -> int:
    """Predict the makespan, in cycles, if each free worker takes the next work tile of the list.

    Neighbours whose costs are small against a worker's share are merged. So the time of the loop
    does not grow with the number of work tiles, and the result is accurate to 1 / `GRAIN` of the
    share.
    """
    if costs.numel() > workers * GRAIN:
        ends = costs.cumsum(0)
        width = max(1, int(ends[-1]) // (workers * GRAIN))
        lump = (ends - 1).clamp(min=0) // width
        costs = costs.new_zeros(int(lump[-1]) + 1).index_add_(0, lump, costs)
    loads = [0] * workers
    makespan = 0
    for cost in costs.tolist():
        end = loads[0] + cost
        heapq.heapreplace(loads, end)
        makespan = max(makespan, end)
    return makespan
