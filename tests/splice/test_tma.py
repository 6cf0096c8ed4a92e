"""Check which tensors TMA may read: contiguous rows, addresses and strides of 16 bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnkit.splice.tma import has_tma_strides, have_tma_strides, loadable

SIZES = [1, 2, 4, 8]


@given(
    size=st.sampled_from(SIZES),
    shape=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    strides=st.lists(st.integers(-20, 40), min_size=4, max_size=4),
    last=st.sampled_from([1, 1, 1, 2]),
)
def test_strides_are_multiples_of_16_bytes(
    size: int, shape: list[int], strides: list[int], last: int
) -> None:
    own = [*strides[: len(shape) - 1], last]
    aligned = all(s * size % 16 == 0 for s in own[:-1])
    forward = all(s > 0 or n == 1 for n, s in zip(shape[:-1], own[:-1], strict=True))
    assert has_tma_strides(shape, own, size) == (last == 1 and aligned and forward)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_stride_of_8_bytes_more_is_not_aligned(size: int, axis: int) -> None:
    step = 16 // size
    strides = [8 * step, 2 * step, 1]
    assert has_tma_strides((3, 3, 4), strides, size)
    if step > 1:
        strides[axis] += step // 2
        assert not has_tma_strides((3, 3, 4), strides, size)


def at_offset(elements: int) -> Tensor:
    """Return a bfloat16 tensor [4, 16] that starts `elements` after a 16-byte boundary."""
    flat = torch.arange(200, dtype=torch.bfloat16)
    first = -flat.data_ptr() % 16 // 2
    return flat[first + elements :][:64].view(4, 16)


@pytest.mark.parametrize("elements", range(1, 8))
def test_a_tensor_between_multiples_of_16_is_copied(elements: int) -> None:
    t = at_offset(elements)
    assert have_tma_strides([t])
    copy = loadable(t)
    assert copy.data_ptr() % 16 == 0
    assert torch.equal(copy, t)


def test_what_can_be_read_is_not_copied() -> None:
    for t in (at_offset(0), at_offset(8)):
        assert loadable(t).data_ptr() == t.data_ptr()


def test_rows_that_are_not_contiguous_are_copied() -> None:
    for t in (torch.randn(8, 4).mT, torch.randn(4, 9)[:, :8], torch.randn(4, 8).expand(2, 4, 8)):
        copy = loadable(t)
        assert have_tma_strides([copy])
        assert torch.equal(copy, t)
