"""Settling the tiles that intervals leave open.

A tile is PARTIAL as soon as one kept and one dropped position of it are known. Positions are tried
where a mask is likely to change: the corners, then wherever a one-sided expression takes its
extremes over a block, then along the diagonals where an expression of q - kv turns true or false,
then along whole rows and columns through those extremes. Tiles without such witnesses are
evaluated whole, in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attnkit import expr
from attnkit.chunks import at_once
from attnkit.expr import BOOL, Node
from attnkit.interp.serial import evaluate_serial
from attnkit.interp.tables import Domain, Key, key_of
from attnkit.sided import Side

# Bytes of intermediate values that one evaluation may hold.
_PASS_BYTES = 24 << 20
_MAX_CRITICAL_KEYS = 6
_MAX_TILES = 1 << 18  # looked at together

_OPEN = 1  # the state of a tile that is not settled, which is PARTIAL unless shown otherwise


@dataclass(frozen=True, eq=False)
class Tiles:
    """A list of tiles and what is known of each: int64 indices [n], bool knowledge [n]."""

    b: Tensor
    h: Tensor
    q: Tensor
    kv: Tensor
    kept: Tensor
    dropped: Tensor

    def at(self, where: Tensor | slice) -> Tiles:
        """Some of the tiles."""
        return Tiles(
            self.b[where],
            self.h[where],
            self.q[where],
            self.kv[where],
            self.kept[where],
            self.dropped[where],
        )

    def __len__(self) -> int:
        return self.q.numel()


@dataclass(frozen=True, eq=False)
class Resolver:
    """Decides tiles of one mask by evaluating it at positions.

    Attributes:
        root: the mask.
        hints: the same mask, rewritten; says where to look, is never evaluated.
        keys: one-sided expressions whose extremes are good places to look.
        checked: loads of the root whose index is not proven to be in range.
    """

    root: Node
    hints: Node
    domain: Domain
    block: tuple[int, int]
    keys: tuple[Key, ...]
    checked: frozenset[Node] = frozenset()
    names: tuple[str, ...] = ()

    @cached_property
    def _points_at_once(self) -> int:
        varying = (Side.MIXED, Side.DIAGONAL)
        nodes = [n for n in expr.topo(self.root) if self.domain.sides.side(n) in varying]
        return max(1, _PASS_BYTES // (5 * max(1, len(nodes))))

    def resolve(self, states: Tensor) -> tuple[int, int]:
        """Turn the open entries (1) of `states` [b, h, q blocks, kv blocks] into exact states.

        Returns:
            How many tiles were open, and how many of them had to be evaluated whole.
        """
        b_count, h_count, rows, columns = states.shape
        step = at_once(states.numel(), states.device) // (b_count * h_count * columns)
        found: list[Tensor] = []
        total = dense = 0
        for first in range(0, rows, max(1, step)):
            band = states[:, :, first : first + max(1, step)]
            open_ = torch.nonzero(band == _OPEN)
            open_[:, 2] += first
            found.append(open_)
            last = first + max(1, step) >= rows
            if last or sum(len(f) for f in found) > _MAX_TILES:
                tiles = torch.cat(found)
                total += len(tiles)
                dense += self._settle(states, tiles)
                found.clear()
        return total, dense

    def _settle(self, states: Tensor, places: Tensor) -> int:
        """Decide the tiles at `places` [n, 4]; returns how many had to be evaluated whole."""
        b, h, q, kv = places.unbind(1)
        unknown = torch.zeros_like(q, dtype=torch.bool)
        tiles = Tiles(b, h, q, kv, unknown, unknown.clone())
        left = torch.arange(len(tiles), device=q.device)
        stages = (self._corners, self._critical, self._diagonals, self._rows, self._columns)
        for stage in stages:
            if not left.numel():
                return 0
            left = self._search(tiles, left, stage)
        dense = left.numel()
        if dense:
            self._evaluate_whole(tiles, left)
            state = tiles.kept.to(torch.int8) + (tiles.kept & ~tiles.dropped).to(torch.int8)
            states[b[left], h[left], q[left], kv[left]] = state[left]
        return dense

    # --- positions to try: each stage maps tiles [n] to (q, kv) positions, [n, x, 1] and [n, 1, y]

    def _search(self, tiles: Tiles, left: Tensor, stage: Callable[[], _Points | None]) -> Tensor:
        points = stage()
        if points is None or points.count > self._points_at_once:
            return left
        limit = min(self._points_at_once, at_once(left.numel() * points.count, left.device))
        for part in left.split(max(1, limit // points.count)):
            some = tiles.at(part)
            self._learn(tiles, part, self._mask(some, *points.positions(some)))
        return left[~(tiles.kept[left] & tiles.dropped[left])]

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

    def _rows(self) -> _Points:
        q, columns = self._extremes[0], min(self.block[1], self.domain.kv_len)
        step = torch.arange(columns, device=self.domain.device)

        def positions(tiles: Tiles) -> tuple[Tensor, Tensor]:
            _, (kv0, kv1) = self._ends(tiles)
            kv = torch.minimum(kv0[:, None] + step, kv1[:, None])
            return _at(q, tiles, tiles.q)[:, :, None], kv[:, None]

        return _Points(q.shape[-1] * columns, positions)

    def _columns(self) -> _Points:
        kv, rows = self._extremes[1], min(self.block[0], self.domain.q_len)
        step = torch.arange(rows, device=self.domain.device)

        def positions(tiles: Tiles) -> tuple[Tensor, Tensor]:
            (q0, q1), _ = self._ends(tiles)
            q = torch.minimum(q0[:, None] + step, q1[:, None])
            return q[:, :, None], _at(kv, tiles, tiles.kv)[:, None]

        return _Points(kv.shape[-1] * rows, positions)

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
            n for n in expr.topo(self.hints) if n.type == BOOL and self.domain.sides.side(n) is side
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
            mine = [key for key in self.keys if key.side is side and not key.is_index]
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
            "b": self.domain.b[tiles.b].view(-1, 1, 1),
            "h": self.domain.h[tiles.h].view(-1, 1, 1),
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

    def _learn(self, tiles: Tiles, which: Tensor, keep: Tensor) -> None:
        tiles.kept[which] |= keep.any(1)
        tiles.dropped[which] |= ~keep.all(1)

    def _evaluate_whole(self, tiles: Tiles, left: Tensor) -> None:
        """Evaluate tiles at every position, a strip of each at a time until it is decided."""
        for row, column in self._strips():
            if not left.numel():
                return
            for part in left.split(max(1, self._points_at_once // (len(row) * len(column)))):
                some = tiles.at(part)
                (q0, q1), (kv0, kv1) = self._ends(some)
                # clamping repeats the last position of a ragged tile, which changes nothing
                q = torch.minimum(q0[:, None] + row, q1[:, None])
                kv = torch.minimum(kv0[:, None] + column, kv1[:, None])
                self._learn(tiles, part, self._mask(some, q[:, :, None], kv[:, None]))
            left = left[~(tiles.kept[left] & tiles.dropped[left])]

    def _strips(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Offsets of rows and columns that together cover a tile."""
        limit, device = self._points_at_once, self.domain.device
        rows = torch.arange(min(self.block[0], self.domain.q_len), device=device)
        columns = torch.arange(min(self.block[1], self.domain.kv_len), device=device)
        for row in rows.split(max(1, limit // min(limit, len(columns)))):
            for column in columns.split(limit):
                yield row, column


_Turns = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class _Points:
    """Positions to try in each tile, and how many there are."""

    count: int
    positions: Callable[[Tiles], tuple[Tensor, Tensor]]


def _at(table: Tensor, tiles: Tiles, index: Tensor) -> Tensor:
    """Entries of a table [b, h, length, ...] for each tile; b or h may be shared."""
    b = tiles.b if table.shape[0] > 1 else torch.zeros_like(tiles.b)
    h = tiles.h if table.shape[1] > 1 else torch.zeros_like(tiles.h)
    return table[b, h, index]


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
