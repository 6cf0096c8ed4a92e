"""Classify the tiles that interval arithmetic leaves undecided.

A tile is PARTIAL as soon as one unmasked and one masked position in it are known, its witnesses.
The search tries the positions where a mask is likely to change: the corners of the tile; positions
where a q value equals a kv value; the extremes of one-sided expressions in the block; and the
diagonals on which an expression of q - kv changes between True and False. `subdivide` cuts the
tiles without witnesses into boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.affine import Side
from attnkit.graph.ir import BOOL, Node
from attnkit.sparsity.ranges.equality_sets import Pairs
from attnkit.sparsity.ranges.eval_blocks import Blocks
from attnkit.sparsity.ranges.serial import evaluate_serial
from attnkit.sparsity.ranges.tables import Domain, Key, Tables, key_of
from attnkit.sparsity.subdivide import Subdivision, Tiles
from attnkit.util.chunks import chunk_size

# Bytes of intermediate values in one evaluation.
_PASS_BYTES = 24 << 20
_MAX_CRITICAL_KEYS = 6
_MAX_TILES = 1 << 18  # largest number of tiles that are decided together

_OPEN = 1  # the state of an undecided tile is PARTIAL, until it is decided


@dataclass(frozen=True, eq=False)
class Resolver:
    """Classifies undecided tiles of one mask by evaluating the mask at selected positions.

    Attributes:
        root: the mask.
        blocks: the same mask, rewritten and compiled; its keys determine which positions to try.
        tables: ranges of the keys.
        checked: loads of the root whose index is not proven to be in range.
        names: names of the captured tensors by slot, for messages.
    """

    root: Node
    blocks: Blocks
    tables: Tables
    checked: frozenset[Node] = frozenset()
    names: tuple[str, ...] = ()

    @property
    def domain(self) -> Domain:
        """Return the positions and captured tensors of the mask."""
        return self.tables.domain

    @property
    def block(self) -> tuple[int, int]:
        """Return the size of a tile in (q, kv) positions."""
        return self.tables.block

    @cached_property
    def _points_at_once(self) -> int:
        varying = (Side.MIXED, Side.DIAGONAL)
        nodes = [n for n in ir.topo(self.root) if self.domain.sides.side(n) in varying]
        return max(1, _PASS_BYTES // (5 * max(1, len(nodes))))

    def resolve(self, states: Tensor) -> tuple[int, int]:
        """Replace the undecided entries (1) of `states` by exact states, in place.

        Args:
            states: int8 [b, h, q blocks, kv blocks].

        Returns:
            The number of undecided tiles, and how many of them were evaluated at every position.
        """
        _, h_count, rows, columns = states.shape
        flat = states.view(-1)
        open_tiles: list[Tensor] = []
        first = total = dense = 0
        for part in flat.split(chunk_size(flat.numel(), flat.device)):
            open_tiles.append((part == _OPEN).nonzero().squeeze(1) + first)
            first += part.numel()
            if first == flat.numel() or sum(t.numel() for t in open_tiles) >= _MAX_TILES:
                places = torch.cat(open_tiles)
                open_tiles.clear()
                total += places.numel()
                for some in places.split(chunk_size(places.numel(), flat.device)):
                    line = some // columns
                    pair = line // rows
                    b = pair // h_count
                    q, kv = line - pair * rows, some - line * columns
                    decided, whole = self.decide(b, pair - b * h_count, q, kv)
                    flat.index_copy_(0, some, decided)
                    dense += whole
        return total, dense

    def decide(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> tuple[Tensor, int]:
        """Classify undecided tiles, and return their exact states.

        Args:
            b, h: int64 [n], indices into the domain's `b` and `h`.
            q, kv: int64 [n], block indices.

        Returns:
            States int8 [n], and the number of tiles that were evaluated at every position.
        """
        unknown = torch.zeros_like(q, dtype=torch.bool)
        tiles = Tiles(b, h, q, kv, unknown, unknown.clone())
        left = torch.arange(q.numel(), device=q.device)
        stages = (self._corners, self._equal, self._critical, self._diagonals)
        for stage in stages:
            if left.numel():
                left = self._search(tiles, left, stage)
        dense = self._subdivision.decide(tiles, left) if left.numel() else 0
        return tiles.kept.to(torch.int8) + (tiles.kept & ~tiles.dropped).to(torch.int8), dense

    @cached_property
    def _subdivision(self) -> Subdivision:
        return Subdivision(self.blocks, self.domain, self.block, self._mask, self._points_at_once)

    # --- positions to try: each stage maps tiles [n] to (q, kv) positions, [n, x, 1] and [n, 1, y]

    def _search(self, tiles: Tiles, left: Tensor, stage: Callable[[], _Points | None]) -> Tensor:
        points = stage()
        if points is None or points.count > self._points_at_once:
            return left
        limit = min(self._points_at_once, chunk_size(left.numel() * points.count, left.device))
        for part in left.split(max(1, limit // points.count)):
            some = tiles.at(part)
            keep = self._mask(some, *points.positions(some))
            tiles.learn(part, keep.any(1), ~keep.all(1))
        return left.masked_select(tiles.undecided(left))

    def _corners(self) -> _Points | None:
        def positions(tiles: Tiles) -> tuple[Tensor, Tensor]:
            (q0, q1), (kv0, kv1) = self._ends(tiles)
            return torch.stack([q0, q1], 1)[:, :, None], torch.stack([kv0, kv1], 1)[:, None]

        return _Points(4, positions)

    def _critical(self) -> _Points | None:
        q, kv = self._extremes
        if q.shape[-1] <= 2 and kv.shape[-1] <= 2:
            return None  # only the corners, which are tried already

        def positions(tiles: Tiles) -> tuple[Tensor, Tensor]:
            return _at(q, tiles, tiles.q)[:, :, None], _at(kv, tiles, tiles.kv)[:, None]

        return _Points(q.shape[-1] * kv.shape[-1], positions)

    def _equal(self) -> _Points | None:
        exact = [match for match in self.tables.equal.values() if isinstance(match, Pairs)]
        lists = exact + self.tables.samples
        if not lists:
            return None

        def positions(tiles: Tiles) -> tuple[Tensor, Tensor]:
            (q0, _), (kv0, _) = self._ends(tiles)
            pairs = [match.witnesses(tiles.q, tiles.kv, (tiles.b, tiles.h)) for match in lists]
            at_q = [torch.where(exists, q, q0) for q, _, exists in pairs]
            at_kv = [torch.where(exists, kv, kv0) for _, kv, exists in pairs]
            return torch.stack(at_q, 1)[:, :, None], torch.stack(at_kv, 1)[:, :, None]

        return _Points(len(lists), positions)

    def _diagonals(self) -> _Points | None:
        changes = self._changes
        if not changes:
            return None

        def positions(tiles: Tiles) -> tuple[Tensor, Tensor]:
            (q0, q1), (kv0, kv1) = self._ends(tiles)
            at_q, at_kv = [], []
            for d in self._diagonals_of(tiles, changes):
                low, high = torch.maximum(q0, kv0 + d), torch.minimum(q1, kv1 + d)
                for q in (low, (low + high) // 2, high):
                    at_q.append(q)
                    at_kv.append(q - d)
            return torch.stack(at_q, 1)[:, :, None], torch.stack(at_kv, 1)[:, :, None]

        return _Points(12 * len(changes), positions)

    def _diagonals_of(self, tiles: Tiles, changes: Sequence[_Changes]) -> Iterator[Tensor]:
        """Yield each tile's first and last diagonal where a condition holds, then where not."""
        (q0, q1), (kv0, kv1) = self._ends(tiles)
        first, last = q0 - kv1, q1 - kv0
        origin = self.domain.kv_len - 1
        for change in changes:
            for table, start in zip(change, (first, last, first, last), strict=True):
                d = _at(table, tiles, start + origin) - origin
                yield torch.minimum(torch.maximum(d, first), last)

    def _conditions(self, side: Side) -> list[Key]:
        """Return the keys of the largest bool expressions of one side in the compiled mask."""
        nodes = [
            n
            for n in ir.topo(self.blocks.root)
            if n.type == BOOL and self.domain.sides.side(n) is side
        ]
        used = {a for n in nodes for a in n.args}
        return [key_of(n, side) for n in nodes if n not in used]

    @cached_property
    def _extremes(self) -> tuple[Tensor, Tensor]:
        """Return the positions of q and of kv to try: block ends, and positions of keys' extremes.

        Returns:
            Two int64 tensors [b, h, blocks, positions].
        """
        b, h = self.domain.b.numel(), self.domain.h.numel()
        tables = []
        for side, block in zip((Side.Q, Side.KV), self.block, strict=True):
            length = self.domain.span(side)[1]
            first = torch.arange(0, length, block, device=self.domain.device)
            places = [first, (first + block - 1).clamp(max=length - 1)]
            mine = [key for key in self.blocks.keys if key.side is side and not key.is_index]
            for key in dict.fromkeys(self._conditions(side) + mine[:_MAX_CRITICAL_KEYS]):
                places += _extreme_positions(self.domain.all_values(key), block)
            tables.append(_distinct(torch.stack([x.expand(b, h, -1) for x in places], -1)))
        return tables[0], tables[1]

    @cached_property
    def _changes(self) -> list[_Changes]:
        keys = self._conditions(Side.DIAGONAL)
        return [_nearest_changes(self.domain.all_values(key)) for key in keys]

    # --- evaluation

    def _ends(self, tiles: Tiles) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        q0, kv0 = tiles.q * self.block[0], tiles.kv * self.block[1]
        q1 = (q0 + self.block[0] - 1).clamp(max=self.domain.q_len - 1)
        kv1 = (kv0 + self.block[1] - 1).clamp(max=self.domain.kv_len - 1)
        return (q0, q1), (kv0, kv1)

    def _mask(self, tiles: Tiles, q: Tensor, kv: Tensor) -> Tensor:
        """Evaluate the mask at positions [n, x, 1] and [n, 1, y]: bool [n, points]."""
        env = {
            "b": self.domain.b.index_select(0, tiles.b).view(-1, 1, 1),
            "h": self.domain.h.index_select(0, tiles.h).view(-1, 1, 1),
            "q": q.to(torch.int32),
            "kv": kv.to(torch.int32),
        }
        values = evaluate_serial(
            [self.root],
            env,
            self.domain.tensors,
            self.domain.dtype,
            checked=self.checked,
            names=self.names,
        )
        shape = [max(x, y) for x, y in zip(q.shape, kv.shape, strict=True)]
        return values[self.root].expand(shape).flatten(1)


