"""Check that TorchScript, which records or compiles Python, is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnkit
import attnkit.flex
from attnkit import flex_attention, masks

FUNCTIONS = [flex_attention, attnkit.flex.flex_attention]


def inputs() -> tuple[Tensor, ...]:
    return tuple(torch.randn(1, 2, 16, 16) for _ in range(3))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_trace(function: Any) -> None:
    """Also after a call with the same arguments, whose preparation could be reused."""
    made = inputs()
    call = lambda q, k, v: function(q, k, v, block_mask=masks.causal())
    call(*made)
    with pytest.raises(attnkit.UnsupportedError, match=r"^torch\.jit\.trace .*torch\.export") as e:
        torch.jit.trace(call, made)
    assert len(str(e.value).splitlines()) == 1
    call(*made)


class Layer(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = flex_attention(query, key, value)
        return out


def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return flex_attention(query, key, value)  # type: ignore[no-any-return]


@pytest.mark.parametrize("scripted", [Layer(), call, *FUNCTIONS])
def test_script(scripted: Any) -> None:
    with pytest.raises(attnkit.UnsupportedError, match=r"^torch\.jit\.script .*torch\.export") as e:
        torch.jit.script(scripted)
    assert len(str(e.value).splitlines()) == 1
