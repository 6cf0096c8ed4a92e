"""Define `Packing`: the masks and score_mods of packed sequences, and the tables that they read."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit import ArgumentError, Mask, ScoreMod, ShapeError
from attnkit.integrations.packed.identity_cache import IdentityCache
from attnkit.integrations.packed.options import Function, Window
from attnkit.integrations.packed.positions import takes_token_positions
from attnkit.tracing.axes import Sizes
from attnkit.tracing.built_for import check_built_for
from attnkit.util.data_state import DataState, set_own, state_of


class _Rows(NamedTuple):
    """Holds int32 tables [total_q]: of each query the sequence, place, first key and key after the
    last.
    """

    sequence: Tensor
    place: Tensor
    first: Tensor
    stop: Tensor


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
        used: int [N], how many keys of each sequence exist, from its start; None for all.
        longest_q, longest_k: lengths of the longest sequence; None if they were not read.
        starts_agree: whether each sequence is known to have the same offsets and lengths in both.
        states: states of the offsets' data when they were read; () if they were not.
    """

    q_offsets: Tensor
    k_offsets: Tensor
    total_q: int
    total_k: int
    used: Tensor | None = None
    longest_q: int | None = None
    longest_k: int | None = None
    starts_agree: bool = False
    states: tuple[DataState, ...] = ()
    _masks: IdentityCache[Mask] = field(default_factory=lambda: IdentityCache(16))
    _score_mods: IdentityCache[ScoreMod] = field(default_factory=lambda: IdentityCache(16))
    _rows: _Rows | None = None
    _columns: Tensor | None = None

    @property
    def count(self) -> int:
        """Return the number of sequences."""
        return self.q_offsets.shape[0] - 1

    def is_current(self) -> bool:
        """Return whether no edit of the offsets was found since the search for the packing.

        The search compares the data itself, unless a GPU does it later: then a call that is prepared
        anew may find an edit.
        """
        known = zip(self.sources, self.states, strict=False)
        return all(s.expected is None or state_of(t) is s for t, s in known)

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """Return the tensors from whose data the tables are made."""
        both = self.q_offsets, self.k_offsets
        return both if self.used is None else (*both, self.used)

    def rows(self) -> _Rows:
        """Return the tables of the queries."""
        if self._rows is None:
            with _own_tables():
                row, sequence = _sequences(self.q_offsets, self.total_q)
                ends, offsets = self.q_offsets.int()[1:], self.k_offsets.int()
                first, stop = offsets[sequence], offsets[1:][sequence]
                if self.used is not None:
                    stop = first + self.used.int()[sequence]
                place = row - ends[sequence] + (stop - first)
                stop = torch.where(row < ends[-1], stop, first)
                self._rows = _Rows(*map(_own, (sequence, place, first, stop)))
        return self._rows

    def columns(self) -> Tensor:
        """Return int32 [total_k], the position of each key in its sequence."""
        if self._columns is None:
            with _own_tables():
                column, sequence = _sequences(self.k_offsets, self.total_k)
                self._columns = _own(column - self.k_offsets.int()[sequence])
        return self._columns

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
        sequence, place, first, _ = self.rows()
        low, high = self._bounds(window)

        def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (kv >= low[q]) & (kv < high[q])

        kept = Mask(keep, f"packed(window={window})")
        if not torch.compiler.is_compiling():  # there each call makes its tables
            kept &= self._watched()
        if inner is None:
            return kept
        given = inner

        def keep_inner(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            here: Tensor = given(sequence[q], h, place[q], kv - first[q])
            both: Tensor = kept(b, h, q, kv) & here
            return both

        own = inner if isinstance(inner, Mask) else Mask(inner)
        self._check_sizes(own)
        label = f"packed(window={window}, mask={own.label})"
        axes = [table.without("b", "q", "kv") for table in own.axes]
        return Mask(keep_inner, label, axes=axes)

    def _watched(self) -> Mask:
        """Return a mask of what the tables already tell, which reads the data they were made from.

        attnkit watches the data that a mask reads.
        """
        cu_seqlens_q, cu_seqlens_k, last = self.q_offsets, self.k_offsets, self.count

        def inside(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (q < cu_seqlens_q[last]) & (kv < cu_seqlens_k[last])

        both = Mask(inside)
        if self.used is None:
            return both
        (sequence, _, first, _), seqused_k = self.rows(), self.used
        return both & (lambda b, h, q, kv: kv - first[q] < seqused_k[sequence[q]])

    def _bounds(self, window: Window) -> tuple[Tensor, Tensor]:
        """Return the first key of each row's window, and the key after its last; int32 [total_q].

        Both stay between the ends of the sequence, so that neither falls from row to row.
        """
        _, place, first, stop = self.rows()
        left, right = window
        low, high = first, stop
        with _own_tables():
            # A place is at most total_q before the first key. A longer window has no other effect,
            # and its sums could leave int32.
            farthest = self.total_q + self.total_k
            if left is not None:
                low = _own(torch.clamp(first + place - min(left, farthest), first, stop))
            if right is not None:
                after = first + place + (min(right, farthest) + 1)
                high = _own(torch.clamp(after, first, stop))
        return low, high

    def score_mod(self, inner: Function | None, heads: int) -> Function | None:
        """Return a score_mod that gives `inner` the sequence, the place and the key's position.

        It is the same object for the same `inner`; or `inner` itself, if that has the same value for
        the positions of the tokens.

        Args:
            inner: a score_mod, or None.
            heads: number of query heads.

        Raises:
            ShapeError: `inner` was built for other sizes.
            TraceError: `inner` cannot be traced.
        """
        if inner is None:
            return None
        if self.states and takes_token_positions(
            inner,
            starts_agree=self.starts_agree,
            lengths=(self.total_q, self.total_k),
            heads=heads,
            device=self.q_offsets.device,
        ):
            return inner
        return self._score_mods.get((), (inner,), lambda: self._new_score_mod(inner))

    def _new_score_mod(self, inner: Function) -> ScoreMod:
        self._check_sizes(inner)
        (sequence, place, _, _), position = self.rows(), self.columns()
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


def _own_tables() -> AbstractContextManager[Any]:
    """Return a context in which new tensors may be captured, also if the caller infers."""
    if torch.compiler.is_compiling():
        return nullcontext()
    return torch.inference_mode(False)


def _own(table: Tensor) -> Tensor:
    """Return a new table, marked as one that only this module writes: its data is not compared."""
    if not torch.compiler.is_compiling():
        set_own(table)
    return table


def _everything(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv >= 0


def _sequences(offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the positions 0 .. total - 1 and the sequence of each, both int32 [total].

    Positions after the last offset are counted to the last sequence.
    """
    position = torch.arange(total, dtype=torch.int32, device=offsets.device)
    inner = offsets.int()[1:-1].contiguous()
    return position, torch.searchsorted(inner, position, right=True, out_int32=True)
