"""Check the sizes of a call against the sizes that a mask or a score_mod was built for."""

from __future__ import annotations

from typing import Any

from attnkit.tracing.axes import Sizes, check_axes
from attnkit.tracing.mask import Mask
from attnkit.tracing.score_mod import ScoreMod


def check_built_for(function: Any, sizes: Sizes) -> None:
    """Raise a ShapeError if a mask or a score_mod was built for other sizes than `sizes`.

    A plain function allows any sizes.

    Raises:
        ShapeError: the function was built for other lengths, or a table that it declares is for
            another batch size, other heads or other lengths.
    """
    if isinstance(function, Mask) and sizes.q is not None and sizes.kv is not None:
        function.lengths.check(function.label, sizes.q, sizes.kv)
    if isinstance(function, Mask | ScoreMod):
        check_axes(function.axes, sizes)


def exact_lengths(function: Any) -> list[tuple[str, str, int]]:
    """Return (name, "q" or "kv", length) for each length that the tables of a function require."""
    if not isinstance(function, Mask | ScoreMod):
        return []
    return [(table.name, *own) for table in function.axes for own in table.exact_lengths()]


def sizes_for(*functions: Any) -> dict[str, int]:
    """Return {"b": batch size, "h": query heads}, as far as the functions' tables declare them."""
    found: dict[str, int] = {}
    for function in functions:
        inner = getattr(function, "mask_mod", function)
        if isinstance(inner, Mask | ScoreMod):
            for table in inner.axes:
                found |= table.exact()
    return found
