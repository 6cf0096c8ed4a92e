"""Clear every cache of the package; a module that defines a cache registers it here."""

from __future__ import annotations

from collections.abc import Callable

_clears: list[Callable[[], None]] = []


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
