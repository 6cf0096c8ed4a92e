"""Every cache of the process, so that one call empties them all."""

from __future__ import annotations

from collections.abc import Callable

_clear: list[Callable[[], None]] = []


def register(clear: Callable[[], None]) -> None:
    """Have `clear_all` call this function; each module registers the caches that it holds.

    Args:
        clear: empties a cache. It must be safe to call at any time: what is in use stays alive
            through its users.
    """
    _clear.append(clear)


def clear_all() -> None:
    """Empty every registered cache."""
    for clear in _clear:
        clear()
