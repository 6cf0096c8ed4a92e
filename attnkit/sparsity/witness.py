"""Settling the tiles that intervals leave open.

A tile is PARTIAL as soon as one kept and one dropped position of it are known. Positions are tried
where a mask is likely to change: the corners, then where two sides are known to be equal, wherever
a one-sided expression takes its extremes over a block, and along the diagonals where an expression
of q - kv turns true or false. Tiles without such witnesses are cut into boxes (`refinement.py`).
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
from attnkit.sparsity.subdivide import Refinement, Tiles
from attnkit.util.chunks import at_once

# Bytes of intermediate values that one evaluation may hold.
_PASS_BYTES = 24 << 20
_MAX_CRITICAL_KEYS = 6
_MAX_TILES = 1 << 18  # looked at together

_OPEN = 1  # the state of a tile that is not settled, which is PARTIAL unless shown otherwise


@dataclass(frozen=True, eq=False)
class Resolver:
    """Decides tiles of one mask by evaluating it at positions.

    Attributes:
        root: the mask.
        blocks: the same mask, rewritten and compiled; says where to look.
        tables: of its keys.
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
        """The points that the mask is asked about."""
        return self.tables.domain

    @property
    def block(self) -> tuple[int, int]:
        """(q, kv) positions of a tile."""
        return self.tables.block

    @cached_property
    def _points_at_once(self) -> int:
        varying = (Side.MIXED, Side.DIAGONAL)
        nodes = [n for n in ir.topo(self.root) if self.domain.sides.side(n) in varying]
        return max(1, _PASS_BYTES // (5 * max(1, len(nodes))))

    def resolve(self, states: Tensor) -> tuple[int, int]:
        """Turn the open entries (1) of `states` [b, h, q blocks, kv blocks] into exact states.

        Returns:
            How many tiles were open, and how many of them had to be evaluated whole.
        """
        _, h_count, rows, columns = states.shape
        flat = states.view(-1)
        found: list[Tensor] = []
        first = total = dense = 0
        for part in flat.split(at_once(flat.numel(), flat.device)):
            found.append((part == _OPEN).nonzero().squeeze(1) + first)
            first += part.numel()
            if first == flat.numel() or sum(f.numel() for f in found) >= _MAX_TILES:
                places = torch.cat(found)
                found.clear()
                total += places.numel()
                for some in places.split(at_once(places.numel(), flat.device)):
                    line = some // columns
                    pair = line // rows
                    b = pair // h_count
                    q, kv = line - pair * rows, some - line * columns
                    settled, whole = self.settle(b, pair - b * h_count, q, kv)
                    flat.index_copy_(0, some, settled)
                    dense += whole
        return total, dense

    def settle(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> tuple[Tensor, int]:
        """Decide open tiles.

        Args:
            b, h, q, kv: int64 [n], places in the domain's `b` and `h` and block indices.

        Returns:
            States int8 [n], and how many tiles had to be evaluated whole.
        """
        unknown = torch.zeros_like(q, dtype=torch.bool)
        tiles = Tiles(b, h, q, kv, unknown, unknown.clone())
        left = torch.arange(q.numel(), device=q.device)
        stages = (self._corners, self._equal, self._critical, self._diagonals)
        for stage in stages:
            if left.numel():
                left = self._search(tiles, left, stage)
        dense = self._refinement.settle(tiles, left) if left.numel() else 0
        return tiles.kept.to(torch.int8) + (tiles.kept & ~tiles.dropped).to(torch.int8), dense

    @cached_property
    def _refinement(self) -> Refinement:
        return Refinement(self.blocks, self.domain, self.block, self._mask, self._points_at_once)

    # --- positions to try: each stage maps tiles [n] to (q, kv) positions, [n, x, 1] and [n, 1, y]

    def _search(self, tiles: Tiles, left: Tensor, stage: Callable[[], _Points | None]) -> Tensor:
        points = stage()
        if points is None or points.count > self._points_at_once:
            return left
        limit = min(self._points_at_once, at_once(left.numel() * points.count, left.device))
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
        if q.shape[-1] + kv.shape[-1] == 4:
            return None  # corners only, and those are done

        def positions(tiles: Tiles) -> tuple[Tensor, Tensor]:
            return _at(q, tiles, tiles.q)[:, :, None], _at(kv, tiles, tiles.kv)[:, None]

        return _Points(q.shape[-1] * kv.shape[-1], positions)

    def _equal(self) -> _Points | None:
        exact = [match for match in self.tables.equal.values() if isinstance(match, Pairs)]
        known = exact + self.tables.samples
        if not known:
            return None

        def positions(tiles: Tiles) -> tuple[Tensor, Tensor]:
            (q0, _), (kv0, _) = self._ends(tiles)
            found = [match.witnesses(tiles.q, tiles.kv, (tiles.b, tiles.h)) for match in known]
            at_q = [torch.where(there, q, q0) for q, _, there in found]
            at_kv = [torch.where(there, kv, kv0) for _, kv, there in found]
            return torch.stack(at_q, 1)[:, :, None], torch.stack(at_kv, 1)[:, :, None]

        return _Points(len(known), positions)

    def _diagonals(self) -> _Points | None:
        turns = self._turns
        if not turns:
            return None

        def positions(tiles: Tiles) -> tuple[Tensor, Tensor]:
            (q0, q1), (kv0, kv1) = self._ends(tiles)
            at_q, at_kv = [], []
            for d in self._diagonals_of(tiles, turns):
                low, high = torch.maximum(q0, kv0 + d), torch.minimum(q1, kv1 + d)
                for q in (low, (low + high) // 2, high):
                    at_q.append(q)
                    at_kv.append(q - d)
            return torch.stack(at_q, 1)[:, :, None], torch.stack(at_kv, 1)[:, :, None]

        return _Points(12 * len(turns), positions)

    def _diagonals_of(self, tiles: Tiles, turns: Sequence[_Turns]) -> Iterator[Tensor]:
        """The first and last diagonal of each tile on which a condition holds, and fails."""
        (q0, q1), (kv0, kv1) = self._ends(tiles)
        first, last = q0 - kv1, q1 - kv0
        origin = self.domain.kv_len - 1
        for turn in turns:
            for table, start in zip(turn, (first, last, first, last), strict=True):
                d = _at(table, tiles, start + origin) - origin
                yield torch.minimum(torch.maximum(d, first), last)

    def _conditions(self, side: Side) -> list[Key]:
        """The largest conditions of one side in the hints."""
        nodes = [
            n
            for n in ir.topo(self.blocks.root)
            if n.type == BOOL and self.domain.sides.side(n) is side
        ]
        used = {a for n in nodes for a in n.args}
        return [key_of(n, side) for n in nodes if n not in used]

    @cached_property
    def _extremes(self) -> tuple[Tensor, Tensor]:
        """Positions [b, h, blocks, x] of q and of kv: block ends, and where keys are extreme."""
        b, h = self.domain.b.numel(), self.domain.h.numel()
        found = []
        for side, block in zip((Side.Q, Side.KV), self.block, strict=True):
            length = self.domain.span(side)[1]
            first = torch.arange(0, length, block, device=self.domain.device)
            places = [first, (first + block - 1).clamp(max=length - 1)]
            mine = [key for key in self.blocks.keys if key.side is side and not key.is_index]
            for key in dict.fromkeys(self._conditions(side) + mine[:_MAX_CRITICAL_KEYS]):
                places += _extreme_positions(self.domain.all_values(key), block)
            found.append(torch.stack([x.expand(b, h, -1) for x in places], -1))
        return found[0], found[1]

    @cached_property
    def _turns(self) -> list[_Turns]:
        keys = self._conditions(Side.DIAGONAL)
        return [_turning_points(self.domain.all_values(key)) for key in keys]

    # --- evaluation

    def _ends(self, tiles: Tiles) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        q0, kv0 = tiles.q * self.block[0], tiles.kv * self.block[1]
        q1 = (q0 + self.block[0] - 1).clamp(max=self.domain.q_len - 1)
        kv1 = (kv0 + self.block[1] - 1).clamp(max=self.domain.kv_len - 1)
        return (q0, q1), (kv0, kv1)

    def _mask(self, tiles: Tiles, q: Tensor, kv: Tensor) -> Tensor:
        """The mask at positions [n, x, 1] and [n, 1, y]: [n, points]."""
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


_Turns = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class _Points:
    """Positions to try in each tile, and how many there are."""

    count: int
    positions: Callable[[Tiles], tuple[Tensor, Tensor]]


def _at(table: Tensor, tiles: Tiles, index: Tensor) -> Tensor:
    """Entries of a table [b, h, length, ...] for each tile; b or h may be shared."""
    b, h, length = table.shape[:3]
    for size, place, stride in ((b, tiles.b, h * length), (h, tiles.h, length)):
        if size > 1:
            index = index + place * stride
    return table.flatten(0, 2).index_select(0, index)


def _extreme_positions(value: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Where a value [b, h, length] is least and greatest in each block, as positions."""
    if value.dtype == torch.bool:
        value = value.to(torch.uint8)
    length = value.shape[-1]
    lead = value[..., 0].numel()
    step = max(1, at_once(value.numel(), value.device) // (lead * block)) * block
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


def _turning_points(value: Tensor) -> _Turns:
    """For every diagonal the next and previous one where `value` holds, then where it fails."""
    length = value.shape[-1]
    at = torch.arange(length, device=value.device).expand(value.shape)
    tables = []
    for flag in (value, ~value):
        after = torch.where(flag, at, length).flip(-1).cummin(-1).values.flip(-1)
        before = torch.where(flag, at, -1).cummax(-1).values
        tables += [after, before]
    after, before, not_after, not_before = tables
    return after, before, not_after, not_before
