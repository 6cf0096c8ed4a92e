"""Divide a mask into cells, and measure what full and partial tiles cover and keep in each cell."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnkit.inspection.summary import kept_function, positions_in_partial_tiles, runs_of
from attnkit.sparsity.block_mask import BlockMask
from attnkit.sparsity.block_runs import BlockRuns, Runs

_RUNS_AT_ONCE = 1 << 15


@dataclass(frozen=True, eq=False)
class Cells:
    """Holds the shares of one batch entry and head in a grid of cells.

    Attributes:
        size: query and key positions of a cell; the last cells may be cut by the lengths.
        full, partial: float64 [rows, columns], share of a cell's positions in full tiles, and in
            partial tiles.
        kept: float64 [rows, columns], share of positions in partial tiles that the mask keeps;
            None if they were too many to evaluate.
    """

    size: tuple[int, int]
    full: Tensor
    partial: Tensor
    kept: Tensor | None


def cells_of(
    blocks: BlockMask, panels: int, most_cells: tuple[int, int], most_positions: int
) -> list[Cells]:
    """Divide the first batch entries and heads of a mask into equal cells.

    The sides of a cell are powers of two, so that cells and tiles share their edges.

    Args:
        blocks: the mask.
        panels: how many pairs of batch entry and head.
        most_cells: most rows and columns of cells.
        most_positions: most positions in partial tiles, of all panels, that are evaluated.

    Returns:
        The cells of each pair.
    """
    runs = blocks.runs
    lengths = runs.q_len, runs.kv_len
    size = _cell_side(lengths[0], most_cells[0]), _cell_side(lengths[1], most_cells[1])
    edges = [_edges(length, side) for length, side in zip(lengths, size, strict=True)]
    pairs = [divmod(i, runs.heads) for i in range(panels)]
    area = torch.outer(*(last - first for first, last in edges)).double()
    kept = _kept(blocks, panels, size, area.shape, most_positions)
    found = []
    for i, pair in enumerate(pairs):
        full, partial = (
            covered(runs_of(kind, runs, *pair), edges, runs.block, lengths) / area
            for kind in (runs.full, runs.partial)
        )
        found.append(Cells(size, full, partial, None if kept is None else kept[i] / area))
    return found


def tile_shares(runs: BlockRuns, b: int, h: int, rows: int, columns: int) -> Tensor:
    """Compute, for each cell of a grid, the share of its tiles that the mask keeps.

    A PARTIAL tile counts as half.

    Args:
        runs: the tiles of all batch entries and heads.
        b, h: the batch entry and the head.
        rows, columns: number of cells, which may be more or fewer than the tiles.

    Returns:
        float64 [rows, columns]. A share is 0 only if nothing is kept, 1 only if everything is.
    """
    counts = runs.q_blocks, runs.kv_blocks
    edges = []
    for tiles, cells in zip(counts, (rows, columns), strict=True):
        at = torch.arange(cells + 1) * tiles
        edges.append((at[:-1] // cells, -(-at[1:] // cells)))
    area = torch.outer(*(last - first for first, last in edges)).double()
    full, partial = (
        covered(runs_of(kind, runs, b, h), edges, (1, 1), counts)
        for kind in (runs.full, runs.partial)
    )
    return (full + 0.5 * partial) / area


def covered(
    kind: Runs,
    edges: list[tuple[Tensor, Tensor]],
    block: tuple[int, int],
    lengths: tuple[int, int],
) -> Tensor:
    """Count the positions of each cell that lie inside of runs of tiles.

    Args:
        kind: runs of tiles, of one batch entry and head.
        edges: for rows and for columns of cells, the first position of each and the one after its
            last, int64.
        block: positions of a tile.
        lengths: positions of the mask; the last tiles are cut there.

    Returns:
        float64 [rows of cells, columns of cells].
    """
    (top, bottom), (left, right) = edges
    (height, width), (q_len, kv_len) = block, lengths
    row = torch.arange(kind.rows).repeat_interleave(kind.row_ptr.long().diff())
    bands = torch.zeros(kind.rows, len(left), dtype=torch.float64)  # of one row of positions each
    for at in torch.arange(len(row)).split(_RUNS_AT_ONCE):
        first = kind.start[at].long() * width
        last = (first + kind.length[at].long() * width).clamp(max=kv_len)
        inside = torch.minimum(last[:, None], right) - torch.maximum(first[:, None], left)
        bands.index_add_(0, row[at], inside.clamp(min=0).double())
    # the sums of all rows of positions above each edge
    heights = (q_len - torch.arange(kind.rows) * height).clamp(max=height)
    above = pad((bands * heights[:, None]).cumsum(0), (0, 0, 1, 0))
    bands = pad(bands, (0, 0, 0, 1))

    def until(edge: Tensor) -> Tensor:
        tile = edge // height
        return above[tile] + bands[tile] * (edge - tile * height)[:, None]

    return until(bottom) - until(top)


def _cell_side(length: int, most: int) -> int:
    """Return the smallest power of two such that `most` cells of this side hold `length`."""
    side = 1
    while side * most < length:
        side *= 2
    return side


def _edges(length: int, side: int) -> tuple[Tensor, Tensor]:
    first = torch.arange(0, length, side)
    return first, (first + side).clamp(max=length)


def _kept(
    blocks: BlockMask, panels: int, size: tuple[int, int], grid: torch.Size, most_positions: int
) -> Tensor | None:
    """Count the positions of each cell that partial tiles keep, float64 [panels, *grid].

    None if the tiles have too many positions.
    """
    runs = blocks.runs
    shown = Runs(
        runs.partial.row_ptr[: panels * runs.q_blocks + 1], runs.partial.start, runs.partial.length
    )
    last = int(shown.row_ptr[-1])
    shown = Runs(shown.row_ptr, shown.start[:last], shown.length[:last])
    if int(shown.length.sum()) * runs.block[0] * runs.block[1] > most_positions:
        return None
    counts = torch.zeros(panels * grid[0] * grid[1], dtype=torch.float64)
    for pair, q, kv, kept in positions_in_partial_tiles(runs, shown, kept_function(blocks)):
        cell = (pair * grid[0] + q // size[0]) * grid[1] + kv // size[1]
        at = cell.expand(kept.shape)[kept].flatten().cpu()
        counts += torch.bincount(at, minlength=len(counts))
    return counts.view(panels, *grid)
