"""Measure attnkit against its peers: `python benchmarks/run.py` (`--help` for the choices).

The script checks each case of cases.toml against float64, in each direction and dtype, then times
attnkit and its peers round-robin. Compile times are not included. If a peer refuses a case, its row
gives the reason.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from committed import add_commit, row_file
from contenders import CONTENDERS, OURS, Problem, Run, dense, error
from machine import describe
from table import ROWS
from timing import Times, in_turn
from torch import Tensor
from variants import MASKS, SCORES

HERE = Path(__file__).parent
WRONG = 0.05  # a peer further than this from float64 computes something else
Row = dict[str, Any]


def problem(case: Row, shape: dict[str, int], dtype: torch.dtype) -> Problem:
    """Draw inputs that require grad, and build the mask and score_mod of a case."""
    torch.manual_seed(0)
    sizes = (shape["batch"], shape["heads"], shape["length"], shape["head_dim"])
    query, key, value, grad = (torch.randn(sizes).to(dtype) for _ in range(4))
    for t in (query, key, value):
        t.requires_grad_()
    score = SCORES[case["score"]](shape["heads"]) if "score" in case else None
    return Problem(query, key, value, grad, MASKS[case["mask"]](shape["length"]), score)


def directed(p: Problem, attention: Run, direction: str) -> Callable[[], list[Tensor]]:
    """Return the function to time: the forward, or only the backward.

    The function returns the tensors to check: the output, or dQ, dK and dV.
    """
    if direction == "forward":
        return lambda: [attention()]
    out = attention()
    inputs = (p.query, p.key, p.value)
    return lambda: list(torch.autograd.grad(out, inputs, p.grad, retain_graph=True))


def prepare(
    p: Problem, peers: list[str], direction: str, truth: list[Tensor]
) -> tuple[dict[str, Callable[[], list[Tensor]]], dict[str, float], dict[str, str]]:
    """Build the functions of attnkit and its peers, and check their results against `truth`.

    Returns:
        By name: the functions to time, their errors, and why other peers are skipped.
    """
    runs, errors, skipped = {}, {}, {}
    for name in (OURS, *peers):
        try:
            run = directed(p, CONTENDERS[name](p), direction)
            off = error(run(), truth)
        except Exception as refusal:
            if name == OURS:
                raise
            skipped[name] = str(refusal).strip().split(". ")[0] or type(refusal).__name__
            continue
        if name != OURS and off > WRONG:
            skipped[name] = f"computes something else: {off:.1e} off"
        else:
            runs[name], errors[name] = run, off
    return runs, errors, skipped


def measure(case: Row, config: Row, seconds: float, attempts: int) -> Iterator[Row]:
    """Measure one case; yield one row for each direction, dtype and peer."""
    for dtype in case["dtypes"]:
        p = problem(case, config["shape"], getattr(torch, dtype))
        truth, same_dtype = dense(p, torch.float64), dense(p, p.query.dtype)
        for direction in case["directions"]:
            forward = direction == "forward"
            part = slice(0, 1) if forward else slice(1, None)
            inputs = p.without_grad() if forward else p
            runs, errors, skipped = prepare(inputs, case["peers"], direction, truth[part])
            times = in_turn(runs, seconds=seconds, attempts=attempts)
            allowed = 2 * error(same_dtype[part], truth[part])
            shared = {"case": case["name"], "direction": direction, "dtype": dtype}
            shared |= {"shape": config["shape"], "error_allowed": allowed}
            for peer in case["peers"]:
                yield shared | compared(times, errors, skipped, peer)


def compared(
    times: dict[str, Times], errors: dict[str, float], skipped: dict[str, str], peer: str
) -> Row:
    """Return the fields of a row that compare `peer` with attnkit."""
    ours = times[OURS]
    row: Row = {"ours_ms": ours.median, "ours_min": ours.least, "error": errors[OURS]}
    row |= {"rounds": len(ours.rounds), "noisy": ours.noisy, "peer": peer}
    if peer in skipped:
        return row | {"skipped": skipped[peer]}
    theirs = times[peer]
    row |= {"peer_ms": theirs.median, "peer_min": theirs.least, "peer_error": errors[peer]}
    row |= {"ratio": theirs.over(ours), "ratio_min": theirs.least / ours.least}
    return row | {"noisy": ours.noisy or theirs.noisy}


def wanted(row: Row, targets: list[Row]) -> float | None:
    """Return the ratio that a row has to reach, or None if there is no target for it."""
    for target in targets:
        same = all(target[k] == row[k] for k in ("direction", "dtype", "peer"))
        if same and row["case"] in target["cases"]:
            return float(target["ratio"])
    return None


def line(row: Row, least: float | None) -> str:
    """Format a row as one line of the printed table; `least` is the ratio it has to reach."""
    text = f"{row['case']:18}{row['direction']:9}{row['dtype']:9}{row['ours_ms']:8.1f}"
    text += f"{row['error']:9.1e}  {row['peer']:15}"
    if "skipped" in row:
        return text + f"skipped: {row['skipped']}"
    text += f"{row['peer_ms']:8.1f}{row['peer_error']:9.1e}{row['ratio']:7.2f}x"
    text += f" (least times {row['ratio_min']:.2f}x)"
    if least is not None:
        text += f"  wanted {least:.1f}x" + ("" if row["ratio"] >= least else ": MISSED")
    if not row["error"] <= row["error_allowed"]:
        text += f"  WRONG: error above {row['error_allowed']:.1e}"
    return text + ("  noisy" if row["noisy"] else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    parser.add_argument(
        "--peer", action="append", help="compare only with this peer; may be repeated"
    )
    parser.add_argument("--length", type=int, help="sequence length instead of the cases' own")
    parser.add_argument(
        "--threads", type=int, default=2, help="number of torch threads (default 2)"
    )
    parser.add_argument("--seconds", type=float, default=4, help="shortest measurement in seconds")
    parser.add_argument(
        "--save", action="store_true", help="append rows that are not noisy to results/"
    )
    parser.add_argument("--attempts", type=int, default=3, help="attempts at a noisy measurement")
    add_commit(parser)
    args = parser.parse_args()
    file = row_file(ROWS if args.save else None, args.commit)
    torch.set_num_threads(args.threads)
    config = tomllib.loads((HERE / "cases.toml").read_text())
    config["shape"]["length"] = args.length or config["shape"]["length"]
    where = describe()
    print(*(f"{k}: {v}" for k, v in where.items()), sep=", ")
    print(f"{'case':18}{'':9}{'':9}{'ours ms':>8}{'error':>9}  {'peer':15}{'ms':>8}{'error':>9}")
    wrong = False
    for case in config["case"]:
        if args.only not in case["name"]:
            continue
        case["peers"] = [peer for peer in case["peers"] if peer in (args.peer or case["peers"])]
        for row in measure(case, config, args.seconds, args.attempts):
            print(line(row, wanted(row, config["target"])), flush=True)
            wrong |= not row["error"] <= row["error_allowed"]
            if not row["noisy"]:
                file.append(where | row)
    if not args.only:
        print("\ntiles of a mask", flush=True)
        command = [sys.executable, HERE / "classify.py", "--threads", str(args.threads)]
        command += ["--json", ROWS.with_name("classify.jsonl")] if args.save else []
        command += ["--commit", args.commit] if args.commit else []
        wrong |= subprocess.run(command, check=False).returncode != 0
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
