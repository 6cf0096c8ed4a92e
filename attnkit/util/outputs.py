"""Allocate the output of an attention with the order of strides of its query."""

from __future__ import annotations

from torch import Tensor


def output_like(query: Tensor, width: int) -> Tensor:
    """Return an empty [B, Hq, Sq, width] with the query's dtype and stride order, last axis dense.

    It is not a view: autograd would not allow in-place changes of one.
    """
    return query.new_empty_strided((*query.shape[:3], width), output_strides(query, width))


def output_strides(query: Tensor, width: int) -> tuple[int, ...]:
    """Return the strides of `output_like`."""
    strides, step = [0, 0, 0, 1], width
    for axis in sorted((2, 1, 0), key=query.stride):
        strides[axis] = step
        step *= query.shape[axis]
    return tuple(strides)
