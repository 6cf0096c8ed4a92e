"""`attnkit explain`: what a variant means and how it would run."""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING

import torch

import attnkit
from attnkit.cli.arguments import (
    DTYPE_NAMES,
    LENGTH,
    OK,
    TARGET,
    add_device,
    dtype,
    lengths,
    size,
)
from attnkit.errors import UnsupportedError
from attnkit.inspection.explain import Explanation
from attnkit.inspection.forecast import HOPPER_SMS

if TYPE_CHECKING:
    from attnkit.cli.arguments import Subparsers


def register(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser("explain", help="formula, derivative, tiles, plan and schedule")
    parser.description = "Say what a variant means and how it would run; computes no attention."
    parser.set_defaults(run=run)
    parser.add_argument("target", help=TARGET)
    parser.add_argument(
        "--q-len",
        type=size,
        metavar="N",
        help=f"query length; default the mask's own, or {LENGTH}",
    )
    parser.add_argument(
        "--kv-len", type=size, metavar="N", help="kv length; default the mask's own, or q-len"
    )
    parser.add_argument("--heads", type=size, default=1, metavar="N", help="query heads")
    parser.add_argument("--batch", type=size, default=1, metavar="N", help="batch size")
    parser.add_argument("--head-dim", type=size, default=64, metavar="N", help="head width")
    parser.add_argument(
        "--dtype",
        type=dtype,
        default=torch.bfloat16,
        metavar="D",
        help=f"one of {DTYPE_NAMES}; default bfloat16",
    )
    parser.add_argument(
        "--arch",
        metavar="A",
        help="predict the kernel for this architecture, say sm_100a: roles, tensor memory, clocks by "
        "unit, speed. Executes a tile of it in the emulator, up to a minute",
    )
    parser.add_argument(
        "--sms",
        type=size,
        metavar="N",
        help="SMs that the schedule is predicted for; default those of the architecture's card, "
        f"{HOPPER_SMS} (an H100 or H200) if none is named",
    )
    parser.add_argument(
        "--timeline", metavar="FILE", help="draw the forward's schedule into a .png or .svg file"
    )
    parser.add_argument(
        "--backward",
        action="store_true",
        help="the backward's schedule for --timeline; with --arch its kernel too",
    )
    add_device(parser)


def run(options: argparse.Namespace) -> int:
    """Explain the target."""
    from attnkit.testing.load import load

    variant = load(options.target)
    q_len, kv_len = lengths(variant.mask, options, LENGTH)
    found = attnkit.explain(
        variant,
        q_len=q_len,
        kv_len=kv_len,
        heads=options.heads,
        batch=options.batch,
        head_dim=options.head_dim,
        device=options.device,
        dtype=options.dtype,
        sms=options.sms,
        arch=options.arch,
    )
    print(found)
    if options.arch is not None and options.backward:
        print(f"backward kernel for {options.arch} (predicted, not measured)")
        print(textwrap.indent(found.backward_kernel, "  "))
    if options.timeline is not None:
        _draw(found, options)
    return OK


def _draw(found: Explanation, options: argparse.Namespace) -> None:
    from attnkit.inspection.timeline import save_timeline

    simulated = found.forecast
    if simulated is None:
        raise UnsupportedError(f"--timeline cannot be drawn: the schedule is {found.schedule}")
    which = "backward" if options.backward else "forward"
    title = f"{options.target}, {which}"
    path = save_timeline(options.timeline, simulated, backward=options.backward, title=title)
    print(f"wrote {path}")
