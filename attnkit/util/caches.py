"""Registry of the package's caches: `clear_all` empties every registered cache.

A module that defines a cache registers it here. The module also provides the locks of caches.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

_clears: list[Callable[[], None]] = []


def fork_safe_lock() -> threading.RLock:
    """Create a reentrant lock that is released in the child process after a fork.

    Otherwise a lock that another thread of the parent holds at the fork would stay locked in the
    child, where that thread does not exist. Use this for module-level locks only: the lock is
    never freed.
    """
    lock: Any = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: lock._at_fork_reinit())
    return lock  # type: ignore[no-any-return]


def drop_oldest(table: dict[Any, Any]) -> None:
    """Remove the oldest entry of `table`; do nothing if the table is empty."""
    for key in list(table)[
        :1
    ]:  # list() copies atomically; an iterator would fail if another thread edits the table
        table.pop(key, None)


def register(clear: Callable[[], None]) -> None:
    """Register a function that `clear_all` calls.

    Args:
        clear: empties one cache. Objects from the cache that are still in use must keep working.
    """
    _clears.append(clear)


def clear_all() -> None:
    """Empty every registered cache, in the order of registration."""
    for clear in _clears:
        clear()
