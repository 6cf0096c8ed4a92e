"""Check the gather on the calling thread against indexing."""

from __future__ import annotations

import pytest
import torch

from attnkit.sparsity.ranges.serial import gather


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_indices_of_any_dtype_wrap_like_indexing(dtype: torch.dtype) -> None:
    values = torch.arange(200 * 3).view(200, 3)
    index = [torch.tensor([[-1], [100], [-128]], dtype=dtype), torch.tensor([[0, -3, 2]])]
    assert torch.equal(gather(values, index), values[tuple(i.long() for i in index)])


@pytest.mark.parametrize("place", [4, -5])
def test_an_index_outside_is_refused(place: int) -> None:
    with pytest.raises(IndexError, match=f"index from 0 to {place}|index from {place} to 0"):
        gather(torch.zeros(4), [torch.tensor([0, place])])
