"""Measure attnkit against its peers on a GPU: `python benchmarks/gpu.py` (`--help` for choices).

The script checks every contender of each case of gpu_cases.toml against float64, then times all
contenders of the case round-robin in this process. If a contender is not installed, refuses the
case or computes a different result, its row gives the reason. Each contender is timed with the
fastest of its settings. A case gets more rounds until the 95 % confidence intervals of all medians,
of times and of ratios to attnkit, are within 3 %. If five attempts do not suffice, its rows are
printed but not saved. The exit status is 1 if attnkit failed or was wrong, else 3 if a case was too
noisy.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from committed import add_commit, row_file
from gpu_check import Check
from gpu_contenders import CONTENDERS, OURS, Sweep, ablations
from gpu_machine import describe_gpu
from gpu_sweep import Sweeper
from gpu_timing import ATTEMPTS, MODES, NOISY, ROUNDS, UNCERTAIN, CudaTimer, Series, Timer, steady
from gpu_variants import Shape, problem

from attnkit import clear_caches

HERE = Path(__file__).parent
ROWS = HERE / "results" / "gpu.jsonl"
Row = dict[str, Any]
Function = Callable[[], Any]


@dataclass(frozen=True)
class Settings:
    """Hold the options that say how each case is measured."""

    backward: bool
    mode: str
    rounds: int
    seconds: float  # for the timing of a case
    sweep_seconds: float = 60  # for finding a contender's best setting
    attempts: int = 5  # at a case that is noisy


def shape_of(case: Row, config: Row) -> Shape:
    """Return the sizes of a case, with the defaults of `config` for those it does not set."""
    return Shape.of(config["shape"] | case.get("shape", {}))


def wanted(config: Row, only: str, backward: bool) -> list[Row]:
    """Return the cases whose name matches the pattern `only`, in the file's order."""
    return [
        case
        for case in config["case"]
        if re.search(only, case["name"]) and (backward or not case.get("backward_only", False))
    ]


def measure(
    case: Row,
    shape: Shape,
    contenders: Mapping[str, Sweep],
    timer: Timer,
    settings: Settings,
    device: torch.device,
) -> Iterator[Row]:
    """Measure one case and yield a row per contender; if one is noisy, all rows say "noisy"."""
    torch.compiler.reset()  # else peers reach dynamo's limit of recompilations after some cases
    clear_caches()  # else a third case that differs in numbers alone reads them at run time
    p = problem(case, shape, device, settings.backward)
    check = Check(p, settings.backward)
    runs, known = Sweeper(p, check, timer, settings.sweep_seconds).prepare(contenders)
    found = steady(
        runs, timer, base=OURS, rounds=settings.rounds, seconds=settings.seconds,
        attempts=settings.attempts,
    )  # fmt: skip
    series = found.series
    shared: Row = {"benchmark": "gpu attention", "case": case["name"], "mode": settings.mode}
    shared["direction"] = "backward" if settings.backward else "forward"
    shared |= {"shape": vars(shape), "dtype": str(p.query.dtype).removeprefix("torch.")}
    shared["density"] = round(p.density, 6)
    shared |= {"attempts": found.attempts, "noisy": found.noisy}
    flops = p.useful_flops(settings.backward)
    for name in contenders:
        row = shared | {"contender": name} | known[name]
        yield row | (figures(series[name], series.get(OURS), flops) if name in series else {})


def figures(own: Series, ours: Series | None, flops: float) -> Row:
    """Return the measured fields of a row: times, clock, TFLOP/s and ratio to attnkit."""
    row: Row = {"ms": own.times.median, "ms_least": own.times.least}
    row |= {"ms_most": max(own.times.rounds), "rounds": len(own.readings)}
    row |= own.spreads(ours) | own.uncertainties(ours)
    row |= {"ghz": own.ghz, "cycles": own.cycles, "tflops": flops / own.times.median / 1e9}
    if ours is None:
        return row
    row["ratio"] = own.times.over(ours.times)
    if own.cycles and ours.cycles:
        row["ratio_cycles"] = own.cycles / ours.cycles
    return row


HEAD = (
    f"{'contender':26}{'ms':>9}{'GHz':>7}{'Mcycles':>9}{'TFLOP/s':>9}{'x ours':>8}"
    f"{'in cycles':>10}{'+-':>8}{'error':>9}{'allowed':>9}  setting"
)


def line(row: Row) -> str:
    """Format a row as one line of the printed table."""
    text = f"{row['contender']:26}"
    if "skipped" in row:
        return f"{text}{'FAILED' if 'failed' in row else 'skipped'}: {row['skipped']}"
    numbers = (
        (row["ms"], "9.4f"), (row["ghz"], "7.3f"),
        (row["cycles"] and row["cycles"] / 1e6, "9.4f"), (row["tflops"], "9.1f"),
        (row.get("ratio"), "8.3f"), (row.get("ratio_cycles"), "10.3f"),
        (max(row["uncertainty"], row.get("ratio_uncertainty", 0)), "8.1%"),
        (row["error"], "9.1e"), (row["error_allowed"], "9.1e"),
    )  # fmt: skip
    for value, form in numbers:
        width = int(form.partition(".")[0])
        text += " " * width if value is None else f"{value:{form}}"
    return f"{text}  {row['setting']}"


def listed(names: str) -> list[str]:
    """Split a comma-separated list of names."""
    return [part.strip() for part in names.split(",") if part.strip()]


