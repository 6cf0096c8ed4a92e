"""A few remembered calls of one kind."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

E = TypeVar("E")

LIMIT = 4  # entries; the oldest goes
ATTEMPTS = 32  # where more kinds of calls take turns than there are entries, learning stops

_lock = threading.Lock()


class Entries(Generic[E]):
    """The newest few calls, oldest first; learns no more after too many attempts.

    Attributes:
        all: the entries. Readers take the tuple once, so that other threads may replace it.
        attempts: how often an entry was offered.
    """

    __slots__ = ("all", "attempts")

    def __init__(self) -> None:
        self.all: tuple[E, ...] = ()
        self.attempts = 0

    def may_learn(self) -> bool:
        """Whether another entry may be offered; counts the offer."""
        if self.attempts >= ATTEMPTS:
            return False
        self.attempts += 1
        return True

    def add(self, entry: E) -> None:
        """Remember a call."""
        with _lock:
            self.all = (*self.all, entry)[-LIMIT:]

    def drop(self, entry: E) -> None:
        """Forget a call."""
        with _lock:
            self.all = tuple([e for e in self.all if e is not entry])
