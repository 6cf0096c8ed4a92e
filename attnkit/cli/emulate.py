"""Execute a variant's GPU kernels on the CPU: `attnkit emulate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from attnkit.cli.arguments import (
    FAILED,
    OK,
    TARGET,
    add_sizes,
    batch_and_heads,
    dtype,
    lengths,
    size,
)
from attnkit.schedule.targets import TARGETS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from attnkit.cli.arguments import Subparsers
    from attnkit.jit.emulation import Session
    from attnkit.runtime.variant import Variant

ARCHS = ", ".join(t.arch for t in TARGETS)
LENGTH = 256
MODES = ("check", "eager", "adversarial", "race")


def register(subparsers: Subparsers) -> None:
    """Add the parser of `attnkit emulate`."""
    parser = subparsers.add_parser("emulate", help="run a variant's GPU kernels on the CPU")
    parser.description = (
        "Compile the kernels of a variant for a GPU and execute them on the CPU: results against "
        "dense float64, faults, races, and predicted clocks. Needs a C compiler and no GPU. Exit "
        "status 0: nothing wrong, 1: wrong results or findings, 2: could not be run."
    )
    parser.set_defaults(run=run)
    parser.add_argument("target", help=TARGET)
    parser.add_argument(
        "--arch", default="sm_90a", metavar="A", help=f"one of {ARCHS}; default sm_90a"
    )
    add_sizes(parser, LENGTH)
    parser.add_argument(
        "--kv-heads", type=size, metavar="N", help="heads of key and value; default heads"
    )
    parser.add_argument(
        "--head-dim", type=size, default=64, metavar="N", help="head dim; default 64"
    )
    parser.add_argument(
        "--dtype", type=dtype, metavar="D", help="float16 or bfloat16; default bfloat16"
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="check",
        help="eager: asynchronous operations complete at once; adversarial: as late as barriers "
        "allow; race: report unordered accesses; check (default): all three, from the same inputs",
    )
    parser.add_argument(
        "--seeds", type=size, default=3, metavar="N", help="number of adversarial orders; default 3"
    )
    parser.add_argument(
        "--backward", action="store_true", help="run the kernels of the gradients too"
    )
    parser.add_argument(
        "--timeline", metavar="FILE.svg", type=Path, help="predict clocks and draw them"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the random inputs; default 0"
    )
    parser.add_argument(
        "--minutes", type=float, metavar="N", help="refuse kernels with a longer estimated time"
    )


def run(options: argparse.Namespace) -> int:
    """Run the variant's kernels in the emulator, print reports, and return the exit status."""
    import torch

    from attnkit.jit import emulation
    from attnkit.testing.kernels import compare
    from attnkit.testing.load import load

    variant = load(options.target)
    sizes = lengths(variant.mask, options, LENGTH)
    with emulation.session(
        mode=options.mode,
        seeds=options.seeds,
        minutes=options.minutes,
        timeline=options.timeline is not None,
        deterministic=not options.backward,  # gradients may be summed by atomics, in any order
    ) as session:
        errors = compare(
            variant,
            _inputs(options, variant, sizes, options.dtype or torch.bfloat16),
            backend=f"emulate:{options.arch}",
            backward=options.backward,
        )
    for error in errors:
        print(error)
    for name, report in session.reports:
        print(f"{name}\n{report}")
    if options.timeline is not None:
        _draw(session, options.timeline)
    return OK if session.ok and all(error.ok for error in errors) else FAILED


def _inputs(
    options: argparse.Namespace, variant: Variant, sizes: tuple[int, int], dtype: torch.dtype
) -> list[Tensor]:
    """Return random query, key and value of the sizes that the options name."""
    import torch

    generator = torch.Generator().manual_seed(options.seed)
    batch, heads = batch_and_heads(options, variant.score_mod, variant.mask)
    kv_heads = options.kv_heads or heads
    return [
        torch.randn(batch, h, n, options.head_dim, generator=generator).to(dtype)
        for h, n in zip((heads, kv_heads, kv_heads), (*sizes, sizes[1]), strict=True)
    ]


def _draw(session: Session, file: Path) -> None:
    """Print each kernel's timeline, and draw it into a file.

    The files of all kernels but the first have a number in their names.
    """
    from attnkit.jit.emulator_runs import picture

    for number, (name, timeline) in enumerate(session.timelines, 1):
        path = file if number == 1 else file.with_stem(f"{file.stem}-{number}")
        path.write_text(picture(timeline))
        print(f"{name}, drawn in {path}\n{timeline}")
