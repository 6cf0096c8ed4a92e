"""Check gradients of learned terms that shift whole rows, with and without a gradient of the LSE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import flex_attention
from attnkit.jit import emulation
from tests.templates.backward_kit import CAUSAL, draw, torch_forward

LENGTH = 150
BACKENDS = ["emulate", "emulate:sm_100a"]
Mod = Callable[..., Any]
GATE = lambda w: lambda s, b, h, q, kv: s + w[h, q] - w[h, kv]
ROW = lambda w: lambda s, b, h, q, kv: s + w[h, q] * 0.5


def gradients(backend: str, mod: Callable[[Tensor], Mod], wide: bool, lse: bool) -> list[Tensor]:
    torch.manual_seed(0)
    inputs, (weights, rows) = draw(LENGTH)
    table = torch.randn(2, LENGTH)
    dtype = torch.float64 if wide else torch.bfloat16
    qkv = [t.to(dtype).requires_grad_() for t in inputs]
    table = (table.double() if wide else table).requires_grad_()
    with torch_forward():
        out, sums = flex_attention(
            *qkv, score_mod=mod(table), block_mask=CAUSAL, return_lse=True, backend=backend
        )
    total = (out * weights.to(out.dtype)).sum()
    if lse:
        total = total + (sums * rows.to(sums.dtype)).sum()
    with emulation.session() as session:
        found = list(torch.autograd.grad(total, [*qkv, table]))
    assert session.ok
    assert bool(session.reports) == backend.startswith("emulate")
    return found


@pytest.mark.parametrize("lse", [False, True], ids=["output", "output and LSE"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_a_gate(backend: str, lse: bool) -> None:
    found = gradients(backend, GATE, False, lse)
    exact = gradients("eager", GATE, True, lse)
    dense = gradients("eager", GATE, False, lse)
    for own, other, true in zip(found, dense, exact, strict=True):
        error, allowed = (own.double() - true).abs().max(), (other.double() - true).abs().max()
        assert error <= 2 * allowed, (error, allowed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shift_of_rows_has_no_gradient_through_the_output(backend: str) -> None:
    *_, table = gradients(backend, ROW, False, False)
    assert torch.equal(table, torch.zeros_like(table))
