"""Train a draft model for speculative decoding by block diffusion, as DFlash does.

At every step some positions of the text become anchors. The draft model sees the text before an
anchor and the token at it, and predicts the rest of a block at once. All blocks of a step are one
sequence of queries; the keys are the text, followed by the blocks. The mask depends on the anchors,
so that every step has a new one. The trainers of this method (SpecForge, TorchSpec, speculators)
call FlexAttention, and change the one import below.

The exit status is 1 if the model does not learn, or if a gradient differs from that of dense
attention.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# the changed import; before: from torch.nn.attention.flex_attention import …
from attnkit.flex import BlockMask, create_block_mask, flex_attention

BATCH, TEXT, ANCHORS, BLOCK = 8, 128, 8, 8
WORDS, WIDTH, HEADS, LAYERS = 10, 64, 2, 1
HIDDEN = WORDS  # the token of what a block has to predict
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # query, key, value: [B, HEADS, S, D]


def draw_anchors(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the anchors of a step, and which of them are used, both [BATCH, ANCHORS].

    Trainers drop anchors in prompts and padding; here some are dropped at random.
    """
    chances = torch.rand(BATCH, TEXT - BLOCK, generator=draw)
    anchors = chances.topk(ANCHORS).indices.sort().values.int()
    used = torch.rand(BATCH, ANCHORS, generator=draw) < 0.9
    used[:, 0] = True
    return anchors, used


def draft_mask(anchors: Tensor, used: Tensor) -> BlockMask:
    """Build the mask of a step: a block sees the text before its anchor, and itself."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block = q // BLOCK
        text = (kv < TEXT) & (kv < anchors[b, block])
        itself = (kv >= TEXT) & ((kv - TEXT) // BLOCK == block)
        return (text | itself) & used[b, block]

    queries = ANCHORS * BLOCK
    return create_block_mask(
        mask_mod, BATCH, None, queries, TEXT + queries, device=str(anchors.device), BLOCK_SIZE=16
    )


def sparse_attention(anchors: Tensor, used: Tensor) -> Attend:
    mask = draft_mask(anchors, used)
    return lambda query, key, value: flex_attention(query, key, value, block_mask=mask)


def dense_attention(anchors: Tensor, used: Tensor) -> Attend:
    """Build attention in plain PyTorch with a mask [BATCH, 1, queries, keys], block by block."""
    mask = torch.zeros(BATCH, 1, ANCHORS * BLOCK, TEXT + ANCHORS * BLOCK, dtype=torch.bool)
    for b in range(BATCH):
        for i in range(ANCHORS):
            if used[b, i]:
                rows = slice(i * BLOCK, (i + 1) * BLOCK)
                mask[b, 0, rows, : anchors[b, i]] = True
                mask[b, 0, rows, TEXT + rows.start : TEXT + rows.stop] = True

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return out.where(mask.any(-1, keepdim=True), 0)  # rows without a key

    return attend


class Layer(nn.Module):
    """Layer of the draft model: blocks attend to the text and to themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, blocks: Tensor, text: Tensor, attend: Attend) -> Tensor:
        x = self.norm(blocks)
        query = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        pairs = self.key_value(torch.cat([text, x], 1)).unflatten(-1, (2, HEADS, -1))
        key, value = pairs.permute(2, 0, 3, 1, 4)
        blocks = blocks + self.out(attend(query, key, value).transpose(1, 2).flatten(2))
        return blocks + self.feed(self.feed_norm(blocks))


class DraftModel(nn.Module):
    """Draft model from a text [B, TEXT] and anchors [B, ANCHORS] to logits of all blocks.

    A trainer has hidden states of the target model for the text; here they are embeddings.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS + 1, WIDTH)
        self.place = nn.Embedding(BLOCK, WIDTH)
        self.text_norm = nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False))

    def forward(self, text: Tensor, anchors: Tensor, attend: Attend) -> Tensor:
        seen = torch.full((BATCH, ANCHORS, BLOCK), HIDDEN)
        seen[:, :, 0] = text.gather(1, anchors.long())
        blocks = (self.embed(seen) + self.place.weight).flatten(1, 2)
        features = self.text_norm(self.embed(text))
        for layer in self.layers:
            blocks = layer(blocks, features, attend)
        return self.head(blocks)


def loss_of(
    model: DraftModel, text: Tensor, anchors: Tensor, used: Tensor, attend: Attend
) -> Tensor:
    """Compute the mean loss in nats of the tokens after the anchors, in the blocks that are used."""
    places = anchors[..., None] + torch.arange(BLOCK)
    targets = text[torch.arange(BATCH)[:, None, None], places]
    targets = targets.masked_fill(~used[..., None], -100)  # -100: cross_entropy skips it
    targets[:, :, 0] = -100
    logits = model(text, anchors, attend)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def draw_text(draw: torch.Generator) -> Tensor:
    """Return texts [BATCH, TEXT] of two words in turn.

    A block sees one of them at its anchor, and has to find the other one in the text before it.
    """
    words = torch.rand(BATCH, WORDS, generator=draw).topk(2).indices
    return words[:, torch.arange(TEXT) % 2]


def gradients(model: DraftModel, text: Tensor, anchors: Tensor, used: Tensor, attend: Attend):
    """Return the gradients of all parameters as one vector in float64."""
    loss = loss_of(model, text, anchors, used, attend)
    return torch.cat([g.double().flatten() for g in torch.autograd.grad(loss, model.parameters())])


def gradient_errors(model: DraftModel, *step: Tensor) -> tuple[float, float]:
    """Return the largest errors of the gradients with attnkit and with dense attention.

    They are relative to the largest gradient of dense attention in float64.
    """
    _, anchors, used = step
    dense = dense_attention(anchors, used)
    exact = gradients(copy.deepcopy(model).double(), *step, dense)
    found = (gradients(model, *step, attend) for attend in (sparse_attention(anchors, used), dense))
    ours, theirs = (((g - exact).abs().max() / exact.abs().max()).item() for g in found)
    return ours, theirs


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=120)
    # Guessing the word that is not at the anchor gives 4/7 log(9) = 1.26.
    parser.add_argument("--bound", type=float, default=1.0, help="loss to reach, nats per token")
    parser.add_argument("--checks", type=int, default=5, help="steps compared with dense attention")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    draw, model = torch.Generator().manual_seed(0), DraftModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses, worst, failures = [], (0.0, 0.0), []
    for step in range(args.steps):
        text, (anchors, used) = draw_text(draw), draw_anchors(draw)
        if step % max(1, args.steps // args.checks) == 0:
            ours, theirs = gradient_errors(model, text, anchors, used)
            worst = max(worst, (ours, theirs))
            if not ours <= 2 * theirs + 4 * torch.finfo(torch.float32).eps:
                failures.append(f"step {step}: the gradient is off by {ours:.1e}")
        loss = loss_of(model, text, anchors, used, sparse_attention(anchors, used))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    reached = statistics.mean(losses[-max(1, args.steps // 10) :])
    mask = draft_mask(anchors, used)
    print(f"loss   {losses[0]:.2f} -> {reached:.2f} nats per token (bound {args.bound:.2f})")
    print(f"mask   {list(mask.shape)}, {mask.sparsity():.0f}% of the tiles are never computed")
    print(f"exact  gradients within {worst[0]:.1e} of float64 (dense float32: {worst[1]:.1e})")
    if not reached < args.bound:
        failures.append(f"the loss {reached:.2f} is not below {args.bound:.2f}")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
