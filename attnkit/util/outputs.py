"""Allocate attention outputs whose axes have the same stride order as the query."""

from __future__ import annotations

from torch import Tensor


def output_like(query: Tensor, width: int) -> Tensor:
    """Return an uninitialized [B, Hq, Sq, width] with the dtype and stride order of `query`.

    The last axis has stride 1. The result is not a view, because autograd would not allow in-place
    changes of a view.
    """
    return query.new_empty_strided((*query.shape[:3], width), output_strides(query, width))


def output_strides(query: Tensor, width: int) -> tuple[int, ...]:
    """Return the strides of `output_like(query, width)`, in elements."""
    strides, step = [0, 0, 0, 1], width
    for axis in sorted((2, 1, 0), key=query.stride):
        strides[axis] = step
        step *= query.shape[axis]
    return tuple(strides)
