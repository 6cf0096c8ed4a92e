"""The command `attnkit`: check or explain a variant that a file or the library holds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

import torch

import attnkit
from attnkit.errors import AttnkitError
from attnkit.validate import DTYPES

OK, FAILED, MISUSED = 0, 1, 2

_TARGET = (
    "file.py:name, masks:name or mods:name. The name may be a call with literal arguments, and "
    'masks combine: "masks:causal() & sliding_window(64)"'
)
_DTYPES = {str(d).removeprefix("torch."): d for d in DTYPES}


def _size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _sizes(text: str) -> int | tuple[int, int]:
    low, colon, high = text.partition(":")
    if not colon:
        return _size(text)
    if _size(low) > _size(high):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range low:high")
    return int(low), int(high)


def _dtypes(text: str) -> list[torch.dtype]:
    unknown = [name for name in text.split(",") if name not in _DTYPES]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is not a dtype; expected some of {','.join(_DTYPES)}"
        )
    return [_DTYPES[name] for name in text.split(",")]


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"cannot use {text!r}: {reason}") from None
    return device


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attnkit", description="Custom attention: check or explain a variant."
    )
    parser.add_argument("--version", action="version", version=f"attnkit {attnkit.__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    _add_check(commands.add_parser("check", help="property test of a variant"))
    _add_explain(commands.add_parser("explain", help="formula, derivative, tiles and plan"))
    return parser


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare every backend with dense float64 attention on drawn calls: output, LSE, "
        "gradients, tiles. Exit status 0: passed, 1: failed, 2: could not be run."
    )
    parser.set_defaults(run=_check)
    parser.add_argument("target", help=_TARGET)
    for name, what in (
        ("q-len", "query length"),
        ("kv-len", "kv length"),
        ("heads", "query heads"),
        ("batch", "batch size"),
    ):
        parser.add_argument(
            f"--{name}", type=_sizes, metavar="N", help=f"{what}, or a range LOW:HIGH to draw from"
        )
    parser.add_argument(
        "--dtype", type=_dtypes, metavar="D,...", help=f"of {', '.join(_DTYPES)}; default all"
    )
    parser.add_argument(
        "--examples", type=_size, default=40, metavar="N", help="calls to draw; default 40"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the drawing")
    parser.add_argument(
        "--device", type=_device, default=torch.device("cpu"), metavar="D", help="default cpu"
    )


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.description = "Say what a variant means and how it would run; computes no attention."
    parser.set_defaults(run=_explain)
    parser.add_argument("target", help=_TARGET)
    parser.add_argument("--q-len", type=_size, required=True, metavar="N", help="query length")
    parser.add_argument("--kv-len", type=_size, metavar="N", help="kv length; default q-len")
    parser.add_argument("--heads", type=_size, default=1, metavar="N", help="query heads")
    parser.add_argument("--batch", type=_size, default=1, metavar="N", help="batch size")
    parser.add_argument("--head-dim", type=_size, default=64, metavar="N", help="head width")
    parser.add_argument(
        "--device", type=_device, default=torch.device("cpu"), metavar="D", help="default cpu"
    )


def _check(options: argparse.Namespace) -> int:
    from attnkit.testing import CheckError, check_variant, load

    with _Progress(sys.stderr) as progress:
        try:
            report = check_variant(
                load(options.target),
                q_len=options.q_len,
                kv_len=options.kv_len,
                heads=options.heads,
                batch=options.batch,
                dtype=options.dtype,
                examples=options.examples,
                seed=options.seed,
                device=options.device,
                progress=progress,
            )
        except CheckError as error:
            report = error.report
    print(report)
    return OK if report.ok else FAILED


def _explain(options: argparse.Namespace) -> int:
    from attnkit.testing.load import load

    print(
        attnkit.explain(
            load(options.target),
            q_len=options.q_len,
            kv_len=options.kv_len,
            heads=options.heads,
            batch=options.batch,
            head_dim=options.head_dim,
            device=options.device,
        )
    )
    return OK


class _Progress:
    """A line that counts, on a terminal; nothing elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream if stream.isatty() else None

    def __enter__(self) -> Callable[[int, int], None]:
        return self._show

    def _show(self, done: int, total: int) -> None:
        if self._stream is not None:
            print(f"\r{done} of {total} calls", end="", file=self._stream, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            print("\r\033[K", end="", file=self._stream, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the arguments; those of the process if None.

    Returns:
        Exit status: 0 done, 1 a check failed, 2 the request could not be served.
    """
    try:
        options = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed what is wrong, or the help
        return stop.code if isinstance(stop.code, int) else MISUSED
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except AttnkitError as error:
        print(f"attnkit: {error}", file=sys.stderr)
        return MISUSED
