"""Define forms: the masks that transformers builds, as values that know which keys they keep.

A form holds positions, as transformers does: the first query of a call has position `q_start`, and
the first key in memory has position `kv_start`. `Geometry` places a form on one call. Each form
bounds the keys that a query may keep, says whether it keeps everything, and becomes an attnkit mask
for the indices of the call. A term that keeps everything is dropped, so that decoding one token
needs no mask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnkit import Mask, and_masks, or_masks
from attnkit.masks import document


@dataclass(frozen=True)
class Geometry:
    """Places the queries and keys of a call at positions of the sequence.

    Attributes:
        batch: batch size.
        q_len, kv_len: number of queries and keys, at least 1.
        q_start, kv_start: positions of the first query and the first key.
        device: device on which masks capture tensors.
    """

    batch: int
    q_len: int
    kv_len: int
    q_start: int
    kv_start: int
    device: torch.device

    @property
    def q_end(self) -> int:
        """Return the position after the last query."""
        return self.q_start + self.q_len

    @property
    def kv_end(self) -> int:
        """Return the position after the last key."""
        return self.kv_start + self.kv_len

    @property
    def shift(self) -> int:
        """Return what turns the index of a query into the index of the key at its position."""
        return self.q_start - self.kv_start

    def keys(self, start: int, stop: int) -> Geometry:
        """Return the geometry of keys `start` to `stop - 1` of this call."""
        return replace(self, kv_len=stop - start, kv_start=self.kv_start + start)


class Form(ABC):
    """Describes the mask of a layer; a subclass overrides what it knows beyond the mask itself."""

    def span(self, at: Geometry) -> tuple[int, int]:
        """Return positions [start, stop) outside of which no query keeps a key."""
        return at.kv_start, at.kv_end

    def keeps_all(self, at: Geometry) -> bool:
        """Return whether every query is known to keep every key."""
        return False

    def key(self, at: Geometry) -> Hashable | None:
        """Return what determines `mask(at)` on a device; None if that includes data of tensors."""
        return None

    @abstractmethod
    def mask(self, at: Geometry) -> Mask:
        """Return the mask for the indices of a call, which start at 0."""


@dataclass(frozen=True)
class Everything(Form):
    """Keeps every key."""

    def keeps_all(self, at: Geometry) -> bool:
        return True

    def key(self, at: Geometry) -> Hashable:
        return "everything"

    def mask(self, at: Geometry) -> Mask:
        return and_masks()


@dataclass(frozen=True)
class Band(Form):
    """Keeps keys from `before` positions before the query to `after` positions after it.

    A causal mask has after=0. The sliding window of W keys, the query's own included, has
    before=W - 1. None is no limit.
    """

    before: int | None
    after: int | None

    def span(self, at: Geometry) -> tuple[int, int]:
        start = at.kv_start if self.before is None else at.q_start - self.before
        return start, at.kv_end if self.after is None else at.q_end + self.after

    def keeps_all(self, at: Geometry) -> bool:
        first = self.before is None or at.kv_start >= at.q_end - 1 - self.before
        return first and (self.after is None or at.kv_end - 1 <= at.q_start + self.after)

    def key(self, at: Geometry) -> Hashable:
        return "band", self.before, self.after, at.shift

    def mask(self, at: Geometry) -> Mask:
        least = None if self.before is None else at.shift - self.before
        most = None if self.after is None else at.shift + self.after

        def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            sides = []
            if least is not None:
                sides.append(kv >= q + least if least else kv >= q)
            if most is not None:
                sides.append(kv <= q + most if most else kv <= q)
            return sides[0] & sides[1] if len(sides) == 2 else sides[0]

        return Mask(keep, f"band({self.before}, {self.after}, shift={at.shift})")


CAUSAL = Band(None, 0)


@dataclass(frozen=True)
class Chunks(Form):
    """Keeps the keys of the query's chunk: `size` positions, counted from `starts[b]`.

    Attributes:
        size: positions of a chunk.
        starts: for each batch entry, the position where chunk 0 starts.
    """

    size: int
    starts: tuple[int, ...]

    def span(self, at: Geometry) -> tuple[int, int]:
        first = [(at.q_start - s) // self.size * self.size + s for s in self.starts]
        last = [(at.q_end - 1 - s) // self.size * self.size + s for s in self.starts]
        return min(first), max(last) + self.size

    def keeps_all(self, at: Geometry) -> bool:
        ends = (at.q_start, at.q_end - 1, at.kv_start, at.kv_end - 1)
        return all(len({(x - s) // self.size for x in ends}) == 1 for s in self.starts)

    def key(self, at: Geometry) -> Hashable:
        starts = self.starts if len(set(self.starts)) > 1 else self.starts[0]
        return "chunks", self.size, starts, at.q_start, at.kv_start

    def mask(self, at: Geometry) -> Mask:
        size, label = self.size, f"chunks({self.size})"
        if len(set(self.starts)) == 1:
            row, column = at.q_start - self.starts[0], at.kv_start - self.starts[0]

            def keep_alike(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
                return (kv + column) // size == (q + row) // size

            return Mask(keep_alike, label)
        rows = numbers([at.q_start - s for s in self.starts], at.device)
        columns = numbers([at.kv_start - s for s in self.starts], at.device)

        def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (kv + columns[b]) // size == (q + rows[b]) // size

        return Mask(keep, label)


@dataclass(frozen=True)
class Padding(Form):
    """Keeps the keys at positions `starts[b]` to `stops[b] - 1` of each batch entry."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    def span(self, at: Geometry) -> tuple[int, int]:
        return min(self.starts), max(self.stops)

    def keeps_all(self, at: Geometry) -> bool:
        return max(self.starts) <= at.kv_start and min(self.stops) >= at.kv_end

    def key(self, at: Geometry) -> Hashable:
        return "padding", *self._indices(at)

    def mask(self, at: Geometry) -> Mask:
        left, right = self._indices(at)
        terms = []
        if left:
            starts = numbers(left, at.device)
            terms.append(Mask(lambda b, h, q, kv: kv >= starts[b], "kv >= start"))
        if right:
            stops = numbers(right, at.device)
            terms.append(Mask(lambda b, h, q, kv: kv < stops[b], "kv < stop"))
        return and_masks(*terms)

    def _indices(self, at: Geometry) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the limits as indices of keys, 0 to `kv_len`; () for limits that mask nothing."""
        left, right = (
            tuple(clamp(s - at.kv_start, at.kv_len) for s in limits)
            for limits in (self.starts, self.stops)
        )
        return left if any(left) else (), right if min(right) < at.kv_len else ()


@dataclass(frozen=True, eq=False)
class Table(Form):
    """Keeps the keys where `visible` is True: padding with holes.

    Attributes:
        visible: bool [B, positions]; keys after the last position are masked.
    """

    visible: Tensor

    def span(self, at: Geometry) -> tuple[int, int]:
        return at.kv_start, self.visible.shape[1]

    def mask(self, at: Geometry) -> Mask:
        visible = _window(self.visible, at.kv_start, at.kv_len, at.device, fill=False)
        return Mask(lambda b, h, q, kv: visible[b, kv], "padding(table)")


@dataclass(frozen=True, eq=False)
class Groups(Form):
    """Keeps the keys of the query's group, for queries whose group is not negative.

    Attributes:
        ids: int [B, positions], the group of each position.
    """

    ids: Tensor

    def mask(self, at: Geometry) -> Mask:
        q_ids = _window(self.ids, at.q_start, at.q_len, at.device, fill=-1).int()
        kv_ids = _window(self.ids, at.kv_start, at.kv_len, at.device, fill=-1).int()

        def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            own = q_ids[b, q]
            return (own == kv_ids[b, kv]) & (own >= 0)

        return Mask(keep, "groups()")


@dataclass(frozen=True, eq=False)
class PackedSequences(Form):
    """Keeps the keys of the query's sequence, where several sequences share a row of the batch.

    transformers packs without a cache only, so positions are indices.

    Attributes:
        ids: int [B, length], the number of the sequence of each token.
    """

    ids: Tensor

    def mask(self, at: Geometry) -> Mask:
        ids = _window(self.ids, at.kv_start, at.kv_len, at.device, fill=-1).int()
        return document(ids[0] if len(ids) == 1 else ids)


@dataclass(frozen=True, eq=False)
class RemappedPositions(Form):
    """Applies a form to the positions inside packed sequences.

    Attributes:
        inner: the form.
        positions: int [B, length], the position of each token inside its sequence.
    """

    inner: Form
    positions: Tensor

    def mask(self, at: Geometry) -> Mask:
        rows = _window(self.positions, at.q_start, at.q_len, at.device, fill=0).int()
        columns = _window(self.positions, at.kv_start, at.kv_len, at.device, fill=0).int()
        inner = self.inner.mask(replace(at, q_start=0, kv_start=0))

        def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            kept: Tensor = inner(b, h, rows[b, q], columns[b, kv])
            return kept

        return Mask(keep, f"remapped({inner.label})")


@dataclass(frozen=True, eq=False)
class Function(Form):
    """Keeps what a function of positions keeps, `function(b, h, q, kv) -> bool`."""

    function: Callable[..., Any]

    def mask(self, at: Geometry) -> Mask:
        function, row, column = self.function, at.q_start, at.kv_start

        def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Any:
            return function(b, h, q + row if row else q, kv + column if column else kv)

        return Mask(keep, getattr(function, "__name__", "function"))


@dataclass(frozen=True)
class And(Form):
    """Keeps what all parts keep."""

    parts: tuple[Form, ...]

    def span(self, at: Geometry) -> tuple[int, int]:
        spans = [part.span(at) for part in self.parts]
        return max(start for start, _ in spans), min(stop for _, stop in spans)

    def keeps_all(self, at: Geometry) -> bool:
        return not self._terms(at)

    def key(self, at: Geometry) -> Hashable | None:
        return _joined("and", self._terms(at), at)

    def mask(self, at: Geometry) -> Mask:
        return and_masks(*(part.mask(at) for part in self._terms(at)))

    def _terms(self, at: Geometry) -> list[Form]:
        return [part for part in self.parts if not part.keeps_all(at)]


@dataclass(frozen=True)
class Or(Form):
    """Keeps what any part keeps."""

    parts: tuple[Form, ...]

    def span(self, at: Geometry) -> tuple[int, int]:
        spans = [part.span(at) for part in self.parts]
        return min(start for start, _ in spans), max(stop for _, stop in spans)

    def keeps_all(self, at: Geometry) -> bool:
        return any(part.keeps_all(at) for part in self.parts)

    def key(self, at: Geometry) -> Hashable | None:
        return _joined("or", list(self.parts), at)

    def mask(self, at: Geometry) -> Mask:
        return or_masks(*(part.mask(at) for part in self.parts))


def _joined(name: str, parts: list[Form], at: Geometry) -> Hashable | None:
    keys = [part.key(at) for part in parts]
    return None if None in keys else (name, *keys)


def clamp(index: int, most: int) -> int:
    """Return the nearest number to `index` from 0 to `most`."""
    return min(max(index, 0), most)


def numbers(values: Any, device: torch.device) -> Tensor:
    """Return an int32 tensor that masks may capture, also where the caller is in inference mode."""
    with torch.inference_mode(False):
        return torch.tensor(list(values), dtype=torch.int32, device=device)


def _window(table: Tensor, start: int, length: int, device: torch.device, *, fill: Any) -> Tensor:
    """Return columns `start` to `start + length - 1` of a table, a copy; `fill` beyond its end.

    It is a copy because transformers may write to its own tables after the mask is made. It is on
    the device of the layer, which differs from layer to layer if a model is spread over several.
    """
    part = table[:, start : start + length]
    missing = length - part.shape[1]
    with torch.inference_mode(False):
        copy = torch.nn.functional.pad(part, (0, missing), value=fill) if missing else part.clone()
        return copy.to(device)
