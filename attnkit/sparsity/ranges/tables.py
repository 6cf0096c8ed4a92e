"""Compute exact ranges of one-sided expressions: evaluate every point, and reduce over each block.

An expression of q costs q_len evaluations, an expression of d = q - kv q_len + kv_len - 1. The
result is exact for any operation: gathers, divisions, bit operations. A `Key` identifies such an
expression; `Tables` holds the range of each key over each block of one tile size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.affine import KV, Q, Side, Sides, Terms
from attnkit.graph.ir import BOOL, F32, Node
from attnkit.sparsity.ranges.eval_interval import Interval
from attnkit.sparsity.ranges.gather import Lead, entries
from attnkit.sparsity.ranges.serial import evaluate_serial
from attnkit.util import caches
from attnkit.util.chunks import chunk_size

if TYPE_CHECKING:
    from attnkit.sparsity.ranges.equality_sets import Matches, Pairs

Reduce = Callable[[Tensor, Tensor], Tensor]

# Bytes of point values in one evaluation pass.
_PASS_BYTES = 16 << 20


_MAX_NODES = 1 << 14
_sides = [Sides()]


def shared_sides() -> Sides:
    """Return the `Sides` object that all masks share. The side of a node never changes."""
    if len(_sides[0]) > _MAX_NODES:
        _clear()
    return _sides[0]


def _clear() -> None:
    _sides[0] = Sides()


caches.register(_clear)


class Key(NamedTuple):
    """Identifies a one-sided expression: one node, or an integer sum of nodes of one side."""

    side: Side
    terms: Terms

    @property
    def is_index(self) -> bool:
        """Return whether the key is a multiple of `q` or of `kv` itself."""
        return len(self.terms) == 1 and self.terms[0][0] in (Q, KV)


def key_of(n: Node, side: Side) -> Key:
    """Return the key of a single node."""
    return Key(side, ((n, 1),))


@dataclass(frozen=True, eq=False)
class Domain:
    """Holds the positions at which a mask is classified, and the captured tensors that it reads.

    Values at points have shape [b or 1, h or 1, points].

    Attributes:
        tensors: captured tensors by slot; unsigned ones become int64, see `signed`.
        q_len, kv_len: lengths in positions.
        b, h: int32 [batch] and [heads], indices of batch entries and heads; [1] if the mask does
            not read them.
        dtype: dtype of the graph's f32.
        sides: side of each node.
    """

    tensors: Sequence[Tensor]
    q_len: int
    kv_len: int
    b: Tensor
    h: Tensor
    dtype: torch.dtype = torch.float32
    sides: Sides = field(default_factory=Sides)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(signed(t) for t in self.tensors))

    @property
    def device(self) -> torch.device:
        """Return the device of the computation."""
        return self.b.device

    @property
    def lead(self) -> int:
        """Return the number of (b, h) pairs."""
        return self.b.numel() * self.h.numel()

    def span(self, side: Side) -> tuple[int, int]:
        """Return the first position and the number of positions of a side."""
        if side is Side.DIAGONAL:
            return 1 - self.kv_len, self.q_len + self.kv_len - 1
        return 0, {Side.Q: self.q_len, Side.KV: self.kv_len}.get(side, 1)

    def evaluate(
        self, forms: Sequence[Node], side: Side, start: int, stop: int
    ) -> dict[Node, Tensor]:
        """Evaluate expressions that read only one side (see `Sides.alone`) at some points.

        Args:
            forms: the expressions.
            side: the side.
            start, stop: range of points, counted from the side's first position (1 - kv_len on the
                diagonal).

        Returns:
            The value of every node, in shapes that broadcast to [b, h, stop - start].
        """
        at = torch.arange(start, stop, dtype=torch.int32, device=self.device)
        at = at + self.span(side)[0]
        env = {"b": self.b.view(-1, 1, 1), "h": self.h.view(1, -1, 1)}
        env["kv" if side is Side.KV else "q"] = at
        return evaluate_serial(forms, env, self.tensors, self.dtype)

    def values(self, keys: Sequence[Key], start: int, stop: int) -> list[Tensor]:
        """Evaluate keys of one side at some points. Sums are int64.

        Args:
            keys: the keys.
            start, stop: range of points, as for `evaluate`.

        Returns:
            [b or 1, h or 1, stop - start] for each key.
        """
        forms = [[(self.sides.alone(n), c) for n, c in key.terms] for key in keys]
        memo = self.evaluate([n for form in forms for n, _ in form], keys[0].side, start, stop)
        values = []
        for (n, c), *others in forms:
            value = memo[n]
            if others or c != 1:
                value = value.to(torch.int64) * c
                for m, factor in others:
                    value = value + memo[m].to(torch.int64) * factor
            value = value.to(self.device)  # a constant, or a captured number on the CPU
            value = value.view((1,) * (3 - value.dim()) + value.shape)
            values.append(value.expand(*value.shape[:2], stop - start))
        return values

    def all_values(self, key: Key) -> Tensor:
        """Evaluate a key at every point of its side: [b or 1, h or 1, points]."""
        pieces = self.pieces([n for n, _ in key.terms], key.side, 1)
        return torch.cat([self.values([key], *piece)[0] for piece in pieces], -1)

    def pieces(self, nodes: Sequence[Node], side: Side, block: int) -> Iterator[tuple[int, int]]:
        """Yield ranges (start, stop) of a side, each of whole blocks or a part of one block.

        The size of a range is bounded.
        """
        reads = ir.reads(*nodes)
        lead = (self.b.numel() if "b" in reads else 1) * (self.h.numel() if "h" in reads else 1)
        length = self.span(side)[1]
        points = _PASS_BYTES // (8 * len(ir.topo(*nodes)) * lead)
        points = max(1, min(points, chunk_size(length * lead, self.device) // lead))
        step = points // block * block
        if step:
            yield from ((i, min(i + step, length)) for i in range(0, length, step))
            return
        for first in range(0, length, block):
            last = min(first + block, length)
            yield from ((i, min(i + points, last)) for i in range(first, last, points))


@dataclass(frozen=True, eq=False)
class Tables:
    """Holds the ranges of keys over the blocks of one tile size.

    Attributes:
        domain: positions and captured tensors.
        block: (q, kv) positions of a tile.
        ranges: for each key, (low, high) of shape [b or 1, h or 1, blocks]; for a diagonal key
            [b or 1, h or 1, windows], see `_diagonal_range`.
        equal: for each equality of a q value and a kv value that is exact on tiles, the tiles that
            hold equal values, or None if the ranges alone are exact.
        samples: for other equalities, some tiles that hold equal values, with their positions.
    """

    domain: Domain
    block: tuple[int, int]
    ranges: dict[Key, Interval] = field(default_factory=dict)
    equal: dict[Node, Matches | None] = field(default_factory=dict)
    samples: list[Pairs] = field(default_factory=list)

    def build(self, keys: Iterable[Key]) -> None:
        """Compute the ranges of the keys that have none yet."""
        todo = [key for key in dict.fromkeys(keys) if key not in self.ranges]
        for key in todo:
            if key.is_index:
                self.ranges[key] = self._index_range(key)
        for side, block in ((Side.Q, self.block[0]), (Side.KV, self.block[1]), (Side.CONST, 1)):
            mine = [key for key in todo if key.side is side and not key.is_index]
            if mine:
                self.ranges.update(zip(mine, _block_ranges(self.domain, mine, block), strict=True))
        for key in todo:
            if key.side is Side.DIAGONAL:
                self.ranges[key] = self._diagonal_range(key)

    def coarser(self, factor: int) -> Tables:
        """Return tables of the same keys over groups of `factor` x `factor` tiles."""
        groups = Tables(self.domain, (self.block[0] * factor, self.block[1] * factor))
        for key, (low, high) in self.ranges.items():
            if key.side is Side.CONST:
                groups.ranges[key] = low, high
            elif key.side is not Side.DIAGONAL and not key.is_index:
                groups.ranges[key] = _reduce_blocks(low, factor)[0], _reduce_blocks(high, factor)[1]
        groups.build(self.ranges)
        for n, matches in self.equal.items():
            groups.equal[n] = None if matches is None else matches.coarser(factor)
        return groups

    def look_up(self, key: Key, qi: Tensor, ki: Tensor, lead: Lead | None = None) -> Interval:
        """Return the range (low, high) of a key in each of the selected tiles.

        Args:
            key: a key that `build` has tabulated.
            qi, ki: int64 block indices that broadcast together to [...].
            lead: int64 indices into `domain.b` and `domain.h` that broadcast with `qi` and `ki`;
                None for the tiles of every (b, h).

        Returns:
            Tensors that broadcast to [...], or without `lead` to [b, h, ...].
        """
        low, high = self.ranges[key]
        if key.side is Side.CONST:
            index = torch.zeros((1,) * max(qi.dim(), ki.dim()), dtype=torch.int64, device=qi.device)
        elif key.side is Side.DIAGONAL:
            index = self._window(qi, ki)
        else:
            index = qi if key.side is Side.Q else ki
        return _as_int64(entries(low, index, lead)), _as_int64(entries(high, index, lead))

    def _index_range(self, key: Key) -> Interval:
        is_q = key.side is Side.Q
        length = self.domain.q_len if is_q else self.domain.kv_len
        step = self.block[0] if is_q else self.block[1]
        first = torch.arange(0, length, step, device=self.domain.device).view(1, 1, -1)
        last = (first + (step - 1)).clamp(max=length - 1)
        c = key.terms[0][1]
        return (first * c, last * c) if c > 0 else (last * c, first * c)

    # On the diagonal a tile covers the window d = q_first - kv_last ... q_last - kv_first. A last
    # tile that is cut off covers a shorter window, so there are tables for up to four lengths.

    def _extents(self) -> list[tuple[int, int]]:
        sizes = []
        for length, step in zip((self.domain.q_len, self.domain.kv_len), self.block, strict=True):
            whole, ragged = min(step, length), length % step
            sizes.append((whole, ragged or whole))
        (q_whole, q_ragged), (kv_whole, kv_ragged) = sizes
        return [(q, kv) for q in (q_whole, q_ragged) for kv in (kv_whole, kv_ragged)]

    def _diagonal_range(self, key: Key) -> Interval:
        values = self.domain.all_values(key)
        smaller, larger = extremes(values)
        low, high = [], []
        done: dict[int, Interval] = {}
        for q, kv in self._extents():
            width = q + kv - 1
            if width not in done:
                done[width] = (sliding(values, width, smaller), sliding(values, width, larger))
            low.append(done[width][0])
            high.append(done[width][1])
        if len(done) == 1:  # the windows of all tiles have this length
            return low[0], high[0]
        return torch.cat(low, -1), torch.cat(high, -1)

    def _window(self, qi: Tensor, ki: Tensor) -> Tensor:
        """Return the index of each tile's window in a diagonal table."""
        q_len, kv_len = self.domain.q_len, self.domain.kv_len
        q_end, kv_end = (qi + 1) * self.block[0], (ki + 1) * self.block[1]
        row = q_end - self.block[0]  # q_first - kv_last, counted from 1 - kv_len
        column = kv_len - kv_end.clamp(max=kv_len)
        if len({q + kv for q, kv in self._extents()}) > 1:  # the tables are concatenated
            points = q_len + kv_len - 1
            row = row + (q_end > q_len) * (2 * points)
            column = column + (kv_end > kv_len) * points
        return row + column


