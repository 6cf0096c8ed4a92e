"""Lay out the arguments of a call for the C interface of a compiled function, and check them.

A function takes an array of pointers. A tensor's pointer is to a structure of its address, its
dynamic sizes and its dynamic strides. A number's pointer, and the stream's, is to the value. The
last pointer is to an int for the status. Sequences of tensors are flattened. All values of a call
are in one buffer.

`Signature.gather` checks the arguments of every launch that is not a relaunch and reads addresses,
sizes and strides from them. It runs Python text that is generated for the kernel's arguments: for a
tensor [n, 8] of float32 and an Int32

    def gather(arguments, stream):
        a0, a1, = arguments
        device = a0.get_device()
        p0 = a0.data_ptr()
        n0_0, n0_1, = a0.shape
        s0_0, s0_1, = a0.stride()
        if a0.dtype is not dtype0 or p0 % 16 or n0_1 != 8 or ...: return None
        if a1.__class__ not in (int, bool): return None
        return (p0, n0_0, s0_0, a1, stream(device), ), device

If a check fails, `gather` calls `Signature.checked`, which is slower. It accepts what is harmless,
such as any stride of an axis of size 1, and raises an error that names the argument otherwise.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch

from attnkit.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from attnkit.jit.arg_specs import NUMBERS, Dim, Extent, NumberSpec, Spec, StreamSpec, TensorSpec

# Values to pack, and the index of the tensors' device: -1 for the CPU, and if there are no tensors.
Gathered: TypeAlias = tuple[Sequence[Any], int]
Stream: TypeAlias = Callable[[int], int]  # handle of the stream to use on a device


class Signature:
    """Describes the flattened arguments of a compiled function, and checks those of a call.

    Attributes:
        specs: one for each argument and for the stream, in order.
        arity: number of arguments of a call, without the stream.
    """

    def __init__(self, specs: Sequence[Spec]) -> None:
        self.specs = tuple(specs)
        self.arity = sum(not isinstance(s, StreamSpec) for s in specs)
        if len(specs) - self.arity > 1:
            raise ArgumentError(f"{len(specs) - self.arity} streams: a kernel takes one")

    @cached_property
    def layout(self) -> tuple[struct.Struct, list[int]]:
        """Return how a call's values are packed, and the byte offsets of arguments and status."""
        code, size, offsets = "<", 0, []
        for spec in self.specs:
            code, size = _padded(code, size, 8)
            offsets.append(size)
            for letters in _structures(spec):  # aligned and padded as in C
                align = max(map(struct.calcsize, letters), default=1)
                code, size = _padded(code, size, align)
                for letter in letters:
                    code, size = _padded(code, size, struct.calcsize(letter))
                    code, size = code + letter, size + struct.calcsize(letter)
                code, size = _padded(code, size, align)
        code, size = _padded(code, size, 8)
        return struct.Struct(code), [*offsets, size]

    @cached_property
    def _generated(self) -> Callable[[Sequence[Any], Stream], Gathered | None]:
        """Compile the function `gather` that the top of this file shows."""
        # The text consists of integers and of names that this module makes up.
        names: dict[str, Any] = {
            f"dtype{i}": getattr(torch, spec.dtype)
            for i, spec in enumerate(self.specs)
            if isinstance(spec, TensorSpec)
        }
        exec("\n".join(_gatherer(self.specs)), names)
        gather: Callable[[Sequence[Any], Stream], Gathered | None] = names["gather"]
        return gather

    def gather(self, arguments: Sequence[Any], stream: Stream) -> Gathered:
        """Check the arguments of a call, and read the values to pass from them.

        Args:
            arguments: tensors and Python numbers.
            stream: gives the stream for a device; called once, after all checks.

        Raises:
            ArgumentError, DTypeError, ShapeError, DeviceError: an argument does not fit what the
                kernel was compiled for.
        """
        try:
            gathered = self._generated(arguments, stream)
        except (TypeError, ValueError, AttributeError):
            gathered = None
        return self.checked(arguments, stream) if gathered is None else gathered

    def checked(self, arguments: Sequence[Any], stream: Stream) -> Gathered:
        """Check and read arguments as `gather` does, but name in the error what does not fit.

        The stride of an axis of size 1 has no effect, so one that does not fit is replaced.
        """
        if len(arguments) != self.arity:
            raise ArgumentError(
                f"{len(arguments)} arguments: the kernel takes {self.arity}, "
                "sequences of tensors counted one by one and without the stream"
            )
        devices = {a.device for a in arguments if isinstance(a, torch.Tensor)}
        if len(devices) > 1:
            places = ", ".join(sorted(map(str, devices)))
            raise DeviceError(f"the tensors of a kernel call lie on different devices: {places}")
        device = next((-1 if d.type == "cpu" else d.index for d in devices), -1)
        values: list[Any] = []
        number = 0
        for spec in self.specs:
            name = f"argument {number}"
            if isinstance(spec, StreamSpec):
                values.append(stream(device))
                continue
            if isinstance(spec, NumberSpec):
                values.append(_number(arguments[number], spec, name))
            else:
                values += _tensor(arguments[number], spec, name)
            number += 1
        return values, device


