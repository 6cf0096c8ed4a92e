"""Tiles of one batch entry and head, counted and brought to the size of a picture."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnkit.sparsity.block_runs import BlockRuns, Runs


def label_of(runs: BlockRuns, b: int, h: int) -> str:
    """Which batch entry and head, where they differ."""
    shown = [f"b={b}"] if runs.batch > 1 else []
    shown += [f"h={h}"] if runs.heads > 1 else []
    return f", {' '.join(shown)}" if shown else ""


def counts(runs: BlockRuns, b: int, h: int) -> list[str]:
    """Tiles and runs of one batch entry and head, in words."""
    full, partial = (rows_of(kind, runs, b, h) for kind in (runs.full, runs.partial))
    total = runs.q_blocks * runs.kv_blocks
    tiles = [int(kind.length.sum()) for kind in (full, partial)]
    a_row = full.row_ptr.diff() + partial.row_ptr.diff()
    kept = 100 * sum(tiles) / total
    return [
        f"tiles: {tiles[0]} full, {tiles[1]} partial, {total - sum(tiles)} empty; "
        f"{kept:.3g}% computed",
        f"runs: {full.start.numel()} full, {partial.start.numel()} partial; "
        f"at most {int(a_row.max())} in a row of tiles",
    ]


def rows_of(kind: Runs, runs: BlockRuns, b: int, h: int) -> Runs:
    """The runs of one batch entry and head."""
    group = (b if runs.batch > 1 else 0) * runs.heads + (h if runs.heads > 1 else 0)
    pointers = kind.row_ptr[group * runs.q_blocks : (group + 1) * runs.q_blocks + 1].cpu()
    first, last = int(pointers[0]), int(pointers[-1])
    return Runs(pointers - first, kind.start[first:last].cpu(), kind.length[first:last].cpu())


def shares(runs: BlockRuns, b: int, h: int, rows: int, columns: int) -> Tensor:
    """How much the tiles of each cell keep, 0 to 1; a partial tile counts half.

    Args:
        runs: of all batch entries and heads.
        b, h: the batch entry and the head.
        rows, columns: cells, more or fewer than the tiles.

    Returns:
        float64 [rows, columns]; 0 only where nothing is kept, 1 only where everything is.
    """
    found = torch.zeros(rows, columns, dtype=torch.float64)
    tops = [(runs.q_blocks * i // rows, -(-runs.q_blocks * (i + 1) // rows)) for i in range(rows)]
    lefts = torch.arange(columns) * runs.kv_blocks // columns
    rights = -(-(torch.arange(columns) + 1) * runs.kv_blocks // columns)
    for weight, kind in ((1.0, runs.full), (0.5, runs.partial)):
        own = rows_of(kind, runs, b, h)
        for i, (top, bottom) in enumerate(tops):
            first, last = int(own.row_ptr[top]), int(own.row_ptr[bottom])
            pointers = own.row_ptr[top : bottom + 1] - first
            part = Runs(pointers, own.start[first:last], own.length[first:last])
            tiles = part.expanded(runs.kv_blocks).sum(0)
            before = pad(tiles.cumsum(0), (1, 0))
            area = (rights - lefts).double() * (bottom - top)
            found[i] += weight * (before[rights] - before[lefts]) / area
    return found


def stored_bytes(runs: BlockRuns) -> int:
    """Memory that the runs take, both ways (by query tile and by kv tile), in bytes."""
    kinds = (runs.full, runs.partial, runs.full_t, runs.partial_t)
    tensors = [t for kind in kinds for t in (kind.row_ptr, kind.start, kind.length)]
    return sum(t.numel() * t.element_size() for t in tensors)
