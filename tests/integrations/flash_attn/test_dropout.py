"""flash-attn's functions drop the elements that `attnkit.flex_attention` drops."""

from __future__ import annotations

import pytest
import torch

import attnkit
from attnkit.integrations.diffusers.attention import attention as diffusers_attention
from attnkit.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from attnkit.integrations.transformers.attention import attention as transformers_attention

CU = torch.tensor([0, 3, 8], dtype=torch.int32)


@pytest.mark.parametrize("door", ["batch", "packed", "transformers", "diffusers"])
def test_is_that_of_flex_attention(door: str) -> None:
    random = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, 4, 8, 16, generator=random) for _ in range(3)]  # [B, H, S, D]
    results = []
    for ours in (True, False):
        leaves = [t.clone().requires_grad_() for t in qkv]
        rows = [t.transpose(1, 2) for t in leaves]
        torch.manual_seed(1)
        if not ours:
            packed = door == "packed"
            same = lambda b, h, q, kv: (q >= 3) == (kv >= 3)
            mask = same if packed else None
            out = attnkit.flex_attention(*leaves, None, mask, dropout_p=0.25).transpose(1, 2)
        elif door == "batch":
            out = flash_attn_func(*rows, dropout_p=0.25)
        elif door == "packed":
            out = flash_attn_varlen_func(*(t[0] for t in rows), CU, CU, 5, 5, dropout_p=0.25)[None]
        elif door == "transformers":
            module = torch.nn.Module()
            out, _ = transformers_attention(module, *leaves, None, dropout=0.25, is_causal=False)
        else:
            out = diffusers_attention(*rows, dropout_p=0.25)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
