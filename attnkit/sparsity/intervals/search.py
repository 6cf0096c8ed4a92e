"""Searches over evaluated positions, for many rows at once.

Values of positions have shape [b, h, points]; what belongs to rows, such as the ends of intervals,
has shape [b, h, rows, n]. All sizes before the last broadcast: 1 stands for "shared". A search
answers with at most `limit` intervals for every row, or None where a row would need more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

Ends = tuple[Tensor, Tensor]

_KEY_LIMIT = 1 << 62
_PASS_NUMBERS = 1 << 18


class Runs:
    """The runs of true positions.

    Args:
        mask: bool [b, h, points].
    """

    def __init__(self, mask: Tensor) -> None:
        self._base = _bases(mask)
        edge = pad(mask.to(torch.int8), (1, 1)).diff(dim=-1)  # [b, h, points + 1]
        self._starts = (edge[..., :-1] > 0).flatten().nonzero().squeeze(1)
        self._stops = (edge[..., 1:] < 0).flatten().nonzero().squeeze(1) + 1

    def within(self, low: Tensor, high: Tensor, limit: int) -> Ends | None:
        """What of the runs is inside intervals, int64 ends from 0 to points."""
        low, high = low + self._base, high + self._base
        first = torch.searchsorted(self._stops, low, right=True)  # the first that ends after low
        count = (torch.searchsorted(self._starts, high) - first).masked_fill(high <= low, 0)
        most = int(count.amax())
        if most * low.shape[-1] > limit:
            return None
        parts = []
        for i in range(most):
            at = (first + i).clamp(max=self._starts.numel() - 1)
            ends = self._starts[at], self._stops[at]
            parts.append(_cut(ends, (low, high), self._base, count <= i))
        return _beside(parts, low)


class Pieces:
    """Pieces of the points along which values never fall.

    Args:
        values: int64 [b, h, points].
    """

    def __init__(self, values: Tensor) -> None:
        self._base = _bases(values)
        falls = torch.ones_like(values, dtype=torch.bool)
        torch.lt(values[..., 1:], values[..., :-1], out=falls[..., 1:])
        self._starts = falls.flatten().nonzero().squeeze(1)
        self._least, greatest = _range(values)
        self._step = greatest - self._least + 2
        self._key: Tensor | None = None
        if self._starts.numel() * self._step < _KEY_LIMIT:
            piece = falls.flatten().cumsum(0) - 1
            self._key = piece * self._step + (values.flatten() - self._least)  # sorted throughout

    def between(
        self, first: Tensor | None, stop: Tensor | None, low: Tensor, high: Tensor, limit: int
    ) -> Ends | None:
        """Where `first <= value < stop` inside intervals, one answer in each piece.

        Args:
            first, stop: int64 [b, h, rows, 1], None for no limit on that side.
            low, high: int64 ends from 0 to points.
            limit: intervals a row.
        """
        if self._key is None:
            return None
        low, high = low + self._base, high + self._base
        piece = torch.searchsorted(self._starts, low, right=True) - 1
        last = torch.searchsorted(self._starts, high - 1, right=True) - 1
        count = (last - piece + 1).masked_fill(high <= low, 0)
        most = int(count.amax())
        if most * low.shape[-1] > limit:
            return None
        begin = 0 if first is None else (first - self._least).clamp(0, self._step - 1)
        end = self._step - 1 if stop is None else (stop - self._least).clamp(0, self._step - 1)
        parts = []
        for i in range(most):
            at = torch.minimum(piece + i, last) * self._step
            ends = (
                torch.searchsorted(self._key, at + begin),
                torch.searchsorted(self._key, at + end),
            )
            parts.append(_cut(ends, (low, high), self._base, count <= i))
        return _beside(parts, low)


class Places:
    """Where each value stands, in runs of equal values.

    Args:
        values: int64 [b, h, points], in any order.
    """

    def __init__(self, values: Tensor) -> None:
        self._base, self._points = _bases(values), values.shape[-1]
        changes = torch.ones_like(values, dtype=torch.bool)
        torch.ne(values[..., 1:], values[..., :-1], out=changes[..., 1:])
        self._starts = changes.flatten().nonzero().squeeze(1)
        self._stops = torch.cat((self._starts[1:], self._starts.new_full((1,), values.numel())))
        self._least, self._greatest = _range(values)
        self._step = self._greatest - self._least + 1
        self._key: Tensor | None = None
        if values.shape[0] * values.shape[1] * self._step < _KEY_LIMIT:
            value = values.flatten()[self._starts] - self._least
            key = self._starts // self._points * self._step + value
            self._key, self._order = key.sort(stable=True)

    def equal(self, wanted: Tensor, limit: int) -> Ends | None:
        """Where the value is the wanted one, int64 [b, h, rows, 1]."""
        if self._key is None:
            return None
        group = self._base // self._points
        at = group * self._step + (wanted - self._least).clamp(0, self._step - 1)
        first = torch.searchsorted(self._key, at)
        count = torch.searchsorted(self._key, at, right=True) - first
        count = count.masked_fill((wanted < self._least) | (wanted > self._greatest), 0)
        most = int(count.amax())
        if most > limit:
            return None
        whole = self._base, self._base + self._points
        parts = []
        for i in range(most):
            run = self._order[(first + i).clamp(max=self._order.numel() - 1)]
            ends = self._starts[run], self._stops[run]
            parts.append(_cut(ends, whole, self._base, count <= i))
        return _beside(parts, wanted)


def equal_in_order(values: Tensor, wanted: Tensor) -> Ends | None:
    """Where never falling values [b, h, points] equal those wanted, [b, h, rows, 1].

    None if they fall somewhere. For devices where `Places`, with its many operators, is dearer
    than two searches through all points.
    """
    if not bool((values[..., 1:] >= values[..., :-1]).all()):
        return None
    shape = torch.broadcast_shapes(values.shape[:2], wanted.shape[:2])
    points = values.expand(*shape, -1).contiguous()
    sought = wanted[..., 0].expand(*shape, -1).contiguous()
    low, high = (torch.searchsorted(points, sought, right=right) for right in (False, True))
    return low[..., None], high[..., None]


def by_passes(
    search: Callable[..., Ends | None], rows: Sequence[Tensor | None], points: int
) -> Ends | None:
    """Call a search for some rows at a time and compact what it finds.

    Args:
        search: takes the tensors of `rows`, cut to some rows.
        rows: [b, h, rows, n], or None.
        points: positions.
    """
    given = [t for t in rows if t is not None]
    count = max(t.shape[2] for t in given)
    # the width of the widest stands for the width of the answer
    step = max(1, _PASS_NUMBERS // max(t.numel() // t.shape[2] for t in given))
    parts = []
    for start in range(0, count, step):
        some = slice(start, start + step)
        found = search(*(t if t is None or t.shape[2] == 1 else t[:, :, some] for t in rows))
        if found is None:
            return None
        parts.append(compacted(*found, points))
    most = max(low.shape[-1] for low, _ in parts)
    padded = [[pad(x, (0, most - x.shape[-1])) for x in part] for part in parts]
    return torch.cat([p[0] for p in padded], 2), torch.cat([p[1] for p in padded], 2)


def compacted(low: Tensor, high: Tensor, points: int) -> Ends:
    """The same sets with the least number of intervals: sorted, touching ones joined.

    Empty places come last and are 0 to 0; a column that is empty in all rows is dropped.
    """
    empty = high <= low
    if low.shape[-1] == 1:
        kept = 0 if bool(empty.all()) else 1
        low, high = (x.masked_fill(empty, 0)[..., :kept] for x in (low, high))
        return low, high
    low, order = low.masked_fill(empty, points).sort(dim=-1, stable=True)
    high = high.masked_fill(empty, 0).gather(-1, order)
    reach = high.cummax(-1).values
    fresh = low < points
    fresh[..., 1:] &= low[..., 1:] > reach[..., :-1]
    into = (fresh.cumsum(-1) - 1).clamp(min=0)
    found_low = torch.full_like(low, points).scatter_reduce(-1, into, low, "amin")
    found_high = torch.zeros_like(high).scatter_reduce(-1, into, high, "amax")
    count = fresh.sum(-1, keepdim=True)
    unused = torch.arange(low.shape[-1], device=low.device) >= count
    most = int(count.amax())
    low, high = (x.masked_fill(unused, 0)[..., :most] for x in (found_low, found_high))
    return low, high


def _range(values: Tensor) -> tuple[int, int]:
    """Least and greatest, read in one go: a GPU is waited for."""
    least, greatest = torch.stack(torch.aminmax(values)).tolist()
    return least, greatest


def _bases(values: Tensor) -> Tensor:
    """[b, h, 1, 1]: where the points of each (b, h) begin in the flattened values."""
    b, h, points = values.shape
    return (torch.arange(b * h, device=values.device) * points).view(b, h, 1, 1)


def _cut(ends: Ends, within: Ends, base: Tensor, outside: Tensor) -> Ends:
    low, high = torch.maximum(ends[0], within[0]) - base, torch.minimum(ends[1], within[1]) - base
    return low.masked_fill(outside, 0), high.masked_fill(outside, 0)


def _beside(parts: list[Ends], like: Tensor) -> Ends:
    if not parts:
        nothing = torch.zeros_like(like[..., :1])
        return nothing, nothing
    pairs = [torch.broadcast_tensors(*part) for part in parts]
    return torch.cat([p[0] for p in pairs], -1), torch.cat([p[1] for p in pairs], -1)
