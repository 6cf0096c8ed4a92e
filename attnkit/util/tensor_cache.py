"""Cache values that are derived from the data of tensors, for as long as the data is unchanged."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from attnkit.util import caches
from attnkit.util.torch_private import version

T = TypeVar("T")

# Guards the entries of every `VersionedCache`: keys compare in Python, so that a thread may be
# interrupted inside of an operation on a dictionary. Nobody computes a value while holding it.
_lock = caches.fork_safe_lock()


def address(tensor: Tensor) -> int:
    """Return the address of a tensor's data, 0 if it has none.

    Stamps compare it because `t.data = other` does not raise the version counter.
    """
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a tensor of torch.func, or without data
        return 0


class Stamp:
    """Records the state of a tensor, to check later that its data is unchanged.

    It compares the object, its version counter and its address. Tensors of inference mode have no
    version counter. For those the stamp stores a copy and compares the data, which waits for the
    GPU.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._reference = weakref.ref(tensor)
        self._copy = tensor.clone() if tensor.is_inference() else None
        self._version = -1 if tensor.is_inference() else version(tensor)
        self._address = address(tensor)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is the same object with the same data."""
        if self._reference() is not tensor:
            return False
        if self._copy is None:
            return version(tensor) == self._version and address(tensor) == self._address
        return self._equal(tensor, self._copy)

    def _equal(self, tensor: Tensor, copy: Tensor) -> bool:
        return copy.shape == tensor.shape and torch.equal(copy, tensor)


class VersionedCache(Generic[T]):
    """Maps (key, tensors) to a value, with a bounded size; an edited or new tensor is a miss.

    Threads may share a cache. Two that miss at the same time both compute the value. Tensors are referenced weakly. The cache notices in-place edits through torch, which raise the
    version counter, and `t.data = other`. It does not notice edits through `t.data[...]` or through
    a numpy view of the same memory.
    """

    def __init__(self, size: int, *, copies: bool = True) -> None:
        """Create an empty cache.

        Args:
            size: largest number of entries; the least recently used is dropped first.
            copies: whether to copy inference tensors, to compare their data later. If not, values
                that depend on inference tensors are not cached.
        """
        self._size = size
        self._copies = copies
        self._entries: OrderedDict[Hashable, tuple[tuple[Stamp, ...], T]] = OrderedDict()

    def get(self, key: Hashable, tensors: Sequence[Tensor], make: Callable[[], T]) -> T:
        """Return the value for a key and tensors; call `make` on a miss."""
        if not self._copies and any(t.is_inference() for t in tensors):
            return make()
        full = (key, tuple(id(t) for t in tensors))
        with _lock:
            entry = self._entries.get(full)
            if entry is not None:
                self._entries.move_to_end(full)
        if entry is not None:
            stamps, value = entry
            if all(s.holds(t) for s, t in zip(stamps, tensors, strict=True)):
                return value
        value = make()
        stamps = tuple(Stamp(t) for t in tensors)
        with _lock:
            self._entries[full] = stamps, value
            self._entries.move_to_end(full)
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)
        return value

    def __len__(self) -> int:
        """Count the values."""
        return len(self._entries)

    def clear(self) -> None:
        """Remove all values."""
        with _lock:
            self._entries.clear()
