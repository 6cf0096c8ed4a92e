"""Check the statistics of `AuxRequest` in the GPU kernels: exact, and the same when repeated."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import AuxRequest, flex_attention, masks, mods
from tests.gpu import cute_kit as kit

LENGTH = 1000
CASES: dict[str, Any] = {
    "plain": (None, None),
    "window": (None, masks.causal() & masks.sliding_window(128)),
    "late": (None, lambda b, h, q, kv: (q >= 400) & (kv <= q - 450)),
    "softcap": (mods.softcap(20.0), masks.causal()),
    "row": (lambda s, b, h, q, kv: s + (q % 7).sqrt(), masks.causal()),
}


def draw(seed: int, width: int) -> list[Tensor]:
    """Return query [2, 4, LENGTH, width], key and value [2, 2, LENGTH, width], and a sink [4]."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(2, 4, LENGTH, width), (2, 2, LENGTH, width), (2, 2, LENGTH, width)]
    qkv = [torch.randn(s, generator=random).bfloat16() for s in shapes]
    return [t.to(kit.DEVICE) for t in (*qkv, torch.randn(4, generator=random))]


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("name", CASES)
def test_entropies_largest_logits_and_gradients(name: str, width: int) -> None:
    mod, mask = CASES[name]
    for step in range(3):
        results = []
        for backend, wide in ((kit.BACKEND, False), ("eager", True), ("eager", False)):
            *qkv, sink = draw(step, width)
            qkv = [(t.double() if wide else t).requires_grad_() for t in qkv]
            learned = [*qkv, sink.requires_grad_()]
            out, aux = flex_attention(
                *(*qkv, mod, mask),
                enable_gqa=True,
                return_aux=AuxRequest(lse=True, max_logits=True, entropy=True),
                backend=backend,
                sink=sink,
            )
            random = torch.Generator().manual_seed(step)
            weight = torch.randn(aux.entropy.shape, generator=random).to(kit.DEVICE)
            loss = (aux.entropy * weight).sum() + out.double().square().sum() / 2
            gradients = torch.autograd.grad(loss, learned)
            results.append((aux.entropy, aux.max_logits, *gradients))
        for ours, exact, dense in zip(*results, strict=True):
            assert torch.equal(ours == -math.inf, exact == -math.inf)
            inside = exact.isfinite()
            errors = [(t[inside].double() - exact[inside]).abs().max() for t in (ours, dense)]
            assert errors[0] <= 2 * errors[1] + exact[inside].abs().max() * 2**-8
