"""The one sparse format: rows of runs of blocks, FULL and PARTIAL apart, both ways.

A row belongs to one (batch, head, block row); a run is a stretch of neighbouring blocks of the
same state. Causal masks have one run a row whatever the length, so the format costs what the
boundary costs, not the area.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnkit.errors import ArgumentError, DTypeError, OptionError, ShapeError
from attnkit.util.chunks import at_once
from attnkit.util.csr import owners

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

EMPTY, PARTIAL, FULL = 0, 1, 2
BLOCK = (128, 128)  # FlexAttention's block; strips of the CPU template join several
_PICTURE = " +#"  # by state


@dataclass(frozen=True, eq=False)
class Runs:
    """Rows of block runs in CSR form.

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
        """Number of rows."""
        return self.row_ptr.numel() - 1

    def to(self, device: torch.device | str) -> Runs:
        """The same runs on a device."""
        return Runs(self.row_ptr.to(device), self.start.to(device), self.length.to(device))

    def expanded(self, blocks: int) -> Tensor:
        """Dense form: bool [rows, blocks], true inside the runs."""
        counts = self.row_ptr.to(torch.int64).diff()
        first = owners(counts) * (blocks + 1) + self.start
        steps = torch.zeros(self.rows * (blocks + 1), dtype=torch.int8, device=counts.device)
        steps.index_add_(0, first, torch.ones_like(first, dtype=torch.int8))
        # a run that touches the end stops in the spare last column
        steps.index_add_(0, first + self.length, torch.full_like(first, -1, dtype=torch.int8))
        inside = steps.view(self.rows, blocks + 1).cumsum(1, dtype=torch.int8)
        return inside[:, :blocks] > 0

    @staticmethod
    def joined(first: Tensor, last: Tensor, rows: int, blocks: int) -> Runs:
        """The rows made of pieces of runs, in any order.

        Args:
            first: int64 [pieces], row * (blocks + 1) + first block of each.
            last: int64 [pieces], the same of the block after the last one; pieces may touch, but
                not overlap.
            rows, blocks: how many there are.
        """
        first, last = merged(first, last)
        row = first // (blocks + 1)
        pointers = torch.zeros(rows + 1, dtype=torch.int32, device=first.device)
        torch.cumsum(torch.bincount(row, minlength=rows), 0, dtype=torch.int32, out=pointers[1:])
        start = (first - row * (blocks + 1)).to(torch.int32)
        return Runs(pointers, start, (last - first).to(torch.int32))

    @staticmethod
    def concatenated(parts: Sequence[Runs]) -> Runs:
        """The rows of several, one after another."""
        ends = torch.stack([p.row_ptr[-1] for p in parts]).cumsum(0, dtype=torch.int32)
        pointers = [parts[0].row_ptr]
        pointers += [p.row_ptr[1:] + end for p, end in zip(parts[1:], ends, strict=False)]
        return Runs(
            torch.cat(pointers),
            torch.cat([p.start for p in parts]),
            torch.cat([p.length for p in parts]),
        )


