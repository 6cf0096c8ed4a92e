"""Broadcast shapes without `torch.broadcast_shapes`, which imports sympy at its first call."""

from __future__ import annotations

from collections.abc import Sequence


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape to which tensors of the given shapes broadcast.

    Raises:
        ValueError: the shapes do not broadcast.

    >>> broadcast((3, 1), (4,), ())
    (3, 4)
    """
    result = [1] * max(map(len, shapes), default=0)
    for shape in shapes:
        for axis, size in enumerate(reversed(shape), start=1):
            if size != 1 and result[-axis] not in (1, size):
                raise ValueError(f"shapes {[tuple(s) for s in shapes]} do not broadcast")
            if size != 1:
                result[-axis] = size
    return tuple(result)
