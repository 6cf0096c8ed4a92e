"""Values derived from the data of tensors, kept while the tensors are unchanged."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class _Stamp:
    """One tensor as it was: the same object, with the same version counter."""

    def __init__(self, tensor: Tensor) -> None:
        self.reference = weakref.ref(tensor)
        # inference tensors have no version counter: keep a copy and compare
        self.copy = tensor.clone() if tensor.is_inference() else None
        self.version = None if tensor.is_inference() else tensor._version

    def holds(self, tensor: Tensor) -> bool:
        if self.reference() is not tensor:
            return False
        if self.copy is not None:
            return self.copy.shape == tensor.shape and torch.equal(self.copy, tensor)
        return self.version == tensor._version


class VersionedCache(Generic[T]):
    """A bounded map from (key, tensors) to a value; an edited or new tensor is a miss.

    Tensors are held weakly. An in-place edit through torch raises the version counter and is
    seen; one through `.data` or a numpy view of the same memory is not.
    """

    def __init__(self, size: int, *, copies: bool = True) -> None:
        """`copies`: keep copies of inference tensors to compare; else values of them are not kept."""
        self._size = size
        self._copies = copies
        self._entries: OrderedDict[Hashable, tuple[tuple[_Stamp, ...], T]] = OrderedDict()

    def get(self, key: Hashable, tensors: Sequence[Tensor], make: Callable[[], T]) -> T:
        """The value for a key and tensors, made if it is not known."""
        if not self._copies and any(t.is_inference() for t in tensors):
            return make()
        full = (key, tuple(id(t) for t in tensors))
        entry = self._entries.get(full)
        if entry is not None:
            stamps, value = entry
            if all(s.holds(t) for s, t in zip(stamps, tensors, strict=True)):
                self._entries.move_to_end(full)
                return value
        value = make()
        self._entries[full] = (tuple(_Stamp(t) for t in tensors), value)
        self._entries.move_to_end(full)
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)
        return value
