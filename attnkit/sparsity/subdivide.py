"""Classify tiles without known witnesses by cutting them into smaller and smaller boxes.

Boxes are evaluated by interval arithmetic, like tiles. Most boxes of a tile are soon proven
unmasked or masked as a whole. Only the undecided boxes are cut again. The smallest ones are
evaluated at every position, unless other boxes have already shown that the tile is PARTIAL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attnkit.graph.affine import Side
from attnkit.sparsity.ranges.boxes import Boxes
from attnkit.sparsity.ranges.eval_blocks import At, Blocks
from attnkit.sparsity.ranges.tables import Domain, Tables
from attnkit.util.chunks import chunk_size

_SMALL = 8  # positions along a side of a box that is evaluated at every position
_PARTS = 8  # largest number of parts into which a side of a box is cut
_PASS_BYTES = 24 << 20  # bytes of intervals in one pass
_MAX_BOXES = 1 << 20  # largest number of boxes in memory together

Sizes = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Tiles:
    """Holds tiles, and for each whether an unmasked and a masked position are known.

    Attributes:
        b, h: int64 [n], indices into the domain's `b` and `h`.
        q, kv: int64 [n], block indices.
        kept: bool [n], whether an unmasked position is known.
        dropped: bool [n], whether a masked position is known.
    """

    b: Tensor
    h: Tensor
    q: Tensor
    kv: Tensor
    kept: Tensor
    dropped: Tensor

    def at(self, where: Tensor) -> Tiles:
        """Return the tiles at indices `where`."""
        return Tiles(
            *(x.index_select(0, where) for x in (self.b, self.h, self.q, self.kv)),
            *(x.index_select(0, where) for x in (self.kept, self.dropped)),
        )

    def learn(self, which: Tensor, kept: Tensor, dropped: Tensor) -> None:
        """Record for some tiles that an unmasked or a masked position was found.

        Args:
            which: int64 [m], indices of tiles; they may repeat.
            kept: bool [m], whether an unmasked position was found.
            dropped: bool [m], whether a masked position was found.
        """
        self.kept.index_fill_(0, which.masked_select(kept), True)
        self.dropped.index_fill_(0, which.masked_select(dropped), True)

    def undecided(self, which: Tensor) -> Tensor:
        """Return bool [m]: whether each of the tiles `which` is not yet known to be PARTIAL."""
        return ~(self.kept.index_select(0, which) & self.dropped.index_select(0, which))

    def __len__(self) -> int:
        return self.q.numel()


@dataclass(frozen=True, eq=False)
class BoxList:
    """Holds boxes of one size: the index of each box's tile, and its (q, kv) box indices.

    Each attribute is int64 [n].
    """

    tile: Tensor
    q: Tensor
    kv: Tensor

    def at(self, where: Tensor) -> BoxList:
        """Return the boxes at indices `where`."""
        return BoxList(*(x.index_select(0, where) for x in (self.tile, self.q, self.kv)))

    def split(self, count: int) -> list[BoxList]:
        """Split into parts of at most `count` boxes."""
        parts = zip(*(x.split(max(1, count)) for x in (self.tile, self.q, self.kv)), strict=True)
        return [BoxList(*part) for part in parts]

    def __len__(self) -> int:
        return self.q.numel()


@dataclass(frozen=True, eq=False)
class Subdivision:
    """Classifies tiles of one mask by cutting them into boxes.

    Attributes:
        blocks: the mask, compiled for evaluation on intervals.
        domain: positions and captured tensors of the mask.
        block: (q, kv) positions of a tile.
        evaluate: evaluates the mask at positions [n, x, 1] and [n, 1, y] of tiles [n].
        at_once: number of positions that `evaluate` takes together.
    """

    blocks: Blocks
    domain: Domain
    block: Sizes
    evaluate: Callable[[Tiles, Tensor, Tensor], Tensor]
    at_once: int

    def decide(self, tiles: Tiles, left: Tensor) -> int:
        """Find which of the tiles `left` have unmasked and masked positions; record it in `tiles`.

        Args:
            tiles: all tiles.
            left: int64 [n], indices of the tiles to decide.

        Returns:
            The number of tiles that were evaluated at every position.
        """
        cuts = self._cuts
        first = cuts[0][0] * cuts[0][1] if cuts else 1
        whole = 0
        for part in left.split(max(1, _MAX_BOXES // first)):
            boxes = BoxList(part, *(x.index_select(0, part) for x in (tiles.q, tiles.kv)))
            size = self._whole
            for cut in cuts:
                size = size[0] // cut[0], size[1] // cut[1]
                boxes = self._cut(tiles, boxes, cut, size) if len(boxes) else boxes
            whole += self._by_positions(tiles, boxes, size)
        return whole

    @cached_property
    def _whole(self) -> Sizes:
        """Return the size of a tile in (q, kv) positions.

        On an axis that one tile covers, it is the length rounded up to a power of two.
        """
        lengths = self.domain.q_len, self.domain.kv_len
        q, kv = (
            block if block < length else 1 << (length - 1).bit_length()
            for block, length in zip(self.block, lengths, strict=True)
        )
        return q, kv

    @cached_property
    def _cuts(self) -> list[Sizes]:
        """Return for each step, from tiles on, into how many parts (q, kv) it cuts a box."""
        q, kv = (_factors(size) for size in self._whole)
        depth = max(len(q), len(kv))
        padded = [f + [1] * (depth - len(f)) for f in (q, kv)]
        return list(zip(*padded, strict=True))

    @cached_property
    def _boxes(self) -> Boxes:
        return Boxes(self.domain)

    @cached_property
    def _tables(self) -> dict[Sizes, Tables]:
        return {}

    def _cut(self, tiles: Tiles, boxes: BoxList, cut: Sizes, size: Sizes) -> BoxList:
        """Cut boxes, evaluate the parts by intervals, and return the undecided parts."""
        if size not in self._tables:
            self._tables[size] = Tables(self.domain, size)
            self._tables[size].build(self.blocks.keys)
        steps = [torch.arange(n, device=self.domain.device) for n in cut]
        last = -(-self.domain.q_len // size[0]) - 1, -(-self.domain.kv_len // size[1]) - 1
        varying = sum(self.domain.sides.side(n) is Side.MIXED for n, _ in self.blocks.steps)
        total = len(boxes) * cut[0] * cut[1]
        limit = min(_PASS_BYTES // (32 * (varying + 1)), chunk_size(total, self.domain.device))
        undecided = []
        for part in boxes.split(limit // (cut[0] * cut[1])):
            # clamping repeats the last box of a ragged tile, which changes nothing
            q = (part.q[:, None] * cut[0] + steps[0]).clamp(max=last[0])
            kv = (part.kv[:, None] * cut[1] + steps[1]).clamp(max=last[1])
            b, h = (x.index_select(0, part.tile).view(-1, 1, 1) for x in (tiles.b, tiles.h))
            at = At(q[:, :, None], kv[:, None], (b, h))
            must, may = self.blocks.run(self._tables[size], self._boxes, at)
            shape = (len(part), cut[0], cut[1])
            must, may = must.expand(shape), may.expand(shape)
            tiles.learn(part.tile, must.flatten(1).any(1), ~may.flatten(1).all(1))
            n, i, j = (may & ~must).nonzero().unbind(1)
            at_q, at_kv = (
                x.reshape(-1).index_select(0, n * len(step) + k)
                for x, step, k in ((q, steps[0], i), (kv, steps[1], j))
            )
            undecided.append(BoxList(part.tile.index_select(0, n), at_q, at_kv))
        parts = BoxList(
            *(torch.cat([getattr(p, name) for p in undecided]) for name in ("tile", "q", "kv"))
        )
        return parts.at(tiles.undecided(parts.tile).nonzero().squeeze(1))

    def _by_positions(self, tiles: Tiles, boxes: BoxList, size: Sizes) -> int:
        """Evaluate boxes at their corners, then at every position, until their tiles are decided.

        Returns:
            The number of tiles that the corners did not decide.
        """
        sides = [
            torch.arange(min(n, length), device=self.domain.device)
            for n, length in zip(size, (self.domain.q_len, self.domain.kv_len), strict=True)
        ]
        ends = [side[[0, -1]] for side in sides]
        boxes = self._evaluate(tiles, boxes, size, ends[0], ends[1])
        count = int(torch.unique(boxes.tile).numel())
        rows = sides[0].split(max(1, self.at_once // min(self.at_once, len(sides[1]))))
        for row in rows:
            for column in sides[1].split(self.at_once):
                boxes = self._evaluate(tiles, boxes, size, row, column)
        return count

    def _evaluate(
        self, tiles: Tiles, boxes: BoxList, size: Sizes, row: Tensor, column: Tensor
    ) -> BoxList:
        """Evaluate boxes at some rows and columns, and return the boxes of undecided tiles."""
        points = len(row) * len(column)
        limit = min(self.at_once, chunk_size(len(boxes) * points, self.domain.device))
        for part in boxes.split(limit // points):
            part = part.at(tiles.undecided(part.tile).nonzero().squeeze(1))
            if not len(part):
                continue
            # clamping repeats the last position of a ragged box, which changes nothing
            q = (part.q[:, None] * size[0] + row).clamp(max=self.domain.q_len - 1)
            kv = (part.kv[:, None] * size[1] + column).clamp(max=self.domain.kv_len - 1)
            keep = self.evaluate(tiles.at(part.tile), q[:, :, None], kv[:, None])
            tiles.learn(part.tile, keep.any(1), ~keep.all(1))
        return boxes.at(tiles.undecided(boxes.tile).nonzero().squeeze(1))


def _factors(size: int) -> list[int]:
    """Return the number of parts into which each step cuts a side, until the side is small."""
    factors = []
    while size > _SMALL:
        parts = [n for n in range(2, _PARTS + 1) if size % n == 0 and 2 * size >= n * _SMALL]
        if not parts:
            break  # no divisor: the box is evaluated as it is
        factors.append(parts[-1])
        size //= parts[-1]
    return factors
