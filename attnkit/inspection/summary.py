"""Count the tiles and positions that a mask keeps, and describe its memory and interval form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnkit.graph.eval_torch import evaluate
from attnkit.sparsity.block_mask import BlockMask
from attnkit.sparsity.block_runs import BlockRuns, Runs
from attnkit.sparsity.intervals.normal_form import Intervals, find_intervals
from attnkit.tracing.float64_checks import compute_dtype
from attnkit.tracing.mask import Mask
from attnkit.tracing.mask_lengths import Lengths
from attnkit.util.arguments import check_type

_MOST_POSITIONS = 1 << 27  # most intervals, or positions in partial tiles, to count positions from
_AT_ONCE = 1 << 22  # positions at which the mask is evaluated together


@dataclass(frozen=True)
class Summary:
    """Holds the counts of `summarize`; `str` formats them as a report.

    Attributes:
        shape: (batch, heads, query length, kv length) that the counts refer to; batch and heads are
            1 if the mask does not read b or h.
        tiles: numbers of (empty, partial, full) tiles.
        kept_positions: positions that the mask keeps; None if counting them would take too long.
        stored: memory of the tiles as runs, in bytes.
        flex: memory of the index tensors of FlexAttention's BlockMask with the same tiles, in
            bytes.
        dense: memory of the dense bool mask, in bytes.
        lengths: the lengths that the mask was built for.
        intervals: the kv positions that each row keeps as a union of intervals, or why there is no
            such union.
    """

    shape: tuple[int, int, int, int]
    tiles: tuple[int, int, int]
    kept_positions: int | None
    stored: int
    flex: int
    dense: int
    lengths: Lengths
    intervals: str

    def __str__(self) -> str:
        positions = self.dense  # a byte each
        empty, partial, full = self.tiles
        computed = 100 * (partial + full) / (empty + partial + full)
        kept = "positions not counted"
        if self.kept_positions is not None:
            kept = f"{100 * self.kept_positions / positions:.3g}% of {positions} positions kept"
        sizes = (self.stored, self.flex, self.dense)
        runs, lists, dense = (bytes_shown(n) for n in sizes)
        return "\n".join(
            [
                f"density: {computed:.3g}% of tiles computed, {kept}",
                f"stored: {runs} as runs; {lists} as FlexAttention's BlockMask, {dense} dense",
                f"built for: {self.lengths}",
                f"intervals: {self.intervals}",
            ]
        )


def summarize(blocks: BlockMask, *, most_positions: int = _MOST_POSITIONS) -> Summary:
    """Count the tiles and positions that a mask keeps.

    Args:
        blocks: the mask and its tiles, from `create_block_mask`.
        most_positions: limit on the number of intervals of all rows, or of positions in partial
            tiles if the mask has no interval form; above it, `kept_positions` is None.

    Raises:
        ArgumentError: blocks is no `BlockMask`.
        The errors of tracing and evaluating the mask.
    """
    check_type("blocks", blocks, BlockMask, "a BlockMask of attnkit.create_block_mask")
    runs, mask = blocks.runs, blocks.traced()
    batch, heads, q_len, kv_len = blocks.shape
    dtype = compute_dtype(mask)
    intervals = find_intervals(
        mask,
        q_len=q_len,
        kv_len=kv_len,
        batch=batch,
        heads=heads,
        device=blocks.device,
        dtype=dtype,
    )

    count = None
    if isinstance(intervals, Intervals):
        if q_len * len(intervals) * runs.batch * runs.heads <= most_positions:
            count = _interval_positions(intervals, dtype)
    elif int(runs.partial.length.sum()) * runs.block[0] * runs.block[1] <= most_positions:
        inside = positions_in_partial_tiles(runs, runs.partial, kept_function(blocks))
        count = _full_positions(runs) + sum(int(kept.sum()) for *_, kept in inside)
    lengths = blocks.mask_mod.lengths if isinstance(blocks.mask_mod, Mask) else Lengths()
    return Summary(
        shape=(runs.batch, runs.heads, q_len, kv_len),
        tiles=runs.counts(),
        kept_positions=count,
        stored=stored_bytes(runs),
        flex=flex_bytes(runs),
        dense=runs.batch * runs.heads * q_len * kv_len,
        lengths=lengths,
        intervals=str(intervals).removeprefix("no interval form: "),
    )


def label_of(runs: BlockRuns, b: int, h: int) -> str:
    """Format the indices of a batch entry and head as ", b=0 h=1", leaving out axes of size 1."""
    shown = [f"b={b}"] if runs.batch > 1 else []
    shown += [f"h={h}"] if runs.heads > 1 else []
    return f", {' '.join(shown)}" if shown else ""


def tile_counts(runs: BlockRuns, b: int, h: int) -> list[str]:
    """Format the counts of tiles and of runs of one batch entry and head, as two lines."""
    full, partial = (runs_of(kind, runs, b, h) for kind in (runs.full, runs.partial))
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


def runs_of(kind: Runs, runs: BlockRuns, b: int, h: int) -> Runs:
    """Select the FULL or PARTIAL runs of one batch entry and head, and copy them to the CPU."""
    group = (b if runs.batch > 1 else 0) * runs.heads + (h if runs.heads > 1 else 0)
    pointers = kind.row_ptr[group * runs.q_blocks : (group + 1) * runs.q_blocks + 1].cpu()
    first, last = int(pointers[0]), int(pointers[-1])
    return Runs(pointers - first, kind.start[first:last].cpu(), kind.length[first:last].cpu())


def stored_bytes(runs: BlockRuns) -> int:
    """Return the memory of the runs in both directions (by q tile and by kv tile), in bytes."""
    kinds = (runs.full, runs.partial, runs.full_t, runs.partial_t)
    tensors = [t for kind in kinds for t in (kind.row_ptr, kind.start, kind.length)]
    return sum(t.numel() * t.element_size() for t in tensors)


def flex_bytes(runs: BlockRuns) -> int:
    """Return the memory of FlexAttention's eight index tensors for the same tiles, in bytes."""
    a_head = 4 * runs.q_blocks * runs.kv_blocks + 2 * (runs.q_blocks + runs.kv_blocks)
    return 4 * runs.batch * runs.heads * a_head


