"""Compare the clocks that the emulator predicts for the Hopper kernels with measured clocks.

    python benchmarks/emulator_cycles.py [--only CASE] [--backward CASE=CYCLES ...] [--save FILE]

The cases are those of gpu_cases.toml without a mask or with a causal mask, because these masks have
the same form at every length. The script predicts the clocks of each case at two small lengths,
with one head and one CTA, and fits clocks = a length + b length^2. It scales the fit to the length,
heads and SMs of the case and compares it with the newest row of results/gpu.jsonl.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from committed import add_commit, row_file
from gpu_variants import Problem, Shape, problem
from machine import describe

import attnkit
from attnkit.jit import emulation

HERE = Path(__file__).parent
ROWS = HERE / "results" / "gpu.jsonl"
LENGTHS = (768, 1536)  # multiples of all block sizes
BACKWARD_LENGTHS = (512, 1024)
FITTED = {"full", "causal + ALiBi", "causal + softcap 20"}  # two constants were fitted to these
SCALE_FREE = ("", "causal")
Row = dict[str, Any]


def measured() -> dict[tuple[str, str], Row]:
    """Return attnkit's newest row for each (case, direction) from results/gpu.jsonl."""
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    ours = [r for r in rows if r.get("contender") == "attnkit" and "cycles" in r]
    return {(r["case"], r["direction"]): r for r in ours}


def predicted(case: Row, shape: Shape, length: int, backward: bool) -> float:
    """Predict the clocks of one head on one SM; in the backward, those of the main kernel only."""
    small = Shape(1, 1, 1, length, shape.head_dim, shape.value_dim)
    p = problem(case, small, torch.device("cpu"), backward)
    with emulation.session(mode="eager", timeline=True, minutes=60, ctas=1) as session:
        _call(p, backward)
    clocks = {name: t.clocks for name, t in session.timelines}
    start = "backward" if backward else "forward"
    return next(c for name, c in clocks.items() if name.startswith(start))


def _call(p: Problem, backward: bool) -> None:
    arguments = (p.query, p.key, p.value, p.score_mod, p.mask_mod)
    out = attnkit.flex_attention(*arguments, backend="emulate")
    if backward:
        torch.autograd.grad(out, (p.query, p.key, p.value), p.grad)


def extrapolated(case: Row, shape: Shape, sms: int, backward: bool) -> float:
    """Predict the clocks of the whole problem from two small lengths and one head."""
    low, high = BACKWARD_LENGTHS if backward else LENGTHS
    at = {n: predicted(case, shape, n, backward) for n in (low, high)}
    square = (at[high] / high - at[low] / low) / (high - low)
    linear = at[low] / low - square * low
    one = linear * shape.length + square * shape.length**2
    return shape.batch * shape.heads * one / sms


def rows(only: str, overrides: dict[str, float]) -> Iterator[Row]:
    """Yield a row with predicted and measured clocks for each case and direction.

    Args:
        only: measure only cases whose name contains this.
        overrides: measured cycles of the backward by case; they replace those of the saved rows.
    """
    config = tomllib.loads((HERE / "gpu_cases.toml").read_text())
    known = measured()
    for case in config["case"]:
        shape = Shape.of(config["shape"] | case.get("shape", {}))
        if only not in case["name"] or case.get("mask", "") not in SCALE_FREE:
            continue
        for direction in ("forward", "backward"):
            row = known.get((case["name"], direction), {})
            cycles = overrides.get(case["name"]) if direction == "backward" else None
            cycles = cycles or row.get("cycles")
            if cycles is None:
                continue
            guess = extrapolated(case, shape, row.get("sms", 132), direction == "backward")
            yield {
                "case": case["name"],
                "direction": direction,
                "measured": cycles,
                "measured_at": row.get("run", "given"),
                "predicted": guess,
                "error": guess / cycles - 1,
                "fitted": direction == "forward" and case["name"] in FITTED,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    parser.add_argument("--backward", nargs="*", default=[], metavar="CASE=CYCLES")
    parser.add_argument("--save", type=Path, help="append the rows to this file")
    add_commit(parser)
    args = parser.parse_args()
    file = row_file(args.save, args.commit)
    overrides = {name: float(x) for name, _, x in (g.partition("=") for g in args.backward)}
    about, errors = describe(), list[Row]()
    for row in rows(args.only, overrides):
        errors.append(row)
        print(
            f"{row['case']:34s} {row['direction']:8s} {row['predicted'] / 1e6:7.3f} predicted "
            f"{row['measured'] / 1e6:7.3f} measured {100 * row['error']:+6.1f} %"
            f"{'  fitted' if row['fitted'] else ''}",
            flush=True,
        )
        file.append(about | {"benchmark": "emulator clocks"} | row)
    for direction in ("forward", "backward"):
        held = [r["error"] for r in errors if r["direction"] == direction and not r["fitted"]]
        if held:
            print(
                f"{direction}: root mean square {100 * fmean(e * e for e in held) ** 0.5:.1f} % of "
                f"{len(held)} that were not fitted, largest {100 * max(map(abs, held)):.1f} %"
            )


if __name__ == "__main__":
    main()
