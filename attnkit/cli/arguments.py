"""Parse arguments that several commands take, and define the exit statuses."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from attnkit.tracing.built_for import sizes_for
from attnkit.tracing.mask import Mask
from attnkit.util.arguments import DTYPES

if TYPE_CHECKING:
    Subparsers: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]

OK, FAILED, MISUSED = 0, 1, 2

TARGET = (
    "file.py:name, masks:name or mods:name. The name may be a call with literal arguments, and "
    'masks combine: "masks:causal() & sliding_window(64)"'
)
_DTYPES = {str(d).removeprefix("torch."): d for d in DTYPES}
DTYPE_NAMES = ", ".join(_DTYPES)
LENGTH = 1024  # default length for masks of any length, in commands that compute no attention


def size(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def size_or_range(text: str) -> int | tuple[int, int]:
    """Parse a positive integer or a range LOW:HIGH."""
    low, colon, high = text.partition(":")
    if not colon:
        return size(text)
    if size(low) > size(high):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range low:high")
    return int(low), int(high)


def dtypes(text: str) -> list[torch.dtype]:
    """Parse names of dtypes, separated by commas."""
    unknown = [name for name in text.split(",") if name not in _DTYPES]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is not a dtype; expected some of {','.join(_DTYPES)}"
        )
    return [_DTYPES[name] for name in text.split(",")]


def dtype(text: str) -> torch.dtype:
    """Parse the name of one dtype."""
    if "," in text:
        raise argparse.ArgumentTypeError(f"{text!r} is more than one dtype")
    return dtypes(text)[0]


def device(text: str) -> torch.device:
    """Parse the name of a device, and check that tensors can be created there."""
    try:
        parsed = torch.device(text)
        torch.empty(1, device=parsed)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"cannot use {text!r}: {reason}") from None
    return parsed


def built_lengths(mask: Any) -> tuple[int | None, int | None]:
    """Return the query and kv length that a mask was built for, each None if any length fits."""
    if hasattr(mask, "seq_lengths"):
        return mask.seq_lengths[0], mask.seq_lengths[1]
    if not isinstance(mask, Mask):
        return None, None
    q_len, kv_len = (most if least == most else None for least, most in mask.lengths)
    return q_len, kv_len


def lengths(mask: Any, options: argparse.Namespace, default: int) -> tuple[int, int]:
    """Return the query and kv length from the options, else from the mask, else the default."""
    mask_q, mask_kv = built_lengths(mask)
    q_len = options.q_len or mask_q or options.kv_len or mask_kv or default
    return q_len, options.kv_len or mask_kv or q_len


def batch_and_heads(options: argparse.Namespace, *functions: Any) -> tuple[int, int]:
    """Return batch size and query heads from the options, else from declared tables, else 1."""
    declared = sizes_for(*functions)
    return options.batch or declared.get("b", 1), options.heads or declared.get("h", 1)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add --device to a parser."""
    parser.add_argument(
        "--device", type=device, default=torch.device("cpu"), metavar="D", help="default cpu"
    )


def add_sizes(parser: argparse.ArgumentParser, default: int) -> None:
    """Add --q-len, --kv-len, --heads and --batch to a parser.

    Args:
        default: query length for masks that fit any length.
    """
    parser.add_argument(
        "--q-len",
        type=size,
        metavar="N",
        help=f"query length; default that of the mask, or {default}",
    )
    parser.add_argument(
        "--kv-len", type=size, metavar="N", help="kv length; default that of the mask, or q-len"
    )
    for name, what in (("heads", "query heads"), ("batch", "batch size")):
        text = f"{what}; default that of the tables, or 1"
        parser.add_argument(f"--{name}", type=size, metavar="N", help=text)
