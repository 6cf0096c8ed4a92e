"""Decide which tensors TMA can access.

Their rows must be contiguous, their other strides multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def has_tma_strides(shape: Sequence[int], strides: Sequence[int], size: int) -> bool:
    """Return whether TMA can access a tensor with these strides and elements of `size` bytes."""
    return strides[-1] == 1 and all(
        s % (16 // size) == 0 and (s > 0 or n == 1)
        for n, s in zip(shape[:-1], strides[:-1], strict=True)
    )


def have_tma_strides(tensors: Sequence[Tensor]) -> bool:
    """Return whether TMA can access tensors like these, if their addresses are multiples of 16."""
    return all(has_tma_strides(t.shape, t.stride(), t.element_size()) for t in tensors)


def loadable(t: Tensor) -> Tensor:
    """Return a tensor itself if TMA can read it, else a copy."""
    t = t.detach()
    if t.data_ptr() % 16 == 0 and have_tma_strides([t]):
        return t
    return t.contiguous().clone() if t.is_contiguous() else t.contiguous()
