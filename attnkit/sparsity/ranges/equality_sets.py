"""Find which tiles hold equal values: exact tiles for `A(q) == B(kv)` with values in any order.

The ranges of two blocks may overlap although the blocks share no value, so intervals are too coarse
for unsorted ids or selected blocks. If there are few different values, each block stores one bit
per value. For many values, the pairs of blocks that share a value are listed, each with a q and a
kv position of the value. If there are too many pairs, only a sample of them is listed. The sample
serves to find unmasked positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnkit.sparsity.ranges.gather import Lead, entries

_MAX_BITS = 62  # of an int64, without the sign
_MAX_PAIRS = 1 << 21
_MAX_DENSE = 1 << 24  # largest number of tiles for a table of one byte per tile


@dataclass(frozen=True, eq=False)
class Bits:
    """Stores the set of values of each block, one bit per value.

    Attributes:
        q, kv: int64 [b or 1, h or 1, blocks].
    """

    q: Tensor
    kv: Tensor

    def among(self, may: Tensor, qi: Tensor, ki: Tensor, lead: Lead | None) -> Tensor:
        """Return `may`, set to False for tiles that hold no equal values.

        `qi`, `ki` and `lead` select the tiles as in `Tables.look_up`.
        """
        return may & ((entries(self.q, qi, lead) & entries(self.kv, ki, lead)) != 0)

    def coarser(self, factor: int) -> Bits:
        """Return the sets of values for groups of `factor` x `factor` tiles."""
        return Bits(*(_grouped(bits, factor) for bits in (self.q, self.kv)))


@dataclass(frozen=True, eq=False)
class Pairs:
    """Lists the tiles that hold a q value and a kv value that are equal.

    Attributes:
        shape: (b or 1, h or 1, q blocks, kv blocks).
        tile: int64 [n], flat indices of the tiles in that shape, ascending.
        q, kv: int64 [n], a q and a kv position with equal values in each tile.
        dense: bool [all tiles], whether each tile is in the list; None if there are too many tiles.
        whole: whether all such tiles are listed, not only a sample.
    """

    shape: tuple[int, int, int, int]
    tile: Tensor
    q: Tensor
    kv: Tensor
    dense: Tensor | None
    whole: bool = True

    @staticmethod
    def from_tiles(
        shape: tuple[int, int, int, int], tile: Tensor, q: Tensor, kv: Tensor, whole: bool = True
    ) -> Pairs:
        """Build the list from tiles in any order. Tiles may occur several times."""
        tile, order = tile.sort()
        fresh = torch.ones_like(tile, dtype=torch.bool)
        torch.ne(tile[1:], tile[:-1], out=fresh[1:])
        tile, order = tile.masked_select(fresh), order.masked_select(fresh)
        dense = None
        total = shape[0] * shape[1] * shape[2] * shape[3]
        if total <= _MAX_DENSE:
            dense = torch.zeros(total, dtype=torch.bool, device=tile.device)
            dense.index_fill_(0, tile, True)
        return Pairs(shape, tile, q.index_select(0, order), kv.index_select(0, order), dense, whole)

    def among(self, may: Tensor, qi: Tensor, ki: Tensor, lead: Lead | None) -> Tensor:
        """Return `may`, set to False for tiles that hold no equal values.

        `qi`, `ki` and `lead` select the tiles as in `Tables.look_up`.
        """
        number, may = torch.broadcast_tensors(self._number(qi, ki, lead), may)
        if self.dense is not None:
            return may & self.dense.index_select(0, number.reshape(-1)).view(number.shape)
        listed = self._place(number.masked_select(may))[1]
        return torch.zeros_like(may).masked_scatter(may, listed)

    def witnesses(self, qi: Tensor, ki: Tensor, lead: Lead) -> tuple[Tensor, Tensor, Tensor]:
        """Return a (q, kv) position with equal values in each of the tiles [n].

        Returns:
            q and kv, int64 [n], and bool [n]: whether the tile is listed.
        """
        place, listed = self._place(self._number(qi, ki, lead))
        return self.q.index_select(0, place), self.kv.index_select(0, place), listed

    def coarser(self, factor: int) -> Pairs:
        """Return the list for groups of `factor` x `factor` tiles."""
        b, h, rows, columns = self.shape
        shape = b, h, -(-rows // factor), -(-columns // factor)
        line = self.tile // columns
        pair = line // rows
        row, column = line - pair * rows, self.tile - line * columns
        tile = (pair * shape[2] + row // factor) * shape[3] + column // factor
        return Pairs.from_tiles(shape, tile, self.q, self.kv)

    def _place(self, number: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of each tile in the (nonempty) list, and whether the tile is in it."""
        place = torch.searchsorted(self.tile, number).clamp(max=self.tile.numel() - 1)
        return place, self.tile.index_select(0, place) == number

    def _number(self, qi: Tensor, ki: Tensor, lead: Lead | None) -> Tensor:
        b, h, rows, columns = self.shape
        number = qi * columns + ki
        if lead is None:
            pair = torch.arange(b * h, device=number.device).view(b, h, *(1,) * number.dim())
            return pair * (rows * columns) + number
        for size, place, stride in ((b, lead[0], h), (h, lead[1], 1)):
            if size > 1:
                number = number + place * (stride * rows * columns)
        return number


