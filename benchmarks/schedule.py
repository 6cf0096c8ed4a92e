"""Simulate schedules on 132 and 148 SMs: `python benchmarks/schedule.py [--json FILE]`.

No GPU is needed: costs are those of `attnkit.schedule.scheduler`, in SM cycles. For each mask,
length and direction the script prints:

- the makespan (the cycles until the last work tile ends), relative to the lower bound max(work /
  SMs, longest work tile), where the work is that of the unsplit rows, and relative to grid order;
- the fraction of visited tiles that hit L2, also for grid order and for longest-first order without
  sections;
- for the backward, the cost of waiting in deterministic order.

Length 2048 has no limit: if an SM has only one or two work tiles, no schedule is near the bound.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from committed import add_commit, row_file
from machine import describe
from torch import Tensor

from attnkit.schedule.scheduler import (
    L2_BYTES,
    MONOTONE,
    Schedule,
    Shape,
    schedule_backward,
    schedule_forward,
)
from attnkit.schedule.simulator import report, simulate, simulate_turns
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.sparsity.classify import classify
from attnkit.tracing.tracer import trace

BLOCK, HEAD_DIM, BATCH, HEADS = (128, 128), 128, 2, 16
LENGTHS = (2048, 8192, 32768)
LIMIT, LIMIT_FROM = 1.05, 8192  # largest makespan / lower bound, and the length from which it holds
CPU = torch.device("cpu")

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def causal(length: int) -> MaskMod:
    return lambda b, h, q, kv: q >= kv


def window(length: int) -> MaskMod:
    return lambda b, h, q, kv: (q >= kv) & (q - kv < 1024)


def documents(length: int) -> MaskMod:
    """Return a causal mask within 16 documents with random boundaries."""
    cuts = torch.randperm(length - 1, generator=torch.Generator().manual_seed(0))[:15] + 1
    ids = torch.searchsorted(cuts.sort().values, torch.arange(length), right=True)
    return lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv])


def full(length: int) -> MaskMod:
    return lambda b, h, q, kv: kv >= 0


def skewed(length: int) -> BlockRuns:
    """Draw random blocks per head; the density of a row is a uniform number to the 4th power."""
    random, blocks = torch.Generator().manual_seed(0), length // BLOCK[0]
    density = torch.rand(1, HEADS, blocks, 1, generator=random) ** 4
    kept = torch.rand(1, HEADS, blocks, blocks, generator=random) < density
    kinds = torch.randint(1, 3, kept.shape, generator=random, dtype=torch.int8)
    return BlockRuns.from_states(kinds * kept, length, length, BLOCK)


MASKS = {"full": full, "causal": causal, "window 1024": window, "16 documents": documents}


def runs_of(mask: str, length: int) -> BlockRuns:
    """Classify the tiles of a mask of `MASKS`, or of "skewed blocks"; return its block lists."""
    if mask == "skewed blocks":
        return skewed(length)
    traced = trace(MASKS[mask](length), "mask")
    return classify(traced.root, traced.tensors, q_len=length, kv_len=length, block=BLOCK,
                    batch=BATCH, heads=HEADS, device=CPU)  # fmt: skip


def timed(make: Callable[[], Schedule]) -> tuple[Schedule, float]:
    """Build a schedule five times; return it and the median build time in milliseconds."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        schedule = make()
        times.append(1000 * (time.perf_counter() - start))
    return schedule, statistics.median(times)


def measure(mask: str, length: int, workers: int, backward: bool) -> dict[str, Any]:
    """Simulate the schedule of one case and return its row."""
    runs, make = runs_of(mask, length), schedule_backward if backward else schedule_forward
    # bytes of a row: K and V in bfloat16, or Q and dO in bfloat16 and dQ in float32
    tile_bytes = BLOCK[0] * HEAD_DIM * (8 if backward else 4)
    shape = Shape(BATCH, HEADS, tile_bytes)
    schedule, plan_ms = timed(lambda: make(runs, shape, workers=workers))
    grid = report(make(runs, shape, workers=workers, order="grid"), runs)
    mine = report(schedule, runs)
    one_section = make(runs, shape, workers=workers, l2_bytes=1 << 60)
    row = {
        "benchmark": "schedule", "mask": mask, "length": length, "batch": BATCH, "heads": HEADS,
        "block": BLOCK, "backward": backward, "workers": workers, "l2_bytes": L2_BYTES,
        "pieces": mine.work_tile_count, "split": mine.split, "makespan": mine.makespan,
        "ratio": mine.makespan / mine.bound, "idle": mine.idle, "reuse": mine.reuse,
        "grid": grid.makespan / mine.makespan, "grid_idle": grid.idle, "grid_reuse": grid.reuse,
        "one_section_reuse": report(one_section, runs).reuse, "plan_ms": plan_ms,
    }  # fmt: skip
    for order in MONOTONE if backward else ():
        fixed = make(runs, shape, workers=workers, order=order)
        row[order] = simulate(fixed).makespan / mine.makespan
        row[f"{order}_turns"] = simulate_turns(fixed, runs).makespan / mine.makespan
    return row


HEAD = (
    f"{'mask':14} {'length':>6} {'':4} {'SMs':>4} {'cycles':>11} {'/bound':>7} {'grid':>6} "
    f"{'split':>6} {'idle':>6}   {'L2 reuse (grid, no sections)':29} {'plan':>8}   in turns"
)


def line(row: dict[str, Any]) -> str:
    """Format a row as one line of the printed table."""
    turns = ""
    if row["backward"]:
        turns = (
            f"ascending x{row['ascending_turns']:.2f}, descending x{row['descending_turns']:.2f}"
        )
    return (
        f"{row['mask']:14} {row['length']:6} {'bwd' if row['backward'] else 'fwd':4} "
        f"{row['workers']:4} {row['makespan']:11} {row['ratio']:7.3f} x{row['grid']:5.3f} "
        f"{row['split']:6} {row['idle']:6.1%}   {row['reuse']:6.1%} ({row['grid_reuse']:6.1%}, "
        f"{row['one_section_reuse']:6.1%}){'':9} {row['plan_ms']:5.1f} ms   {turns}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also append the rows to FILE")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--workers", type=int, nargs="+", default=(132, 148))
    add_commit(parser)
    options = parser.parse_args()
    file = row_file(options.json, options.commit)
    place, over = describe(), 0
    print(HEAD)
    for length in options.lengths:
        for mask in (*MASKS, "skewed blocks"):
            for backward in (False, True):
                for workers in options.workers:
                    row = place | measure(mask, length, workers, backward)
                    print(line(row), flush=True)
                    over += length >= LIMIT_FROM and row["ratio"] > LIMIT
                    file.append(row)
    verdict = f"missed in {over} rows" if over else "met"
    print(f"target from {LIMIT_FROM} on: at most {LIMIT} x the lower bound: {verdict}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