_Changes = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class _Points:
    """Holds the number of positions to try in each tile, and the function that returns them."""

    count: int
    positions: Callable[[Tiles], tuple[Tensor, Tensor]]


def _at(table: Tensor, tiles: Tiles, index: Tensor) -> Tensor:
    """Gather one entry of a table [b, h, length, ...] per tile; b or h may be 1 (shared)."""
    b, h, length = table.shape[:3]
    for size, place, stride in ((b, tiles.b, h * length), (h, tiles.h, length)):
        if size > 1:
            index = index + place * stride
    return table.flatten(0, 2).index_select(0, index)


def _extreme_positions(value: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the positions of the least and the greatest value in each block.

    Args:
        value: [b, h, length].
        block: positions of a block.

    Returns:
        Two int64 tensors [b, h, blocks].
    """
    if value.dtype == torch.bool:
        value = value.to(torch.uint8)
    length = value.shape[-1]
    lead = value[..., 0].numel()
    step = max(1, chunk_size(value.numel(), value.device) // (lead * block)) * block
    low, high = [], []
    for first in range(0, length, step):
        part = value[..., first : first + step]
        whole = part.shape[-1] // block * block
        if whole:
            blocks = part[..., :whole].unflatten(-1, (whole // block, block))
            low.append(blocks.argmin(-1))
            high.append(blocks.argmax(-1))
        if whole < part.shape[-1]:  # the ragged end
            low.append(part[..., None, whole:].argmin(-1))
            high.append(part[..., None, whole:].argmax(-1))
    start = torch.arange(0, length, block, device=value.device)
    return torch.cat(low, -1) + start, torch.cat(high, -1) + start


def _distinct(places: Tensor) -> Tensor:
    """Drop repeated positions of each block. All blocks keep the same number of positions.

    A mask of hundreds of conditions lists each position of a block many times.

    Args:
        places: int64 [b, h, blocks, positions].
    """
    if places.shape[-1] <= 8:
        return places
    places = places.sort(-1).values
    again = torch.zeros_like(places, dtype=torch.bool)
    again[..., 1:] = places[..., 1:] == places[..., :-1]
    most = int((~again).sum(-1).max())
    return places.gather(-1, again.to(torch.int8).sort(dim=-1, stable=True).indices[..., :most])


def _nearest_changes(value: Tensor) -> _Changes:
    """Return for every diagonal the nearest diagonals where `value` is True and where it is False.

    Args:
        value: bool [b, h, diagonals].

    Returns:
        Four int64 tensors like `value`: the first True from the diagonal on, the last True up to
        it, and the same for False. If there is none, the first is the number of diagonals and the
        last is -1.
    """
    length = value.shape[-1]
    at = torch.arange(length, device=value.device).expand(value.shape)
    tables = []
    for flag in (value, ~value):
        after = torch.where(flag, at, length).flip(-1).cummin(-1).values.flip(-1)
        before = torch.where(flag, at, -1).cummax(-1).values
        tables += [after, before]
    after, before, not_after, not_before = tables
    return after, before, not_after, not_before
