"""Time a training step of GPT-2 small on packed documents, with attnkit and with its peers.

    python benchmarks/gpt2.py --save

A step is a forward, a backward and an AdamW update in bfloat16. The model has twelve layers with 12
heads of 64, and the batch has 8 sequences of 4096 tokens, each packed with documents of random
lengths. Every contender trains its own model from the same initial weights, compiled layer by
layer. The script compares the losses of the first steps, then times steps round-robin in this
process. The contender "no attention" returns the value instead of attention, which gives the time
of the rest of the step. The exit status is 1 if attnkit failed, else 3 if a median stays
uncertain by more than 3 %; such rows are not saved.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from committed import add_commit, row_file
from gpu_machine import describe_gpu
from gpu_timing import (
    MODES,
    NOISY,
    ROUNDS,
    UNCERTAIN,
    CudaTimer,
    Function,
    Reading,
    Series,
    Timer,
    steady,
)
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

import attnkit
from attnkit import masks

ROWS = Path(__file__).parent / "results" / "gpt2.jsonl"
OURS = "attnkit"
STEPS = 3  # steps whose losses are compared
AGREED = 0.02  # largest allowed difference of two losses, which are about 10, in bfloat16

Row = dict[str, Any]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # [B, H, S, D]


@dataclass(frozen=True)
class Sizes:
    """Hold the sizes of the model and of a batch."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    vocabulary: int = 50304
    batch: int = 8
    length: int = 4096
    document: int = 600  # tokens, the median


class Block(nn.Module):
    """Transformer block: attention and a feed-forward layer, each with a residual connection."""

    def __init__(self, sizes: Sizes, attention: Attention) -> None:
        super().__init__()
        width = sizes.width
        self.heads, self.attention = sizes.heads, attention
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in parts)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))


class Head(nn.Module):
    """Output layer: next-token loss in float32, with the input embedding as the output weight."""

    def __init__(self, tokens: nn.Embedding) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(tokens.embedding_dim), tokens.weight

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        scores = F.linear(self.norm(x), self.weight).flatten(0, 1)
        following = F.pad(tokens[:, 1:], (0, 1), value=-100)  # the last token has no next one
        return F.cross_entropy(scores.float(), following.flatten(), ignore_index=-100)


