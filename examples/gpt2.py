"""Train a small GPT-2 on packed documents with FlexAttention, PyTorch's or attnkit's.

    python examples/gpt2.py                        # attnkit
    python examples/gpt2.py --attention torch      # PyTorch

The two differ by one import. Each batch has documents of random lengths, so each has a new block
mask. The texts count upwards in steps of the document's own, so that the model has to look back to
predict them. The exit status is 1 if the model does not learn.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, LENGTH, WORDS, WIDTH, HEADS, LAYERS = 4, 128, 32, 64, 4, 2
# the changed import
MODULES = {"torch": "torch.nn.attention.flex_attention", "attnkit": "attnkit.flex"}


def load(attention: str, device: torch.device) -> Any:
    """Import FlexAttention's names from PyTorch or from attnkit."""
    flex: Any = importlib.import_module(MODULES[attention])
    if attention == "torch" and device.type == "cpu":
        # PyTorch refuses to differentiate on a CPU, though its operators can without compilation.
        flex._validate_device = lambda *tensors: None
    return flex


class Block(nn.Module):
    """Transformer block of GPT-2: attention, then a feed-forward layer, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, flex: Any, block_mask: Any) -> Tensor:
        parts = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = flex.flex_attention(*parts, block_mask=block_mask)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))


class Model(nn.Module):
    """GPT-2 with learned positions and tied embeddings; the forward returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.1)

    def forward(self, tokens: Tensor, places: Tensor, flex: Any, block_mask: Any) -> Tensor:
        x = self.words(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x, flex, block_mask)
        return F.linear(self.norm(x), self.words.weight)


def batch(draw: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Draw tokens, document ids and positions inside the documents, all [BATCH, LENGTH]."""
    shape = BATCH, LENGTH
    starts = torch.rand(shape, generator=draw) < 1 / 24
    starts[:, 0] = True
    documents = starts.cumsum(1) - 1
    at = torch.arange(LENGTH).expand(shape)
    places = at - torch.where(starts, at, 0).cummax(1).values
    first, step = (
        torch.randint(low, WORDS, shape, generator=draw).gather(1, documents) for low in (0, 1)
    )
    tokens = (first + step * places) % WORDS
    return tokens.to(device), documents.to(device, torch.int32), places.to(device)


def loss_of(logits: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """Compute the mean loss in nats of tokens that their document determines: all but two."""
    targets = tokens.masked_fill(places < 2, -100)[:, 1:]  # -100: cross_entropy skips it
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100)


def train(
    attention: str, steps: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[float]:
    """Train a model from a fixed seed and return the loss of each step."""
    place = torch.device(device)
    flex = load(attention, place)
    torch.manual_seed(0)
    draw, model = torch.Generator().manual_seed(0), Model().to(place, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        tokens, documents, places = batch(draw, place)

        def mask_mod(
            b: Tensor, h: Tensor, q: Tensor, kv: Tensor, ids: Tensor = documents
        ) -> Tensor:
            return (q >= kv) & (ids[b, q] == ids[b, kv])

        block_mask = flex.create_block_mask(
            mask_mod, BATCH, None, LENGTH, LENGTH, device=place.type, BLOCK_SIZE=32
        )
        loss = loss_of(model(tokens, places, flex, block_mask), tokens, places)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--attention", choices=MODULES, default="attnkit")
    parser.add_argument("--steps", type=int, default=200)
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
