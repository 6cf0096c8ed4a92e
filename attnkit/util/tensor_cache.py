"""Cache values that are computed from the data of tensors, until the data changes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from attnkit.util import caches
from attnkit.util.data_state import DataState, state_of

T = TypeVar("T")

# Guards the entries of every `VersionedCache`: keys compare in Python code, so a thread may be
# interrupted inside a dictionary operation. No thread computes a value while it holds the lock.
_lock = caches.fork_safe_lock()


class VersionedCache(Generic[T]):
    """LRU cache from (key, tensors) to a value; a tensor whose data has changed is a miss.

    Threads may share a cache. Two threads that miss at the same time both compute the value. The
    cache references tensors weakly. `DataState` describes which changes are detected (on the CPU,
    all of them).
    """

    def __init__(self, size: int, *, copies: bool = True) -> None:
        """Create an empty cache.

        Args:
            size: largest number of entries; the least recently used entry is dropped first.
            copies: whether to record the data of inference tensors, to compare it later. If False,
                values that depend on inference tensors are not cached.
        """
        self._size = size
        self._copies = copies
        self._entries: OrderedDict[Hashable, tuple[tuple[DataState, ...], T]] = OrderedDict()

    def get(self, key: Hashable, tensors: Sequence[Tensor], make: Callable[[], T]) -> T:
        """Return the value cached for `key` and `tensors`; compute it with `make` on a miss."""
        if not self._copies and any(t.is_inference() for t in tensors):
            return make()
        full = (key, tuple(id(t) for t in tensors))
        # before `make` reads the data: the state must not be newer than the value
        states = tuple([state_of(t) for t in tensors])
        with _lock:
            entry = self._entries.get(full)
            if entry is not None:
                self._entries.move_to_end(full)
        if entry is not None and entry[0] == states:  # states compare by identity
            return entry[1]
        value = make()
        with _lock:
            self._entries[full] = states, value
            self._entries.move_to_end(full)
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)
        return value

    def __len__(self) -> int:
        """Return the number of cached values."""
        return len(self._entries)

    def clear(self) -> None:
        """Remove all values."""
        with _lock:
            self._entries.clear()