class Model(nn.Module):
    """GPT-2 model whose forward returns the next-token loss."""

    def __init__(self, sizes: Sizes, attention: Attention) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.places = nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, attention) for _ in range(sizes.layers))
        self.head = Head(self.tokens)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Return the scalar loss; `tokens` and `places` are as in `Batch`."""
        x = self.tokens(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x, tokens)
        return loss


@dataclass(frozen=True)
class Batch:
    """Hold a batch of packed documents; all tensors are int64 [B, S].

    Attributes:
        tokens: token ids.
        documents: document ids, increasing along the sequence.
        places: position of each token within its document.
    """

    tokens: Tensor
    documents: Tensor
    places: Tensor

    @staticmethod
    def drawn(sizes: Sizes, device: torch.device) -> Batch:
        """Draw documents with log-normal lengths, like web pages; cut the last of a sequence."""
        random = torch.Generator().manual_seed(0)
        shape = (sizes.batch, sizes.length)
        tokens = torch.randint(sizes.vocabulary, shape, generator=random)
        spread = torch.randn(shape, generator=random).exp()
        starts = (sizes.document * spread).long().clamp(min=8).cumsum(1)
        at = torch.arange(sizes.length).expand(shape).contiguous()
        documents = torch.searchsorted(starts, at, right=True)
        begin = F.pad(starts, (1, 0)).gather(1, documents)
        return Batch(*(t.to(device) for t in (tokens, documents, at - begin)))

    @property
    def count(self) -> int:
        """Return the number of documents in the batch."""
        return int((self.documents[:, -1] + 1).sum())

    @property
    def density(self) -> float:
        """Return the fraction of scores that the mask keeps."""
        return float((self.places + 1).sum() / self.places.shape[1] / self.places.numel())


def attnkit_attention(batch: Batch) -> Attention:
    """Build causal attention within documents with attnkit; the first call classifies the tiles."""
    mask = masks.causal() & masks.document(batch.documents)
    return lambda q, k, v: attnkit.flex_attention(q, k, v, block_mask=mask)


def flex_attention(batch: Batch, options: dict[str, Any] | None = None) -> Attention:
    """Build causal attention within documents with FlexAttention; the block mask is built here."""
    documents = batch.documents

    def keep(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (documents[b, q] == documents[b, kv])

    count, length = documents.shape
    mask = flex.create_block_mask(keep, count, None, length, length, device=documents.device)
    return lambda q, k, v: flex.flex_attention(q, k, v, block_mask=mask, kernel_options=options)


def dense_attention(batch: Batch) -> Attention:
    """Build causal attention within documents with SDPA and a dense mask."""
    at = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    kept = batch.documents[:, :, None] == batch.documents[:, None]
    kept = (kept & (at[:, None] >= at))[:, None]
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, kept)


CONTENDERS: dict[str, Callable[[Batch], Attention]] = {
    OURS: attnkit_attention,
    "Flex Triton": flex_attention,
    "Flex FLASH": lambda batch: flex_attention(batch, {"BACKEND": "FLASH"}),
    "SDPA dense": dense_attention,
    "no attention": lambda batch: lambda q, k, v: v,
}
DEFAULT = "attnkit,Flex Triton,Flex FLASH,no attention"


@dataclass(frozen=True)
class Contender:
    """Hold a model's training step and the fields of its row that are known before timing.

    Attributes:
        step: runs one training step and returns the loss.
        known: losses of the first steps, seconds until they were done, and peak memory.
    """

    step: Callable[[], Tensor]
    known: Row


def prepared(attention: Attention, batch: Batch, sizes: Sizes, whole: bool) -> Contender:
    """Build a model, run its first training steps, and return it as a `Contender`."""
    began = time.perf_counter()
    device = batch.tokens.device
    torch.manual_seed(0)
    dtype = torch.bfloat16
    model = Model(sizes, attention).to(device, dtype)
    if whole:
        for part in (*model.blocks, model.head):
            part.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batch.tokens, batch.places)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [float(step()) for _ in range(STEPS)]
    known: Row = {"losses": losses, "seconds_to_start": round(time.perf_counter() - began, 1)}
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        known["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
    return Contender(step, known)


class WallTimer:
    """Timer that uses the wall clock, for machines without a GPU."""

    def prepare(self, function: Function) -> None:
        function()

    def measure(self, function: Function, prepared: None) -> Reading:
        began = time.perf_counter()
        function()
        return Reading(1000 * (time.perf_counter() - began), None)


def measured(
    names: list[str], batch: Batch, sizes: Sizes, timer: Timer, rounds: int, whole: bool
) -> list[Row]:
    """Build and time all contenders; return one row for each name, in order."""
    ready: dict[str, Contender] = {}
    rows: dict[str, Row] = {}
    for name in names:
        torch.compiler.reset()
        try:
            ready[name] = prepared(CONTENDERS[name](batch), batch, sizes, whole)
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            rows[name] = {"skipped": f"{type(error).__name__}: {first}"[:300]}
        print(name, rows.get(name) or ready[name].known, flush=True)
    steps = {name: contender.step for name, contender in ready.items()}
    found = steady(steps, timer, base=OURS, rounds=rounds)
    series = found.series
    tokens = batch.tokens.numel()
    for name, contender in ready.items():
        rows[name] = contender.known | figures(series[name], series.get(OURS), tokens)
    shared = {"attempts": found.attempts, "noisy": found.noisy}
    return [{"contender": name} | shared | rows[name] for name in names]


def figures(own: Series, ours: Series | None, tokens: int) -> Row:
    """Return times, SM clock, tokens per second, and the time relative to attnkit's."""
    row: Row = {"ms": own.times.median, "ms_least": own.times.least}
    row |= {"ms_most": max(own.times.rounds), "rounds": len(own.readings), "ghz": own.ghz}
    row |= own.spreads(ours) | own.uncertainties(ours)
    row["tokens_a_second"] = round(1000 * tokens / own.times.median)
    return row | ({} if ours is None else {"ratio": own.times.over(ours.times)})