Matches = Bits | Pairs


@dataclass(frozen=True, eq=False)
class BlockValues:
    """Holds the value at every position; a run of equal values in a block is stored once.

    Attributes:
        shape: (b or 1, h or 1, positions).
        place: int64 [n], flat indices of positions in that shape: the first of each block, and each
            position whose value differs from the one before.
        value: int64 [n], their values.
        solid: bool [], whether neighbours in a block differ by at most 1, so that every integer
            between two values of a block occurs in it.
    """

    shape: tuple[int, int, int]
    place: Tensor
    value: Tensor
    solid: Tensor

    @staticmethod
    def of(pieces: Iterable[tuple[int, Tensor]], length: int, block: int) -> BlockValues:
        """Build the `BlockValues` of consecutive pieces of positions.

        Args:
            pieces: first position, and int64 values [b or 1, h or 1, positions], of each piece.
            length: number of positions of all pieces together.
            block: number of positions of a block.
        """
        places, values, gaps = [], [], []
        b = h = 1
        last: Tensor | None = None
        for start, value in pieces:
            b, h, count = value.shape
            step = value.diff(dim=-1)
            new = torch.ones(value.shape, dtype=torch.bool, device=value.device)
            torch.ne(step, 0, out=new[..., 1:])
            first = -start % block  # where a block begins
            new[..., first::block] = True
            step[..., (first or block) - 1 :: block] = 0
            gaps.append((step.abs() > 1).any())
            if first and last is not None:  # the piece continues a block
                gaps.append(((value[..., 0] - last).abs() > 1).any())
            last = value[..., -1]
            at = new.flatten().nonzero().squeeze(1)
            pair = at // count
            places.append(pair * (length - count) + at + start)
            values.append(value.reshape(-1).index_select(0, at))
        solid = ~torch.stack(gaps).any()
        return BlockValues((b, h, length), torch.cat(places), torch.cat(values), solid)

    def within(self, low: int, high: int) -> BlockValues:
        """Return the values from `low` to `high`, both included."""
        inside = (self.value >= low) & (self.value <= high)
        place, value = (x.masked_select(inside) for x in (self.place, self.value))
        return BlockValues(self.shape, place, value, self.solid)

    def expand(self, b: int, h: int) -> BlockValues:
        """Repeat the values that batches or heads share for `b` batches and `h` heads."""
        if self.shape[:2] == (b, h):
            return self
        length = self.shape[2]
        pair = self.place // length
        from_b, from_h = pair // self.shape[1], pair % self.shape[1]
        to_b = from_b if self.shape[0] > 1 else torch.arange(b, device=pair.device)[:, None, None]
        to_h = from_h if self.shape[1] > 1 else torch.arange(h, device=pair.device)[:, None]
        place = (to_b * h + to_h) * length + self.place % length
        return BlockValues(
            (b, h, length),
            place.flatten(),
            self.value.expand(place.shape).flatten(),
            self.solid,
        )


