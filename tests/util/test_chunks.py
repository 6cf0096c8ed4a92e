"""Check how many elements are processed at once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from attnkit.util.chunks import chunk_size


@given(st.integers(0, 1 << 40))
def test_chunks_are_few_and_on_one_thread_where_that_is_possible(total: int) -> None:
    size = chunk_size(total, torch.device("cpu"))
    count = -(-total // size)
    assert count <= 1024
    assert size < 32768 or -(-total // (size - 1)) > 1024
    assert chunk_size(total, torch.device("meta")) == max(1, total)
