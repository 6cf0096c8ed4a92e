"""Compare the float64 oracle with PyTorch's eager flex_attention, and with a plain loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from attnkit.runtime.reference import attention
from attnkit.tracing.tracer import trace

SLOPES = torch.rand(4, dtype=torch.float64, requires_grad=True)
BIAS = torch.randn(4, 40, dtype=torch.float64, requires_grad=True)
DOCUMENTS = torch.tensor([0] * 5 + [1] * 9 + [2] * 3)

MODS: dict[str, Any] = {
    "none": None,
    "alibi": lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q),
    "relative": lambda s, b, h, q, kv: s + BIAS[h, q - kv + 20],
    "softcap": lambda s, b, h, q, kv: 2 * torch.tanh(s / 2) + b,
    "gated": lambda s, b, h, q, kv: s * torch.sigmoid(BIAS[h, q]) + BIAS[h, kv],
}
MASKS: dict[str, Any] = {
    "none": None,
    "causal": lambda b, h, q, kv: q >= kv,
    "documents": lambda b, h, q, kv: DOCUMENTS[q] == DOCUMENTS[kv],
    "per head": lambda b, h, q, kv: (q - kv).abs() <= h,
}


@pytest.fixture(autouse=True)
def _flex_with_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    # PyTorch refuses gradients on the CPU; its dense eager path computes them all the same
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)


def inputs(*, kv_heads: int = 4, width: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, 4, 17, 6), (2, kv_heads, 17, 6), (2, kv_heads, 17, width))
    q, k, v = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    return q, k, v


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mod", MODS)
def test_against_flex_attention(mod: str, mask: str) -> None:
    tensors = (*inputs(), SLOPES, BIAS)
    score_mod, mask_mod = MODS[mod], MASKS[mask]
    block = mask_mod and flex.create_block_mask(mask_mod, 2, 4, 17, 17, device="cpu")
    expected = flex.flex_attention(*tensors[:3], score_mod, block, return_lse=True)
    found = attention(
        *tensors[:3],
        score_mod and trace(score_mod, "score"),
        mask_mod and trace(mask_mod, "mask"),
    )[:2]
    weight = [torch.randn_like(x) for x in expected]
    gradients = []
    for out, lse in (expected, found):
        total = (out * weight[0]).sum() + (lse * weight[1]).sum()
        gradients.append(torch.autograd.grad(total, tensors, allow_unused=True))
    for a, b in zip((*found, *gradients[1]), (*expected, *gradients[0]), strict=True):
        if a is None or b is None:
            assert a is b
        else:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_against_loops() -> None:
    q, k, v = (t.detach() for t in inputs(kv_heads=2))
    traces = trace(MODS["alibi"], "score"), trace(MASKS["causal"], "mask")
    found, lse, top, entropy = attention(q, k, v, *traces, need_entropy=True)
    assert entropy is not None
    for b, h, i in ((0, 0, 0), (1, 3, 16), (0, 2, 7)):
        g = h // 2
        scores = [
            float(q[b, h, i] @ k[b, g, j]) / math.sqrt(6) + float(SLOPES.detach()[h]) * (j - i)
            for j in range(i + 1)
        ]
        weights = [math.exp(s) for s in scores]
        row = sum(w * v[b, g, j] for j, w in enumerate(weights)) / sum(weights)
        torch.testing.assert_close(found[b, h, i], row)
        assert float(lse[b, h, i]) == pytest.approx(math.log(sum(weights)))
        assert float(top[b, h, i]) == pytest.approx(max(scores))
        shares = [w / sum(weights) for w in weights]
        nats = -sum(p * math.log(p) for p in shares)
        assert float(entropy[b, h, i]) == pytest.approx(nats, abs=1e-12)


def test_dead_rows_and_shared_kv() -> None:
    q, k, v = inputs()
    k1, v1 = k[:1].detach().requires_grad_(), v[:1].detach().requires_grad_()
    mask = trace(lambda b, h, q, kv: (q >= 5) & (kv < 3), "mask")
    out, lse, top, entropy = attention(q, k1, v1, None, mask, need_entropy=True)
    assert entropy is not None
    assert (out[:, :, :5] == 0).all()
    assert (lse[:, :, :5] == -math.inf).all()
    assert (top[:, :, :5] == -math.inf).all()
    assert (entropy[:, :, :5] == 0).all()
    loss = out.sum() + lse[:, :, 5:].sum() + entropy.sum()
    grads = torch.autograd.grad(loss, (q, k1, v1))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, :, :5] == 0).all()
    assert (grads[1][:, :, 3:] == 0).all()
    torch.testing.assert_close(out[1], attention(q[1:], k1, v1, None, mask)[0][0])


def test_allowed_restricts_further() -> None:
    q, k, v = inputs()
    allowed = torch.rand(2, 1, 17, 17) > 0.4
    both = attention(q, k, v, None, trace(MASKS["causal"], "mask"), allowed=allowed)[0]
    dense = allowed & torch.ones(17, 17, dtype=torch.bool).tril()
    torch.testing.assert_close(both, attention(q, k, v, allowed=dense)[0])
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)
    alive = dense.any(-1, keepdim=True).expand_as(sdpa)
    torch.testing.assert_close(both[alive], sdpa[alive])