def _structures(spec: Spec) -> list[str]:
    """Return the `struct` letters of an argument's values.

    A number or a stream has one string. A tensor has three: for its address, its dynamic sizes and
    its dynamic strides.
    """
    if isinstance(spec, NumberSpec):
        return [NUMBERS[spec.kind]]
    if isinstance(spec, StreamSpec):
        return ["Q"]
    parts = [[n for n in part if isinstance(n, Dim)] for part in (spec.shape, spec.stride)]
    return ["Q", *("".join("i" if n.width == 32 else "q" for n in part) for part in parts)]


def _padded(code: str, size: int, align: int) -> tuple[str, int]:
    """Pad a `struct` format and its size in bytes to a multiple of `align`."""
    return code + "x" * (-size % align), size + -size % align


def _gatherer(specs: Sequence[Spec]) -> Iterator[str]:
    """Generate the lines of the function `gather` that the top of this file shows."""
    names = "".join(f"a{i}, " for i, s in enumerate(specs) if not isinstance(s, StreamSpec))
    first = next((i for i, s in enumerate(specs) if isinstance(s, TensorSpec)), None)
    values: list[str] = []
    yield "def gather(arguments, stream):"
    yield f"    {names or '()'} = arguments"
    yield "    device = " + ("-1" if first is None else f"a{first}.get_device()")
    for i, spec in enumerate(specs):
        if isinstance(spec, StreamSpec):
            values.append("stream(device)")
        elif isinstance(spec, NumberSpec):
            kinds = "(float, int)" if spec.kind.startswith("Float") else "(int, bool)"
            yield f"    if a{i}.__class__ not in {kinds}: return None"
            values.append(f"a{i}")
        else:
            yield from _tensor_gatherer(i, spec, values)
    yield f"    return ({''.join(f'{v}, ' for v in values)}), device"


def _tensor_gatherer(i: int, spec: TensorSpec, values: list[str]) -> Iterator[str]:
    """Generate the lines that check a tensor, and append the names of its values to `values`."""
    shape = [f"n{i}_{k}" for k in range(len(spec.shape))]
    stride = [f"s{i}_{k}" for k in range(len(spec.shape))]
    yield f"    p{i} = a{i}.data_ptr()"
    values.append(f"p{i}")
    if shape:
        yield f"    {', '.join(shape)}, = a{i}.shape"
        yield f"    {', '.join(stride)}, = a{i}.stride()"
    faults = [
        f"a{i}.dtype is not dtype{i}",
        f"a{i}.get_device() != device",
        f"p{i} % {spec.align:d}",
    ]
    for name, want in zip((*shape, *stride), (*spec.shape, *spec.stride), strict=True):
        if isinstance(want, int):
            faults.append(f"{name} != {want:d}")
            continue
        values.append(name)
        if want.divisibility > 1:
            faults.append(f"{name} % {want.divisibility:d}")
    yield f"    if {' or '.join(faults)}: return None"


def _number(x: Any, spec: NumberSpec, name: str) -> int | float:
    """Check a number; `name` is for errors."""
    takes = (int, float) if spec.kind.startswith("Float") else (int, bool)
    if not isinstance(x, int | float) or not isinstance(x, takes):
        raise ArgumentError(
            f"{name}: expected a Python number for {spec.kind}, got {type(x).__name__}"
        )
    try:
        struct.pack("<" + NUMBERS[spec.kind], x)
    except (struct.error, OverflowError):
        raise ArgumentError(f"{name}: {x} does not fit into {spec.kind}") from None
    return x


def _tensor(x: Any, spec: TensorSpec, name: str) -> list[int]:
    """Check a tensor; return its address, dynamic sizes and dynamic strides."""
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(f"{name}: expected a tensor, got {type(x).__name__}")
    if str(x.dtype) != f"torch.{spec.dtype}":
        raise DTypeError(f"{name}: dtype {x.dtype}, the kernel was compiled for {spec.dtype}")
    sizes = (*x.shape, *_effective_strides(x, spec))
    extents = (*spec.shape, *spec.stride)
    if len(sizes) != len(extents) or not all(map(_fits, sizes, extents)):
        raise ShapeError(
            f"{name}: shape {tuple(x.shape)} with strides {x.stride()}, the kernel was compiled "
            f"for {spec}"
        )
    address = x.data_ptr()
    if address % spec.align:
        raise misplaced(name, address, spec.align)
    return [address, *(n for n, want in zip(sizes, extents, strict=True) if isinstance(want, Dim))]


def misplaced(name: str, address: int, align: int) -> ArgumentError:
    """Build the error for a tensor whose address is not aligned as the kernel needs it."""
    return ArgumentError(
        f"{name}: its address {address:#x} is not a multiple of {align} bytes, for which the kernel "
        "was compiled"
    )


def _effective_strides(x: torch.Tensor, spec: TensorSpec) -> list[int]:
    """Return the strides of a tensor; for axes of size 1, replace those that do not fit."""
    strides = list(x.stride())
    for axis, (size, want) in enumerate(zip(x.shape, spec.stride, strict=False)):
        if size <= 1 and not _fits(strides[axis], want):
            if isinstance(want, int):
                strides[axis] = want
            else:
                strides[axis] += -strides[axis] % want.divisibility
    return strides


def _fits(n: int, want: Extent) -> bool:
    """Return whether a size or stride fits what the kernel was compiled for."""
    if isinstance(want, int):
        return n == want
    return n % want.divisibility == 0 and -(1 << want.width - 1) <= n < 1 << want.width - 1