def disagreeing(rows: list[Row]) -> list[str]:
    """Return the contenders whose losses differ from attnkit's, except "no attention"."""
    losses = {r["contender"]: r["losses"] for r in rows if "losses" in r}
    ours = losses.get(OURS, [])
    return [
        name
        for name, theirs in losses.items()
        if name != "no attention"
        and any(not abs(a - b) <= AGREED for a, b in zip(theirs, ours, strict=False))
    ]


def line(row: Row) -> str:
    """Format a row as one line of text."""
    if "skipped" in row:
        return f"{row['contender']:18}skipped: {row['skipped']}"
    peak, clock = row.get("peak_bytes", 0) / 2**30, row["ghz"]
    return (
        f"{row['contender']:18}{row['ms']:9.2f}{row.get('ratio', 0):8.3f}"
        f"{row['tokens_a_second']:12,}{peak:9.2f}{clock or 0:7.3f}  {row['losses'][-1]:.4f}"
    )


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, value in asdict(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument(
        "--contenders", default=DEFAULT, help=f"comma-separated names from: {', '.join(CONTENDERS)}"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--rounds",
        type=ROUNDS,
        default=7,
        help="timed steps of each contender per attempt (default 7)",
    )
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    add_commit(parser)
    parser.add_argument(
        "--save", type=Path, nargs="?", const=ROWS, metavar="FILE",
        help="append the rows to FILE (default results/gpt2.jsonl)",
    )  # fmt: skip
    return parser


def main(argv: list[str] | None = None) -> int:
    options = arguments().parse_args(argv)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("this benchmark needs a CUDA device, and torch.cuda sees none", file=sys.stderr)
        return 2
    file = row_file(options.save, options.commit)
    sizes = Sizes(**{name: getattr(options, name) for name in asdict(Sizes())})
    names = [name.strip() for name in options.contenders.split(",")]
    if unknown := set(names) - set(CONTENDERS):
        print(f"no contender {sorted(unknown)}; see --help", file=sys.stderr)
        return 2
    on_gpu = device.type == "cuda"
    timer: Timer = CudaTimer(MODES["sustained"], device) if on_gpu else WallTimer()
    batch = Batch.drawn(sizes, device)
    shared: Row = {"benchmark": "gpt2 step", "sizes": asdict(sizes), "density": batch.density}
    shared |= {"compiled": not options.eager, "documents": batch.count}
    rows = measured(names, batch, sizes, timer, options.rounds, not options.eager)
    where = describe_gpu(device) if on_gpu else {}
    print(*(f"{k}: {v}" for k, v in (where | shared).items()), sep=", ")
    print(f"{'contender':18}{'ms':>9}{'x ours':>8}{'tokens/s':>12}{'peak GiB':>9}{'GHz':>7}  loss")
    for row in rows:
        print(line(row))
        if not row["noisy"]:
            file.append(where | shared | row)
    wrong = disagreeing(rows)
    if wrong:
        print(f"losses differ from attnkit's: {', '.join(wrong)}")
    if noisy := any(row["noisy"] for row in rows):
        print(f"noisy: a median is uncertain by more than {UNCERTAIN:.0%}; not saved")
    failed = any("skipped" in r and r["contender"] == OURS for r in rows)
    return 1 if failed or wrong else NOISY if noisy else 0


if __name__ == "__main__":
    sys.exit(main())
