"""Check that a small model trains equally on the GPU kernels and in float32 on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnkit import flex_attention, masks
from tests.gpu import backward_kit
from tests.gpu import cute_kit as kit

LENGTH, WIDTH, HEADS, LETTERS = 200, 128, 2, 32
STEPS = 25


class Model(nn.Module):
    """Model with two attention layers and learned slopes over packed documents."""

    def __init__(self, documents: Tensor, backend: str) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.slopes = nn.Parameter(torch.tensor([0.5, 0.1]))
        self.backend = backend
        self.mask = masks.causal() & masks.document(documents)

    def bias(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + self.slopes[h] * (kv - q)

    def forward(self, text: Tensor) -> Tensor:
        x = self.letters(text)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            parts = qkv(F.layer_norm(x, (WIDTH,))).unflatten(-1, (3, HEADS, -1))
            found = flex_attention(
                *parts.permute(2, 0, 3, 1, 4), self.bias, self.mask, backend=self.backend
            )
            x = x + out(found.transpose(1, 2).flatten(2))
        scores = F.linear(F.layer_norm(x, (WIDTH,)), self.letters.weight)
        return F.cross_entropy(scores[:, :-1].flatten(0, 1).float(), text[:, 1:].flatten())


def curve(device: str, backend: str, *, half: bool) -> list[float]:
    """Return the losses of `STEPS` training steps, with fixed initial weights and data."""
    torch.manual_seed(0)
    words = torch.randint(LETTERS, (6, 10))
    text = words[torch.randint(6, (2, LENGTH // 10))].flatten(1).to(device)
    documents = torch.arange(LENGTH) // 70
    model = Model(documents.to(device), backend)
    nn.init.normal_(model.letters.weight, std=0.3)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(STEPS):
        with torch.autocast(device, torch.bfloat16, enabled=half):
            loss = model(text)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_loss_curves_agree() -> None:
    exact = curve("cpu", "cpu", half=False)
    with backward_kit.counted() as seen:
        found = curve(kit.DEVICE, kit.BACKEND, half=True)
    assert len(seen) == 2 * STEPS
    dense = curve(kit.DEVICE, "eager", half=True)
    assert exact[-1] < 0.7 * exact[0]  # it learns
    off, allowed = (
        max(abs(a - b) for a, b in zip(losses, exact, strict=True)) for losses in (found, dense)
    )
    # where the dense model is right by luck: half a unit of the dtype that it is computed in
    assert off <= 2 * max(allowed, torch.finfo(torch.bfloat16).eps / 2 * exact[0])
