"""Values derived from the data of tensors, kept while the tensors are unchanged."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from attnkit.util.torch_private import version

T = TypeVar("T")


def address(tensor: Tensor) -> int:
    """Where a tensor's data lies: `t.data = other` counts no version. 0 where there is none."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a tensor of torch.func, or without data
        return 0


class Stamp:
    """A tensor's data as it was: the same object, with the same version counter and address.

    Tensors of inference mode count no versions: of those a copy is kept and compared, which waits
    for the GPU.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._reference = weakref.ref(tensor)
        self._copy = tensor.clone() if tensor.is_inference() else None
        self._version = -1 if tensor.is_inference() else version(tensor)
        self._address = address(tensor)

    def holds(self, tensor: Tensor) -> bool:
        """Whether this is the tensor, with that data."""
        if self._reference() is not tensor:
            return False
        if self._copy is None:
            return version(tensor) == self._version and address(tensor) == self._address
        return self._equal(tensor, self._copy)

    def _equal(self, tensor: Tensor, copy: Tensor) -> bool:
        return copy.shape == tensor.shape and torch.equal(copy, tensor)


class VersionedCache(Generic[T]):
    """A bounded map from (key, tensors) to a value; an edited or new tensor is a miss.

    Tensors are held weakly. An in-place edit through torch raises the version counter and is
    seen, and so is `t.data = other`; one through `t.data[...]` or a numpy view of the same memory
    is not.
    """

    def __init__(self, size: int, *, copies: bool = True) -> None:
        """`copies`: keep copies of inference tensors to compare; else values of them are not kept."""
        self._size = size
        self._copies = copies
        self._entries: OrderedDict[Hashable, tuple[tuple[Stamp, ...], T]] = OrderedDict()

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
        self._entries[full] = (tuple(Stamp(t) for t in tensors), value)
        self._entries.move_to_end(full)
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)
        return value

    def clear(self) -> None:
        """Forget all values."""
        self._entries.clear()
