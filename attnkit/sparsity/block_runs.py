"""Define `BlockRuns`, the block-sparse format of masks: CSR rows of runs of blocks.

A row belongs to one (batch, head, block row). A run is a maximal sequence of neighbouring blocks in
the same state. FULL and PARTIAL runs are separate lists. The format stores both directions: runs of
kv blocks by query block, and runs of query blocks by kv block. Its size is proportional to the
boundary of the mask, not to the area: rows of a causal mask have at most two runs at any length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnkit.errors import ArgumentError, DTypeError, OptionError, ShapeError
from attnkit.util.chunks import chunk_size
from attnkit.util.csr import row_indices

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

EMPTY, PARTIAL, FULL = 0, 1, 2
BLOCK = (128, 128)  # (query, kv) positions: the default of FlexAttention
_MOST_LISTED = 1 << 31  # blocks in lists of blocks: 8 GiB each
_PICTURE = " +#"  # character of each state


@dataclass(frozen=True, eq=False)
class Runs:
    """Holds runs of blocks, grouped by row in CSR form.

    Attributes:
        row_ptr: int32 [rows + 1]; the runs of row r are row_ptr[r] to row_ptr[r + 1] - 1.
        start: int32 [runs], first block of each run, ascending within a row.
        length: int32 [runs], blocks in each run, at least 1; runs of a row never touch.
    """

    row_ptr: Tensor
    start: Tensor
    length: Tensor

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return self.row_ptr.numel() - 1

    def to(self, device: torch.device | str) -> Runs:
        """Return a copy of the runs on `device`."""
        return Runs(self.row_ptr.to(device), self.start.to(device), self.length.to(device))

    def expanded(self, blocks: int) -> Tensor:
        """Return the dense form: bool [rows, blocks], True inside the runs."""
        counts = self.row_ptr.to(torch.int64).diff()
        first = row_indices(counts) * (blocks + 1) + self.start
        steps = torch.zeros(self.rows * (blocks + 1), dtype=torch.int8, device=counts.device)
        steps.index_add_(0, first, torch.ones_like(first, dtype=torch.int8))
        # a run that touches the end stops in the spare last column
        steps.index_add_(0, first + self.length, torch.full_like(first, -1, dtype=torch.int8))
        inside = steps.view(self.rows, blocks + 1).cumsum(1, dtype=torch.int8)
        return inside[:, :blocks] > 0

    @staticmethod
    def from_segments(first: Tensor, last: Tensor, rows: int, blocks: int) -> Runs:
        """Build `Runs` from segments in any order. Segments that touch become one run.

        Args:
            first: int64 [segments], row * (blocks + 1) + first block of each segment.
            last: int64 [segments], row * (blocks + 1) + the block after its last one. Segments may
                touch but not overlap.
            rows, blocks: number of rows, and of blocks in a row.
        """
        first, last = merge_segments(first, last)
        row = first // (blocks + 1)
        pointers = torch.zeros(rows + 1, dtype=torch.int32, device=first.device)
        torch.cumsum(torch.bincount(row, minlength=rows), 0, dtype=torch.int32, out=pointers[1:])
        start = (first - row * (blocks + 1)).to(torch.int32)
        return Runs(pointers, start, (last - first).to(torch.int32))

    @staticmethod
    def concatenate(parts: Sequence[Runs]) -> Runs:
        """Return the rows of all parts, one part after another."""
        ends = torch.stack([p.row_ptr[-1] for p in parts]).cumsum(0, dtype=torch.int32)
        pointers = [parts[0].row_ptr]
        pointers += [p.row_ptr[1:] + end for p, end in zip(parts[1:], ends, strict=False)]
        return Runs(
            torch.cat(pointers),
            torch.cat([p.start for p in parts]),
            torch.cat([p.length for p in parts]),
        )


def merge_segments(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Sort segments, merge those that touch, and return the (first, last) of the result.

    Args:
        first: int64 [segments], first position of each segment, in any order.
        last: int64 [segments], the position after its last one; segments do not overlap.
    """
    first, last = first.sort().values, last.sort().values  # segment i is still first[i]..last[i]
    fresh = first.new_ones(first.numel() + 1, dtype=torch.bool)
    torch.ne(first[1:], last[:-1], out=fresh[1:-1])
    return first.masked_select(fresh[:-1]), last.masked_select(fresh[1:])


