"""Show a line of status on a terminal, which the next line replaces."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from attnkit.util import environment

_INTERVAL = 0.25  # seconds between updates of the elapsed time


class StatusLine:
    """Shows a status line if the stream is a terminal; otherwise does nothing.

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


@contextmanager
def elapsed(what: str) -> Iterator[None]:
    """Show a status text and the elapsed seconds on a terminal during the `with` block.

    Args:
        what: text of the line, such as "compiling kernel 1". How long it takes is not known before.
    """
    line = StatusLine()
    if not line.is_shown:
        yield
        return
    done = threading.Event()
    start = time.monotonic()

    def update() -> None:
        while True:
            line.show(f"attnkit: {time.monotonic() - start:.0f} s, {what}")
            if done.wait(_INTERVAL):
                return

    thread = threading.Thread(target=update, name="attnkit progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        line.clear()
