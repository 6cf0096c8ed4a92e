"""Delay Python signal handlers while the DSL's C++ code calls Python functions."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, TypeAlias

_Handler: TypeAlias = Callable[[int, FrameType | None], Any]

# Signals whose handlers usually raise an exception or end the process, such as Ctrl-C, a timeout, a
# termination request or the warning of a batch system.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGBREAK")
_HELD = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


class _Holder:
    """Signal handler that records a signal while `holding` is set and else calls `handler`."""

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
    """Delay Python signal handlers until the end of the `with` block; each runs at most once.

    During a compilation, a handler may run in a function that the DSL's C++ code has called. If the
    handler raises there, as the handler of Ctrl-C does, the exception is lost or ends the process.
    Signals without a Python handler are not delayed. Python runs handlers only in the main thread,
    so this function does nothing in other threads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    holders: dict[int, _Holder] = {}
    try:
        # A signal handler may raise between any two lines here and below. While `holding` is not
        # set, a holder calls the original handler.
        for number in _HELD:
            handler = signal.getsignal(number)
            if callable(handler):
                holders[number] = _Holder(handler)
                signal.signal(number, holders[number])
        for holder in holders.values():
            holder.holding = True
        yield
    finally:
        with ExitStack() as rest:  # runs all callbacks, even if one raises
            for number, holder in holders.items():
                rest.callback(_release, number, holder)


def _release(number: int, holder: _Holder) -> None:
    """Restore the original handler of signal `number` and run it if the signal has arrived."""
    holder.holding = False
    signal.signal(number, holder.handler)
    if holder.arrived:
        signal.raise_signal(number)
