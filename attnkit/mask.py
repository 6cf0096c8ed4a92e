"""Masks as values: `causal() & sliding_window(1024) | prefix(128)`, `~mask`.

A mask is a function `mask_mod(b, h, q, kv)` that says which positions are kept, with the boolean
operators on it. Nothing is computed until attention needs the tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from attnkit.errors import ArgumentError

if TYPE_CHECKING:
    from attnkit.intervals import Intervals

MaskMod: TypeAlias = Callable[..., Any]

_SIGNS = {"and": "&", "or": "|", "xor": "^"}


class Mask:
    """A mask_mod that composes with `&`, `|`, `^` and `~`; plain functions mix in anywhere.

    Args:
        function: `mask_mod(b, h, q, kv) -> bool tensor`; indices are int32 scalars.
        label: what `repr` shows, for example "causal()".

    Raises:
        ArgumentError: function is not callable.
    """

    __slots__ = ("function", "label", "op", "parts")

    def __init__(self, function: MaskMod, label: str | None = None) -> None:
        if not callable(function):
            raise ArgumentError(
                f"a mask must be a function mask_mod(b, h, q, kv), got {type(function).__name__}"
            )
        self.function: MaskMod | None = function
        self.label: str = label or str(getattr(function, "__name__", type(function).__name__))
        self.op = ""
        self.parts: tuple[Mask, ...] = ()

    @classmethod
    def _join(cls, op: str, *parts: Any) -> Mask:
        masks = tuple(p if isinstance(p, Mask) else Mask(p) for p in parts)
        joined = cls.__new__(cls)
        joined.function, joined.op, joined.parts = None, op, masks
        shown = [f"({m.label})" if m.op not in ("", "not", op) else m.label for m in masks]
        joined.label = f"~{shown[0]}" if op == "not" else f" {_SIGNS[op]} ".join(shown)
        return joined

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

    def shift(self, q: int | Tensor = 0, kv: int | Tensor = 0) -> Mask:
        """This mask moved along the queries or the keys.

        The result keeps (q', kv') where this mask keeps (q' + q, kv' + kv): its first row is row
        `q` of this mask. What lies before the first row or column of this mask is not kept.

        Args:
            q, kv: an int of either sign, or an integer tensor, [] or [B] with one per batch entry.

        Raises:
            ArgumentError: neither.

        >>> causal = Mask(lambda b, h, q, kv: kv <= q, "causal()")
        >>> causal.shift(q=5)  # the queries stand behind 5 keys of a cache
        causal().shift(q=5)
        """
        q_shift, kv_shift = _check_shift("q", q), _check_shift("kv", kv)

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
            if isinstance(by, Tensor) or by
        ]
        return Mask(keep, f"{shown}.shift({', '.join(given)})")

    def intervals(
        self,
        q_len: int,
        kv_len: int,
        batch: int = 1,
        heads: int = 1,
        *,
        device: torch.device | str | None = None,
    ) -> Intervals | None:
        """What each row keeps, as a union of few intervals of kv; None if it is no such union.

        `attnkit.intervals.find_intervals` also says why not.

        Args:
            q_len, kv_len, batch, heads: sizes that the answer holds for.
            device: where query and key live; None: where the captured tensors live, else CPU.

        Raises:
            TraceError: the mask cannot be traced.
            BoundsError: an index leaves its captured tensor at these sizes.
            DeviceError: captured tensors live on several devices.
            OptionError: a size is not a positive int.
        """
        from attnkit.intervals import Intervals, intervals_of

        found = intervals_of(
            self, q_len=q_len, kv_len=kv_len, batch=batch, heads=heads, device=device
        )
        return found if isinstance(found, Intervals) else None

    def __bool__(self) -> NoReturn:
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
    """
    return _per("head", masks)


def per_batch(masks: Sequence[MaskMod]) -> Mask:
    """The mask that is `masks[b]` for batch entry b.

    Attention with more batch entries than masks is refused (BoundsError).

    Args:
        masks: one mask or mask_mod for each batch entry; the same one may stand there repeatedly.

    Raises:
        ArgumentError: not a sequence of callables, or an empty one.
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
        if str(device) not in tables:
            with torch.inference_mode(False):
                tables[str(device)] = torch.tensor(choice, dtype=torch.int32, device=device)
        chosen = tables[str(device)][at]
        *others, last = (option(b, h, q, kv) for option in options)
        if not others:
            return (chosen == 0) & last
        kept = last
        for i in reversed(range(len(others))):
            kept = torch.where(chosen == i, others[i], kept)
        return kept

    labels = [m.label if isinstance(m, Mask) else Mask(m).label for m in masks]
    return Mask(keep, f"per_{what}([{', '.join(labels)}])")


def _check_shift(name: str, by: Any) -> int | Tensor:
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


def _moved(at: Any, by: int | Tensor, b: Any) -> tuple[Any, Any]:
    """A moved index, and where it is not before the first position (None: everywhere)."""
    if isinstance(by, Tensor):
        moved = at + (by[b] if by.ndim else by)
        return moved, moved >= 0
    return (at + by, at + by >= 0) if by < 0 else (at + by, None)


def noop_mask(b: Any, h: Any, q: Any, kv: Any) -> bool:
    """The mask that keeps everything."""
    return True
