"""Compute the value range of a captured tensor over boxes of indices.

This serves loads whose index depends on q and kv together. Along each axis two overlapping windows
of a power-of-two length cover a box, as in a sparse table for range-minimum queries. For each
window length that occurs, the tensor is reduced over all such windows once, by doubling. The range
is exact for any box. If the tensor is too large for that, the range of the whole tensor is
returned, and tiles that it leaves undecided are evaluated.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from attnkit.graph.ir import BOOL, F32, Node
from attnkit.sparsity.ranges.eval_interval import Interval
from attnkit.sparsity.ranges.tables import Domain, Reduce, extremes, value_range

# Bytes of all reduced copies of one tensor.
_MAX_BYTES = 32 << 20


class Boxes:
    """Answers range queries on the captured tensors of a domain."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._copies: dict[tuple[object, ...], Interval] = {}
        self._whole: dict[tuple[object, ...], Interval] = {}

    def load(self, n: Node, index: Sequence[Interval]) -> Interval:
        """Return the range of load `n` if each index is in its interval (int64, broadcastable)."""
        slot = int(n.attr)  # type: ignore[arg-type]
        tensor = self._domain.tensors[slot]
        first, last, code = _boxes(index, tensor.shape)
        codes = torch.unique(code).tolist()
        if codes != [0] and len(codes) * self._bytes(tensor) > _MAX_BYTES:
            return self._overall(n, slot)
        low, high = self._query(slot, first, last, _powers(codes[0], tensor.dim()))
        for c in codes[1:]:
            other = self._query(slot, first, last, _powers(c, tensor.dim()))
            low = torch.where(code == c, other[0], low)
            high = torch.where(code == c, other[1], high)
        return self._converted(n, low), self._converted(n, high)

    def _bytes(self, tensor: Tensor) -> int:
        return 2 * tensor.numel() * tensor.element_size()  # two copies: least and greatest

    def _overall(self, n: Node, slot: int) -> Interval:
        key = (slot, n.type)
        if key not in self._whole:
            self._whole[key] = value_range(self._domain.tensors[slot], n, self._domain.dtype)
        return self._whole[key]

    def _converted(self, n: Node, value: Tensor) -> Tensor:
        if n.type == F32:
            return value.to(self._domain.dtype)
        return value.to(torch.bool if n.type == BOOL else torch.int64)

    def _query(
        self, slot: int, first: list[Tensor], last: list[Tensor], powers: tuple[int, ...]
    ) -> Interval:
        low, high = self._copy(slot, powers)
        smaller, larger = extremes(low)
        result: Interval | None = None
        for corner in itertools.product(*((0, 1) if p else (0,) for p in powers)):
            at = []
            for axis, (end, p) in enumerate(zip(corner, powers, strict=True)):
                position = last[axis] - (1 << p) + 1 if end else first[axis]
                # boxes with other window lengths may leave the tensor; their result is not used
                at.append(position.clamp(0, low.shape[axis] - 1))
            here = low[tuple(at)], high[tuple(at)]
            result = (
                here
                if result is None
                else (smaller(result[0], here[0]), larger(result[1], here[1]))
            )
        if result is None:
            raise AssertionError("a product of no factors has one element")
        return result

    def _copy(self, slot: int, powers: tuple[int, ...]) -> Interval:
        key = (slot, *powers)
        if key not in self._copies:
            low = high = self._domain.tensors[slot]
            if any(powers) and len(self._copies) * self._bytes(low) > _MAX_BYTES:
                self._copies.clear()
            smaller, larger = extremes(low)
            for axis, power in enumerate(powers):
                for step in range(power):
                    low = _doubled(low, axis, 1 << step, smaller)
                    high = _doubled(high, axis, 1 << step, larger)
            self._copies[key] = low, high
        return self._copies[key]


def _doubled(values: Tensor, axis: int, span: int, reduce: Reduce) -> Tensor:
    length = values.shape[axis] - span
    return reduce(values.narrow(axis, 0, length), values.narrow(axis, span, length))


def _boxes(
    index: Sequence[Interval], shape: Sequence[int]
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Convert index intervals to boxes of a tensor, and find the window length of each axis.

    Returns:
        The first and the last entry of the boxes along each axis, and a code for the window
        lengths 2**p of all axes: p of axis i is in bits 5 * i to 5 * i + 4, see `_powers`.
    """
    first, last = [], []
    code = index[0][0].new_zeros(())
    for axis, ((low, high), size) in enumerate(zip(index, shape, strict=True)):
        wraps = high < 0  # all indices are negative: they count from the end
        low, high = torch.where(wraps, low + size, low), torch.where(wraps, high + size, high)
        outside = (low < 0) | (high >= size)
        first.append(low.masked_fill(outside, 0))
        last.append(high.masked_fill(outside, size - 1))
        length = (last[-1] - first[-1] + 1).to(torch.float64)
        code = code + (torch.log2(length).floor().to(torch.int64) << (5 * axis))
    return first, last, code


def _powers(code: int, axes: int) -> tuple[int, ...]:
    return tuple((code >> (5 * axis)) & 31 for axis in range(axes))
