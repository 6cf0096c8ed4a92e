"""Classify the tiles of masks whose rows keep one interval each, with ends that never decrease.

Causal masks, windows, prefixes and packed documents are such masks: neither end decreases from row
to row. The tiles that a block of rows touches are then one run, and so are its FULL tiles. Both
runs follow from the first and the last row of the block. A search gives the runs along the columns.
A few dozen operators on [rows] compute all tiles, however complex the mask is. On a GPU, where each
operator costs a launch, that takes a small part of the time of `classify`.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from attnkit.sparsity.block_runs import BlockRuns, Runs
from attnkit.sparsity.intervals.normal_form import Intervals

_MAX_ROWS = 1 << 24  # largest number of rows, as the ends of all are in memory together


def tiles_of(
    intervals: Intervals,
    block: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> BlockRuns | None:
    """Classify the tiles of a mask if each row keeps one interval and no end ever decreases.

    Args:
        intervals: the mask, valid for the current data of its captured tensors.
        block: (q, kv) positions of a tile.
        dtype: dtype of the mask's floats.
        device: device of the result; None: that of the tensors of `intervals`, else the CPU.

    Returns:
        The runs, as from `classify.classify`; None if a row keeps no interval or several, if an
        end decreases from one row to the next, or if the intervals of neighbouring rows do not
        touch.
    """
    batch, heads, q_len, kv_len = intervals.shape
    if len(intervals) != 1 or batch * heads * q_len > _MAX_ROWS:
        return None
    low, high = (x.flatten(0, 1) for x in intervals.ends(dtype, device))
    if not _in_order(low, high):
        return None
    columns = -(-kv_len // block[1])
    first = torch.arange(0, q_len, block[0], device=low.device)
    last = (first + (block[0] - 1)).clamp(max=q_len - 1)
    touched = low[:, first] // block[1], _up(high[:, last], block[1])
    end = high[:, first]
    # a last tile that reaches beyond kv_len is FULL if its rows keep the last position
    whole = _up(low[:, last], block[1]), (end // block[1]).masked_fill(end == kv_len, columns)
    along = [_across(x, columns) for x in (touched, whole)]
    runs = _runs([_candidates(*touched, *whole), _candidates(*along[0], *along[1])])
    return BlockRuns(q_len, kv_len, (block[0], block[1]), batch, heads, *runs)


def _in_order(low: Tensor, high: Tensor) -> bool:
    """Return whether no row is empty, no end decreases, and neighbouring rows touch."""
    ordered = (high > low).all()
    before, after = slice(None, -1), slice(1, None)
    ordered &= (low[:, after] >= low[:, before]).all()
    ordered &= (high[:, after] >= high[:, before]).all()
    return bool(ordered & (low[:, after] <= high[:, before]).all())


def _up(position: Tensor, block: int) -> Tensor:
    return (position + (block - 1)) // block


def _across(ends: tuple[Tensor, Tensor], columns: int) -> tuple[Tensor, Tensor]:
    """Convert the columns [first, stop) of each row to the rows [first, stop) of each column.

    Args:
        ends: int [pairs, rows], first and stop, both ascending; a row with stop <= first has no
            columns.

    Returns:
        int [pairs, columns], first and stop of the rows; a column with stop <= first has no rows.
    """
    first, stop = (x.contiguous() for x in ends)
    column = torch.arange(columns, device=first.device)
    column = column.expand(len(first), columns).contiguous()
    began = torch.searchsorted(stop, column, right=True, out_int32=True)
    return began, torch.searchsorted(first, column, right=True, out_int32=True)


def _candidates(
    begin: Tensor, end: Tensor, full_begin: Tensor, full_end: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Return starts and stops of FULL runs [rows, 1], and of PARTIAL runs around them [rows, 2].

    Args:
        begin, end: the tiles that each row touches, [pairs, rows].
        full_begin, full_end: the FULL tiles among them.
    """
    begin, end, full_begin, full_end = (x.flatten() for x in (begin, end, full_begin, full_end))
    none = full_end <= full_begin
    cut = torch.stack((torch.where(none, end, full_begin), end), 1)
    resume = torch.stack((begin, torch.where(none, end, full_end)), 1)
    return [(full_begin[:, None], full_end[:, None]), (resume, cut)]


def _runs(candidates: list[list[tuple[Tensor, Tensor]]]) -> list[Runs]:
    """Build one `Runs` from each pair of starts and stops, without empty runs."""
    parts = [pair for pairs in candidates for pair in pairs]
    start = torch.cat([start.flatten() for start, _ in parts])
    length = torch.cat([stop.flatten() for _, stop in parts]) - start
    nonempty = length > 0
    # number of nonempty candidates before each candidate
    before = torch.zeros(len(start) + 1, dtype=torch.int32, device=start.device)
    torch.cumsum(nonempty, 0, dtype=torch.int32, out=before[1:])
    at = nonempty.nonzero().squeeze(1)
    start, length = (x.index_select(0, at).to(torch.int32) for x in (start, length))
    first = [0, *itertools.accumulate(start.numel() for start, _ in parts)]
    ends = torch.stack([before[i] for i in first]).tolist()
    runs = []
    for i, (pair, _) in enumerate(parts):
        pointers = before[first[i] : first[i + 1] + 1 : pair.shape[1]] - ends[i]
        part = slice(ends[i], ends[i + 1])
        runs.append(Runs(pointers, start[part], length[part]))
    return runs
