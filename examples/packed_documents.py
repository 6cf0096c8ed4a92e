"""Train a small language model on packed documents, with its own mask and score_mod.

The example packs source files of Python's standard library into one sequence. The mask lets a byte
attend to earlier bytes of the same document, at most WINDOW positions back. The score_mod is ALiBi:
scores decrease with distance, with a slope that each head learns. Tiles that the mask drops are
never computed.

The exit status is 1 if the model does not learn or if attention is not exact.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from report import errors, milliseconds, picture
from torch import Tensor, nn
from tqdm import trange

import attnkit
from attnkit.masks import causal, document, sliding_window

WIDTH, HEADS, LAYERS, WINDOW = 128, 4, 2, 256
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # query, key, value, slopes


def packed(ids: Tensor) -> attnkit.Mask:
    """Build the mask that keeps earlier bytes of the same document within WINDOW positions.

    Args:
        ids: [S], the document of each byte.
    """
    return causal() & document(ids) & sliding_window(WINDOW)


def sparse_attention(ids: Tensor, backend: str = "auto") -> Attend:
    """Build attention with attnkit for the documents `ids`.

    Training on new documents needs no new trace, because ids and slopes are passed to the kernels
    as captured tensors.
    """
    mask = packed(ids)

    def attend(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
        def alibi(score, b, h, q, kv):
            return score - slopes[h] * (q - kv)

        return attnkit.flex_attention(query, key, value, alibi, mask, backend=backend)

    return attend


def dense_attention(ids: Tensor) -> Attend:
    """Build attention in plain PyTorch with a dense bias [HEADS, S, S] for the documents `ids`."""
    place = torch.arange(len(ids))
    distance = place[:, None] - place
    dropped = (distance < 0) | (distance > WINDOW) | (ids[:, None] != ids)

    def attend(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
        bias = (-slopes[:, None, None] * distance).masked_fill(dropped, -math.inf)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)

    return attend


class Block(nn.Module):
    """Transformer block: attention and a feed-forward layer on the residual stream [S, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        wide = 4 * WIDTH
        self.feed = nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH))
        self.log_slopes = nn.Parameter(-math.log(2) * torch.arange(1.0, HEADS + 1))

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return query, key, value [1, HEADS, S, WIDTH / HEADS] and slopes [HEADS]."""
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, 1, HEADS, -1))
        return *qkv.permute(1, 2, 3, 0, 4), self.log_slopes.exp()

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        x = x + self.out(attend(*self.heads(x))[0].transpose(0, 1).flatten(1))
        return x + self.feed(self.feed_norm(x))


class Model(nn.Module):
    """Language model from bytes [S] to logits [S, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False))

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, attend)
        return self.head(x)


def loss_of(model: Model, tokens: Tensor, ids: Tensor, attend: Attend) -> Tensor:
    """Compute the mean next-byte loss in nats, ignoring the last byte of each document."""
    targets = tokens[1:].masked_fill(ids[1:] != ids[:-1], -100)  # -100: cross_entropy skips it
    return F.cross_entropy(model(tokens, attend)[:-1], targets)


def read_files() -> list[bytes]:
    """Return the larger modules of Python's standard library, as bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    return [text for text in files if len(text) > 2000] or sys.exit(f"no source in {folder}")


def pack(files: list[bytes], length: int, draw: random.Random) -> tuple[Tensor, Tensor]:
    """Pack random excerpts of random files; return tokens and document ids, both [length]."""
    text, ids = b"", []
    while len(text) < length:
        source = draw.choice(files)
        size = min(draw.randint(64, 700), length - len(text))
        start = draw.randrange(len(source) - size)
        text += source[start : start + size]
        ids += [ids[-1] + 1 if ids else 0] * size
    return torch.tensor(list(text)), torch.tensor(ids, dtype=torch.int32)


def train(model: Model, files: list[bytes], steps: int, length: int) -> list[float]:
    """Train on newly packed documents at every step; return the loss of each step."""
    draw, losses = random.Random(0), []
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps + 1, pct_start=0.1)
    quarters = {math.ceil(steps * part / 4) for part in (1, 2, 3, 4)}
    bar = trange(1, steps + 1, desc="training", unit="step", disable=None)  # None: on a terminal
    for step in bar:
        tokens, ids = pack(files, length, draw)
        loss = loss_of(model, tokens, ids, sparse_attention(ids))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.2f}")
        if bar.disable and step in quarters:
            print(f"training  step {step} of {steps}, loss {losses[-1]:.2f}", flush=True)
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="short sequences, little to learn")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    args = parser.parse_args()
    length, bound = (512, 5.4) if args.quick else (2048, 2.2)  # guessing gives log(256) = 5.55
    torch.manual_seed(0)
    files, model = read_files(), Model()
    print(f"{len(files)} source files, packed again at each step into {length} bytes")
    losses = train(model, files, args.steps, length)
    reached = statistics.mean(losses[-max(1, args.steps // 10) :])
    print(f"loss      {losses[0]:.2f} -> {reached:.2f} nats per byte (bound {bound:.2f})")

    tokens, ids = pack(files, length, random.Random(1))
    tiles = attnkit.create_block_mask(packed(ids), None, None, length, length)
    print(f"mask      {packed(ids)}: {tiles.sparsity():.0f}% of the tiles are never computed")

    inputs = [x.detach() for x in model.blocks[0].heads(model.embed(tokens))]
    oracle = sparse_attention(ids, backend="eager")
    ours, dense = (errors(f(ids), oracle, inputs) for f in (sparse_attention, dense_attention))
    print("exact     largest difference from dense float64, as a share of the largest entry")
    for name in ours:
        print(f"  {name:10}{ours[name]:.1e}   (dense float32: {dense[name]:.1e})")

    def step_time(attention: Callable[[Tensor], Attend]) -> float:
        # cloned ids are new documents to attnkit, as at each step of the training
        return milliseconds(lambda: loss_of(model, tokens, ids, attention(ids.clone())))

    fast, slow = step_time(sparse_attention), step_time(dense_attention)
    print(f"time      {fast:.0f} ms a step; with a dense mask {slow:.0f} ms: {slow / fast:.1f}x")
    picture(args.out / "packed_documents.png", losses, bound, packed(ids), length)
    print(f"picture   {args.out / 'packed_documents.png'}")

    rounding = 100 * torch.finfo(torch.float32).eps
    failures = [f"{k} is off by {e:.1e}" for k, e in ours.items() if not e < rounding]
    if not reached < bound:
        failures.append(f"the loss {reached:.2f} is not below {bound:.2f}")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
