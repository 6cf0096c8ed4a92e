"""Check attnkit.flex on a GPU: devices by default, lists that the kernel follows, paged attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.experimental import _paged_attention as paged

from attnkit import flex

S, PAGE = 512, 128


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def bias(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + 0.01 * (q - kv)


def inputs(batch: int = 2) -> list[Tensor]:
    options: Any = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    return [torch.randn(batch, 4, S, 64, **options) for _ in range(3)]


def close(found: Tensor, of: Any, *tensors: Tensor) -> None:
    """Compare with dense float64, to twice the error of dense attention in the same dtype."""
    exact = of(*(t.detach().double() for t in tensors))
    own = of(*(t.detach() for t in tensors))
    limit = 2 * (own.double() - exact).abs().max() + 1e-3 * exact.abs().max()
    assert (found.double() - exact).abs().max() <= limit


def test_devices_by_default() -> None:
    mask = flex.create_block_mask(causal, 2, 4, S, S)
    expected = theirs.create_block_mask(causal, 2, 4, S, S)
    assert mask.kv_indices.device == expected.kv_indices.device
    for name in ("kv_num_blocks", "kv_indices", "full_kv_indices", "q_indices"):
        assert torch.equal(getattr(mask, name), getattr(expected, name))
    assert flex.create_mask(causal, 1, 1, 8, 8).is_cuda
    assert not mask.to("cpu").kv_indices.is_cuda


@pytest.mark.parametrize("edit", [False, True])
def test_forward_and_backward(edit: bool) -> None:
    query, key, value = inputs()
    mask = flex.create_block_mask(causal, 2, 4, S, S)
    if edit:
        mask.full_kv_num_blocks[:, :, 2:] = 1  # fewer full blocks than the mask_mod keeps
    scale = torch.tensor(0.1, device="cuda", requires_grad=True)
    out, aux = flex.flex_attention(
        query, key, value, bias, mask, scale, return_aux=flex.AuxRequest(lse=True, max_scores=True)
    )
    out.sum().backward()

    def dense(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return flex.flex_attention(query, key, value, bias, mask, 0.1, backend="eager")

    close(out, dense, query, key, value)
    assert type(aux) is theirs.AuxOutput
    assert scale.grad is not None
    assert all(t.grad is not None for t in (query, key, value))


def test_paged_attention() -> None:
    batch = 3
    pages = paged.PagedAttention(16, PAGE, batch, device="cuda")
    for b in range(batch):
        pages.reserve(torch.tensor(b, device="cuda"), torch.tensor(S, device="cuda"))
    query, key, value = (t.detach() for t in inputs(batch))
    pool = [torch.zeros(1, 4, 16 * PAGE, 64, device="cuda", dtype=key.dtype) for _ in range(2)]
    rows = torch.arange(S, device="cuda").expand(batch, -1)
    pages.assign(torch.arange(batch, device="cuda"), rows, key, value, *pool)
    mask = flex.create_block_mask(causal, batch, 1, S, S, BLOCK_SIZE=PAGE)
    physical = pages.convert_logical_block_mask(mask)
    out = flex.flex_attention(query, *pool, block_mask=physical)

    def dense(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return flex.flex_attention(query, key, value, block_mask=mask, backend="eager")

    close(out, dense, query, key, value)
