"""Masks as values: `causal() & sliding_window(1024) | prefix(128)`, `~mask`.

A mask is a function `mask_mod(b, h, q, kv)` that says which positions are kept, with the boolean
operators on it. Nothing is computed until attention needs the tiles.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attnkit.errors import ArgumentError
from attnkit.tracing.mask_lengths import Lengths, as_lengths, joined

MaskMod: TypeAlias = Callable[..., Any]

_SIGNS = {"and": "&", "or": "|", "xor": "^"}


class Mask:
    """A mask_mod that composes with `&`, `|`, `^` and `~`; plain functions mix in anywhere.

    Args:
        function: `mask_mod(b, h, q, kv) -> bool tensor`; indices are int32 scalars.
        label: what `repr` shows, for example "causal()".
        lengths: (query, kv) lengths that the mask was built for, each an int, a (least, most) pair
            or None for any. Masks that are combined must agree; at other lengths a mask is refused
            (ShapeError) wherever it is used.

    Attributes:
        lengths: the ranges of query and kv length, those of all parts together.

    Raises:
        ArgumentError: function is not callable.
        OptionError: lengths is not such a pair.
        ShapeError: masks are combined that no length suits.
    """

    __slots__ = ("__weakref__", "function", "label", "lengths", "op", "parts")

    def __init__(self, function: MaskMod, label: str | None = None, *, lengths: Any = None) -> None:
        if not callable(function):
            raise ArgumentError(
                f"a mask must be a function mask_mod(b, h, q, kv), got {type(function).__name__}"
            )
        self.function: MaskMod | None = function
        self.label: str = label or str(getattr(function, "__name__", type(function).__name__))
        self.op = ""
        self.parts: tuple[Mask, ...] = ()
        self.lengths: Lengths = as_lengths(lengths)

    @classmethod
    def _join(cls, op: str, *parts: Any) -> Mask:
        masks = tuple(p if isinstance(p, Mask) else Mask(p) for p in parts)
        whole = cls.__new__(cls)
        whole.function, whole.op, whole.parts = None, op, masks
        shown = [f"({m.label})" if m.op not in ("", "not", op) else m.label for m in masks]
        whole.label = f"~{shown[0]}" if op == "not" else f" {_SIGNS[op]} ".join(shown)
        whole.lengths = _common(masks)
        return whole

    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        if self.function is not None:
            return self.function(b, h, q, kv)
        values = [part(b, h, q, kv) for part in self.parts]
        if self.op == "not":
            return ~values[0] if not isinstance(values[0], bool) else not values[0]
        result = values[0]
        for value in values[1:]:
            if self.op == "and":
                result = result & value
            elif self.op == "or":
                result = result | value
            else:
                result = result ^ value
        return result

    def __and__(self, other: MaskMod) -> Mask:
        return Mask._join("and", self, other) if callable(other) else NotImplemented

    def __rand__(self, other: MaskMod) -> Mask:
        return Mask._join("and", other, self) if callable(other) else NotImplemented

    def __or__(self, other: MaskMod) -> Mask:
        return Mask._join("or", self, other) if callable(other) else NotImplemented

    def __ror__(self, other: MaskMod) -> Mask:
        return Mask._join("or", other, self) if callable(other) else NotImplemented

    def __xor__(self, other: MaskMod) -> Mask:
        return Mask._join("xor", self, other) if callable(other) else NotImplemented

    def __rxor__(self, other: MaskMod) -> Mask:
        return Mask._join("xor", other, self) if callable(other) else NotImplemented

    def __invert__(self) -> Mask:
        return self.parts[0] if self.op == "not" else Mask._join("not", self)

    def shift(self, q: int | Tensor | None = None, kv: int | Tensor | None = None) -> Mask:
        """This mask moved along the queries or the keys.

        The result keeps (q', kv') where this mask keeps (q' + q, kv' + kv): its first row is row
        `q` of this mask. What lies before the first row or column of this mask is not kept. The
        result may be used with fewer rows or columns than are left, also for a shift by 0: it is a
        window on this mask, as for the queries of one chunk.

        Args:
            q, kv: an int of either sign, or an integer tensor, [] or [B] with one per batch entry;
                None to leave that side as it is. A tensor may change, so the lengths that the mask
                was built for are not known of the result.

        Raises:
            ArgumentError: neither.
            ShapeError: nothing is left of a mask that was built for given lengths.

        >>> causal = Mask(lambda b, h, q, kv: kv <= q, "causal()")
        >>> causal.shift(q=5)  # the queries stand behind 5 keys of a cache
        causal().shift(q=5)
        """
        q_shift, kv_shift = _check_shift("q", q), _check_shift("kv", kv)
        lengths = _moved_lengths(self, q_shift, kv_shift)

        def keep(b: Any, h: Any, q: Any, kv: Any) -> Any:
            row, behind = _moved(q, q_shift, b)
            column, inside = _moved(kv, kv_shift, b)
            kept = self(b, h, row, column)
            for condition in (behind, inside):
                kept = kept if condition is None else condition & kept
            return kept

        shown = f"({self.label})" if self.op else self.label
        given = [
            f"{n}={list(by.shape) if isinstance(by, Tensor) else by}"
            for n, by in (("q", q), ("kv", kv))
            if by is not None
        ]
        return Mask(keep, f"{shown}.shift({', '.join(given)})", lengths=lengths)

    def __bool__(self) -> bool:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch._dynamo."):
            return True  # torch 2.11 asks this of whatever a compiled function calls
        raise ArgumentError(
            f"the mask {self.label} has no truth value; combine masks with `&`, `|`, `~`, not with "
            "`and`, `or`, `not`, and compare with `is None`"
        )

    def __repr__(self) -> str:
        return self.label


def and_masks(*mask_mods: MaskMod) -> Mask:
    """The mask that keeps what all of the given masks keep (everything, for none)."""
    return Mask._join("and", *mask_mods) if mask_mods else Mask(noop_mask)


def or_masks(*mask_mods: MaskMod) -> Mask:
    """The mask that keeps what any of the given masks keeps (nothing, for none)."""
    return Mask._join("or", *mask_mods) if mask_mods else ~Mask(noop_mask)


def per_head(masks: Sequence[MaskMod]) -> Mask:
    """The mask that is `masks[h]` for query head h.

    Attention with more heads than masks is refused (BoundsError).

    Args:
        masks: one mask or mask_mod for each query head; the same one may stand there repeatedly.

    Raises:
        ArgumentError: not a sequence of callables, or an empty one.
        ShapeError: masks that were built for different lengths.
    """
    return _per("head", masks)


def per_batch(masks: Sequence[MaskMod]) -> Mask:
    """The mask that is `masks[b]` for batch entry b.

    Attention with more batch entries than masks is refused (BoundsError).

    Args:
        masks: one mask or mask_mod for each batch entry; the same one may stand there repeatedly.

    Raises:
        ArgumentError: not a sequence of callables, or an empty one.
        ShapeError: masks that were built for different lengths.
    """
    return _per("batch", masks)


def _per(what: str, masks: Sequence[MaskMod]) -> Mask:
    if not isinstance(masks, Sequence) or not masks:
        raise ArgumentError(
            f"per_{what} takes one mask per {'head' if what == 'head' else 'batch entry'} in a "
            f"list, got {masks!r}"
        )
    different = {id(m): m if isinstance(m, Mask) else Mask(m) for m in masks}
    place = {key: i for i, key in enumerate(different)}
    choice = [place[id(m)] for m in masks]
    options = tuple(different.values())
    # The choice is a tensor on each device in use, not arithmetic on h, so that an index beyond
    # the masks is found out like any index that leaves its captured tensor.
    tables: dict[str, Tensor] = {}

    def keep(b: Any, h: Any, q: Any, kv: Any) -> Any:
        at = h if what == "head" else b
        device = getattr(at, "device", None)
        table = tables.get(str(device))
        if table is None and torch.compiler.is_dynamo_compiling():
            table = torch.tensor(choice, dtype=torch.int32, device=device)
        elif table is None:
            with torch.inference_mode(False):
                table = tables[str(device)] = torch.tensor(choice, dtype=torch.int32, device=device)
        chosen = table[at]
        *others, last = (option(b, h, q, kv) for option in options)
        if not others:
            return (chosen == 0) & last
        kept = last
        for i in reversed(range(len(others))):
            kept = torch.where(chosen == i, others[i], kept)
        return kept

    labels = [m.label if isinstance(m, Mask) else Mask(m).label for m in masks]
    return Mask(keep, f"per_{what}([{', '.join(labels)}])", lengths=_common(options))


def check_built_for(mask: Any, q_len: int, kv_len: int) -> None:
    """Lengths at which a mask is used; a plain function has none of its own.

    Raises:
        ShapeError: the mask was built for others.
    """
    if isinstance(mask, Mask):
        mask.lengths.check(mask.label, q_len, kv_len)


def _common(masks: Sequence[Mask]) -> Lengths:
    return joined((m.label, m.lengths) for m in masks)


def _check_shift(name: str, by: Any) -> int | Tensor | None:
    if by is None:
        return None
    whole = isinstance(by, int) and not isinstance(by, bool)
    if isinstance(by, Tensor):
        whole = by.ndim <= 1 and not (by.is_floating_point() or by.is_complex())
        whole = whole and by.dtype != torch.bool
    if not whole:
        got = f"{by.dtype} {list(by.shape)}" if isinstance(by, Tensor) else repr(by)
        raise ArgumentError(
            f"shift takes an int or an integer tensor, [] or [B], as {name}, got {got}"
        )
    return by  # type: ignore[no-any-return]


def _moved_lengths(mask: Mask, q: int | Tensor | None, kv: int | Tensor | None) -> Lengths:
    """The lengths of a moved mask; any where a tensor says how far."""
    known = [None if isinstance(by, Tensor) else by for by in (q, kv)]
    found = mask.lengths.moved(mask.label, *known)
    free = Lengths()
    return Lengths(
        free.q if isinstance(q, Tensor) else found.q,
        free.kv if isinstance(kv, Tensor) else found.kv,
    )


def _moved(at: Any, by: int | Tensor | None, b: Any) -> tuple[Any, Any]:
    """A moved index, and where it is not before the first position (None: everywhere)."""
    if by is None:
        return at, None
    if isinstance(by, Tensor):
        moved = at + (by[b] if by.ndim else by)
        return moved, moved >= 0
    return (at + by, at + by >= 0) if by < 0 else (at + by, None)


def noop_mask(b: Any, h: Any, q: Any, kv: Any) -> bool:
    """The mask that keeps everything."""
    return True
