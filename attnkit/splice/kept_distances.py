"""Find the distances q - kv at which a mask keeps a score.

At other distances an expression of q - kv may have no finite derivative (the logarithm of q - kv
under a causal mask). Its gradient there is 0, and 0 times infinity would be NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.eval_torch import evaluate, mask_dtype
from attnkit.graph.ir import Node
from attnkit.graph.staging import is_relative
from attnkit.sparsity.block_runs import BlockRuns, Runs
from attnkit.splice.program import Program
from attnkit.util.csr import row_indices

_AT_ONCE = 1 << 22  # positions at which a mask is evaluated together


class CallSizes(NamedTuple):
    """Holds batch size, query heads, and the lengths of query and key of a call."""

    batch: int
    heads: int
    q_len: int
    kv_len: int

    @property
    def distances(self) -> int:
        """Return the number of distances, from 1 - kv_len to q_len - 1."""
        return self.q_len + self.kv_len - 1


def kept_distances(
    program: Program, masks: Sequence[Tensor], runs: BlockRuns | None, sizes: CallSizes
) -> Tensor | None:
    """Return at which distances a mask keeps a score of each head.

    Args:
        program: the graphs of a variant.
        masks: tensors that the mask captures.
        runs: tiles of the mask; None for all.
        sizes: sizes of the call.

    Returns:
        Bool [batch or 1, heads or 1, distances], from 1 - kv_len on; None if every distance is
        kept. Batch and heads are 1 if the mask does not depend on them.
    """
    mask = program.mask
    if runs is None:
        return None if mask is None else _of_relative(mask, masks, sizes)
    if mask is not None and not program.lists_override_mask and is_relative(mask):
        return _of_relative(mask, masks, sizes)
    return _Search(mask, masks, runs, sizes).kept()


def _of_relative(mask: Node, masks: Sequence[Tensor], sizes: CallSizes) -> Tensor:
    """Evaluate a mask of q - kv at every distance."""
    device = masks[0].device if masks else torch.device("cpu")
    steps = torch.arange(sizes.distances, dtype=torch.int32, device=device) - (sizes.kv_len - 1)
    env = {
        "b": torch.arange(sizes.batch, dtype=torch.int32, device=device).view(-1, 1, 1),
        "h": torch.arange(sizes.heads, dtype=torch.int32, device=device).view(-1, 1),
        "q": steps,
        "kv": torch.zeros_like(steps),
    }
    kept = evaluate([mask], env, masks, mask_dtype(mask, masks), clamps=True)[0]
    shape = torch.broadcast_shapes(kept.shape, (1, 1, sizes.distances))
    return kept.expand(shape)


class _Search:
    """Finds kept distances from tiles: a FULL tile keeps all of its own, others are evaluated."""

    def __init__(
        self, mask: Node | None, masks: Sequence[Tensor], runs: BlockRuns, sizes: CallSizes
    ) -> None:
        self._mask, self._masks, self._runs, self._sizes = mask, masks, runs, sizes
        names = frozenset() if mask is None else ir.reads(mask)
        self._batch = sizes.batch if "b" in names else runs.batch
        self._heads = sizes.heads if "h" in names else runs.heads
        self._device = runs.full.row_ptr.device

    def kept(self) -> Tensor:
        """Return the result of `kept_distances`."""
        full = self._covered(self._runs.full)
        if self._mask is None:  # block lists without a mask_mod
            full |= self._covered(self._runs.partial)
        shape = self._batch, self._heads, self._sizes.distances
        found = full.expand(shape).contiguous()
        if self._mask is not None:
            self._add_partial(self._mask, found.view(-1, self._sizes.distances))
        return found

    def _covered(self, runs: Runs) -> Tensor:
        """Return the distances of positions in runs of tiles: bool [batch, heads, distances]."""
        sizes, grid = self._sizes, self._runs
        pair, row = self._rows(runs)
        first_q, first_kv = row * grid.block[0], runs.start.long() * grid.block[1]
        last_q = (first_q + grid.block[0]).clamp(max=sizes.q_len) - 1
        last_kv = first_kv + runs.length.long() * grid.block[1]
        last_kv = last_kv.clamp(max=sizes.kv_len) - 1
        steps = torch.zeros(
            grid.batch * grid.heads, sizes.distances + 1, dtype=torch.int32, device=self._device
        )
        one = torch.ones_like(pair, dtype=torch.int32)
        zero = sizes.kv_len - 1
        steps.index_put_((pair, first_q - last_kv + zero), one, accumulate=True)
        steps.index_put_((pair, last_q - first_kv + zero + 1), -one, accumulate=True)
        inside = steps.cumsum(1)[:, :-1] > 0
        return inside.view(grid.batch, grid.heads, sizes.distances)

    def _rows(self, runs: Runs) -> tuple[Tensor, Tensor]:
        """Return the pair b * heads + h, and the row of tiles, of each run."""
        row = row_indices(runs.row_ptr.long().diff()).to(self._device)
        return row // self._runs.q_blocks, row % self._runs.q_blocks

    def _add_partial(self, mask: Node, found: Tensor) -> None:
        """Evaluate the mask in PARTIAL tiles that may add to `found`, [pairs, distances]."""
        sizes, (rows, columns) = self._sizes, self._runs.block
        tiles = self._partial_tiles()
        count = max(1, _AT_ONCE // (rows * columns))
        while tiles.shape[1]:
            pair, q, kv = tiles
            low = (q - kv - columns + sizes.kv_len).clamp(min=0)
            high = (q - kv + rows + sizes.kv_len - 1).clamp(max=sizes.distances)
            missing = torch.nn.functional.pad((~found).cumsum(1), (1, 0))
            tiles = tiles[:, missing[pair, high] > missing[pair, low]]
            self._evaluate(mask, tiles[:, :count], found)
            tiles = tiles[:, count:]

    def _partial_tiles(self) -> Tensor:
        """Return PARTIAL tiles as int64 [3, tiles]: pair b * heads + h, first q, first kv."""
        grid, runs = self._runs, self._runs.partial
        pair, row = self._rows(runs)
        run = row_indices(runs.length.long()).to(self._device)
        before = runs.length.long().cumsum(0) - runs.length
        column = runs.start[run] + torch.arange(run.numel(), device=self._device) - before[run]
        b, h = pair[run] // grid.heads, pair[run] % grid.heads
        tiles = torch.stack([b, h, row[run] * grid.block[0], column * grid.block[1]])
        for axis, own, all_ in ((0, grid.batch, self._batch), (1, grid.heads, self._heads)):
            if own != all_:  # the tiles are shared, but the mask differs
                copies = tiles.repeat_interleave(all_, 1)
                copies[axis] = torch.arange(all_, device=self._device).repeat(tiles.shape[1])
                tiles = copies
        return torch.cat([tiles[:1] * self._heads + tiles[1:2], tiles[2:]])

    def _evaluate(self, mask: Node, tiles: Tensor, found: Tensor) -> None:
        sizes, (rows, columns) = self._sizes, self._runs.block
        pair, q, kv = (t.view(-1, 1, 1) for t in tiles)
        q = q + torch.arange(rows, device=self._device).view(-1, 1)
        kv = kv + torch.arange(columns, device=self._device)
        inside = (q < sizes.q_len) & (kv < sizes.kv_len)
        q, kv = q.clamp(max=sizes.q_len - 1), kv.clamp(max=sizes.kv_len - 1)
        env = {"b": pair // self._heads, "h": pair % self._heads, "q": q, "kv": kv}
        env = {name: at.to(torch.int32) for name, at in env.items()}
        kind = mask_dtype(mask, self._masks)
        keep = evaluate([mask], env, self._masks, kind, clamps=True)[0] & inside
        places = pair * sizes.distances + (q - kv + sizes.kv_len - 1)
        found.view(-1)[places.expand(keep.shape)[keep]] = True
