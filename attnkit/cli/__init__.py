"""Run the command line `attnkit`. Each of its commands is a module of this package.

In: command line arguments. Out: text and an exit status. Nothing imports this room but `__main__`.

Each module has two functions. `register(subparsers)` adds the command's parser, and sets `run` as
the default of the option `run`. `run(options) -> int` does the work and returns the exit status.
`COMMANDS` lists the modules.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import attnkit
from attnkit.cli import bench, check, compile, doctor, emulate, explain, show
from attnkit.cli.arguments import MISUSED
from attnkit.errors import AttnkitError

COMMANDS: tuple[ModuleType, ...] = (
    show,
    explain,
    check,
    bench,
    doctor,
    emulate,
    compile,
)


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line, with a subparser for each command."""
    whole = argparse.ArgumentParser(
        prog="attnkit",
        description="Custom attention: explain, draw, check, time and compile variants.",
    )
    whole.add_argument("--version", action="version", version=f"attnkit {attnkit.__version__}")
    subparsers = whole.add_subparsers(metavar="command", required=True)
    for command in COMMANDS:
        command.register(subparsers)
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, and run the command that it names.

    Args:
        argv: the arguments; None for the arguments of the process.

    Returns:
        Exit status: 0 if all is well, 1 if a check failed, 2 if the command could not run.
    """
    try:
        options = parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed an error or the help
        return stop.code if isinstance(stop.code, int) else MISUSED
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except (AttnkitError, OSError) as error:  # OSError: for example, a folder does not exist
        print(f"attnkit: {error}", file=sys.stderr)
        return MISUSED
