"""Deciding tiles that have no known witness, by cutting them into smaller and smaller boxes.

Boxes are evaluated on intervals like tiles. Most of a tile is soon found to be kept or dropped as
a whole; only the boxes that stay undecided are cut again, and in the end evaluated at every
position, unless the rest of the tile has made it PARTIAL already.
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
from attnkit.util.chunks import at_once

_SMALL = 8  # a box of so many positions along each side is evaluated whole
_PARTS = 8  # at most so many boxes along a side of the larger one
_PASS_BYTES = 24 << 20  # of intervals
_MAX_BOXES = 1 << 20  # held together

Sizes = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Tiles:
    """A list of tiles and what is known of each: int64 indices [n], bool knowledge [n]."""

    b: Tensor
    h: Tensor
    q: Tensor
    kv: Tensor
    kept: Tensor
    dropped: Tensor

    def at(self, where: Tensor) -> Tiles:
        """Some of the tiles."""
        return Tiles(
            *(x.index_select(0, where) for x in (self.b, self.h, self.q, self.kv)),
            *(x.index_select(0, where) for x in (self.kept, self.dropped)),
        )

    def learn(self, which: Tensor, kept: Tensor, dropped: Tensor) -> None:
        """Note that positions of tiles `which` [m] are kept, or dropped; tiles may repeat."""
        self.kept.index_fill_(0, which.masked_select(kept), True)
        self.dropped.index_fill_(0, which.masked_select(dropped), True)

    def undecided(self, which: Tensor) -> Tensor:
        """Which of tiles [m] are not known to be PARTIAL, bool [m]."""
        return ~(self.kept.index_select(0, which) & self.dropped.index_select(0, which))

    def __len__(self) -> int:
        return self.q.numel()


@dataclass(frozen=True, eq=False)
class Boxed:
    """Boxes of one size: numbers of their tiles and their block indices, all int64 [n]."""

    tile: Tensor
    q: Tensor
    kv: Tensor

    def at(self, where: Tensor) -> Boxed:
        """Some of the boxes."""
        return Boxed(*(x.index_select(0, where) for x in (self.tile, self.q, self.kv)))

    def split(self, count: int) -> list[Boxed]:
        """Parts of at most so many boxes."""
        parts = zip(*(x.split(max(1, count)) for x in (self.tile, self.q, self.kv)), strict=True)
        return [Boxed(*part) for part in parts]

    def __len__(self) -> int:
        return self.q.numel()


@dataclass(frozen=True, eq=False)
class Refinement:
    """Cuts tiles of one mask into boxes.

    Attributes:
        blocks: the mask, compiled for evaluation on intervals.
        domain: where.
        block: (q, kv) positions of a tile.
        evaluate: the mask at positions of tiles, as `witness.Resolver` does it.
        at_once: positions that it can evaluate together.
    """

    blocks: Blocks
    domain: Domain
    block: Sizes
    evaluate: Callable[[Tiles, Tensor, Tensor], Tensor]
    at_once: int

    def settle(self, tiles: Tiles, left: Tensor) -> int:
        """Complete what is known of tiles; returns how many were evaluated at positions.

        Args:
            tiles: some of them known.
            left: int64 [n], those to decide.
        """
        cuts = self._cuts
        first = cuts[0][0] * cuts[0][1] if cuts else 1
        whole = 0
        for part in left.split(max(1, _MAX_BOXES // first)):
            boxes = Boxed(part, *(x.index_select(0, part) for x in (tiles.q, tiles.kv)))
            size = self._whole
            for cut in cuts:
                size = size[0] // cut[0], size[1] // cut[1]
                boxes = self._cut(tiles, boxes, cut, size) if len(boxes) else boxes
            whole += self._by_positions(tiles, boxes, size)
        return whole

    @cached_property
    def _whole(self) -> Sizes:
        """The size of a tile; a power of two where one tile is all there is."""
        lengths = self.domain.q_len, self.domain.kv_len
        q, kv = (
            block if block < length else 1 << (length - 1).bit_length()
            for block, length in zip(self.block, lengths, strict=True)
        )
        return q, kv

    @cached_property
    def _cuts(self) -> list[Sizes]:
        """Into how many boxes the sides (q, kv) are cut, from tiles down."""
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

    def _cut(self, tiles: Tiles, boxes: Boxed, cut: Sizes, size: Sizes) -> Boxed:
        """The undecided parts of undecided boxes."""
        if size not in self._tables:
            self._tables[size] = Tables(self.domain, size)
            self._tables[size].build(self.blocks.keys)
        steps = [torch.arange(n, device=self.domain.device) for n in cut]
        last = -(-self.domain.q_len // size[0]) - 1, -(-self.domain.kv_len // size[1]) - 1
        varying = sum(self.domain.sides.side(n) is Side.MIXED for n, _ in self.blocks.steps)
        total = len(boxes) * cut[0] * cut[1]
        limit = min(_PASS_BYTES // (32 * (varying + 1)), at_once(total, self.domain.device))
        found = []
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
            found.append(Boxed(part.tile.index_select(0, n), at_q, at_kv))
        joined = Boxed(
            *(torch.cat([getattr(f, name) for f in found]) for name in ("tile", "q", "kv"))
        )
        return joined.at(tiles.undecided(joined.tile).nonzero().squeeze(1))

    def _by_positions(self, tiles: Tiles, boxes: Boxed, size: Sizes) -> int:
        """Evaluate boxes at their corners, then at every position, until their tiles are decided.

        Returns:
            How many tiles were not decided by the corners.
        """
        sides = [
            torch.arange(min(n, length), device=self.domain.device)
            for n, length in zip(size, (self.domain.q_len, self.domain.kv_len), strict=True)
        ]
        ends = [side[[0, -1]] for side in sides]
        boxes = self._evaluated(tiles, boxes, size, ends[0], ends[1])
        count = int(torch.unique(boxes.tile).numel())
        rows = sides[0].split(max(1, self.at_once // min(self.at_once, len(sides[1]))))
        for row in rows:
            for column in sides[1].split(self.at_once):
                boxes = self._evaluated(tiles, boxes, size, row, column)
        return count

    def _evaluated(
        self, tiles: Tiles, boxes: Boxed, size: Sizes, row: Tensor, column: Tensor
    ) -> Boxed:
        """Evaluate boxes at some of their rows and columns; those of undecided tiles are left."""
        points = len(row) * len(column)
        limit = min(self.at_once, at_once(len(boxes) * points, self.domain.device))
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
    """Into how many equal parts to cut a side, again and again, until it is small."""
    found = []
    while size > _SMALL:
        parts = [n for n in range(2, _PARTS + 1) if size % n == 0 and 2 * size >= n * _SMALL]
        if not parts:
            break  # no divisor: evaluated as it is
        found.append(parts[-1])
        size //= parts[-1]
    return found
