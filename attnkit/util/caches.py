"""Clear every cache of the package: each registers here, next to where it is defined."""

from __future__ import annotations

from collections.abc import Callable

_clears: list[Callable[[], None]] = []


def register(clear: Callable[[], None]) -> None:
    """Have `clear_all` call a function.

    Args:
        clear: empties a cache; must leave what is in use now working.
    """
    _clears.append(clear)


def clear_all() -> None:
    """Empty every registered cache, in the order of registration."""
    for clear in _clears:
        clear()