def bytes_shown(count: int) -> str:
    """Format a number of bytes with a unit.

    >>> bytes_shown(1536), bytes_shown(10)
    ('1.5 KiB', '10 bytes')
    """
    size, unit = float(count), 0
    while size >= 1024 and unit < 4:
        size, unit = size / 1024, unit + 1
    shown = f"{size:.0f}" if size >= 100 else f"{size:.3g}"
    return f"{shown} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def _interval_positions(intervals: Intervals, dtype: torch.dtype) -> int:
    """Count the positions in the union of each row's intervals."""
    low, high = intervals.rows(dtype).long().unbind(-1)
    low, order = low.sort(-1)
    high = high.gather(-1, order)
    covered = high.cummax(-1).values.roll(1, -1)  # the end of all intervals that begin earlier
    covered[..., :1] = 0
    return int((high - torch.maximum(low, covered)).clamp(min=0).sum())


def _full_positions(runs: BlockRuns) -> int:
    """Count the positions in full tiles."""
    row, first, last = _spans(runs.full)
    height, width = runs.block
    rows = ((row % runs.q_blocks + 1) * height).clamp(max=runs.q_len)
    rows = rows - row % runs.q_blocks * height
    columns = (last * width).clamp(max=runs.kv_len) - first * width
    return int((rows * columns).sum())


def kept_function(blocks: BlockMask) -> Callable[..., Tensor]:
    """Return a function (b, h, q, kv) -> bool that evaluates the mask on int32 tensors."""
    mask = blocks.traced()
    dtype = compute_dtype(mask)

    def kept(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        env = {"b": b, "h": h, "q": q, "kv": kv}
        return evaluate([mask.root], env, mask.tensors, dtype)[0]

    return kept


def positions_in_partial_tiles(
    runs: BlockRuns, partial: Runs, kept: Callable[..., Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Evaluate a mask on the positions of partial tiles, some tiles at a time.

    Args:
        runs: the tiles.
        partial: `runs.partial`, or its first rows.
        kept: see `kept_function`.

    Yields:
        Batch entry and head as b * heads + h, int32 [tiles, 1, 1]; query positions [tiles, rows, 1]
        and key positions [tiles, 1, columns]; and bool [tiles, rows, columns], True where the mask
        keeps a position. Positions beyond the lengths are not kept.
    """
    row, first, last = _spans(partial)
    tiles = row.repeat_interleave(last - first)
    before = (last - first).cumsum(0) - (last - first)
    column = torch.arange(len(tiles)) - (before - first).repeat_interleave(last - first)
    height, width = runs.block
    inside = [torch.arange(n, dtype=torch.int32, device=runs.device) for n in runs.block]
    for at in torch.arange(len(tiles)).split(max(1, _AT_ONCE // (height * width))):
        tile_row, tile_column = (
            x[at].to(runs.device, torch.int32).view(-1, 1, 1) for x in (tiles, column)
        )
        q = tile_row % runs.q_blocks * height + inside[0].view(1, -1, 1)
        kv = tile_column * width + inside[1]
        pair = tile_row // runs.q_blocks
        real = (q < runs.q_len) & (kv < runs.kv_len)
        # positions beyond the lengths may index outside of a captured tensor
        q, kv = q.clamp(max=runs.q_len - 1), kv.clamp(max=runs.kv_len - 1)
        yield pair, q, kv, kept(pair // runs.heads, pair % runs.heads, q, kv) & real


def _spans(kind: Runs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row, the first tile and the end of each run, int64 on the CPU."""
    pointers, start, length = (t.cpu().long() for t in (kind.row_ptr, kind.start, kind.length))
    row = torch.arange(kind.rows).repeat_interleave(pointers.diff())
    return row, start, start + length
