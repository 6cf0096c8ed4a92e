"""Train a small Gemma 2 with FlexAttention, PyTorch's or attnkit's.

    python examples/gemma2.py                      # attnkit
    python examples/gemma2.py --attention torch    # PyTorch

The two differ by one import. As in Gemma 2, attention scores have a softcap, a score_mod; layers
alternate between a sliding window and all tokens before; four query heads share two key heads. The
texts repeat a phrase of their own. The exit status is 1 if the model does not learn.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, LENGTH, WORDS, WIDTH, LAYERS = 4, 128, 48, 64, 2
HEADS, KV_HEADS, HEAD_DIM, WINDOW = 4, 2, 16, 32
SCORE_CAP, LOGIT_CAP = 50.0, 30.0
# the changed import
MODULES = {"torch": "torch.nn.attention.flex_attention", "attnkit": "attnkit.flex"}


def load(attention: str, device: torch.device) -> Any:
    """Import FlexAttention's names from PyTorch or from attnkit."""
    flex: Any = importlib.import_module(MODULES[attention])
    if attention == "torch" and device.type == "cpu":
        # PyTorch refuses to differentiate on a CPU, though its operators can without compilation.
        flex._validate_device = lambda *tensors: None
    return flex


def softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return SCORE_CAP * torch.tanh(score / SCORE_CAP)


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def sliding(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (q - kv < WINDOW)


class Norm(nn.Module):
    """RMSNorm whose weight is counted from 1."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + self.weight, eps=1e-6)


def rotated(x: Tensor) -> Tensor:
    """Rotate query or key [B, H, S, D] by its position."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** -(torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[2], device=x.device, dtype=x.dtype)[:, None] * rates
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


class Block(nn.Module):
    """Transformer block of Gemma 2: a norm before and after attention and feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm() for _ in range(4))
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 8 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, flex: Any, block_mask: Any) -> Tensor:
        inner = self.norms[0](x)
        query = self.q(inner).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = self.kv(inner).unflatten(-1, (2, KV_HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = flex.flex_attention(
            rotated(query), rotated(key), value, score_mod=softcap, block_mask=block_mask,
            enable_gqa=True,
        )  # fmt: skip
        x = x + self.norms[1](self.out(heads.transpose(1, 2).flatten(2)))
        gate, up = self.up(self.norms[2](x)).chunk(2, -1)
        return x + self.norms[3](self.down(F.gelu(gate, approximate="tanh") * up))


class Model(nn.Module):
    """Gemma 2 with tied embeddings; the forward returns logits with a softcap."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()
        nn.init.normal_(self.words.weight, std=0.1)

    def forward(self, tokens: Tensor, flex: Any, block_masks: list[Any]) -> Tensor:
        x = self.words(tokens) * WIDTH**0.5
        for i, block in enumerate(self.blocks):
            x = block(x, flex, block_masks[i % 2])
        return LOGIT_CAP * torch.tanh(F.linear(self.norm(x), self.words.weight) / LOGIT_CAP)


def batch(draw: torch.Generator, device: torch.device) -> Tensor:
    """Draw texts [BATCH, LENGTH] that repeat a phrase of eight words in a random order."""
    phrases = torch.rand(BATCH, WORDS, generator=draw).topk(8).indices
    return phrases[:, torch.arange(LENGTH) % 8].to(device)


def train(
    attention: str, steps: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[float]:
    """Train a model from a fixed seed and return the loss of each step."""
    place = torch.device(device)
    flex = load(attention, place)
    torch.manual_seed(0)
    draw, model = torch.Generator().manual_seed(0), Model().to(place, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    block_masks = [
        flex.create_block_mask(
            mask, None, None, LENGTH, LENGTH, device=place.type, BLOCK_SIZE=32
        )
        for mask in (sliding, causal)
    ]  # fmt: skip
    losses = []
    for _ in range(steps):
        tokens = batch(draw, place)
        logits = model(tokens, flex, block_masks)
        loss = F.cross_entropy(logits[:, 7:-1].flatten(0, 1), tokens[:, 8:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--attention", choices=MODULES, default="attnkit")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    losses = train(args.attention, args.steps, args.device)
    for step in range(0, args.steps, max(1, args.steps // 10)):
        print(f"step {step:4}  loss {losses[step]:.4f} nats per token")
    reached = sum(losses[-10:]) / len(losses[-10:])
    print(f"{args.attention}: loss {losses[0]:.2f} -> {reached:.2f}")
    if not reached < 0.8 * losses[0]:
        print("FAILED: the model did not learn", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
