"""Check labels and apply position shifts, for both masks and score_mods."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnkit.errors import ArgumentError
from attnkit.util.arguments import shown


def check_shift(name: str, by: Any) -> int | Tensor | None:
    """Return the argument `by` of a method `shift` if it is valid; `name` is for the message.

    Raises:
        ArgumentError: `by` is not None, an int, or an integer tensor of shape [] or [B].
    """
    if by is None:
        return None
    whole = isinstance(by, int) and not isinstance(by, bool)
    if isinstance(by, Tensor):
        whole = by.ndim <= 1 and not (by.is_floating_point() or by.is_complex())
        whole = whole and by.dtype != torch.bool
    if not whole:
        got = f"{by.dtype} {list(by.shape)}" if isinstance(by, Tensor) else shown(by)
        raise ArgumentError(
            f"shift takes an int or an integer tensor, [] or [B], as {name}, got {got}"
        )
    return by  # type: ignore[no-any-return]


def checked_label(label: Any, function: Any) -> str:
    """Return the label of a mask or a score_mod: `label` if given, else the function's name.

    Raises:
        ArgumentError: `label` is neither a str nor None.
    """
    if label is not None and not isinstance(label, str):
        raise ArgumentError(f"label must be a str or None, got {type(label).__name__}")
    return label or str(getattr(function, "__name__", type(function).__name__))


def shifted(at: Any, by: int | Tensor | None, b: Any) -> Any:
    """Return position `at` plus the shift `by`; a shift of shape [B] is indexed by `b` first."""
    if by is None:
        return at
    return at + (by[b] if isinstance(by, Tensor) and by.ndim else by)


def may_precede(by: int | Tensor | None) -> bool:
    """Return whether a shift may move a position below 0."""
    return isinstance(by, Tensor) or (by is not None and by < 0)


def shift_text(q: int | Tensor | None, kv: int | Tensor | None) -> str:
    """Format the arguments of `shift` for a label, for example "q=5, kv=[8]" (a tensor [8]).

    The text is "..." in torch.compile.
    """
    if torch.compiler.is_dynamo_compiling():  # a shift may be a symbol
        return "..."
    return ", ".join(
        f"{name}={list(by.shape) if isinstance(by, Tensor) else by}"
        for name, by in (("q", q), ("kv", kv))
        if by is not None
    )