def find_matches(q: BlockValues, kv: BlockValues, block: tuple[int, int]) -> Matches | None:
    """Find the tiles that hold a q value and a kv value that are equal.

    Args:
        q, kv: the values.
        block: (q, kv) positions of a tile.

    Returns:
        All such tiles. If there are too many, a sample of them (`Pairs` with whole=False) or None.
    """
    ends = torch.stack([end for x in (q, kv) for end in torch.aminmax(x.value)]).tolist()
    low, high = max(ends[0], ends[2]), min(ends[1], ends[3])
    q, kv = q.within(low, high), kv.within(low, high)
    if high - low < _MAX_BITS:
        return Bits(_bits(q, block[0], low, high), _bits(kv, block[1], low, high))
    return _pairs(q, kv, block, high - low + 1)


def _bits(values: BlockValues, block: int, low: int, high: int) -> Tensor:
    b, h, length = values.shape
    kinds, blocks = max(high - low + 1, 1), -(-length // block)
    pair = values.place // length
    at = pair * blocks + (values.place - pair * length) // block
    present = torch.zeros(b * h * blocks * kinds, dtype=torch.bool, device=at.device)
    present.index_fill_(0, at * kinds + (values.value - low), True)
    weight = torch.ones((), dtype=torch.int64, device=at.device) << torch.arange(
        kinds, device=at.device
    )
    return (present.view(b, h, blocks, kinds) * weight).sum(-1)


def _pairs(q: BlockValues, kv: BlockValues, block: tuple[int, int], span: int) -> Matches | None:
    b, h = max(q.shape[0], kv.shape[0]), max(q.shape[1], kv.shape[1])
    if span * b * h >= 1 << 62:
        return None
    q, kv = q.expand(b, h), kv.expand(b, h)
    lengths = q.shape[2], kv.shape[2]
    shape = b, h, -(-lengths[0] // block[0]), -(-lengths[1] // block[1])
    # one number per value and (b, h): all values are within one span, so `% span` is unique
    kv_key, order = (kv.place // lengths[1] * span + kv.value % span).sort()
    q_key = q.place // lengths[0] * span + q.value % span
    first = torch.searchsorted(kv_key, q_key)
    count = torch.searchsorted(kv_key, q_key, right=True) - first
    total = int(count.sum())
    if total == 0:  # no bit in common
        return Bits(
            *(torch.zeros(b, h, n, dtype=torch.int64, device=count.device) for n in shape[2:])
        )
    sampled, whole = count, total <= _MAX_PAIRS
    if not whole:
        sampled = count.clamp(max=_MAX_PAIRS // count.numel())
        total = int(sampled.sum())
        if total == 0:
            return None
    entry = torch.arange(count.numel(), device=count.device).repeat_interleave(sampled)
    number = torch.arange(total, device=count.device)
    number = number - (sampled.cumsum(0) - sampled).index_select(0, entry)
    if not whole:  # spread the sample over all partners, with another start for each entry
        every = count.index_select(0, entry)
        number = (number * every // sampled.index_select(0, entry) + entry) % every
    place = order.index_select(0, first.index_select(0, entry) + number)
    q_place, kv_place = q.place.index_select(0, entry), kv.place.index_select(0, place)
    pair = q_place // lengths[0]
    q_place, kv_place = q_place - pair * lengths[0], kv_place - pair * lengths[1]
    tile = (pair * shape[2] + q_place // block[0]) * shape[3] + kv_place // block[1]
    return Pairs.from_tiles(shape, tile, q_place, kv_place, whole)


def _grouped(bits: Tensor, factor: int) -> Tensor:
    bits = pad(bits, (0, -bits.shape[-1] % factor)).unflatten(-1, (-1, factor))
    return reduce(torch.bitwise_or, bits.unbind(-1))
