"""Show on a terminal that a kernel is being compiled, and for how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from attnkit.util.status_line import StatusLine

_INTERVAL = 0.25  # seconds between updates of the line
_numbers = count(1)


@contextmanager
def compile_progress(name: str, arch: str) -> Iterator[None]:
    """Show a line with the kernel's name and the elapsed time during the `with` block.

    The line is on stderr, only if that is a terminal, and ATTNKIT_PROGRESS=0 switches it off. How
    long a compilation takes is not known before, so the line counts the kernels of this process and
    the seconds of this one.

    Args:
        name: name of the kernel.
        arch: architecture that it is compiled for.
    """
    line = StatusLine()
    number = next(_numbers)
    if not line.is_shown:
        yield
        return
    done = threading.Event()
    start = time.monotonic()

    def update() -> None:
        while True:
            seconds = time.monotonic() - start
            line.show(f"attnkit: {seconds:.0f} s, compiling kernel {number}: {name} for {arch}")
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
