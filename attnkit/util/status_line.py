"""Show a line of status on a terminal, which the next line replaces."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO

from attnkit.util import environment


class StatusLine:
    """Shows one line on a terminal, and nothing if the stream is no terminal.

    ATTNKIT_PROGRESS=0 switches it off.

    Args:
        stream: where to write; None for stderr.

    Attributes:
        is_shown: whether anything is written.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self.is_shown = (
            self._stream is not None  # pythonw has no stderr
            and self._stream.isatty()
            and environment.read("ATTNKIT_PROGRESS") != "0"
        )

    def show(self, text: str) -> None:
        """Replace the line by `text`, cut to the width of the terminal."""
        if self.is_shown:
            text = text[: shutil.get_terminal_size().columns - 1]
            print(f"\r\033[K{text}", end="", file=self._stream, flush=True)

    def clear(self) -> None:
        """Remove the line."""
        self.show("")
