"""Check that calls allocate on the device of their inputs under any `torch.set_default_device`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnkit import create_block_mask, explain, flex_attention, masks, mods

LENGTH = 150
CPU = torch.device("cpu")


def inputs(example: Any) -> list[torch.Tensor]:
    heads, batch = max(1, example.heads), example.batch
    lengths = example.q_len, example.kv_len, example.kv_len
    return [torch.randn(batch, heads, n, 8, device=CPU).requires_grad_() for n in lengths]


def both_ways(example: Any, score_mod: Any, mask: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = inputs(example)
    out, lse = flex_attention(*made, score_mod, mask, return_lse=True)
    loss = out.sum() + torch.where(lse == -torch.inf, 0, lse).sum()
    return [out, lse, *torch.autograd.grad(loss, made)]


@pytest.mark.parametrize("name", masks.examples(48))
def test_mask(name: str) -> None:
    example = masks.examples(LENGTH)[name]
    expected = both_ways(example, None, example.mask)
    fresh = masks.examples(LENGTH)[name]
    with torch.device("meta"):  # the meta device, on which nothing can be computed by mistake
        found = both_ways(fresh, None, fresh.mask)
        heads = max(1, fresh.heads)
        block = create_block_mask(
            fresh.mask, fresh.batch, heads, fresh.q_len, fresh.kv_len, device="cpu"
        )
        assert block.to_dense().device == CPU
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", mods.examples(48))
def test_mod(name: str) -> None:
    example = mods.examples(LENGTH)[name]
    expected = both_ways(example, example.mod, None)
    fresh = mods.examples(LENGTH)[name]
    with torch.device("meta"):
        found = both_ways(fresh, fresh.mod, None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_explanation() -> None:
    documents, slopes = torch.arange(600) // 100, torch.rand(4)
    mask = masks.causal() & masks.document(documents)
    expected = str(explain(mods.alibi(slopes), mask, q_len=600, heads=4))
    with torch.device("meta"):
        assert str(explain(mods.alibi(slopes), mask, q_len=600, heads=4)) == expected
