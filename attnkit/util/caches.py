"""Clear every cache of the package, and lock caches that several threads change.

A module that defines a cache registers it here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

_clears: list[Callable[[], None]] = []


def fork_safe_lock() -> threading.RLock:
    """Create a reentrant lock that a forked child finds released.

    Another thread of the parent may hold it at the fork, and that thread does not exist in the
    child. Call this for locks of modules only: nothing ever drops the lock.
    """
    lock: Any = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: lock._at_fork_reinit())
    return lock  # type: ignore[no-any-return]


def drop_oldest(table: dict[Any, Any]) -> None:
    """Remove the entry that was added first, unless other threads have emptied the table."""
    for key in list(table)[
        :1
    ]:  # the copy is one step of C; an iterator sees edits of other threads
        table.pop(key, None)


def register(clear: Callable[[], None]) -> None:
    """Register a function that `clear_all` calls.

    Args:
        clear: empties a cache; objects that are still in use must go on working.
    """
    _clears.append(clear)


def clear_all() -> None:
    """Empty every registered cache, in the order of registration."""
    for clear in _clears:
        clear()
