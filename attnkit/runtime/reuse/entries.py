"""Store the most recent entries of a fast path."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

E = TypeVar("E")

LIMIT = 4  # most entries; a new entry replaces the oldest
# After this many attempts, more kinds of calls alternate than fit, so that storing costs time only.
ATTEMPTS = 32

_lock = threading.Lock()


class Entries(Generic[E]):
    """Holds the `LIMIT` most recent entries, and accepts no more after `ATTEMPTS` additions.

    Attributes:
        all: the entries, oldest first. Readers read the attribute once, because other threads may
            replace the tuple.
        attempts: number of calls of `may_learn` that returned True.
    """

    __slots__ = ("all", "attempts")

    def __init__(self) -> None:
        self.all: tuple[E, ...] = ()
        self.attempts = 0

    def may_learn(self) -> bool:
        """Return whether the caller may add an entry, and count the attempt."""
        if self.attempts >= ATTEMPTS:
            return False
        self.attempts += 1
        return True

    def add(self, entry: E) -> None:
        """Add an entry; drop the oldest entry if there are more than `LIMIT`."""
        with _lock:
            self.all = (*self.all, entry)[-LIMIT:]

    def drop(self, entry: E) -> None:
        """Remove an entry, compared by identity."""
        with _lock:
            self.all = tuple([e for e in self.all if e is not entry])
