"""Write matplotlib figures to files. The same figure gives the same bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from attnkit.errors import ArgumentError, OptionError, UnsupportedError
from attnkit.util.arguments import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Check that the path of a picture ends in .png or .svg, and return it as a `Path`.

    Raises:
        ArgumentError: `path` is no path.
        OptionError: the suffix is neither .png nor .svg.
    """
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(f"path must be a string or a Path, got {shown(path)}")
    target = Path(path)
    if target.suffix not in (".png", ".svg"):
        raise OptionError(f"path must end in .png or .svg, got {str(path)!r}")
    return target


def write(target: Path, draw: Callable[[], Figure], instead: str) -> Path:
    """Draw a figure, and write it to a file.

    Args:
        target: path of the file, see `checked_path`.
        draw: draws the figure; called only if matplotlib is installed.
        instead: what to do without matplotlib, for the error.

    Returns:
        The path.

    Raises:
        ArgumentError: the file cannot be written.
        UnsupportedError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise UnsupportedError(
            "drawing a picture needs matplotlib; install it with `pip install attnkit[plot]`, or "
            f"{instead}"
        ) from None
    with matplotlib.rc_context({"svg.hashsalt": "attnkit", "font.size": 8.0}):
        metadata = {"Date": None} if target.suffix == ".svg" else {"Software": None}
        figure = draw()
        try:
            figure.savefig(target, dpi=160, metadata=metadata)
        except OSError as error:
            raise ArgumentError(
                f"path must name a file that can be written, got {str(target)!r}: "
                f"{error.strerror or error}"
            ) from error
    return target
