"""Cache objects that are made from other objects, found again by their identity."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch

from attnkit.util import caches

T = TypeVar("T")


class IdentityCache(Generic[T]):
    """Maps (key, objects) to a value; objects are compared by identity.

    attnkit recognizes a mask or a score_mod by its identity. A function that wraps those of a user
    must therefore return the same wrapper for the same arguments. An entry keeps its objects alive,
    so that no other object gets their ids.
    """

    def __init__(self, size: int) -> None:
        """Create an empty cache of at most `size` entries; the oldest is dropped first."""
        self._size = size
        self._entries: dict[Hashable, tuple[tuple[Any, ...], T]] = {}

    def get(self, key: Hashable, objects: tuple[Any, ...], make: Callable[[], T]) -> T:
        """Return the value of `key` and `objects`; compute it with `make` if there is none.

        In torch.compile nothing is kept: the graph makes the value at each of its calls.
        """
        if torch.compiler.is_compiling():
            return make()
        full = (key, *map(id, objects))
        entry = self._entries.get(full)
        if entry is None:
            if len(self._entries) >= self._size:
                caches.drop_oldest(self._entries)
            entry = self._entries[full] = objects, make()
        return entry[1]

    def clear(self) -> None:
        """Remove all values."""
        self._entries.clear()