def merged(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Pieces `first` to `last` (not included) in order, those that touch made one.

    Args:
        first, last: int64 [pieces], in any order; pieces do not overlap.
    """
    first, last = first.sort().values, last.sort().values  # piece i is still first[i]..last[i]
    fresh = first.new_ones(first.numel() + 1, dtype=torch.bool)
    torch.ne(first[1:], last[:-1], out=fresh[1:-1])
    return first.masked_select(fresh[:-1]), last.masked_select(fresh[1:])


def _bands(grid: Tensor) -> Iterator[Tensor]:
    """Cut states [pairs, rows, blocks] into consecutive rows [n, blocks]."""
    _, rows, blocks = grid.shape
    limit = at_once(grid.numel(), grid.device)
    for pairs in grid.split(max(1, limit // (rows * blocks))):
        if pairs.shape[0] == 1:
            yield from pairs[0].split(max(1, limit // blocks))
        else:
            yield pairs.reshape(-1, blocks)


def stretches(grid: Tensor) -> tuple[Tensor, Tensor]:
    """Where the state changes along rows of [pairs, rows, blocks], and to what.

    Places count blocks through all rows; each row begins with a change.
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
    """FULL and PARTIAL runs of int8 states [pairs, rows, blocks]."""
    pairs, rows, blocks = grid.shape
    at, state = stretches(grid)
    length = at.diff(append=at.new_full((1,), grid.numel()))
    row = at // blocks
    found = {}
    for kind in (PARTIAL, FULL):
        mine = state == kind
        pointers = torch.zeros(pairs * rows + 1, dtype=torch.int32, device=grid.device)
        counts = torch.bincount(row[mine], minlength=pairs * rows)
        torch.cumsum(counts, 0, dtype=torch.int32, out=pointers[1:])
        start = (at[mine] - row[mine] * blocks).to(torch.int32)
        found[kind] = Runs(pointers, start, length[mine].to(torch.int32))
    return found


@dataclass(frozen=True, eq=False)
class BlockRuns:
    """Which tiles of a mask are kept, and which of those need the mask.

    A tile is FULL where the mask keeps every position (q < q_len, kv < kv_len) in it, EMPTY where
    it keeps none, else PARTIAL. Tiles at a ragged end are judged on the positions that exist.

    Attributes:
        q_len, kv_len: lengths in positions.
        block: (q, kv) positions of a tile.
        batch, heads: leading sizes; 1 means shared by all.
        full, partial: one row per (b, h, q block), runs of kv blocks.
        full_t, partial_t: one row per (b, h, kv block), runs of q blocks.
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
        """Number of block rows, the last one perhaps ragged."""
        return -(-self.q_len // self.block[0])

    @property
    def kv_blocks(self) -> int:
        """Number of block columns, the last one perhaps ragged."""
        return -(-self.kv_len // self.block[1])

    @property
    def device(self) -> torch.device:
        """Where the runs are."""
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
    def stacked(parts: Sequence[BlockRuns], batch: int, heads: int) -> BlockRuns:
        """Join runs of consecutive (b, h) pairs, in order, into one of `batch` by `heads`."""
        if sum(p.batch * p.heads for p in parts) != batch * heads:
            raise AssertionError("the parts do not add up to batch * heads")
        return replace(
            parts[0],
            batch=batch,
            heads=heads,
            full=Runs.concatenated([p.full for p in parts]),
            partial=Runs.concatenated([p.partial for p in parts]),
            full_t=Runs.concatenated([p.full_t for p in parts]),
            partial_t=Runs.concatenated([p.partial_t for p in parts]),
        )

    def states(self) -> Tensor:
        """The dense grid: int8 [batch, heads, q blocks, kv blocks], 0 EMPTY, 1 PARTIAL, 2 FULL."""
        full = self.full.expanded(self.kv_blocks).to(torch.int8)
        grid = full * FULL + self.partial.expanded(self.kv_blocks).to(torch.int8) * PARTIAL
        return grid.view(self.batch, self.heads, self.q_blocks, self.kv_blocks)

    def counts(self) -> tuple[int, int, int]:
        """Number of EMPTY, PARTIAL and FULL tiles; shared batches and heads count once."""
        total = self.batch * self.heads * self.q_blocks * self.kv_blocks
        partial, full = int(self.partial.length.sum()), int(self.full.length.sum())
        return total - partial - full, partial, full

    def density(self) -> float:
        """Share of the tiles that are not EMPTY, 0 to 1."""
        empty, partial, full = self.counts()
        return (partial + full) / (empty + partial + full)

    def to(self, device: torch.device | str) -> BlockRuns:
        """The same runs on a device."""
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
        """The first batch and head in at most limit x limit signs: `#` full, `+` mixed, else empty."""
        grid = self.states()[0, 0].to("cpu")
        rows, columns = min(limit, grid.shape[0]), min(limit, grid.shape[1])
        lines = []
        for part in grid.tensor_split(rows, 0):
            cells = [(int(c.min()), int(c.max())) for c in part.tensor_split(columns, 1)]
            lines.append("".join(_PICTURE[low if low == high else PARTIAL] for low, high in cells))
        return "\n".join(f"|{line}|" for line in lines)

    def to_flex(self, mask_mod: Callable[..., Tensor] | None = None) -> BlockMask:
        """The same tiles as PyTorch's BlockMask.

        FULL tiles stay full at ragged ends, where FlexAttention checks the lengths by itself.

        Args:
            mask_mod: the mask function that FlexAttention applies on PARTIAL tiles.
        """
        from torch.nn.attention import flex_attention

        states = self.states()
        lists = [_listed(states == kind) for kind in (PARTIAL, FULL)]
        return flex_attention.BlockMask.from_kv_blocks(
            *lists[0],
            *lists[1],
            BLOCK_SIZE=self.block,
            mask_mod=mask_mod,
            seq_lengths=(self.q_len, self.kv_len),
        )


def from_flex(block_mask: BlockMask) -> BlockRuns:
    """The tiles of PyTorch's BlockMask.

    Only the q -> kv lists are read; the transposed ones are made anew. Where the block mask keeps
    no list of full blocks, every listed block is PARTIAL. Entries of `kv_indices` beyond
    `kv_num_blocks` are ignored.

    Raises:
        ArgumentError: not a BlockMask.
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
    partial = _grid(block_mask.kv_num_blocks, block_mask.kv_indices, columns, "kv")
    states = partial.to(torch.int8) * PARTIAL
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _grid(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns, "full_kv")
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


def _listed(grid: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [..., rows] and indices [..., rows, columns]: listed blocks first, ascending."""
    order = torch.argsort(grid.to(torch.int8), dim=-1, descending=True, stable=True)
    return grid.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _grid(counts: Tensor, indices: Tensor, columns: int, name: str) -> Tensor:
    """Bool [batch, heads, rows, columns] from counts [.., rows] and indices [.., rows, n]."""
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