def chosen(config: Row, case: str, options: argparse.Namespace) -> dict[str, Sweep]:
    """Return the contenders of a case; with `--ablations` only attnkit unless peers are named."""
    names = listed(options.contenders) or ([OURS] if options.ablations else list(CONTENDERS))
    found = {name: settings for name, settings in CONTENDERS.items() if name in names}
    return found | (ablations(config, case) if options.ablations else {})


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="run only cases whose name contains PATTERN"
    )
    parser.add_argument(
        "--contenders", default="", metavar="NAMES",
        help=f"run only these, separated by commas, from: {', '.join(CONTENDERS)}",
    )  # fmt: skip
    parser.add_argument(
        "--ablations", action="store_true", help="also time attnkit with other options"
    )
    parser.add_argument("--backward", action="store_true", help="time the backward instead")
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="burst",
        help="burst (default): the GPU rests before each measurement; sustained: it does not",
    )
    parser.add_argument(
        "--rounds",
        type=ROUNDS,
        default=7,
        help="measurements of each contender per attempt (default 7)",
    )
    parser.add_argument(
        "--case-seconds", type=float, default=8, metavar="S",
        help="end an attempt after S seconds, but not before 3 rounds (default 8)",
    )  # fmt: skip
    parser.add_argument(
        "--sweep-seconds", type=float, default=60, metavar="S",
        help="try no more settings of a contender in a case after S seconds (default 60)",
    )  # fmt: skip
    parser.add_argument(
        "--attempts",
        type=ATTEMPTS,
        default=5,
        metavar="N",
        help="attempts at a noisy case (default 5)",
    )
    parser.add_argument(
        "--seconds", type=float, default=450, metavar="S",
        help="start no case after S seconds (default 450)",
    )  # fmt: skip
    parser.add_argument(
        "--save", type=Path, nargs="?", const=ROWS, metavar="FILE",
        help="append the rows to FILE (default results/gpu.jsonl)",
    )  # fmt: skip
    add_commit(parser)
    parser.add_argument(
        "--missing", action="store_true",
        help="run only cases that FILE of --save does not have for this commit",
    )  # fmt: skip
    parser.add_argument("--cases", type=Path, default=HERE / "gpu_cases.toml", metavar="FILE")
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument(
        "--host",
        action="store_true",
        help="measure the host time of calls and the time of first calls",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    options = arguments().parse_args(argv)
    config = tomllib.loads(options.cases.read_text())
    cases = wanted(config, options.only, options.backward)
    unknown = set(listed(options.contenders)) - set(CONTENDERS)
    if unknown or not cases:
        what = f"no contender {sorted(unknown)}" if unknown else f"no case with {options.only!r}"
        return fail(f"{what}; see --help and --list")
    if options.missing and not options.save:
        return fail("--missing needs --save: it looks for rows in that file")
    if options.list:
        print(*(f"{case['name']:34}{shape_of(case, config)}" for case in cases), sep="\n")
        return 0
    if not torch.cuda.is_available():
        return fail("this benchmark needs a CUDA device, and torch.cuda sees none")
    device = torch.device("cuda", torch.cuda.current_device())
    if options.host:
        import gpu_host  # a benchmark of its own, which uses this module's cases

        return gpu_host.main(options)
    # a timed backward runs many times on the tensors that one forward saved
    torch._functorch.config.donated_buffer = False
    return run(config, cases, options, CudaTimer(MODES[options.mode], device), device)


def run(
    config: Row, cases: list[Row], options: argparse.Namespace, timer: Timer, device: torch.device
) -> int:
    """Measure and print all cases; return 1 if attnkit was wrong, `NOISY` if noisy, else 0."""
    where = describe_gpu(device) if device.type == "cuda" else {}
    print(*(f"{k}: {v}" for k, v in where.items()), sep=", ")
    file = row_file(options.save, options.commit)
    if options.missing:
        there = saved_cases(options, file.commit)
        cases = [case for case in cases if case["name"] not in there]
    settings = Settings(
        *(options.backward, options.mode, options.rounds, options.case_seconds),
        *(options.sweep_seconds, options.attempts),
    )
    began, wrong, late, noisy = time.perf_counter(), False, [], []
    for case in cases:
        if time.perf_counter() - began > options.seconds:
            late.append(case["name"])
            continue
        shape, contenders = shape_of(case, config), chosen(config, case["name"], options)
        start = time.perf_counter()
        direction = "backward" if options.backward else "forward"
        print(f"\n{case['name']}, {direction}, {options.mode}: {shape}\n{HEAD}", flush=True)
        for row in measure(case, shape, contenders, timer, settings, device):
            print(line(row), flush=True)
            wrong |= row.get("failed", False)
            if not row["noisy"]:
                file.append(where | row)
        if row["noisy"]:
            noisy.append(case["name"])
            print(f"noisy: a median is uncertain by more than {UNCERTAIN:.0%}; not saved")
        print(f"({time.perf_counter() - start:.0f} s)", flush=True)
    if late:
        print(f"\nnot started within {options.seconds:.0f} s: {', '.join(late)}")
    if noisy:
        print(f"\ntoo noisy to save: {', '.join(noisy)}")
    return 1 if wrong else NOISY if noisy else 0


def saved_cases(options: argparse.Namespace, commit: str) -> set[str]:
    """Return the cases with saved rows for this commit, direction and mode."""
    if not options.save.exists():
        return set()
    wanted = commit, "backward" if options.backward else "forward", options.mode
    rows = map(json.loads, options.save.read_text().splitlines())
    return {r["case"] for r in rows if (r["commit"], r["direction"], r["mode"]) == wanted}


def fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
