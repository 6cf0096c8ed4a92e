"""Run a property test of a variant: `attnkit check`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from attnkit.cli.arguments import (
    DTYPE_NAMES,
    FAILED,
    OK,
    TARGET,
    add_device,
    dtypes,
    size,
    size_or_range,
)
from attnkit.util.status_line import StatusLine

if TYPE_CHECKING:
    from attnkit.cli.arguments import Subparsers


def register(subparsers: Subparsers) -> None:
    """Add the parser of `attnkit check`."""
    parser = subparsers.add_parser("check", help="property test of a variant")
    parser.description = (
        "Compare every backend with dense float64 attention on random calls: output, LSE, "
        "gradients, tiles. Exit status 0: passed, 1: failed, 2: could not be run."
    )
    parser.set_defaults(run=run)
    parser.add_argument("target", help=TARGET)
    parser.add_argument(
        "--mask", metavar="TARGET", help="mask for a score_mod, named as the target is"
    )
    for name, what in (
        ("q-len", "query length"),
        ("kv-len", "kv length"),
        ("heads", "query heads"),
        ("batch", "batch size"),
    ):
        parser.add_argument(
            f"--{name}",
            type=size_or_range,
            metavar="N",
            help=f"{what}, or a range LOW:HIGH to draw from",
        )
    parser.add_argument(
        "--dtype", type=dtypes, metavar="D,...", help=f"of {DTYPE_NAMES}; default all"
    )
    parser.add_argument(
        "--normalization",
        default="softmax",
        metavar="N",
        help="softmax (the default, which draws softmax1 too), softmax1, sigmoid or none",
    )
    parser.add_argument(
        "--examples", type=size, default=40, metavar="N", help="number of random calls; default 40"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the random calls; default 0"
    )
    add_device(parser)


def run(options: argparse.Namespace) -> int:
    """Check the variant that the options name, print the report, and return the exit status."""
    from attnkit.testing import CheckError, check_variant, load

    line = StatusLine()
    try:
        report = check_variant(
            load(options.target, options.mask),
            q_len=options.q_len,
            kv_len=options.kv_len,
            heads=options.heads,
            batch=options.batch,
            dtype=options.dtype,
            examples=options.examples,
            seed=options.seed,
            device=options.device,
            normalization=options.normalization,
            progress=lambda done, total: line.show(f"{done} of {total} calls"),
        )
    except CheckError as error:
        report = error.report
    finally:
        line.clear()
    print(report)
    return OK if report.ok else FAILED
