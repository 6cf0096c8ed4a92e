"""Check the distances that a mask keeps against the mask at every position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnkit import masks
from attnkit.runtime.variant import Variant
from attnkit.splice.kept_distances import CallSizes, kept_distances

LENGTHS = torch.tensor([70, 20])
MASKS: dict[str, Any] = {
    "causal": masks.causal(),
    "window": masks.sliding_window(40),
    "documents": masks.causal() & masks.document(torch.arange(160) // 50),
    "dilated": masks.dilated(2, 3),
    "by batch": lambda b, h, q, kv: (kv < LENGTHS[b]) & (q >= kv),
    "by head": lambda b, h, q, kv: (q - kv) % (h + 2) == 1,
    "rows by head": lambda b, h, q, kv: (q == 3 * h) & (kv > q),
    "none": lambda b, h, q, kv: q < 0 * kv,
    "scattered": lambda b, h, q, kv: (q * 7 + kv * 3) % 61 == 0,
}


@pytest.mark.parametrize("name", MASKS)
@given(q_len=st.integers(1, 160), kv_len=st.integers(1, 160))
def test_kept_distances(name: str, q_len: int, kv_len: int) -> None:
    sizes = CallSizes(2, 3, q_len, kv_len)
    query, key = torch.empty(2, 3, q_len, 8), torch.empty(2, 3, kv_len, 8)
    bound = Variant(None, MASKS[name]).bind(query, key, (16, 32))
    found = kept_distances(bound.program, bound.captured.masks, bound.runs, sizes)

    b, h = torch.arange(2).view(2, 1, 1, 1), torch.arange(3).view(3, 1, 1)
    q, kv = torch.arange(q_len).view(-1, 1), torch.arange(kv_len)
    keep = torch.as_tensor(MASKS[name](b, h, q, kv)).expand(2, 3, q_len, kv_len)
    at = (q - kv + kv_len - 1).expand_as(keep).reshape(2, 3, -1)
    counts = torch.zeros(2, 3, sizes.distances, dtype=torch.int64)
    expected = counts.scatter_add_(2, at, keep.reshape(2, 3, -1).long()) > 0
    if found is None:
        assert expected.all()
    else:
        assert torch.equal(found.expand_as(expected), expected)


def test_block_lists_override_the_mask() -> None:
    """A FULL block of PyTorch's lists keeps distances that the mask_mod drops."""
    from torch.nn.attention.flex_attention import BlockMask

    lists = BlockMask.from_kv_blocks(
        torch.tensor([[[1, 1]]], dtype=torch.int32),
        torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32),
        torch.tensor([[[0, 1]]], dtype=torch.int32),
        torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32),
        BLOCK_SIZE=32,
        mask_mod=lambda b, h, q, kv: q - kv == 5,
        seq_lengths=(64, 64),
    )
    query = torch.empty(1, 1, 64, 8)
    bound = Variant(None, lists).bind(query, query, (32, 32))
    found = kept_distances(bound.program, (), bound.runs, CallSizes(1, 1, 64, 64))
    assert found is not None
    expected = torch.zeros(127, dtype=torch.bool)
    expected[63 + 5] = True  # of both PARTIAL blocks
    expected[63 + 1 : 63 + 64] = True  # of the FULL block below the diagonal
    assert torch.equal(found.view(-1), expected)
