"""Model global memory: the caller's arrays and the kernel's variables, at their host addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnkit.emulator.faults import Trap
from attnkit.emulator.numerics.formats import Lanes
from attnkit.errors import ArgumentError


@dataclass(eq=False)
class Buffer:
    """Holds one range of global memory.

    `written` is true for bytes that have a defined value; None if that is not tracked. `views` are
    the results of `view`, by dtype.
    """

    name: str
    base: int
    data: Lanes
    written: Lanes | None = None
    views: dict[Any, Lanes] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Return the address after the last byte."""
        return self.base + self.data.size

    def view(self, dtype: Any) -> Lanes:
        """Return a view of the bytes as items of `dtype`, without an incomplete item at the end."""
        if dtype not in self.views:
            size = np.dtype(dtype).itemsize
            self.views[dtype] = self.data[: self.data.size // size * size].view(dtype)
        return self.views[dtype]


def extent(array: Any) -> tuple[int, int]:
    """Return the address and the size in bytes of what a numpy array or a torch tensor spans."""
    if isinstance(array, np.ndarray):
        address, shape = array.__array_interface__["data"][0], array.shape
        strides: Sequence[int] = array.strides
        item = array.itemsize
    elif hasattr(array, "data_ptr"):
        address, shape, item = array.data_ptr(), tuple(array.shape), array.element_size()
        strides = [s * item for s in array.stride()]
    else:
        raise ArgumentError(
            f"argument of type {type(array).__name__}: expected a numpy array or a torch tensor"
        )
    if 0 in shape:
        return address, 0
    if any(s < 0 for s in strides):
        raise ArgumentError("arrays with negative strides cannot be kernel arguments")
    return address, sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + item


class Undefined:
    """Marks an output whose contents must not be read before the kernel has written them."""

    def __init__(self, array: Any) -> None:
        self.array = array


class Pointers:
    """Marks an array of addresses, and holds the arrays to which they point.

    A kernel may access the memory of its arguments, and of these arrays.
    """

    def __init__(self, array: Any, targets: Sequence[Any]) -> None:
        self.array = array
        self.targets = targets

    def add_targets(self, name: str, memory: GlobalMemory) -> None:
        """Register the arrays to which the addresses point."""
        for i, target in enumerate(self.targets):
            memory.add(f"target {i} of {name}", target)


class GlobalMemory:
    """Holds the buffers that a launch may access; an access outside all of them is a fault."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._keep: list[Any] = []

    def add(self, name: str, array: Any, *, undefined: bool = False) -> int:
        """Register `array`; return its address. If `undefined`, reads before writes are faults."""
        address, size = extent(array)
        if size:
            raw = (ctypes.c_ubyte * size).from_address(address)
            data = np.ctypeslib.as_array(raw)
            written = np.zeros(size, bool) if undefined else None
            self.buffers.append(Buffer(name, address, data, written))
            self._keep.append(array)
        return address

    def find(self, lo: int, hi: int) -> Buffer:
        """Return the buffer that contains the addresses [lo, hi); fault if none does."""
        for b in self.buffers:
            if b.base <= lo and hi <= b.end:
                return b
        near = ", ".join(f"{b.name} [{b.base:#x}, {b.end:#x})" for b in self.buffers)
        raise Trap("bounds", f"global access [{lo:#x}, {hi:#x}) is in no argument: {near}")

    def check_defined(self, b: Buffer, lo: Any, size: int) -> None:
        """Fault if a byte of [lo, lo + size) of `b` is undefined; `lo`: one offset, or a vector."""
        if (
            b.written is not None
            and not b.written[np.asarray(lo)[..., None] + np.arange(size)].all()
        ):
            raise Trap("uninitialised", f"read of {b.name} before anything was written there")

    def mark(self, b: Buffer, lo: Any, size: int, defined: bool = True) -> None:
        """Mark the bytes [lo, lo + size) of `b` as defined or not; `lo`: one offset, or a vector."""
        if b.written is not None:
            b.written[(np.asarray(lo)[..., None] + np.arange(size)).ravel()] = defined


def arrays(args: Sequence[Any]) -> list[Any]:
    """Return the arrays among the arguments of a run, also those in sequences and `Undefined`."""
    out: list[Any] = []
    for a in args:
        if isinstance(a, list | tuple):
            out += arrays(a)
        elif isinstance(a, Undefined):
            out.append(a.array)
        elif isinstance(a, Pointers):
            out += [a.array, *a.targets]
        elif isinstance(a, np.ndarray) or hasattr(a, "data_ptr"):
            out.append(a)
    return out


def array_names(args: Sequence[Any], name: str = "argument {}") -> list[str]:
    """Return the name of each array that `arrays` returns: "argument 2", "argument 3[0]"."""
    out: list[str] = []
    for i, a in enumerate(args):
        if isinstance(a, list | tuple):
            out += array_names(a, name.format(i) + "[{}]")
        else:
            out += [name.format(i)] * len(arrays([a]))
    return out


def snapshot(args: Sequence[Any]) -> list[Lanes]:
    """Return copies of the bytes that the arrays among `args` span."""
    return [_bytes(a).copy() for a in arrays(args)]


def restore(args: Sequence[Any], saved: Sequence[Lanes]) -> None:
    """Copy the bytes of a snapshot back to the arrays among `args`."""
    for a, data in zip(arrays(args), saved, strict=True):
        _bytes(a)[:] = data


def _bytes(array: Any) -> Lanes:
    """Return a view of the bytes that an array spans."""
    memory = GlobalMemory()
    memory.add("array", array)
    return memory.buffers[0].data if memory.buffers else np.zeros(0, np.uint8)
