"""Declare the meaning of the axes of captured tables, and check them against call sizes."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from attnkit.errors import ArgumentError, OptionError, ShapeError

# Meaning of an axis: None, "b", "h", "q", "kv", "len", "=q", "=kv", or ("q" or "kv", positions per
# entry).
AxisLike: TypeAlias = str | tuple[str, int] | None

_MEANINGS = {"b": ("b",), "h": ("h",), "q": ("q",), "kv": ("kv",), "len": ("q", "kv")}
_EXACT = {"=q": "q", "=kv": "kv"}
_SIZES = {"b": "batch size", "h": "query heads", "q": "query length", "kv": "kv length"}


class Sizes(NamedTuple):
    """Holds the sizes of an attention call; None for a size that is not known.

    Attributes:
        b: batch size of the query.
        h: query heads.
        q, kv: query and kv length.
        kv_heads: heads of key and value, for messages.
    """

    b: int | None = None
    h: int | None = None
    q: int | None = None
    kv: int | None = None
    kv_heads: int | None = None


class _Limit(NamedTuple):
    """Describes how the size of an axis is compared with one field of `Sizes`.

    Attributes:
        size: the field of `Sizes`.
        per: number of positions per entry.
        start: number of positions at the start that are skipped.
        exact: whether a length must be equal, not at most the size of the axis.
    """

    size: str
    per: int = 1
    start: int = 0
    exact: bool = False


class Axes:
    """Declares the axes of a captured table, so that calls with other sizes raise a ShapeError.

    Pass it as `axes=[...]` to `Mask` or `ScoreMod`. The shape is checked at every new call, before
    anything is computed. The message names the table and suggests the transpose if that would fit.

    Args:
        name: name of the table, for messages.
        table: the captured tensor; or an int or a shape, if no tensor exists.
        axes: the meaning of each axis. "b" (batch) and "h" (query heads, also with grouped-query
            attention) must equal the sizes of the query. "q" and "kv" must be at least the query
            and the kv length, "len" at least both, "=q" and "=kv" equal to them. `("q", 64)` is an
            axis with one entry per 64 positions. None is an axis that is not checked.

    Raises:
        ArgumentError: `table` has another type.
        ShapeError: the table has another number of axes.
        OptionError: the meaning of an axis is not one of the above.

    >>> import torch
    >>> from attnkit import Axes, ScoreMod, flex_attention
    >>> bias = torch.zeros(16, 4)  # transposed by mistake
    >>> mod = ScoreMod(lambda s, b, h, q, kv: s + bias[h, kv % 4], axes=[Axes("bias", bias, "h", None)])
    >>> x = torch.zeros(1, 4, 8, 8)
    >>> flex_attention(x, x, x, mod)
    Traceback (most recent call last):
        ...
    attnkit.errors.ShapeError: bias has shape (16, 4), read as [h, _]: for 16 query heads, got 4; \
