"""Evaluate the mask of partial tiles, many tiles at a time, and apply it as bit patterns."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnkit.templates.cpu.hooks import Hooks, Tile
from attnkit.templates.cpu.strips import Chunk
from attnkit.templates.cpu.units import Unit
from attnkit.util.shapes import broadcast

WIDTH = 128  # maximum columns per mask tile
VALUES = 1 << 21  # mask values per evaluation

# dtype -> (integer dtype of the same width, bit pattern of -inf as a signed integer)
_BITS = {torch.float32: (torch.int32, -(1 << 23)), torch.float64: (torch.int64, -(1 << 52))}

_Pieces = list[tuple[int, slice]]  # (first kv position, columns of the chunk), each <= WIDTH wide


@dataclass(frozen=True, slots=True)
class Keep:
    """Holds the mask of some columns of a chunk as bit patterns.

    Masking by bit patterns also removes NaN and infinities under the mask, which adding -inf does
    not. `torch.where` would take three times as long on a CPU.

    Attributes:
        columns: the columns.
        bits: integers, broadcastable to [nb, nh, rows, columns]: all ones where kept, else zero.
        floor: the same shape: zero where kept, else the bit pattern of -inf.
    """

    columns: slice
    bits: Tensor
    floor: Tensor

    def zero(self, s: Tensor) -> None:
        """Set `s` [nb, nh, rows, width] to 0 in place where the mask is false."""
        s[..., self.columns].view(self.bits.dtype).bitwise_and_(self.bits)

    def fill(self, s: Tensor) -> None:
        """Set `s` [nb, nh, rows, width] to -inf in place where the mask is false."""
        part = s[..., self.columns].view(self.bits.dtype)
        part.bitwise_and_(self.bits).bitwise_or_(self.floor)


def masked(
    chunks: Iterable[Chunk],
    unit: Unit,
    hooks: Hooks,
    index: Tensor,
    kv_len: int,
    dtype: torch.dtype,
) -> Iterator[tuple[Chunk, list[Keep]]]:
    """Yield each chunk of a unit with the masks of its partial columns, for scores of `dtype`.

    `index` is an int32 arange, at least as long as every axis and as WIDTH.
    """
    group: list[tuple[Chunk, _Pieces]] = []
    count = 0
    for chunk in chunks:
        pieces = list(_pieces(chunk))
        tile = math.prod(unit.shape) * chunk.height * WIDTH
        if group and (count + len(pieces)) * tile > VALUES:
            yield from _evaluate(group, unit, hooks, index, kv_len, dtype)
            group, count = [], 0
        group.append((chunk, pieces))
        count += len(pieces)
    if group:
        yield from _evaluate(group, unit, hooks, index, kv_len, dtype)


def _pieces(chunk: Chunk) -> Iterator[tuple[int, slice]]:
    for span, place in chunk.places():
        for start, stop in span.partial:
            for kv in range(start, stop, WIDTH):
                at = place.start + kv - span.start
                yield kv, slice(at, at + min(WIDTH, stop - kv))


def _evaluate(
    group: list[tuple[Chunk, _Pieces]],
    unit: Unit,
    hooks: Hooks,
    index: Tensor,
    kv_len: int,
    dtype: torch.dtype,
) -> Iterator[tuple[Chunk, list[Keep]]]:
    """Evaluate the mask for a group of chunks in one call of the hook."""
    corners = [(chunk.strip.start, kv) for chunk, pieces in group for kv, _ in pieces]
    if not corners:
        yield from ((chunk, []) for chunk, _ in group)
        return
    q, kv = torch.tensor(corners, dtype=torch.int32, device=index.device).unbind(1)
    height = max(chunk.height for chunk, _ in group)
    width = max(columns.stop - columns.start for _, pieces in group for _, columns in pieces)
    q_last = max(chunk.strip.stop for chunk, _ in group) - 1
    tile = Tile(
        b=index[unit.batch].view(1, -1, 1, 1, 1),
        h=index[unit.head].view(1, 1, -1, 1, 1),
        # a tile that overhangs the score tensor repeats its last row or column
        q=(q[:, None] + index[:height]).clamp_(max=q_last).view(-1, 1, 1, height, 1),
        kv=(kv[:, None] + index[:width]).clamp_(max=kv_len - 1).view(-1, 1, 1, 1, width),
    )
    integer, infinity = _BITS[dtype]
    bits = hooks.keep(tile).to(integer).neg_()
    shape = broadcast(bits.shape, (len(corners), 1, 1, height, width))
    if any(chunk.strip.patches for chunk, _ in group):
        bits = bits.expand(shape).contiguous()
        _patch(bits, group)
    bits, floor = bits.expand(shape), (bits.bitwise_not() & infinity).expand(shape)
    n = 0
    for chunk, pieces in group:
        keeps = []
        for _, columns in pieces:
            inside = (n, ..., slice(chunk.height), slice(columns.stop - columns.start))
            keeps.append(Keep(columns, bits[inside], floor[inside]))
            n += 1
        yield chunk, keeps


def _patch(bits: Tensor, group: list[tuple[Chunk, _Pieces]]) -> None:
    """Overwrite the mask where the block runs decide instead of the mask function.

    Args:
        bits: the mask, [pieces, nb or 1, nh or 1, height, width], written in place.
        group: chunks with their pieces, in the order of the first axis of `bits`.
    """
    n = 0
    for chunk, pieces in group:
        patches = chunk.strip.patches
        for kv, columns in pieces:
            stop = kv + columns.stop - columns.start
            at = bisect.bisect_right(patches, kv, key=lambda patch: patch.stop)
            while at < len(patches) and patches[at].start < stop:
                inside = slice(max(patches[at].start - kv, 0), min(patches[at].stop, stop) - kv)
                bits[n, ..., patches[at].rows, inside] = -1 if patches[at].keep else 0
                at += 1
            n += 1
