"""Check that captured uint16, uint32 and uint64 tensors act as in PyTorch's create_mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from attnkit import create_block_mask, create_mask, flex_attention, intervals
from attnkit.errors import BoundsError

DTYPES = (torch.uint16, torch.uint32, torch.uint64)
S = 48


def ids(dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(S) // 11 * 3 + 1).to(dtype)


# What PyTorch computes with unsigned integers: comparisons, bits, products, conversions.
MASKS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "documents": lambda t, q, kv: t[q] == t[kv],
    "other documents": lambda t, q, kv: t[q] != t[kv],
    "a number": lambda t, q, kv: t[kv] == 4,
    "bits": lambda t, q, kv: (t[q] & t[kv]) == 1,
    "product": lambda t, q, kv: t[q] * t[kv] == 16,
    "converted": lambda t, q, kv: t[kv].int() <= q,
    "float": lambda t, q, kv: t[q] * 1.5 > kv,
    "bool": lambda t, q, kv: (t[kv] ^ t[q]).bool(),
    "causal documents": lambda t, q, kv: (t[q] == t[kv]) & (q >= kv),
    "selected": lambda t, q, kv: torch.where(q > kv, t[q], t[kv]) == 7,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks_agree_with_pytorch(name: str, dtype: torch.dtype) -> None:
    table, body = ids(dtype), MASKS[name]
    keep = lambda b, h, q, kv: body(table, q, kv)
    expected = flex.create_mask(keep, 1, 1, S, S, device="cpu")
    assert torch.equal(create_mask(keep, 1, 1, S, S), expected)
    blocks = create_block_mask(keep, 1, 1, S, S, BLOCK_SIZE=16)
    tiles = expected.view(1, 1, 3, 16, 3, 16)
    assert torch.equal(blocks.to_dense().bool(), tiles.any(5).any(3))
    query = torch.randn(1, 1, S, 8)
    out = flex_attention(query, query, query, None, keep)
    torch.testing.assert_close(
        out, flex_attention(query, query, query, None, keep, backend="eager")
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_and_indices(dtype: torch.dtype) -> None:
    table, bias = ids(dtype), torch.randn(16, requires_grad=True)
    mod = lambda s, b, h, q, kv: s + bias[table[kv].int()] * table[q]
    query = torch.randn(1, 1, S, 8)
    out = flex_attention(query, query, query, mod)
    scores = query @ query.mT / 8**0.5
    scores = scores + bias[ids(torch.int64)] * ids(torch.float32)[:, None]
    torch.testing.assert_close(out, scores.softmax(-1) @ query)
    (grad,) = torch.autograd.grad(out.sum(), bias)
    (expected,) = torch.autograd.grad((scores.softmax(-1) @ query).sum(), bias)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)


def test_runs_of_documents_are_intervals() -> None:
    form = intervals(lambda b, h, q, kv: ids32[q] == ids32[kv], S, S)
    assert form is not None
    assert len(form) == 1


ids32 = ids(torch.uint32)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.uint32, 2**31),
        (torch.uint32, 2**32 - 1),
        (torch.uint64, 2**40),
        (torch.uint64, 2**64 - 1),
    ],
)
def test_numbers_beyond_int32_are_refused(dtype: torch.dtype, value: int) -> None:
    table = torch.tensor([1, value] * 8, dtype=dtype)
    same = lambda b, h, q, kv: table[q] == table[kv]
    with pytest.raises(BoundsError, match="'table' holds integers from 1 to"):
        create_mask(same, 1, 1, 16, 16)
    with pytest.raises(BoundsError, match="'table' holds integers from 1 to"):
        create_block_mask(same, 1, 1, 16, 16).sparsity()
