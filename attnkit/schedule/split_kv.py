"""Split rows of tiles into work tiles, so that no worker gets more than its share.

A row is the work of one output tile: its PARTIAL tiles, then its FULL tiles, in that sequence. A
cut is a position in the sequence, at a run's boundary or inside a run.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from attnkit.errors import OptionError
from attnkit.util.csr import row_indices, searchsorted_right

# Costs are compared to a precision of 1 / GRAIN of a worker's share. If the longest work tile is below
# that, splitting is not needed: list scheduling exceeds the share by at most the longest work tile.
GRAIN = 32


@dataclass(frozen=True)
class Cost:
    """Linear cost of the work on one output tile, in SM clock cycles.

    A row costs `tile + partial * partial tiles + full * full tiles`. Integers, so that sums are
    exact and the same on every device.

    Attributes:
        full: a FULL tile.
        partial: a PARTIAL tile, mask included.
        tile: what each work tile costs besides its tiles (prologue, epilogue).
        merge: what a work tile of a split row costs on top (partial result written and read again).
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


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows to be scheduled: number of tiles of each kind, int64 [rows]."""

    partial: Tensor
    full: Tensor
    cost: Cost

    @property
    def body(self) -> Tensor:
        """Cost of the tiles alone, int64 [rows]."""
        return self.partial * self.cost.partial + self.full * self.cost.full

    @property
    def tiles(self) -> Tensor:
        """Tiles of either kind, int64 [rows]."""
        return self.partial + self.full

    def ordinal(self, row: Tensor, offset: Tensor) -> Tensor:
        """Return the position in the sequence that is nearest to an offset in cost."""
        a, b = self.cost.full, self.cost.partial
        head = self.partial[row] * b
        return torch.where(
            offset < head,
            (2 * offset + b) // (2 * b),
            self.partial[row] + (2 * (offset - head) + a) // (2 * a),
        )


@dataclass(frozen=True, eq=False)
class WorkTiles:
    """Work tiles of rows, ascending by row and position; int64 [work tiles] each.

    Attributes:
        row: the row that each is a part of.
        first, stop: half-open stretch of the row's sequence.
        index: 0, 1, ... within the row.
        parts: number of work tiles of the row.
    """

    row: Tensor
    first: Tensor
    stop: Tensor
    index: Tensor
    parts: Tensor

    def partial(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the position of the first PARTIAL tile, and the number of PARTIAL tiles."""
        limit = rows.partial[self.row]
        first = torch.minimum(self.first, limit)
        return first, torch.minimum(self.stop, limit) - first

    def full(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the position of the first FULL tile among the row's, and the number of FULL tiles."""
        skip = rows.partial[self.row]
        first = (self.first - skip).clamp(min=0)
        return first, (self.stop - skip).clamp(min=0) - first

    def costs(self, rows: Rows) -> Tensor:
        """Return the cost of each work tile, int64 [work tiles]."""
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
    """Lay the rows end to end, longest first, and cut them into one equal stretch per worker.

    This is McNaughton's wrap-around rule (1959): at most workers - 1 cuts.
    """
    prices, order = torch.sort(rows.body + rows.cost.tile, descending=True, stable=True)
    share = int(prices.sum()) // workers
    return _cut_at_gaps(rows, order, torch.full((workers,), share, device=order.device))


def fill_shares(rows: Rows, order: Tensor, workers: int) -> WorkTiles:
    """Keep rows whole as long as they fit their workers' shares; split the others to fill the gaps.

    The others are laid end to end and cut where the gaps end. That takes fewer cuts than
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
    """Lay rows end to end in an order, and the gaps too; cut the rows at the ends of the gaps.

    A cut whose work tile would cost less than its own overhead is left out.
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
    """Cut rows at positions of their sequences; positions at either end make no cut."""
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
    """Predict the makespan if each free worker takes the next work tile of the list.

    Neighbours that are small against a worker's share are merged, so the running time does not grow
    with the number of work tiles, and the result is accurate to 1 / `GRAIN` of the share.
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
