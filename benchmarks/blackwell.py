"""Predicted speed of the Blackwell kernels beside what FlashAttention-4 states: a table for docs.

Nothing is measured: the clocks are those of the emulator's timeline, see `attnkit.feeds`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import torch

from attnkit import create_block_mask, masks, noop_mask
from attnkit.feeds import Feeds, backward_feeds, forward_feeds
from attnkit.forecast import CARDS, forecast_backward, forecast_forward
from attnkit.summary import summarize
from attnkit.targets import SM100
from attnkit.variant import Variant

TOKENS, HEADS, HEAD_DIM = 16384, 16, 128  # as in FlashAttention-4's figures
LENGTHS = (1024, 2048, 4096, 8192, 16384)
# TFLOP/s on one B200 with head dim 128: Dao-AILab/flash-attention issue 2280
STATED = {
    ("full", "forward", 8192): 1535,
    ("causal", "forward", 8192): 1418,
    ("full", "backward", 8192): 1360,
    ("causal", "backward", 8192): 1209,
}


def rate(mask: Any, length: int, feeds: Feeds, backward: bool) -> float:
    """TFLOP/s of the kept scores, predicted."""
    card, batch = CARDS[SM100.arch], TOKENS // length
    block = create_block_mask(mask, None, None, length, length, BLOCK_SIZE=feeds.block)
    predict = forecast_backward if backward else forecast_forward
    found = predict(
        block.runs,
        batch=batch,
        heads=HEADS,
        head_dim=HEAD_DIM,
        sms=card.sms // feeds.sms,
        cost=feeds.cost,
    )
    seconds = found.timeline.makespan / (card.clock * 1e9)
    kept = summarize(block).kept
    assert kept is not None
    return (10 if backward else 4) * HEAD_DIM * kept * batch * HEADS / seconds / 1e12


def lines() -> Iterator[str]:
    """The table."""
    yield (
        "| B200, head dim 128, predicted TFLOP/s | " + " | ".join(map(str, LENGTHS)) + " | limit |"
    )
    yield "| --- |" + " --- |" * (len(LENGTHS) + 1)
    for direction, measure in (("forward", forward_feeds), ("backward", backward_feeds)):
        for name, mask in (("full", None), ("causal", masks.causal())):
            feeds = measure(Variant(None, mask), SM100, head_dim=HEAD_DIM)
            cells = []
            for length in LENGTHS:
                kept = noop_mask if mask is None else mask
                cell = f"{rate(kept, length, feeds, direction == 'backward'):.0f}"
                stated = STATED.get((name, direction, length))
                cells.append(cell if stated is None else f"{cell} (FA4 {stated})")
            yield f"| {name}, {direction} | {' | '.join(cells)} | {feeds.limit} |"
            for line in str(feeds).splitlines():
                print(f"{name}, {direction}: {line}", file=sys.stderr)


def main() -> int:
    """Print the table; the clocks go to stderr."""
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    torch.set_num_threads(1)
    for line in lines():
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
