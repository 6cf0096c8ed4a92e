"""Explain what a variant computes and how it would run: `attnkit explain`."""

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
    add_sizes,
    batch_and_heads,
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
    """Add the parser of `attnkit explain`."""
    parser = subparsers.add_parser("explain", help="formula, derivative, tiles, plan and schedule")
    parser.description = "Explain what a variant means and how it would run; computes no attention."
    parser.set_defaults(run=run)
    parser.add_argument("target", help=TARGET)
    add_sizes(parser, LENGTH)
    parser.add_argument(
        "--head-dim", type=size, default=64, metavar="N", help="head dim; default 64"
    )
    parser.add_argument(
        "--dtype",
        type=dtype,
        default=torch.bfloat16,
        metavar="D",
        help=f"one of {DTYPE_NAMES}; default bfloat16",
    )
    parser.add_argument(
        "--normalization",
        default="softmax",
        metavar="N",
        help="what makes the weights: softmax (default), softmax1, sigmoid or none",
    )
    parser.add_argument("--sink", action="store_true", help="a softmax with an attention sink")
    parser.add_argument(
        "--dropout", type=float, default=0.0, metavar="P", help="probability of dropping a weight"
    )
    parser.add_argument(
        "--arch",
        metavar="A",
        help="predict the kernel for this architecture, such as sm_100a: roles, tensor memory, "
        "clocks of each unit, speed. Executes a tile of it in the emulator, which takes up to a minute",
    )
    parser.add_argument(
        "--sms",
        type=size,
        metavar="N",
        help="SMs that the schedule is predicted for; default those of the architecture's GPU, "
        f"{HOPPER_SMS} (an H100 or H200) without --arch",
    )
    parser.add_argument(
        "--timeline", metavar="FILE", help="draw the forward's schedule into a .png or .svg file"
    )
    parser.add_argument(
        "--backward",
        action="store_true",
        help="draw the backward's schedule with --timeline; predict its kernel too with --arch",
    )
    add_device(parser)


def run(options: argparse.Namespace) -> int:
    """Explain the variant that the options name, draw its schedule on request, and return 0."""
    from attnkit.testing.load import load

    variant = load(options.target)
    q_len, kv_len = lengths(variant.mask, options, LENGTH)
    batch, heads = batch_and_heads(options, variant.score_mod, variant.mask)
    explanation = attnkit.explain(
        variant,
        q_len=q_len,
        kv_len=kv_len,
        heads=heads,
        batch=batch,
        head_dim=options.head_dim,
        device=options.device,
        dtype=options.dtype,
        sms=options.sms,
        arch=options.arch,
        normalization=options.normalization,
        sink=torch.zeros(heads, device=options.device) if options.sink else None,
        dropout_p=options.dropout,
    )
    print(explanation)
    if options.arch is not None and options.backward:
        print(f"backward kernel for {options.arch} (predicted, not measured)")
        print(textwrap.indent(explanation.backward_kernel, "  "))
    if options.timeline is not None:
        _draw(explanation, options)
    return OK


def _draw(explanation: Explanation, options: argparse.Namespace) -> None:
    """Draw the schedule into the file that the options name."""
    from attnkit.inspection.timeline import save_timeline

    simulated = explanation.forecast
    if simulated is None:
        raise UnsupportedError(
            f"--timeline cannot be drawn: the schedule is {explanation.schedule}"
        )
    which = "backward" if options.backward else "forward"
    title = f"{options.target}, {which}"
    path = save_timeline(options.timeline, simulated, backward=options.backward, title=title)
    print(f"wrote {path}")