def _bands(grid: Tensor) -> Iterator[Tensor]:
    """Yield consecutive rows [n, blocks] of states [pairs, rows, blocks], n of bounded size."""
    _, rows, blocks = grid.shape
    limit = chunk_size(grid.numel(), grid.device)
    for pairs in grid.split(max(1, limit // (rows * blocks))):
        if pairs.shape[0] == 1:
            yield from pairs[0].split(max(1, limit // blocks))
        else:
            yield pairs.reshape(-1, blocks)


def state_changes(grid: Tensor) -> tuple[Tensor, Tensor]:
    """Find where the state changes along the rows of a grid.

    Args:
        grid: int8 states [pairs, rows, blocks].

    Returns:
        int64 [changes], the changes as flat indices into the grid; and int8 [changes], the states
        from there on. Each row begins with a change.
    """
    places, states = [], []
    first = 0
    for band in _bands(grid):
        change = torch.ones_like(band, dtype=torch.bool, memory_format=torch.contiguous_format)
        change[:, 1:] = band[:, 1:] != band[:, :-1]
        at = change.flatten().nonzero().squeeze(1)
        places.append(at + first)
        states.append(band.reshape(-1)[at])
        first += band.numel()
    return torch.cat(places), torch.cat(states)


def _runs_of(grid: Tensor) -> dict[int, Runs]:
    """Return {FULL: runs, PARTIAL: runs} of int8 states [pairs, rows, blocks]."""
    pairs, rows, blocks = grid.shape
    at, state = state_changes(grid)
    length = at.diff(append=at.new_full((1,), grid.numel()))
    row = at // blocks
    runs = {}
    for kind in (PARTIAL, FULL):
        mine = state == kind
        pointers = torch.zeros(pairs * rows + 1, dtype=torch.int32, device=grid.device)
        counts = torch.bincount(row[mine], minlength=pairs * rows)
        torch.cumsum(counts, 0, dtype=torch.int32, out=pointers[1:])
        start = (at[mine] - row[mine] * blocks).to(torch.int32)
        runs[kind] = Runs(pointers, start, length[mine].to(torch.int32))
    return runs


@dataclass(frozen=True, eq=False)
class BlockRuns:
    """Holds the state of every tile of a mask: EMPTY, PARTIAL or FULL.

    A tile is FULL if the mask keeps every position in it, EMPTY if it keeps none, else PARTIAL.
    Only positions with q < q_len and kv < kv_len count, so a tile at a ragged end may be FULL.

    Attributes:
        q_len, kv_len: lengths in positions.
        block: (q, kv) positions of a tile.
        batch, heads: batch size and number of query heads; 1 means shared by all.
        full, partial: runs of kv blocks, one row per (b, h, q block).
        full_t, partial_t: runs of q blocks, one row per (b, h, kv block).
    """

    q_len: int
    kv_len: int
    block: tuple[int, int]
    batch: int
    heads: int
    full: Runs
    partial: Runs
    full_t: Runs
    partial_t: Runs

    @property
    def q_blocks(self) -> int:
        """Return the number of block rows; the last one may be shorter than a block."""
        return -(-self.q_len // self.block[0])

    @property
    def kv_blocks(self) -> int:
        """Return the number of block columns; the last one may be shorter than a block."""
        return -(-self.kv_len // self.block[1])

    @property
    def device(self) -> torch.device:
        """Return the device of the runs."""
        return self.full.row_ptr.device

    @staticmethod
    def from_states(states: Tensor, q_len: int, kv_len: int, block: tuple[int, int]) -> BlockRuns:
        """Build the runs from a dense grid of states.

        Args:
            states: int8 [batch, heads, q blocks, kv blocks]; 0 EMPTY, 1 PARTIAL, 2 FULL.
            q_len, kv_len: lengths in positions, at least 1.
            block: (q, kv) positions of a tile, each at least 1.

        Raises:
            ShapeError: the grid does not fit the lengths and the block.
            DTypeError: the grid is not int8.
            OptionError: a block size is not positive.
        """
        _check_grid(states, q_len, kv_len, block)
        batch, heads = states.shape[:2]
        pairs = states.flatten(0, 1)
        forward, backward = _runs_of(pairs), _runs_of(pairs.transpose(1, 2))
        return BlockRuns(
            q_len, kv_len, (block[0], block[1]), batch, heads,
            forward[FULL], forward[PARTIAL], backward[FULL], backward[PARTIAL],
        )  # fmt: skip

    @staticmethod
    def stack(parts: Sequence[BlockRuns], batch: int, heads: int) -> BlockRuns:
        """Combine parts with consecutive (b, h) pairs into runs of `batch` x `heads`."""
        if sum(p.batch * p.heads for p in parts) != batch * heads:
            raise AssertionError("the parts do not add up to batch * heads")
        return replace(
            parts[0],
            batch=batch,
            heads=heads,
            full=Runs.concatenate([p.full for p in parts]),
            partial=Runs.concatenate([p.partial for p in parts]),
            full_t=Runs.concatenate([p.full_t for p in parts]),
            partial_t=Runs.concatenate([p.partial_t for p in parts]),
        )

    def states_for(self, batch: int, heads: int) -> Tensor:
        """Return the dense grid of states for a batch and heads that share these runs.

        Args:
            batch, heads: sizes that this object has already, or has as 1.

        Returns:
            int8 [batch, heads, q blocks, kv blocks], expanded from the grid of this object.

        Raises:
            OptionError: the grid, which lists of blocks fill, has more than 2**31 entries.
        """
        entries = batch * heads * self.q_blocks * self.kv_blocks
        if entries > _MOST_LISTED:
            raise OptionError(
                f"lists of blocks for batch {batch}, heads {heads} and {self.q_blocks} x "
                f"{self.kv_blocks} blocks have {entries} entries, expected at most {_MOST_LISTED}; "
                "take larger blocks, or B=None and H=None where the mask does not read b and h"
            )
        return self.states().expand(batch, heads, -1, -1)

    def states(self) -> Tensor:
        """Return the dense grid of states.

        Returns:
            int8 [batch, heads, q blocks, kv blocks]: 0 EMPTY, 1 PARTIAL, 2 FULL.
        """
        full = self.full.expanded(self.kv_blocks).to(torch.int8)
        grid = full * FULL + self.partial.expanded(self.kv_blocks).to(torch.int8) * PARTIAL
        return grid.view(self.batch, self.heads, self.q_blocks, self.kv_blocks)

    def counts(self) -> tuple[int, int, int]:
        """Count the EMPTY, PARTIAL and FULL tiles. Shared batches and heads count once."""
        total = self.batch * self.heads * self.q_blocks * self.kv_blocks
        partial, full = int(self.partial.length.sum()), int(self.full.length.sum())
        return total - partial - full, partial, full

    def density(self) -> float:
        """Return the fraction of tiles that are not EMPTY, 0 to 1."""
        empty, partial, full = self.counts()
        return (partial + full) / (empty + partial + full)

    def to(self, device: torch.device | str) -> BlockRuns:
        """Return a copy of the runs on `device`."""
        return replace(
            self,
            full=self.full.to(device),
            partial=self.partial.to(device),
            full_t=self.full_t.to(device),
            partial_t=self.partial_t.to(device),
        )

    def __str__(self) -> str:
        empty, partial, full = self.counts()
        shared = f"{self.batch} batch(es) x {self.heads} head(s)"
        runs = self.full.start.numel() + self.partial.start.numel()
        return (
            f"BlockRuns of {self.q_len} x {self.kv_len} positions in tiles of "
            f"{self.block[0]} x {self.block[1]}, {shared}: {full} full, {partial} partial, "
            f"{empty} empty tiles ({100 * self.density():.1f}% kept) in {runs} runs\n"
            + self.picture()
        )

    def picture(self, limit: int = 32) -> str:
        """Draw the first batch and head in at most limit x limit characters.

        `#` stands for tiles that are all FULL, a space for EMPTY ones, `+` for any other.
        """
        grid = self.states()[0, 0].to("cpu")
        rows, columns = min(limit, grid.shape[0]), min(limit, grid.shape[1])
        lines = []
        for part in grid.tensor_split(rows, 0):
            cells = [(int(c.min()), int(c.max())) for c in part.tensor_split(columns, 1)]
            lines.append("".join(_PICTURE[low if low == high else PARTIAL] for low, high in cells))
        return "\n".join(f"|{line}|" for line in lines)

    def to_flex(
        self,
        mask_mod: Callable[..., Tensor] | None = None,
        sizes: tuple[int, int] | None = None,
    ) -> BlockMask:
        """Convert to PyTorch's BlockMask.

        FULL tiles that reach beyond the lengths stay full: FlexAttention checks the lengths itself.

        Args:
            mask_mod: the mask function that FlexAttention applies in PARTIAL tiles.
            sizes: (batch, heads) of the result; None for those of the runs.

        Raises:
            OptionError: the lists would have more than 2**31 entries.
        """
        from torch.nn.attention import flex_attention

        states = self.states_for(*(sizes or (self.batch, self.heads)))
        lists = [_block_lists(states == kind) for kind in (PARTIAL, FULL)]
        return flex_attention.BlockMask.from_kv_blocks(
            *lists[0],
            *lists[1],
            BLOCK_SIZE=self.block,
            mask_mod=mask_mod,
            seq_lengths=(self.q_len, self.kv_len),
        )


def from_flex(block_mask: BlockMask) -> BlockRuns:
    """Convert PyTorch's BlockMask to `BlockRuns`.

    Only its q -> kv lists are read; the transposed runs are computed from them. If the block mask
    has no list of full blocks, every listed block is PARTIAL. Entries of `kv_indices` beyond
    `kv_num_blocks` are ignored.

    Raises:
        ArgumentError: block_mask is not PyTorch's BlockMask.
        ShapeError: the lists do not fit the lengths, or name a block twice.
    """
    from torch.nn.attention import flex_attention

    if not isinstance(block_mask, flex_attention.BlockMask):
        raise ArgumentError(
            f"block_mask must be a torch.nn.attention.flex_attention.BlockMask, "
            f"got {type(block_mask).__name__}"
        )
    q_len, kv_len = block_mask.seq_lengths
    block = (block_mask.BLOCK_SIZE[0], block_mask.BLOCK_SIZE[1])
    columns = -(-kv_len // block[1])
    partial = _grid_of_lists(block_mask.kv_num_blocks, block_mask.kv_indices, columns, "kv")
    states = partial.to(torch.int8) * PARTIAL
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _grid_of_lists(
            block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns, "full_kv"
        )
        if full.shape != partial.shape:
            raise ShapeError(
                f"block_mask lists partial blocks of shape {tuple(partial.shape)} and full blocks "
                f"of shape {tuple(full.shape)}; expected one shape"
            )
        if bool((full & partial).any()):
            raise ShapeError(
                "block_mask lists a block both as partial and as full, which would count it twice; "
                "list each block once"
            )
        states = states + full.to(torch.int8) * FULL
    rows = -(-q_len // block[0])
    if partial.shape[2] != rows:
        raise ShapeError(
            f"block_mask lists {partial.shape[2]} rows of blocks, but {q_len} queries in blocks of "
            f"{block[0]} are {rows} rows; assign lists, seq_lengths and BLOCK_SIZE that fit each "
            "other, or create the block mask again"
        )
    return BlockRuns.from_states(states, q_len, kv_len, block)


def _check_grid(states: Tensor, q_len: int, kv_len: int, block: tuple[int, int]) -> None:
    if states.dtype != torch.int8:
        raise DTypeError(f"states must be int8, got {states.dtype}")
    if min(block) < 1:
        raise OptionError(f"block must be two positive sizes (q, kv), got {block}")
    if min(q_len, kv_len) < 1:
        raise ShapeError(f"q_len and kv_len must be at least 1, got {q_len} and {kv_len}")
    expected = (-(-q_len // block[0]), -(-kv_len // block[1]))
    if states.dim() != 4 or tuple(states.shape[2:]) != expected:
        raise ShapeError(
            f"states of q_len={q_len}, kv_len={kv_len} in blocks {block} must be "
            f"[batch, heads, {expected[0]}, {expected[1]}], got {tuple(states.shape)}"
        )


def _block_lists(grid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the True blocks of each row: counts [..., rows], and indices [..., rows, columns].

    In each row the indices of True blocks come first, ascending, and then all others, ascending.
    """
    order = torch.argsort(grid.to(torch.int8), dim=-1, descending=True, stable=True)
    return grid.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _grid_of_lists(counts: Tensor, indices: Tensor, columns: int, name: str) -> Tensor:
    """Build a bool grid [batch, heads, rows, columns] from lists of blocks.

    Args:
        counts: int [..., rows], number of valid entries at the start of each row of `indices`.
        indices: int [..., rows, n], indices of kv blocks.
        columns: number of kv blocks.
        name: name of the lists, for messages.
    """
    while indices.dim() < 4:
        counts, indices = counts[None], indices[None]
    width = indices.shape[-1]
    listed = torch.arange(width, device=indices.device) < counts[..., None]
    outside = listed & ((indices < 0) | (indices >= columns))
    if bool(outside.any()):
        raise ShapeError(
            f"block_mask.{name}_indices names block {int(indices[outside][0])}, but its lengths "
            f"have {columns} kv blocks"
        )
    grid = torch.zeros(*indices.shape[:3], columns + 1, dtype=torch.bool, device=indices.device)
    # entries that are not listed all go to a spare column
    grid.scatter_(-1, torch.where(listed, indices, columns).to(torch.int64), True)
    grid = grid[..., :columns]
    if bool((grid.sum(-1) != counts).any()):
        raise ShapeError(f"block_mask.{name}_indices names a block twice in one row")
    return grid
