"""Draw a mask, and count its tiles: `attnkit show`."""

from __future__ import annotations

import argparse
import shutil
import sys
from typing import TYPE_CHECKING

from attnkit.cli.arguments import (
    LENGTH,
    OK,
    TARGET,
    add_device,
    add_sizes,
    batch_and_heads,
    lengths,
    size,
)
from attnkit.errors import ArgumentError

if TYPE_CHECKING:
    from attnkit.cli.arguments import Subparsers


def register(subparsers: Subparsers) -> None:
    """Add the parser of `attnkit show`."""
    parser = subparsers.add_parser("show", help="picture of a mask, its tiles and interval form")
    parser.description = (
        "Draw the tiles of a mask as text or into a file, and print how many tiles and positions "
        "it keeps, the memory of its tiles, and its interval form."
    )
    parser.set_defaults(run=run)
    parser.add_argument("target", help=TARGET)
    add_sizes(parser, LENGTH)
    parser.add_argument(
        "--at",
        type=_place,
        default=(0, 0),
        metavar="B,H",
        help="batch entry and head to show; default 0,0",
    )
    parser.add_argument("--block", type=_block, metavar="N[,N]", help="tile size; default 128")
    parser.add_argument("--output", metavar="FILE", help="draw all heads into a .png or .svg file")
    parser.add_argument("--plain", action="store_true", help="use ASCII only")
    add_device(parser)


def run(options: argparse.Namespace) -> int:
    """Draw the mask that the options name, print its counts, and return 0."""
    from attnkit.inspection import picture
    from attnkit.inspection.summary import summarize
    from attnkit.sparsity.block_mask import BlockMask, create_block_mask
    from attnkit.sparsity.block_runs import BLOCK
    from attnkit.testing.load import load

    mask = load(options.target).mask
    if mask is None:
        raise ArgumentError(
            f"{options.target!r} has no mask to show; expected a mask, a mask_mod or a variant "
            "that has one"
        )
    if hasattr(mask, "kv_num_blocks"):
        raise ArgumentError(
            f"{options.target!r} is PyTorch's BlockMask, whose block lists `show` cannot draw; name "
            "its mask_mod, or a BlockMask of attnkit.create_block_mask"
        )
    if isinstance(mask, BlockMask):
        _refuse_sizes(options)
        blocks = mask
    else:
        sizes = (*batch_and_heads(options, mask), *lengths(mask, options, LENGTH))
        blocks = create_block_mask(mask, *sizes, options.device, options.block or BLOCK)
    if options.output is not None:
        print(f"wrote {picture.save(options.output, blocks)}")
    else:
        plain = options.plain or not _prints("·█")
        columns = shutil.get_terminal_size().columns - len(str(blocks.shape[2])) - 4
        width = max(8, min(64, columns))
        print(picture.show(blocks, at=options.at, width=width, plain=plain))
    print(summarize(blocks))
    return OK


def _refuse_sizes(options: argparse.Namespace) -> None:
    """Raise an error if an option sets a size, because a BlockMask has its own sizes."""
    names = ("q_len", "kv_len", "block", "heads", "batch")
    sizes = [n for n in names if getattr(options, n) is not None]
    if sizes:
        name = sizes[0].replace("_", "-")
        raise ArgumentError(
            f"--{name} was given, and {options.target!r} is a BlockMask, which has its own sizes; "
            "leave the option out"
        )


def _block(text: str) -> tuple[int, int]:
    """Parse a tile size N or a pair QUERY,KV, and return (query, kv) tile sizes."""
    parts = [size(part) for part in text.split(",")]
    if len(parts) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size N or a pair QUERY,KV")
    return parts[0], parts[-1]


def _place(text: str) -> tuple[int, int]:
    """Parse a pair BATCH,HEAD."""
    parts = text.split(",")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a pair BATCH,HEAD")
    return int(parts[0]), int(parts[1])


def _prints(text: str) -> bool:
    """Return whether the encoding of stdout can represent `text`."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
