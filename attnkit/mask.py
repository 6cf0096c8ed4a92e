"""Masks as values: `causal() & sliding_window(1024) | prefix(128)`, `~mask`.

A mask is a function `mask_mod(b, h, q, kv)` that says which positions are kept, with the boolean
operators on it. Nothing is computed until attention needs the tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

from attnkit.errors import ArgumentError

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


def noop_mask(b: Any, h: Any, q: Any, kv: Any) -> bool:
    """The mask that keeps everything."""
    return True
