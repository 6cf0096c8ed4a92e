"""Store the few newest entries of a fast path."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

E = TypeVar("E")

LIMIT = 4  # number of entries; a new one replaces the oldest
# After so many attempts, more kinds of calls alternate than fit; storing entries only costs time.
ATTEMPTS = 32

_lock = threading.Lock()


class Entries(Generic[E]):
    """Hold the newest few entries, oldest first, and stop adding after too many attempts.

    Attributes:
        all: the entries. Readers take the tuple once, so that other threads may replace it.
        attempts: number of entries that were offered.
    """

    __slots__ = ("all", "attempts")

    def __init__(self) -> None:
        self.all: tuple[E, ...] = ()
        self.attempts = 0

    def may_learn(self) -> bool:
        """Count an offered entry; return whether it may be added."""
        if self.attempts >= ATTEMPTS:
            return False
        self.attempts += 1
        return True

    def add(self, entry: E) -> None:
        """Add an entry, and drop the oldest if there are too many."""
        with _lock:
            self.all = (*self.all, entry)[-LIMIT:]

    def drop(self, entry: E) -> None:
        """Remove an entry."""
        with _lock:
            self.all = tuple([e for e in self.all if e is not entry])
