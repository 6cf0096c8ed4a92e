"""Print the predicted speed of the Blackwell kernels beside FlashAttention-4's published figures.

With `--pairs`, print the predicted clocks of a two-CTA forward relative to those of one CTA
instead, for several variants. Nothing is measured: the clocks come from the emulator's timeline
(`attnkit.inspection.throughput`).
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch

from attnkit import create_block_mask, masks, mods, noop_mask
from attnkit.inspection.forecast import GPUS, forecast_backward, forecast_forward
from attnkit.inspection.summary import summarize
from attnkit.inspection.throughput import BlockClocks, backward_block_clocks, forward_block_clocks
from attnkit.runtime.variant import Variant
from attnkit.schedule.targets import SM100
from attnkit.splice import Program
from attnkit.splice.forward import forward_block

TOKENS, HEADS, HEAD_DIM = 16384, 16, 128  # as in FlashAttention-4's figures
LENGTHS = (1024, 2048, 4096, 8192, 16384)
# TFLOP/s on one B200 with head dim 128: Dao-AILab/flash-attention issue 2280
STATED = {
    ("full", "forward", 8192): 1535,
    ("causal", "forward", 8192): 1418,
    ("full", "backward", 8192): 1360,
    ("causal", "backward", 8192): 1209,
}
PAIR, SINGLE = (512, 128), (256, 128)
LONG = 8192  # length in the table of pairs
CAUSAL = masks.causal()


@functools.cache
def forward(variant: Variant, block: tuple[int, int]) -> BlockClocks:
    """Predict the clocks per block of the forward kernel with tiles `block` (rows, columns)."""
    return forward_block_clocks(variant, SM100, head_dim=HEAD_DIM, block=block)


@functools.cache
def backward(variant: Variant) -> BlockClocks:
    """Predict the clocks per block of the backward kernel that attnkit uses for long sequences."""
    return backward_block_clocks(variant, SM100, head_dim=HEAD_DIM)


def tiles(mask: Any, length: int, block: tuple[int, int]) -> Any:
    """Build the block mask of `mask` at S=`length`, with tiles `block` (rows, columns)."""
    return create_block_mask(mask, None, None, length, length, BLOCK_SIZE=block)


def chosen_block(variant: Variant, length: int) -> tuple[int, int]:
    """Return the tile sizes (rows, columns) of the forward kernel that attnkit chooses."""
    runs = None if variant.mask is None else tiles(variant.mask, length, (128, 128)).runs
    score, _ = variant.trace(torch.device("cpu"))
    program = Program(None if score is None else score.root)
    return forward_block(SM100.name, program, (HEAD_DIM, HEAD_DIM), runs, length)[0]


def clocks(mask: Any, length: int, feeds: BlockClocks, backward: bool = False) -> float:
    """Predict the clocks that one B200 needs for a pass over `TOKENS` tokens."""
    predict = forecast_backward if backward else forecast_forward
    simulated = predict(
        tiles(noop_mask if mask is None else mask, length, feeds.block).runs,
        batch=TOKENS // length,
        heads=HEADS,
        head_dim=HEAD_DIM,
        sms=GPUS[SM100.arch].sms // feeds.sms,
        cost=feeds.cost,
    )
    return simulated.timeline.makespan


def rate(mask: Any, length: int, feeds: BlockClocks, backward: bool) -> float:
    """Predict the TFLOP/s of a pass, counting the operations for unmasked scores only."""
    seconds = clocks(mask, length, feeds, backward) / (GPUS[SM100.arch].clock * 1e9)
    kept = summarize(tiles(noop_mask if mask is None else mask, length, feeds.block)).kept_positions
    assert kept is not None
    return (10 if backward else 4) * HEAD_DIM * kept * (TOKENS // length) * HEADS / seconds / 1e12


def lines() -> Iterator[str]:
    """Yield the lines of the Markdown table of predicted TFLOP/s."""
    yield (
        "| B200, head dim 128, predicted TFLOP/s | " + " | ".join(map(str, LENGTHS)) + " | limit |"
    )
    yield "| --- |" + " --- |" * (len(LENGTHS) + 1)
    for direction in ("forward", "backward"):
        for name, mask in (("full", None), ("causal", CAUSAL)):
            variant, cells = Variant(None, mask), []
            said: dict[str, None] = {}
            for length in LENGTHS:
                ahead = direction == "forward"
                feeds = (
                    forward(variant, chosen_block(variant, length)) if ahead else backward(variant)
                )
                said[str(feeds)] = None
                cell = f"{rate(mask, length, feeds, not ahead):.0f}"
                stated = STATED.get((name, direction, length))
                cells.append(cell if stated is None else f"{cell} (FA4 {stated})")
            yield f"| {name}, {direction} | {' | '.join(cells)} | {feeds.limit} |"
            for line in "\n".join(said).splitlines():
                print(f"{name}, {direction}: {line}", file=sys.stderr)


def documents(length: int) -> Any:
    """Return a causal mask within eight documents of different lengths (`length` > 6650)."""
    sizes = torch.tensor([350, 700, 900, 1000, 1100, 1200, 1400, length - 6650])
    return CAUSAL & masks.document_from_lengths(sizes)


def pairs() -> Iterator[str]:
    """Yield the lines of a Markdown table: clocks of a CTA pair over one CTA, and the choice."""
    scores = {
        "no score_mod": None,
        "ALiBi": mods.alibi(HEADS),
        "softcap": mods.softcap(20.0),
        "relative bias": mods.relative_bias(torch.zeros(HEADS, 129)),
    }
    kinds = {
        "full": None,
        "causal": CAUSAL,
        "causal, window 1024": CAUSAL & masks.sliding_window(1024),
        "documents": documents(LONG),
    }
    yield f"| pair over one CTA, S = {LONG} | " + " | ".join(kinds) + " |"
    yield "| --- |" + " --- |" * len(kinds)
    for name, score in scores.items():
        cells = []
        for mask in kinds.values():
            # time masked blocks with a causal mask: all these masks have one interval in each row
            timed = Variant(score, CAUSAL)
            one, two = (clocks(mask, LONG, forward(timed, b)) for b in (SINGLE, PAIR))
            best = chosen_block(Variant(score, mask), LONG)
            cells.append(f"{two / one:.3f} ({'pair' if best == PAIR else 'one'})")
        yield f"| {name} | {' | '.join(cells)} |"
        for block in (SINGLE, PAIR):
            feeds = forward(Variant(score, CAUSAL), block)
            said = f"full {feeds.full:.0f}, masked {feeds.partial:.0f}, tile {feeds.tile:.0f}"
            print(f"{name}, {block[0]} x {block[1]}: {said}", file=sys.stderr)


def main() -> int:
    """Print the table to stdout and the clocks per block to stderr."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--pairs", action="store_true", help="compare pairs of CTAs with single CTAs"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    for line in pairs() if options.pairs else lines():
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
