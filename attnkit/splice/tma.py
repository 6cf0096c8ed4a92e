"""Check whether TMA can access tensors.

TMA needs contiguous rows, other strides that are multiples of 16 bytes, and an address that is a
multiple of 16.
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
    """Return whether TMA can access all tensors, provided that their addresses are aligned."""
    return all(has_tma_strides(t.shape, t.stride(), t.element_size()) for t in tensors)


def begins_aligned(t: Tensor) -> bool:
    """Return whether the address of a tensor is a multiple of 16 bytes."""
    return t.data_ptr() % 16 == 0


def loadable(t: Tensor) -> Tensor:
    """Return `t`, detached, if TMA can read it; otherwise return a contiguous copy."""
    t = t.detach()
    if begins_aligned(t) and have_tma_strides([t]):
        return t
    return t.contiguous().clone() if t.is_contiguous() else t.contiguous()
