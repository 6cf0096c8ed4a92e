"""Convert a schedule to the tables that a GPU kernel reads.

Each work tile has cursors that visit its kv blocks from the last to the first. Scores tend to be
largest near the diagonal, so the row maximum is reached early and the output is rescaled less
often.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnkit.errors import OptionError
from attnkit.schedule.scheduler import Schedule
from attnkit.sparsity.block_runs import BlockRuns, Runs
from attnkit.util import caches
from attnkit.util.csr import row_indices, searchsorted_right


class WorkList(NamedTuple):
    """Holds the tables of work tiles and of runs that a forward kernel reads.

    Attributes:
        work_tiles: int32 [work tiles, 12]. The columns are b, h, tile, slot; the PARTIAL and the
            FULL cursor; the number of blocks that need the mask, which come first; the number of
            work tiles that visit any block of the mask, which is the same in all rows. The other
            work tiles, whose rows are fully masked, are at the end of the list. A cursor is
            (run, take, count): visit the first `take` blocks of run `run` in descending order, then
            the runs before it, `count` blocks in total.
        partial, full: int32 [2, runs + 1], starts and lengths of the runs. One more run follows: a
            block beyond the end of the tensor, for fully masked tiles.
        split: int32 [rows, 3], the (b, h, tile) of the rows that are split into several work tiles.
        split_ptr: int32 [rows + 1], the first slot of each split row, then the number of slots.
        slots: number of slots of partial results.
    """

    work_tiles: Tensor
    partial: Tensor
    full: Tensor
    split: Tensor
    split_ptr: Tensor
    slots: int

    def to(self, device: torch.device) -> WorkList:
        """Return a copy of the tables on `device`."""
        return self._replace(
            work_tiles=self.work_tiles.to(device),
            partial=self.partial.to(device),
            full=self.full.to(device),
            split=self.split.to(device),
            split_ptr=self.split_ptr.to(device),
        )


def work_list(runs: BlockRuns, schedule: Schedule) -> WorkList:
    """Convert a forward schedule of `runs` to the tables that a kernel reads."""
    table = schedule.table()
    partial, _ = _descending(runs.partial, table[:, 4:7])
    full, first = _descending(runs.full, table[:, 7:10])
    # a FULL block that extends beyond the tensor needs the mask: it comes first in its list
    ragged = runs.kv_len % runs.block[1] != 0
    edge = (first == runs.kv_blocks - 1) & ragged
    masked = partial[:, 2] + edge
    # a fully masked tile visits one block beyond the end, where all scores are masked
    empty = (masked == 0) & (full[:, 2] == 0)
    beyond = masked.new_tensor([runs.partial.start.numel(), 1, 1])
    partial = torch.where(empty[:, None], beyond, partial)
    masked = torch.where(empty, 1, masked)
    live = (~empty).sum(dtype=torch.int32).expand_as(masked)
    work_tiles = torch.cat([table[:, :4], partial, full, torch.stack([masked, live], 1)], 1)
    work_tiles = work_tiles[empty.to(torch.int8).argsort(stable=True)].contiguous()
    return WorkList(
        work_tiles,
        _pairs(runs.partial, runs),
        _pairs(runs.full, runs),
        schedule.split.to(torch.int32).contiguous(),
        schedule.split_ptr.to(torch.int32),
        int(schedule.split_ptr[-1]),
    )


def _descending(runs: Runs, cursor: Tensor) -> tuple[Tensor, Tensor]:
    """Convert ascending cursors (run, skip, count) to descending ones (run, take, count).

    Returns:
        The cursors, int32 [work tiles, 3]; the last block of each, [work tiles], or -1.
    """
    run, skip, count = cursor.to(torch.int64).unbind(1)
    if not runs.length.numel():
        return torch.zeros_like(cursor), torch.full_like(cursor[:, 0], -1)
    ends = runs.length.cumsum(0)
    begins = ends - runs.length
    last = begins[run] + skip + count - 1
    at = searchsorted_right(ends, last).clamp(max=ends.numel() - 1)
    inside = last - begins[at]
    some = count > 0
    descending = torch.stack([at, inside + 1, count], 1)
    block = torch.where(some, runs.start[at] + inside, -1)
    return torch.where(some[:, None], descending, 0).to(torch.int32), block


def _pairs(part: Runs, runs: BlockRuns) -> Tensor:
    """Stack starts and lengths of runs, and append a run beyond the end: int32 [2, runs + 1]."""
    pairs = torch.stack([part.start, part.length])
    return torch.cat([pairs, pairs.new_tensor([[runs.kv_blocks], [1]])], 1)


@functools.lru_cache(maxsize=64)
def full_runs(q_len: int, kv_len: int, block: tuple[int, int], device: torch.device) -> BlockRuns:
    """Build the runs of attention without a mask, where every tile is FULL."""
    q_blocks, kv_blocks = -(-q_len // block[0]), -(-kv_len // block[1])

    def whole(rows: int, blocks: int) -> Runs:
        row_ptr = torch.arange(rows + 1, dtype=torch.int32, device=device)
        start = torch.zeros(rows, dtype=torch.int32, device=device)
        return Runs(row_ptr, start, torch.full_like(start, blocks))

    def none(rows: int) -> Runs:
        empty = torch.zeros(0, dtype=torch.int32, device=device)
        return Runs(torch.zeros(rows + 1, dtype=torch.int32, device=device), empty, empty)

    return BlockRuns(
        q_len, kv_len, block, 1, 1,
        whole(q_blocks, kv_blocks), none(q_blocks), whole(kv_blocks, q_blocks), none(kv_blocks),
    )  # fmt: skip


caches.register(full_runs.cache_clear)


def refine(runs: BlockRuns, block: tuple[int, int]) -> BlockRuns:
    """Cut tiles into smaller tiles of size `block`, which must divide the tile size of `runs`.

    A part of a FULL tile is FULL. A part of a PARTIAL tile counts as PARTIAL.

    Raises:
        OptionError: the sizes do not divide.
    """
    if block == runs.block:
        return runs
    if any(old % new for old, new in zip(runs.block, block, strict=True)):
        raise OptionError(f"tiles of {runs.block} cannot be cut into tiles of {block}")
    states = runs.states()
    for axis, (old, new) in enumerate(zip(runs.block, block, strict=True)):
        states = states.repeat_interleave(old // new, dim=2 + axis)
    rows, columns = -(-runs.q_len // block[0]), -(-runs.kv_len // block[1])
    states = states[:, :, :rows, :columns].contiguous()
    return BlockRuns.from_states(states, runs.q_len, runs.kv_len, block)


def packed(runs: BlockRuns, heads: int) -> BlockRuns:
    """Return the runs of `heads` heads as those of one, whose q tiles follow each other.

    Q tile i of head g becomes tile g * q_blocks + i, also where the last tile of a head is ragged.

    Args:
        runs: runs that all batch elements and heads share.
        heads: number of heads.
    """
    rows, more = runs.q_blocks, range(heads)

    def together(part: Runs) -> Runs:
        line = row_indices(part.row_ptr.diff()) * (heads * rows + 1) + part.start
        first = torch.cat([line + rows * g for g in more])
        last = first + part.length.repeat(heads)
        return Runs.from_segments(first, last, part.rows, heads * rows)

    return replace(
        runs,
        q_len=heads * rows * runs.block[0],
        full=Runs.concatenate([runs.full for _ in more]),
        partial=Runs.concatenate([runs.partial for _ in more]),
        full_t=together(runs.full_t),
        partial_t=together(runs.partial_t),
    )


def retile(runs: BlockRuns, block: tuple[int, int]) -> BlockRuns:
    """Convert runs to tiles of size `block`: cut tiles, and join parts where sizes do not divide.

    A joined tile is FULL or EMPTY only if all of its parts are.
    """
    if not any(old % new for old, new in zip(runs.block, block, strict=True)):
        return refine(runs, block)
    least = (math.gcd(runs.block[0], block[0]), math.gcd(runs.block[1], block[1]))
    fine = refine(runs, least)
    high, wide = block[0] // least[0], block[1] // least[1]
    pairs, sizes = fine.batch * fine.heads, (fine.q_blocks, fine.kv_blocks)
    full, partial = _joined((fine.full, fine.partial), pairs, sizes, (high, wide))
    back = _joined((fine.full_t, fine.partial_t), pairs, sizes[::-1], (wide, high))
    return replace(runs, block=block, full=full, partial=partial, full_t=back[0], partial_t=back[1])


def _joined(
    kinds: tuple[Runs, Runs], pairs: int, sizes: tuple[int, int], by: tuple[int, int]
) -> tuple[Runs, Runs]:
    """Join tiles into larger ones, and return the FULL and PARTIAL runs of these, in O(runs).

    Args:
        kinds: FULL and PARTIAL runs of the tiles.
        pairs: number of pairs of batch element and head.
        sizes: rows and columns of tiles of a pair.
        by: how many rows and columns of tiles to join.
    """
    (rows, columns), (high, wide) = sizes, by
    some, length = -(-rows // high), -(-columns // wide)

    def ends(kind: Runs, inside: bool) -> tuple[Tensor, Tensor]:
        """Return begin and end of the joined columns that each run covers (`inside`) or touches."""
        counts = kind.row_ptr.diff().to(torch.int64)
        row = row_indices(counts)
        base = (row // rows * some + row % rows // high) * (length + 1)
        first, last = kind.start.to(torch.int64), (kind.start + kind.length).to(torch.int64)
        if inside:  # the last column may be narrower
            whole = torch.where(last == columns, length, last // wide)
            first, last = (first + wide - 1) // wide, whole
        else:
            first, last = first // wide, (last + wide - 1) // wide
        some_columns = first < last
        return (base + first)[some_columns], (base + last)[some_columns]

    places, changes = [], []
    for kind, inside in ((kinds[0], True), (kinds[0], False), (kinds[1], False)):
        for side, sign in zip(ends(kind, inside), (1, -1), strict=True):
            change = side.new_zeros(side.numel(), 2)  # in the number of covering, touching rows
            change[:, 0 if inside else 1] = sign
            places.append(side)
            changes.append(change)
    place, order = torch.cat(places).sort()
    counts = torch.cat(changes)[order].cumsum(0)
    final = torch.ones_like(place, dtype=torch.bool)  # the last change at each place
    final[:-1] = place[1:] != place[:-1]
    place, counts = place[final], counts[final]
    heights = (rows - place // (length + 1) % some * high).clamp(max=high)
    full = (counts[:, 0] == heights)[:-1]
    touched = (counts[:, 1] > 0)[:-1]
    first, last = place[:-1], place[1:]
    full_runs, partial_runs = (
        Runs.from_segments(first[m], last[m], pairs * some, length) for m in (full, touched & ~full)
    )
    return full_runs, partial_runs