def _as_int64(values: Tensor) -> Tensor:
    """Convert integers to int64, the dtype of integer intervals."""
    return values.to(torch.int64) if values.dtype == torch.int32 else values


def extremes(values: Tensor) -> tuple[Reduce, Reduce]:
    """Return the elementwise minimum and maximum functions for the dtype of `values`.

    Both functions return NaN if either argument is NaN.
    """
    if values.dtype == torch.bool:
        return torch.logical_and, torch.logical_or
    return torch.minimum, torch.maximum


def sliding(values: Tensor, width: int, reduce: Reduce) -> Tensor:
    """Reduce every window of `width` entries along the last axis, by doubling.

    Entry i of the result covers values[i : i + width]. The last width - 1 entries have no complete
    window. They repeat the last complete one, so that the length stays the same.
    """
    length = values.shape[-1]
    whole = length - width + 1
    lead = values[..., 0].numel()
    step = max(1, width, chunk_size(values.numel(), values.device) // lead - width + 1)
    parts = [
        _windows(values[..., first : min(first + step, whole) + width - 1], width, reduce)
        for first in range(0, whole, step)
    ]
    tail = parts[-1][..., -1:].expand(*values.shape[:-1], width - 1)
    return torch.cat([*parts, tail], -1)


def _windows(values: Tensor, width: int, reduce: Reduce) -> Tensor:
    span = 1
    while 2 * span <= width:
        values = reduce(values[..., :-span], values[..., span:])
        span *= 2
    missing = width - span
    return reduce(values[..., :-missing], values[..., missing:]) if missing else values


def _block_ranges(domain: Domain, keys: Sequence[Key], block: int) -> list[Interval]:
    """Return the range of each key of one side in every block, [b or 1, h or 1, blocks]."""
    parts: list[list[tuple[int, Interval]]] = [[] for _ in keys]
    nodes = [n for key in keys for n, _ in key.terms]
    for start, stop in domain.pieces(nodes, keys[0].side, block):
        for part, value in zip(parts, domain.values(keys, start, stop), strict=True):
            part.append((start // block, _reduce_blocks(value, block)))
    return [_combine(part) for part in parts]


def _reduce_blocks(value: Tensor, block: int) -> Interval:
    whole = value.shape[-1] // block * block
    parts = []
    if whole:
        parts.append(_ends(value[..., :whole].unflatten(-1, (-1, block))))
    if whole < value.shape[-1]:
        low, high = _ends(value[..., whole:])
        parts.append((low[..., None], high[..., None]))
    return parts[0] if len(parts) == 1 else _concatenate(parts)


def _ends(value: Tensor) -> Interval:
    if value.dtype == torch.bool:
        return value.all(-1), value.any(-1)
    low, high = value.amin(-1), value.amax(-1)  # both NaN if a value is NaN
    return low, high


def _combine(parts: list[tuple[int, Interval]]) -> Interval:
    """Concatenate the ranges of pieces, after combining pieces of the same block."""
    merged: list[Interval] = []
    last = -1
    for first, interval in parts:
        if first == last:
            both = [torch.stack([a, b], -1) for a, b in zip(merged[-1], interval, strict=True)]
            merged[-1] = _ends(both[0])[0], _ends(both[1])[1]
        else:
            merged.append(interval)
        last = first
    return merged[0] if len(merged) == 1 else _concatenate(merged)


def _concatenate(parts: Sequence[Interval]) -> Interval:
    return torch.cat([p[0] for p in parts], -1), torch.cat([p[1] for p in parts], -1)


def signed(tensor: Tensor) -> Tensor:
    """Convert uint16, uint32 and uint64, on which torch has no minimum, to int64.

    Numbers of 2**63 and more become 2**63 - 1, which fails every check of int32.
    """
    if tensor.dtype not in (torch.uint16, torch.uint32, torch.uint64):
        return tensor
    numbers = tensor.to(torch.int64)
    return numbers.where(numbers >= 0, torch.iinfo(torch.int64).max)


def value_range(tensor: Tensor, n: Node, dtype: torch.dtype) -> Interval:
    """Return the least and greatest value that load `n` can return from its tensor."""
    if n.type == BOOL and tensor.dtype != torch.bool:
        tensor = tensor != 0
    flat = signed(tensor).reshape(-1)
    parts = [_ends(part) for part in flat.split(chunk_size(flat.numel(), flat.device))]
    low, high = parts[0]
    if len(parts) > 1:
        low = _ends(torch.stack([p[0] for p in parts]))[0]
        high = _ends(torch.stack([p[1] for p in parts]))[1]
    kind = {F32: dtype, BOOL: torch.bool}.get(n.type, torch.int64)
    return low.to(kind), high.to(kind)
