"""Find, for many rows at once, the intervals of positions whose values satisfy a condition.

Values of positions have shape [b, h, points]. Tensors of rows, such as the ends of intervals, have
shape [b, h, rows, n]. All sizes but the last broadcast: 1 means shared. A search returns the ends
(low, high) of at most `limit` intervals for every row, or None if a row needs more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

Ends = tuple[Tensor, Tensor]

_KEY_LIMIT = 1 << 62
_PASS_NUMBERS = 1 << 18


class TrueRuns:
    """Finds the maximal runs of True positions inside intervals.

    Args:
        mask: bool [b, h, points].
    """

    def __init__(self, mask: Tensor) -> None:
        self._base = _bases(mask)
        edge = pad(mask.to(torch.int8), (1, 1)).diff(dim=-1)  # [b, h, points + 1]
        self._starts = (edge[..., :-1] > 0).flatten().nonzero().squeeze(1)
        self._stops = (edge[..., 1:] < 0).flatten().nonzero().squeeze(1) + 1

    def within(self, low: Tensor, high: Tensor, limit: int) -> Ends | None:
        """Return the parts of the runs of True positions inside the intervals `low` to `high`.

        Args:
            low, high: int64 ends of the intervals, from 0 to points.
            limit: largest number of intervals per row.
        """
        low, high = low + self._base, high + self._base
        first = torch.searchsorted(
            self._stops, low, right=True
        )  # the first run that ends after low
        count = (torch.searchsorted(self._starts, high) - first).masked_fill(high <= low, 0)
        most = int(count.amax())
        if most * low.shape[-1] > limit:
            return None
        parts = []
        for i in range(most):
            at = (first + i).clamp(max=self._starts.numel() - 1)
            ends = self._starts[at], self._stops[at]
            parts.append(_clip(ends, (low, high), self._base, count <= i))
        return _concatenate(parts, low)


class AscendingPieces:
    """Finds positions with values in a range, by binary search in each non-decreasing piece.

    Args:
        values: int64 [b, h, points].
    """

    def __init__(self, values: Tensor) -> None:
        self._base = _bases(values)
        falls = torch.ones_like(values, dtype=torch.bool)
        torch.lt(values[..., 1:], values[..., :-1], out=falls[..., 1:])
        self._starts = falls.flatten().nonzero().squeeze(1)
        self._numbers = _Numbers(values, self._starts.numel())
        piece = falls.flatten().cumsum(0) - 1
        self._key = piece * self._numbers.count + self._numbers.of(values.flatten())  # sorted

    def between(
        self, first: Tensor | None, stop: Tensor | None, low: Tensor, high: Tensor, limit: int
    ) -> Ends | None:
        """Return the intervals inside `low` to `high` where `first <= value < stop`.

        The result has one interval per piece.

        Args:
            first, stop: int64 [b, h, rows, 1], None for no limit on that side.
            low, high: int64 ends of the intervals, from 0 to points.
            limit: largest number of intervals per row.
        """
        low, high = low + self._base, high + self._base
        piece = torch.searchsorted(self._starts, low, right=True) - 1
        last = torch.searchsorted(self._starts, high - 1, right=True) - 1
        count = (last - piece + 1).masked_fill(high <= low, 0)
        most = int(count.amax())
        if most * low.shape[-1] > limit:
            return None
        begin = 0 if first is None else self._numbers.of(first)
        end = self._numbers.count - 1 if stop is None else self._numbers.of(stop)
        parts = []
        for i in range(most):
            at = torch.minimum(piece + i, last) * self._numbers.count
            ends = (
                torch.searchsorted(self._key, at + begin),
                torch.searchsorted(self._key, at + end),
            )
            parts.append(_clip(ends, (low, high), self._base, count <= i))
        return _concatenate(parts, low)


class ValueIndex:
    """Finds the positions of a value with a sorted index of the runs of equal values.

    Args:
        values: int64 [b, h, points], in any order.
    """

    def __init__(self, values: Tensor) -> None:
        self._base, self._points = _bases(values), values.shape[-1]
        changes = torch.ones_like(values, dtype=torch.bool)
        torch.ne(values[..., 1:], values[..., :-1], out=changes[..., 1:])
        self._starts = changes.flatten().nonzero().squeeze(1)
        self._stops = torch.cat((self._starts[1:], self._starts.new_full((1,), values.numel())))
        self._numbers = _Numbers(values, values.shape[0] * values.shape[1])
        number = self._numbers.of(values.flatten()[self._starts])
        key = self._starts // self._points * self._numbers.count + number
        self._key, self._order = key.sort(stable=True)

    def equal(self, target: Tensor, limit: int) -> Ends | None:
        """Return the intervals of positions whose value equals `target`.

        Args:
            target: int64 [b, h, rows, 1].
            limit: largest number of intervals per row.
        """
        group = self._base // self._points
        at = group * self._numbers.count + self._numbers.of(target)
        first = torch.searchsorted(self._key, at)
        count = torch.searchsorted(self._key, at, right=True) - first
        most = int(count.amax())
        if most > limit:
            return None
        whole = self._base, self._base + self._points
        parts = []
        for i in range(most):
            run = self._order[(first + i).clamp(max=self._order.numel() - 1)]
            ends = self._starts[run], self._stops[run]
            parts.append(_clip(ends, whole, self._base, count <= i))
        return _concatenate(parts, target)


def equal_in_order(values: Tensor, target: Tensor) -> Ends | None:
    """Return the intervals where ascending values [b, h, points] equal `target` [b, h, rows, 1].

    The result is None if the values decrease somewhere. On a GPU these two searches through all
    points are faster than the many operators of `ValueIndex`.
    """
    if not bool((values[..., 1:] >= values[..., :-1]).all()):
        return None
    shape = torch.broadcast_shapes(values.shape[:2], target.shape[:2])
    points = values.expand(*shape, -1).contiguous()
    sought = target[..., 0].expand(*shape, -1).contiguous()
    low, high = (torch.searchsorted(points, sought, right=right) for right in (False, True))
    return low[..., None], high[..., None]


def search_in_passes(
    search: Callable[..., Ends | None], rows: Sequence[Tensor | None], points: int
) -> Ends | None:
    """Call a search for some rows at a time, and join the compacted results.

    Args:
        search: called with the tensors of `rows`, each sliced to some rows.
        rows: arguments of the search, [b, h, rows, n] or None.
        points: number of positions.
    """
    tensors = [t for t in rows if t is not None]
    count = max(t.shape[2] for t in tensors)
    # the widest input is an estimate of the width of the result
    step = max(1, _PASS_NUMBERS // max(t.numel() // t.shape[2] for t in tensors))
    parts = []
    for start in range(0, count, step):
        some = slice(start, start + step)
        intervals = search(*(t if t is None or t.shape[2] == 1 else t[:, :, some] for t in rows))
        if intervals is None:
            return None
        parts.append(compact(*intervals, points))
    most = max(low.shape[-1] for low, _ in parts)
    padded = [[pad(x, (0, most - x.shape[-1])) for x in part] for part in parts]
    return torch.cat([p[0] for p in padded], 2), torch.cat([p[1] for p in padded], 2)


def compact(low: Tensor, high: Tensor, points: int) -> Ends:
    """Sort the intervals of each row, and merge those that overlap or touch.

    Args:
        low, high: ends, [b, h, rows, n].
        points: number of positions.

    Returns:
        Ends [b, h, rows, m]. Empty intervals come last and are 0 to 0; m is the largest number of
        intervals of a row.
    """
    empty = high <= low
    if low.shape[-1] == 1:
        kept = 0 if bool(empty.all()) else 1
        low, high = (x.masked_fill(empty, 0)[..., :kept] for x in (low, high))
        return low, high
    low, order = low.masked_fill(empty, points).sort(dim=-1, stable=True)
    high = high.masked_fill(empty, 0).gather(-1, order)
    reach = high.cummax(-1).values
    begins = low < points  # whether an interval begins a new interval of the result
    begins[..., 1:] &= low[..., 1:] > reach[..., :-1]
    into = (begins.cumsum(-1) - 1).clamp(min=0)
    merged_low = torch.full_like(low, points).scatter_reduce(-1, into, low, "amin")
    merged_high = torch.zeros_like(high).scatter_reduce(-1, into, high, "amax")
    count = begins.sum(-1, keepdim=True)
    unused = torch.arange(low.shape[-1], device=low.device) >= count
    most = int(count.amax())
    low, high = (x.masked_fill(unused, 0)[..., :most] for x in (merged_low, merged_high))
    return low, high


class _Numbers:
    """Maps integers to numbers from 0 to `count` - 1 that compare with those of `values` alike.

    The numbers are distances from the least value. Where these times `groups` would leave int64,
    they are positions among the sorted values, which takes longer.

    Args:
        values: int64, of any shape.
        groups: number of groups that make keys `group * count + number`.
    """

    def __init__(self, values: Tensor, groups: int) -> None:
        self._least, self._greatest = _range(values)
        self.count = self._greatest - self._least + 3
        self._distinct: Tensor | None = None
        if max(groups * self.count, -self._least, self._greatest) >= _KEY_LIMIT:
            self._distinct = values.unique()
            self.count = 2 * self._distinct.numel() + 1

    def of(self, x: Tensor) -> Tensor:
        """Return the numbers of `x`: 0 below all values, and `count` - 1 above all of them."""
        if self._distinct is None:
            return x.clamp(self._least - 1, self._greatest + 1) - (self._least - 1)
        x = x.contiguous()  # searchsorted warns of others
        # 2 i + 1 for value i, and the even numbers for what lies between values
        return torch.searchsorted(self._distinct, x) + torch.searchsorted(
            self._distinct, x, right=True
        )


def _range(values: Tensor) -> tuple[int, int]:
    """Return the least and the greatest value, in one read because a read waits for the GPU."""
    least, greatest = torch.stack(torch.aminmax(values)).tolist()
    return least, greatest


def _bases(values: Tensor) -> Tensor:
    """Return the offset of the points of each (b, h) in the flattened values, [b, h, 1, 1]."""
    b, h, points = values.shape
    return (torch.arange(b * h, device=values.device) * points).view(b, h, 1, 1)


def _clip(ends: Ends, within: Ends, base: Tensor, outside: Tensor) -> Ends:
    low, high = torch.maximum(ends[0], within[0]) - base, torch.minimum(ends[1], within[1]) - base
    return low.masked_fill(outside, 0), high.masked_fill(outside, 0)


def _concatenate(parts: list[Ends], like: Tensor) -> Ends:
    if not parts:
        nothing = torch.zeros_like(like[..., :1])
        return nothing, nothing
    pairs = [torch.broadcast_tensors(*part) for part in parts]
    return torch.cat([p[0] for p in pairs], -1), torch.cat([p[1] for p in pairs], -1)
