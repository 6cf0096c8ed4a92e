"""Align query positions with key positions in causal masks and windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

from attnkit import ArgumentError, Axes, OptionError
from attnkit.masks._check import number_text, per_batch, text, whole

Align: TypeAlias = Literal["top-left", "bottom-right"]
Index: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class Alignment(NamedTuple):
    """Describes how queries are aligned with keys, as functions that a mask_mod calls.

    Attributes:
        position: function (b, q) -> key position at which the query is placed.
        exists: function (b, kv) -> whether the key is within the kv length.
        padded: whether `exists` is False for some keys.
        lengths: the (query, kv) lengths that the alignment requires; None for any length.
        arguments: the alignment arguments as text, for the label of a mask.
        axes: declares the table of kv lengths if `kv_len` is a tensor; else empty.
    """

    position: Index
    exists: Index
    padded: bool
    lengths: tuple[int | None, int | None]
    arguments: tuple[str, ...]
    axes: tuple[Axes, ...] = ()


def aligned(align: Align, q_len: int | None, kv_len: int | Tensor | None) -> Alignment:
    """Check the alignment arguments of a mask and return them as an `Alignment`.

    Args:
        align: "top-left" places query 0 at key 0; "bottom-right" places the last query at the last
            key.
        q_len: query length; only for "bottom-right".
        kv_len: kv length, an int or int [B]; only for "bottom-right".

    Raises:
        ArgumentError, OptionError, ShapeError, DTypeError: an argument is not as described.
    """
    if isinstance(align, str) and align == "top-left":
        if q_len is not None or kv_len is not None:
            raise ArgumentError('q_len and kv_len have a meaning with align="bottom-right" only')
        return Alignment(_same_position, _exists, False, (None, None), ())
    check_align(align)
    if q_len is None or kv_len is None:
        raise ArgumentError(
            f'align="bottom-right" needs q_len and kv_len, got {q_len=} and {kv_len=}'
        )
    whole("q_len", q_len, least=1)
    if isinstance(kv_len, Tensor):
        lengths = per_batch("kv_len", kv_len)
        arguments = ('"bottom-right"', f"q_len={number_text(q_len)}", "kv_len=[B]")
        return Alignment(
            lambda b, q: q + (lengths[b] - q_len),
            lambda b, kv: kv < lengths[b],
            True,
            (q_len, None),
            arguments,
            (Axes("kv_len", lengths, "b"),),
        )
    offset = whole("kv_len", kv_len, least=1) - q_len
    arguments = ('"bottom-right"', f"q_len={number_text(q_len)}", f"kv_len={number_text(kv_len)}")
    return Alignment(lambda b, q: q + offset, _exists, False, (q_len, kv_len), arguments)


def check_align(align: Any) -> None:
    """Check that `align` is "top-left" or "bottom-right".

    Raises:
        OptionError: `align` is another value.
    """
    if not isinstance(align, str) or align not in ("top-left", "bottom-right"):
        raise OptionError(f'align must be "top-left" or "bottom-right", got {text(align)}')


def keyword_arguments(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Return `Alignment.arguments` with "align=" before the first, or () if there are none."""
    return (f"align={arguments[0]}", *arguments[1:]) if arguments else ()


def _same_position(b: Tensor, q: Tensor) -> Tensor:
    return q


def _exists(b: Tensor, kv: Tensor) -> Tensor:
    return kv >= 0