it looks transposed: pass bias.T
    """

    __slots__ = ("__weakref__", "_limits", "axes", "name", "table")

    def __init__(self, name: str, table: Tensor | int | Sequence[int], *axes: AxisLike) -> None:
        self.name = name
        self.table = _checked(name, table)
        self.axes = axes
        self._limits = tuple([_limits(name, axis) for axis in axes])
        if len(axes) != len(self.shape):
            raise ShapeError(
                f"{name} has {len(self.shape)} axes, shape {tuple(self.shape)}; {len(axes)} were "
                "declared"
            )

    def __deepcopy__(self, memo: Any) -> Axes:
        return self  # copies of a function read the same tensor as the function

    @property
    def shape(self) -> Sequence[int]:
        """Return the shape of the table."""
        return self.table.shape if isinstance(self.table, Tensor) else self.table

    @property
    def key(self) -> tuple[Any, ...]:
        """Return a hashable key of the declaration, without the table."""
        return self.name, self.axes, self._limits

    def check(self, sizes: Sizes) -> None:
        """Raise a ShapeError if the shape of the table does not fit the sizes of a call.

        Raises:
            ShapeError: an axis has another size.
        """
        shape = self.shape
        for axis, limits in enumerate(self._limits):
            for limit in limits:
                wanted = getattr(sizes, limit.size)
                if wanted is not None and not _fits(limit, shape[axis], wanted):
                    raise ShapeError(self._message(axis, limit, wanted, sizes))

    def shifted(self, q: int | Tensor | None, kv: int | Tensor | None) -> Axes:
        """Return the declaration for a function shifted by `q` and `kv`, see `Mask.shift`.

        Axes that are shifted by a tensor are not checked, because the positions are unknown, nor
        are shifted axes of an exact length, as a shifted function need not reach their end.
        """
        by = {"q": q, "kv": kv}

        def moved(limit: _Limit) -> _Limit | None:
            steps = by.get(limit.size)
            if isinstance(steps, Tensor) or (limit.exact and steps is not None):
                return None
            return limit._replace(start=limit.start + (steps or 0))

        return self._with_limits(moved)

    def without(self, *sizes: str) -> Axes:
        """Return a copy of the declaration that does not check `sizes` ("b", "h", "q", "kv")."""
        return self._with_limits(lambda limit: None if limit.size in sizes else limit)

    def _with_limits(self, change: Callable[[_Limit], _Limit | None]) -> Axes:
        other = Axes(self.name, self.table, *self.axes)
        other._limits = tuple(
            [tuple([m for m in map(change, limits) if m is not None]) for limits in self._limits]
        )
        return other

    def exact_lengths(self) -> list[tuple[str, int]]:
        """Return ("q" or "kv", length) for each axis that must have the length of a call."""
        return [
            (limit.size, self.shape[axis])
            for axis, limits in enumerate(self._limits)
            for limit in limits
            if limit.exact
        ]

    def exact(self) -> dict[str, int]:
        """Return {"b": batch size, "h": query heads} as far as axes of the table declare them."""
        return {
            limit.size: self.shape[axis]
            for axis, limits in enumerate(self._limits)
            for limit in limits
            if limit.size in ("b", "h")
        }

    def _message(self, axis: int, limit: _Limit, wanted: int, sizes: Sizes) -> str:
        shape, name = tuple(self.shape), self.name
        most = shape[axis] * limit.per - limit.start
        what = _SIZES[limit.size]
        if limit.exact:
            return f"{name} was built for {what} {most}, got {wanted}; build it for that length"
        is_count = limit.size == "h"
        built = f"{most} {what}" if is_count else f"{what} {most}"
        built += "" if limit.size in ("b", "h") else " at most"
        if not isinstance(self.table, Tensor):
            value = shape[0] if len(shape) == 1 else shape
            return f"{name} is {value}: for {built}, got {wanted}{self._hint(axis, limit, wanted, sizes)}"
        read = ", ".join(_shown(a) for a in self.axes)
        return (
            f"{name} has shape {shape}, read as [{read}]: for {built}, got {wanted}"
            f"{self._hint(axis, limit, wanted, sizes)}"
        )

    def _hint(self, axis: int, limit: _Limit, wanted: int, sizes: Sizes) -> str:
        """Return the suffix of the error message that suggests a fix for an axis of wrong size."""
        shape, name = self.shape, self.name
        is_table = isinstance(self.table, Tensor)
        other = self._transposed(axis, limit, wanted, sizes) if is_table else None
        if other is not None:
            swap = (
                f"{name}.T"
                if len(shape) == 2
                else f"{name}.transpose{tuple(sorted((axis, other)))}"
            )
            return f"; it looks transposed: pass {swap}"
        if limit.size == "h" and shape[axis] == sizes.kv_heads:
            hint = "; it has an entry per kv head, but heads are query heads"
            again = f"{name}.repeat_interleave({wanted // shape[axis]}, dim={axis})"
            return f"{hint}: pass {again}" if is_table else hint
        if limit.size == "b" and shape[axis] == 1 and is_table:
            return f"; to share it, pass {name}.expand({wanted}, {', '.join(['-1'] * (len(shape) - 1))})"
        if limit.size == "h":
            return "; build it for the heads of the query"
        if limit.size == "b":
            return "; build it for the batch of the query"
        return "; build it for that length"

    def _transposed(self, axis: int, limit: _Limit, wanted: int, sizes: Sizes) -> int | None:
        """Return another axis such that swapping it with `axis` fits; None if there is none."""
        shape = self.shape
        for other, limits in enumerate(self._limits):
            exact = limit.size in ("b", "h")
            fits = shape[other] == wanted if exact else _fits(limit, shape[other], wanted)
            if other != axis and fits:
                needs = [(m, getattr(sizes, m.size)) for m in limits]
                if all(n is None or _fits(m, shape[axis], n) for m, n in needs):
                    return other
        return None


def as_axes(axes: Any, inner: tuple[Axes, ...] = ()) -> tuple[Axes, ...]:
    """Validate the `axes` argument of a mask or a score_mod; return `inner` followed by it.

    Raises:
        ArgumentError: `axes` is not a list or tuple of `Axes`.
        ShapeError: two tables are for different batch sizes or different numbers of heads.
    """
    if not isinstance(axes, tuple | list) or not all(isinstance(t, Axes) for t in axes):
        raise ArgumentError(f"axes must be a list of attnkit.Axes, got {reprlib.repr(axes)}")
    return joined([inner, axes])


def shift_tables(**shifts: int | Tensor | None) -> list[Axes]:
    """Return the declarations of the tensors of shape [B] among the arguments of a shift."""
    tensors = {name: by for name, by in shifts.items() if isinstance(by, Tensor) and by.ndim == 1}
    return [Axes(name, by, "b") for name, by in tensors.items()]


def check_axes(axes: Iterable[Axes], sizes: Sizes) -> None:
    """Raise a ShapeError if a declared table does not fit the sizes of a call.

    While torch compiles, exact lengths are not checked, as they may be unknown: the compiled call
    checks them when it runs.

    Raises:
        ShapeError: an axis has another size.
    """
    for table in axes:
        table.check(sizes)


def joined(parts: Iterable[Sequence[Axes]]) -> tuple[Axes, ...]:
    """Concatenate the declared tables of functions that are combined.

    Raises:
        ShapeError: two tables are for different batch sizes or different numbers of heads.
    """
    tables = tuple([table for part in parts for table in part])
    first: dict[str, tuple[Axes, int]] = {}
    for table in tables:
        for size, own in table.exact().items():
            other, count = first.setdefault(size, (table, own))
            if own != count:
                raise ShapeError(
                    f"{other.name} is for {_SIZES[size]} {count} and {table.name} for {own}: they "
                    f"cannot be combined; build both for the same {_SIZES[size]}"
                )
    return tables


def _checked(name: Any, table: Any) -> Tensor | tuple[int, ...]:
    if not isinstance(name, str):
        raise ArgumentError(f"the name of a table must be a str, got {type(name).__name__}")
    if isinstance(table, Tensor):
        return table
    shape = (table,) if isinstance(table, int | torch.SymInt) else table
    if isinstance(shape, tuple | list):
        return tuple(shape)
    raise ArgumentError(
        f"the table {name} must be a tensor, an int or a shape, got {type(table).__name__}"
    )


def _limits(name: str, axis: Any) -> tuple[_Limit, ...]:
    """Parse the declared meaning of an axis of table `name` to its limits."""
    if axis is None:
        return ()
    if isinstance(axis, str) and axis in _EXACT:
        return (_Limit(_EXACT[axis], exact=True),)
    letter, per = axis if isinstance(axis, tuple) and len(axis) == 2 else (axis, 1)
    if isinstance(letter, str) and letter in _MEANINGS and isinstance(per, int) and per >= 1:
        return tuple([_Limit(size, per) for size in _MEANINGS[letter]])
    raise OptionError(
        f'an axis of {name} must be "b", "h", "q", "kv", "len", "=q", "=kv", ("q", positions), '
        f'("kv", positions) or None, got {reprlib.repr(axis)}'
    )


def _fits(limit: _Limit, size: int, wanted: int) -> bool:
    if limit.size in ("b", "h"):
        return size == wanted
    if limit.exact:
        return torch.compiler.is_compiling() or size == wanted
    return size * limit.per - limit.start >= wanted


def _shown(axis: AxisLike) -> str:
    if axis is None:
        return "_"
    return axis if isinstance(axis, str) else f"{axis[0]} / {axis[1]}"
