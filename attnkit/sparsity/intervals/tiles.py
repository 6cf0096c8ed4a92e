"""Tiles of masks whose rows keep one interval each, with ends that never fall from row to row.

Causal masks, windows, prefixes and packed documents are of this kind. Then the tiles that a block
of rows touches, and those that it keeps whole, are one stretch each, given by its first and last
row; the same holds along the columns, by search. So a few dozen operators on [rows] find all
tiles, however the mask is written: on a GPU, where each operator costs its launch, that is a small
part of what the general way takes.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from attnkit.sparsity.block_runs import BlockRuns, Runs
from attnkit.sparsity.intervals.normal_form import Intervals

_MOST_ROWS = 1 << 24  # of ends held together


def tiles_of(
    found: Intervals,
    block: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> BlockRuns | None:
    """The tiles of a mask in interval normal form.

    Args:
        found: the mask, valid for its captured tensors as they are.
        block: (q, kv) positions of a tile.
        dtype: what the mask's floats are computed in.
        device: where to; None: where the tensors of `found` are, else on the CPU.

    Returns:
        The same as `tiles.classify`; None where a row keeps no interval or several, or the rows
        are in another order: intervals that fall, or leave a gap.
    """
    batch, heads, q_len, kv_len = found.shape
    if len(found) != 1 or batch * heads * q_len > _MOST_ROWS:
        return None
    low, high = (x.flatten(0, 1) for x in found.ends(dtype, device))
    if not _in_order(low, high):
        return None
    columns = -(-kv_len // block[1])
    first = torch.arange(0, q_len, block[0], device=low.device)
    last = (first + (block[0] - 1)).clamp(max=q_len - 1)
    touched = low[:, first] // block[1], _up(high[:, last], block[1])
    end = high[:, first]
    # a ragged last tile is whole where its rows go on to the last position
    whole = _up(low[:, last], block[1]), (end // block[1]).masked_fill(end == kv_len, columns)
    along = [_across(x, columns) for x in (touched, whole)]
    runs = _runs([_candidates(*touched, *whole), _candidates(*along[0], *along[1])])
    return BlockRuns(q_len, kv_len, (block[0], block[1]), batch, heads, *runs)


def _in_order(low: Tensor, high: Tensor) -> bool:
    """No row is empty, no end falls, and each row's interval touches the one before."""
    fine = (high > low).all()
    before, after = slice(None, -1), slice(1, None)
    fine &= (low[:, after] >= low[:, before]).all()
    fine &= (high[:, after] >= high[:, before]).all()
    return bool(fine & (low[:, after] <= high[:, before]).all())


def _up(position: Tensor, block: int) -> Tensor:
    return (position + (block - 1)) // block


def _across(stretch: tuple[Tensor, Tensor], columns: int) -> tuple[Tensor, Tensor]:
    """Which rows each column is in, given the columns [first, stop) of rows; neither ever falls.

    Args:
        stretch: int [pairs, rows], first and stop; a row with stop <= first has no columns.

    Returns:
        int [pairs, columns], first and stop of the rows; no rows where stop <= first.
    """
    first, stop = (x.contiguous() for x in stretch)
    column = torch.arange(columns, dtype=first.dtype, device=first.device)
    column = column.expand(len(first), columns).contiguous()
    began = torch.searchsorted(stop, column, right=True, out_int32=True)
    return began, torch.searchsorted(first, column, right=True, out_int32=True)


def _candidates(
    begin: Tensor, end: Tensor, full_begin: Tensor, full_end: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """FULL runs [rows, 1], and PARTIAL runs before and after them [rows, 2]: starts and stops.

    Args:
        begin, end: what each row touches, [pairs, rows].
        full_begin, full_end: what is FULL of that.
    """
    begin, end, full_begin, full_end = (x.flatten() for x in (begin, end, full_begin, full_end))
    none = full_end <= full_begin
    cut = torch.stack((torch.where(none, end, full_begin), end), 1)
    resume = torch.stack((begin, torch.where(none, end, full_end)), 1)
    return [(full_begin[:, None], full_end[:, None]), (resume, cut)]


def _runs(candidates: list[list[tuple[Tensor, Tensor]]]) -> list[Runs]:
    """Those of the candidates that hold something, all lists together."""
    parts = [pair for pairs in candidates for pair in pairs]
    start = torch.cat([start.flatten() for start, _ in parts])
    length = torch.cat([stop.flatten() for _, stop in parts]) - start
    held = length > 0
    # how many are held before each candidate
    before = torch.zeros(len(start) + 1, dtype=torch.int32, device=start.device)
    torch.cumsum(held, 0, dtype=torch.int32, out=before[1:])
    at = held.nonzero().squeeze(1)
    start, length = (x.index_select(0, at).to(torch.int32) for x in (start, length))
    first = [0, *itertools.accumulate(start.numel() for start, _ in parts)]
    ends = torch.stack([before[i] for i in first]).tolist()
    found = []
    for i, (pair, _) in enumerate(parts):
        pointers = before[first[i] : first[i + 1] + 1 : pair.shape[1]] - ends[i]
        own = slice(ends[i], ends[i + 1])
        found.append(Runs(pointers, start[own], length[own]))
    return found
