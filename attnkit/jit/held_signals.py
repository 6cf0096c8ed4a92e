"""Delay Python's signal handlers while C++ code calls Python functions."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, TypeAlias

_Handler: TypeAlias = Callable[[int, FrameType | None], Any]

# Signals whose handlers usually raise an exception or end the process: Ctrl-C, a time-out, a
# request to stop, the warning of a batch system.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGBREAK")
_HELD = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


class _Holder:
    """Replaces a signal handler: remembers a signal while `holding`, and else passes it on."""

    def __init__(self, handler: _Handler) -> None:
        self.handler = handler
        self.holding = False
        self.arrived = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.holding:
            self.arrived = True
        else:
            self.handler(number, frame)


@contextmanager
def held_signals() -> Iterator[None]:
    """Run Python's signal handlers after the `with` block instead of inside of it, each once.

    Inside of a compilation, a handler may run in a function that the DSL's C++ code has called. If
    it raises there, as that of Ctrl-C does, the exception is lost or ends the process. Signals
    without a Python handler act at once. Only the main thread runs handlers; in another thread
    this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    holders: dict[int, _Holder] = {}
    try:
        # An exception may come between any two lines here and below; until `holding` is set and
        # after it is cleared, a holder does what the handler did.
        for number in _HELD:
            handler = signal.getsignal(number)
            if callable(handler):
                holders[number] = _Holder(handler)
                signal.signal(number, holders[number])
        for holder in holders.values():
            holder.holding = True
        yield
    finally:
        with ExitStack() as rest:  # runs all of them, even if one raises
            for number, holder in holders.items():
                rest.callback(_release, number, holder)


def _release(number: int, holder: _Holder) -> None:
    """Put a signal's handler back, and run it if the signal arrived."""
    holder.holding = False
    signal.signal(number, holder.handler)
    if holder.arrived:
        signal.raise_signal(number)
