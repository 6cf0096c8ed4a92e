"""Define `Packing`: which tokens belong to which sequence, from offsets in tensors.

The tables of a packing are made on the device of the offsets. The offsets are read on the host once
for each change of their data, to check them; calls that find the packing again wait for nothing.
Masks of a packing capture the offsets beside the tables, so that attnkit watches the data from which
the tables were made: where a change of the offsets is found, the packing is made again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit import (
    ArgumentError,
    DeviceError,
    DTypeError,
    Mask,
    OptionError,
    ScoreMod,
    ShapeError,
    UnsupportedError,
)
from attnkit.integrations.packed.identity_cache import IdentityCache
from attnkit.integrations.packed.options import Function, Window
from attnkit.tracing.axes import Sizes
from attnkit.tracing.built_for import check_built_for
from attnkit.util import caches
from attnkit.util.arguments import shown
from attnkit.util.tensor_cache import VersionedCache
from attnkit.util.torch_private import is_fake, is_stream_capturing


class Names(NamedTuple):
    """Holds the names that an interface gives to the arguments of a packed call, for messages."""

    query: str
    key: str
    value: str
    q_offsets: str
    k_offsets: str
    longest_q: str
    longest_k: str


@dataclass(eq=False)
class Packing:
    """Holds the sequences of a packed call and the functions made for them.

    Query i of a sequence with n queries and m keys has the place i + m - n among its keys, so that
    the last query is at the last key, as in FlashAttention. Tokens after the last offset belong to
    no sequence; their queries keep nothing.

    Attributes:
        q_offsets, k_offsets: int32 or int64 [N + 1], the start of each sequence and the end of the
            last, as the caller passed them.
        total_q, total_k: number of query and key tokens.
        longest_q, longest_k: lengths of the longest sequence; None if they were not read.
    """

    q_offsets: Tensor
    k_offsets: Tensor
    total_q: int
    total_k: int
    longest_q: int | None = None
    longest_k: int | None = None
    _masks: IdentityCache[Mask] = field(default_factory=lambda: IdentityCache(16))
    _score_mods: IdentityCache[ScoreMod] = field(default_factory=lambda: IdentityCache(16))

    @property
    def count(self) -> int:
        """Return the number of sequences."""
        return self.q_offsets.shape[0] - 1

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return int32 [total_q] of each query: sequence, place, first key, key after the last."""
        with torch.inference_mode(False):
            row, sequence = _sequences(self.q_offsets, self.total_q)
            ends, offsets = self.q_offsets.int()[1:], self.k_offsets.int()
            first, stop = offsets[sequence], offsets[1:][sequence]
            place = row - ends[sequence] + (stop - first)
            stop = torch.where(row < ends[-1], stop, first)
            return sequence, place, first, stop

    @cached_property
    def _columns(self) -> Tensor:
        """Return int32 [total_k], the position of each key in its sequence."""
        with torch.inference_mode(False):
            column, sequence = _sequences(self.k_offsets, self.total_k)
            return column - self.k_offsets.int()[sequence]

    def mask(self, window: Window, inner: Function | None) -> Mask:
        """Return the mask of a call, the same object for the same arguments.

        Args:
            window: keys that a row keeps before and after the place of its query.
            inner: a mask_mod of sequence, head, place and position of the key in its sequence.

        Raises:
            ArgumentError: `inner` is no function.
            ShapeError: `inner` was built for other sizes.
        """
        if inner is not None and not callable(inner):
            raise ArgumentError(
                f"mask must be a function mask_mod(b, h, q, kv) or None, got {type(inner).__name__}"
            )
        return self._masks.get(window, (inner,), lambda: self._new_mask(window, inner))

    def _new_mask(self, window: Window, inner: Function | None) -> Mask:
        sequence, place, first, _ = self._rows
        low, high = self._bounds(window)
        q_offsets, k_offsets, last = self.q_offsets, self.k_offsets, self.count

        # The offsets are read, although the tables tell all, so that their data is watched.
        def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            inside = (q < q_offsets[last]) & (kv < k_offsets[last])
            return inside & (kv >= low[q]) & (kv < high[q])

        if inner is None:
            return Mask(keep, f"packed({self.count} sequences, window={window})")
        given = inner

        def keep_inner(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            here: Tensor = given(sequence[q], h, place[q], kv - first[q])
            return keep(b, h, q, kv) & here

        own = inner if isinstance(inner, Mask) else Mask(inner)
        self._check_sizes(own)
        label = f"packed({self.count} sequences, window={window}, mask={own.label})"
        axes = [table.without("b", "q", "kv") for table in own.axes]
        return Mask(keep_inner, label, axes=axes)

    def _bounds(self, window: Window) -> tuple[Tensor, Tensor]:
        """Return the first key of each row's window, and the key after its last; int32 [total_q]."""
        _, place, first, stop = self._rows
        left, right = window
        low, high = first, stop
        with torch.inference_mode(False):
            # clamped, so that no sum leaves int32; the window is as long as the keys at most
            if left is not None:
                low = torch.maximum(first, first + place - min(left, self.total_k))
            if right is not None:
                high = torch.minimum(stop, first + place + (min(right, self.total_k) + 1))
        return low, high

    def score_mod(self, inner: Function | None) -> ScoreMod | None:
        """Return a score_mod that gives `inner` the sequence, the place and the key's position.

        It is the same object for the same `inner`.

        Raises:
            ShapeError: `inner` was built for other sizes.
        """
        if inner is None:
            return None
        return self._score_mods.get((), (inner,), lambda: self._new_score_mod(inner))

    def _new_score_mod(self, inner: Function) -> ScoreMod:
        self._check_sizes(inner)
        (sequence, place, _, _), position = self._rows, self._columns
        own = inner if isinstance(inner, ScoreMod) else ScoreMod(inner)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Any:
            return inner(score, sequence[q], h, place[q], position[kv])

        axes = [table.without("b", "q", "kv") for table in own.axes]
        return ScoreMod(score_mod, f"packed({own.label})", axes=axes)

    def _check_sizes(self, function: Function) -> None:
        """Raise a ShapeError unless a function fits every sequence; heads are checked by the call."""
        if isinstance(function, Mask) and function.lengths != Mask(_everything).lengths:
            raise ShapeError(
                f"mask must fit sequences of any length; {function.label} was built for "
                f"{function.lengths}"
            )
        # places are among the keys
        check_built_for(function, Sizes(b=self.count, q=self.longest_k, kv=self.longest_k))


def _everything(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv >= 0


def _sequences(offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the positions 0 .. total - 1 and the sequence of each, both int32 [total].

    Positions after the last offset are counted to the last sequence.
    """
    position = torch.arange(total, dtype=torch.int32, device=offsets.device)
    inner = offsets.int()[1:-1].contiguous()
    return position, torch.searchsorted(inner, position, right=True, out_int32=True)


_packings: VersionedCache[Packing] = VersionedCache(16)
caches.register(_packings.clear)


def find_packing(
    names: Names,
    query: Tensor,
    key: Tensor,
    q_offsets: Any,
    k_offsets: Any,
    longest_q: Any,
    longest_k: Any,
) -> Packing:
    """Check the offsets of a call and return its packing, the same object for the same data.

    In torch.compile, and for tensors without data, the offsets are not read and not checked.

    Args:
        names: names of the arguments, for messages.
        query: [total_q, Hq, D].
        key: [total_k, Hkv, D].
        q_offsets, k_offsets: int32 or int64 [N + 1], the start of each sequence and the end of the
            last.
        longest_q, longest_k: bounds on the lengths of the sequences.

    Raises:
        ArgumentError, ShapeError, DTypeError, DeviceError: an argument is not as described.
        OptionError: the offsets do not start at 0, decrease or leave the tokens; or a sequence is
            longer than its bound.
        UnsupportedError: the offsets are not known yet, and a CUDA graph is captured.
    """
    for name, offsets in ((names.q_offsets, q_offsets), (names.k_offsets, k_offsets)):
        _check_tensor(name, offsets, names.query, query)
    if q_offsets.shape != k_offsets.shape:
        raise ShapeError(
            f"{names.q_offsets} and {names.k_offsets} must have one entry for each sequence and one "
            f"more, got {list(q_offsets.shape)} and {list(k_offsets.shape)}"
        )
    totals = query.shape[0], key.shape[0]
    if torch.compiler.is_compiling() or q_offsets.is_meta or is_fake(q_offsets):
        return Packing(q_offsets, k_offsets, *totals)

    def make() -> Packing:
        longest = (
            _read(names.q_offsets, q_offsets, names.query, totals[0]),
            _read(names.k_offsets, k_offsets, names.key, totals[1]),
        )
        return Packing(q_offsets, k_offsets, *totals, *longest)

    packing = _packings.get(totals, (q_offsets, k_offsets), make)
    for name, bound, longest in (
        (names.longest_q, longest_q, packing.longest_q),
        (names.longest_k, longest_k, packing.longest_k),
    ):
        if isinstance(bound, bool) or not isinstance(bound, int):
            raise ArgumentError(f"{name} must be an int, got {shown(bound)}")
        if longest is not None and bound < longest:
            raise OptionError(
                f"{name} must be at least the length of the longest sequence, {longest}, got {bound}"
            )
    return packing


def _check_tensor(name: str, offsets: Any, query_name: str, query: Tensor) -> None:
    if not isinstance(offsets, Tensor):
        raise ArgumentError(
            f"{name} must be an int32 tensor [sequences + 1], got {type(offsets).__name__}"
        )
    if offsets.dtype not in (torch.int32, torch.int64):
        raise DTypeError(f"{name} must be int32, got {offsets.dtype}; pass {name}.int()")
    if offsets.ndim != 1 or offsets.shape[0] < 2:
        raise ShapeError(
            f"{name} must have shape [sequences + 1], for at least one sequence, got "
            f"{list(offsets.shape)}"
        )
    if offsets.device != query.device:
        raise DeviceError(
            f"{name} is on {offsets.device}, {query_name} is on {query.device}; move it with "
            f"{name}.to({str(query.device)!r})"
        )


def _read(name: str, offsets: Tensor, tokens: str, total: int) -> int:
    """Check the data of offsets, and return the length of the longest sequence."""
    if offsets.is_cuda and is_stream_capturing():
        raise UnsupportedError(
            f"{name} has data that no earlier call has seen, and reading it waits for the GPU, which "
            "a CUDA graph cannot capture; call the function once before the capture"
        )
    ends: list[int] = offsets.tolist()
    if ends[0] != 0:
        raise OptionError(f"{name} must begin with 0, got {ends[0]}")
    lengths = [stop - start for start, stop in zip(ends[:-1], ends[1:], strict=True)]
    shortest = min(lengths)
    if shortest < 0:
        at = lengths.index(shortest)
        raise OptionError(
            f"{name} must not decrease, or sequences would overlap; entry {at + 1} is "
            f"{ends[at + 1]} after {ends[at]}"
        )
    if ends[-1] > total:
        raise OptionError(
            f"{name} must end with the number of tokens of {tokens}, {total}, or less, got {ends[-1]}"
        )
    return max(lengths)
