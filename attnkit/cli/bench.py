"""Measure a variant beside FlexAttention and SDPA on this machine: `attnkit bench`."""

from __future__ import annotations

import argparse
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import attnkit
from attnkit.cli.arguments import (
    DTYPE_NAMES,
    FAILED,
    LENGTH,
    OK,
    TARGET,
    batch_and_heads,
    device,
    dtype,
    lengths,
    size,
)
from attnkit.util.status_line import StatusLine

if TYPE_CHECKING:
    from attnkit.cli.arguments import Subparsers

ROUNDS = 20
SECONDS = 10


def register(subparsers: Subparsers) -> None:
    """Add the parser of `attnkit bench`."""
    parser = subparsers.add_parser("bench", help="time a variant beside FlexAttention and SDPA")
    parser.description = (
        "Compare the results of attnkit, FlexAttention (compiled and eager) and SDPA with dense "
        "float64 attention, then time them in turns on this machine. What cannot compute the variant "
        "says why. Exit status 0: done, 1: attnkit's result is wrong, 2: could not be run."
    )
    parser.set_defaults(run=run)
    parser.add_argument("target", help=TARGET)
    parser.add_argument(
        "--mask", metavar="TARGET", help="mask for a score_mod, named as the target is"
    )
    parser.add_argument(
        "--length",
        "--q-len",
        dest="q_len",
        type=size,
        metavar="N",
        help=f"query length; default that of the mask, or {LENGTH}",
    )
    for name, default, what in (
        ("kv-len", None, "kv length; default that of the mask, or length"),
        ("batch", None, "batch size; default that of the tables, or 1"),
        ("heads", None, "query heads; default that of the tables, or 1"),
        ("kv-heads", None, "key and value heads; default heads"),
        ("head-dim", 64, "head dim; default 64"),
        ("rounds", ROUNDS, f"number of rounds; default {ROUNDS}"),
        ("seconds", SECONDS, f"begin no further round after this time; default {SECONDS}"),
    ):
        parser.add_argument(f"--{name}", type=size, default=default, metavar="N", help=what)
    parser.add_argument(
        "--dtype",
        type=dtype,
        metavar="D",
        help=f"one of {DTYPE_NAMES}; default bfloat16 on a GPU, float32 elsewhere",
    )
    parser.add_argument("--backward", action="store_true", help="forward and backward too")
    parser.add_argument(
        "--device", type=device, metavar="D", help="default cuda if there is one, else cpu"
    )


def run(options: argparse.Namespace) -> int:
    """Measure the variant that the options name, print the table, and return the exit status."""
    from attnkit.testing.case import Case
    from attnkit.testing.contenders import Problem
    from attnkit.testing.contest import measure
    from attnkit.testing.load import load

    variant = load(options.target, options.mask)
    where = options.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    q_len, kv_len = lengths(variant.mask, options, LENGTH)
    batch, heads = batch_and_heads(options, variant.score_mod, variant.mask)
    case = Case(
        q_len,
        kv_len,
        batch,
        heads,
        kv_heads=options.kv_heads or heads,
        kv_batch=batch,
        head_dim=options.head_dim,
        value_dim=options.head_dim,
        dtype=options.dtype or (torch.bfloat16 if where.type == "cuda" else torch.float32),
    )
    line = StatusLine()
    try:
        problem = Problem(variant, case, where, options.backward)
        contest = measure(
            problem, rounds=options.rounds, seconds=options.seconds, progress=line.show
        )
    finally:
        line.clear()
    print(f"attnkit {attnkit.__version__}, torch {torch.__version__}, {_machine(where)}")
    print(contest)
    return OK if contest.ok else FAILED


def _machine(where: torch.device) -> str:
    """Return the name of the GPU, or of the processor with the number of threads."""
    if where.type == "cuda":
        return torch.cuda.get_device_name(where)
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        name = found[0].partition(":")[2].strip() if found else name
    return f"{name}, {torch.get_num_threads()} threads"
