"""A mask in numbers: tiles and positions that it keeps, what storing it takes, its interval form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnkit.graph.eval_torch import evaluate
from attnkit.inspection.tile_map import stored_bytes
from attnkit.sparsity.block_mask import BlockMask
from attnkit.sparsity.block_runs import BlockRuns, Runs
from attnkit.sparsity.intervals.normal_form import Intervals, find_intervals
from attnkit.tracing.float64_checks import compute_dtype
from attnkit.tracing.mask import Mask
from attnkit.tracing.mask_lengths import Lengths

_MOST_POSITIONS = 1 << 27  # of partial tiles that are evaluated to be counted
_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Summary:
    """What `summarize` found; `str` gives the report.

    Attributes:
        shape: (batch, heads, query length, kv length) of what is counted; batch and heads are 1
            where the mask does not read b or h.
        tiles: numbers of (empty, partial, full) tiles.
        kept: positions that are kept; None where counting them would take too long.
        stored: bytes of the tiles as runs.
        flex: bytes of the index tensors of FlexAttention's BlockMask with the same tiles.
        dense: bytes of the dense mask, bool.
        lengths: which lengths the mask was built for.
        intervals: what each row keeps, as intervals of kv, or why it is no such union.
    """

    shape: tuple[int, int, int, int]
    tiles: tuple[int, int, int]
    kept: int | None
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
        if self.kept is not None:
            kept = f"{100 * self.kept / positions:.3g}% of {positions} positions kept"
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
    """Count what a mask keeps; finds its tiles.

    Args:
        blocks: of `create_block_mask`.
        most_positions: look at so many ends of intervals, or positions of partial tiles where
            there are no intervals; beyond, `kept` is None.

    Raises:
        What using the mask would raise.
    """
    runs, mask = blocks.runs, blocks.traced()
    batch, heads, q_len, kv_len = blocks.shape
    dtype = compute_dtype(mask)
    found = find_intervals(
        mask,
        q_len=q_len,
        kv_len=kv_len,
        batch=batch,
        heads=heads,
        device=blocks.device,
        dtype=dtype,
    )

    def kept(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        env = {"b": b, "h": h, "q": q, "kv": kv}
        return evaluate([mask.root], env, mask.tensors, dtype)[0]

    count = None
    if isinstance(found, Intervals):
        if q_len * len(found) * runs.batch * runs.heads <= most_positions:
            count = _interval_positions(found, dtype)
    elif int(runs.partial.length.sum()) * runs.block[0] * runs.block[1] <= most_positions:
        count = _full_positions(runs) + _partial_positions(runs, kept)
    own = blocks.mask_mod.lengths if isinstance(blocks.mask_mod, Mask) else Lengths()
    return Summary(
        shape=(runs.batch, runs.heads, q_len, kv_len),
        tiles=runs.counts(),
        kept=count,
        stored=stored_bytes(runs),
        flex=flex_bytes(runs),
        dense=runs.batch * runs.heads * q_len * kv_len,
        lengths=own,
        intervals=str(found).removeprefix("no interval form: "),
    )


def flex_bytes(runs: BlockRuns) -> int:
    """Memory of FlexAttention's eight index tensors for the same tiles, in bytes."""
    a_head = 4 * runs.q_blocks * runs.kv_blocks + 2 * (runs.q_blocks + runs.kv_blocks)
    return 4 * runs.batch * runs.heads * a_head


def bytes_shown(count: int) -> str:
    """A number of bytes, to be read."""
    size, unit = float(count), 0
    while size >= 1024 and unit < 4:
        size, unit = size / 1024, unit + 1
    shown = f"{size:.0f}" if size >= 100 else f"{size:.3g}"
    return f"{shown} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def _interval_positions(found: Intervals, dtype: torch.dtype) -> int:
    """The positions in the union of each row's intervals."""
    low, high = found.rows(dtype).long().unbind(-1)
    low, order = low.sort(-1)
    high = high.gather(-1, order)
    covered = high.cummax(-1).values.roll(1, -1)  # by the intervals that begin before
    covered[..., :1] = 0
    return int((high - torch.maximum(low, covered)).clamp(min=0).sum())


def _full_positions(runs: BlockRuns) -> int:
    row, first, last = _listed(runs.full)
    height, width = runs.block
    rows = ((row % runs.q_blocks + 1) * height).clamp(max=runs.q_len)
    rows = rows - row % runs.q_blocks * height
    columns = (last * width).clamp(max=runs.kv_len) - first * width
    return int((rows * columns).sum())


def _partial_positions(runs: BlockRuns, kept: Callable[..., Any]) -> int:
    """The positions that partial tiles keep, some tiles at a time."""
    row, first, last = _listed(runs.partial)
    tiles = row.repeat_interleave(last - first)
    before = (last - first).cumsum(0) - (last - first)
    column = torch.arange(len(tiles)) - (before - first).repeat_interleave(last - first)
    height, width = runs.block
    inside = [torch.arange(n, dtype=torch.int32, device=runs.device) for n in runs.block]
    found = 0
    for at in torch.arange(len(tiles)).split(max(1, _AT_ONCE // (height * width))):
        own = [x[at].to(runs.device, torch.int32).view(-1, 1, 1) for x in (tiles, column)]
        q = own[0] % runs.q_blocks * height + inside[0].view(1, -1, 1)
        kv = own[1] * width + inside[1]
        pair = own[0] // runs.q_blocks
        real = (q < runs.q_len) & (kv < runs.kv_len)
        # what lies beyond the lengths may be beyond a captured tensor too
        q, kv = q.clamp(max=runs.q_len - 1), kv.clamp(max=runs.kv_len - 1)
        found += int((kept(pair // runs.heads, pair % runs.heads, q, kv) & real).sum())
    return found


def _listed(kind: Runs) -> tuple[Tensor, Tensor, Tensor]:
    """Row, first tile and end of each run, int64 on the CPU."""
    pointers, start, length = (t.cpu().long() for t in (kind.row_ptr, kind.start, kind.length))
    row = torch.arange(kind.rows).repeat_interleave(pointers.diff())
    return row, start, start + length
