"""Check the arguments of a kernel call and pack them for the C interface of the compiled function.

The compiled host function takes an array of pointers, one per argument. For a tensor, the pointer
points to a struct of the address, the dynamic sizes and the dynamic strides. For a number or the
stream, it points to the value. The last pointer points to an int that receives the status.
Sequences of tensors are flattened. All values of a call are in one buffer.

`Signature.gather` checks the arguments of every launch (except relaunches) and reads addresses,
sizes and strides from them. It runs a Python function that is generated for the kernel's arguments.
For a float32 tensor [n, 8] and an Int32, the function is

    def gather(arguments, stream):
        a0, a1, = arguments
        device = a0.get_device()
        p0 = a0.data_ptr()
        n0_0, n0_1, = a0.shape
        s0_0, s0_1, = a0.stride()
        if a0.dtype is not dtype0 or p0 % 16 or n0_1 != 8 or ...: return None
        if a1.__class__ not in (int, bool): return None
        return (p0, n0_0, s0_0, a1, stream(device), ), device

If a check fails, `gather` calls the slower `Signature.checked`. It accepts arguments that differ in
a harmless way, such as in the stride of an axis of size 1. For other arguments it raises an error
that names the argument.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch

from attnkit.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from attnkit.jit.arg_specs import NUMBERS, Dim, Extent, NumberSpec, Spec, StreamSpec, TensorSpec

# (values to pack, index of the tensors' device); the index is -1 for the CPU or without tensors.
Gathered: TypeAlias = tuple[Sequence[Any], int]
Stream: TypeAlias = Callable[[int], int]  # device index -> handle of the stream to use


class Signature:
    """Describes the flattened arguments of a compiled function; checks and reads those of a call.

    Attributes:
        specs: one spec for each argument and for the stream, in order.
        arity: number of arguments of a call, without the stream.
    """

    def __init__(self, specs: Sequence[Spec]) -> None:
        self.specs = tuple(specs)
        self.arity = sum(not isinstance(s, StreamSpec) for s in specs)
        if len(specs) - self.arity > 1:
            raise ArgumentError(f"{len(specs) - self.arity} streams: a kernel takes one")

    @cached_property
    def layout(self) -> tuple[struct.Struct, list[int]]:
        """Return (struct format of all values of a call, byte offsets of arguments and status)."""
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
        """Return the generated function `gather` (see the module docstring)."""
        # The generated text contains only integers and names that this module defines.
        names: dict[str, Any] = {
            f"dtype{i}": getattr(torch, spec.dtype)
            for i, spec in enumerate(self.specs)
            if isinstance(spec, TensorSpec)
        }
        exec("\n".join(_gatherer(self.specs)), names)
        gather: Callable[[Sequence[Any], Stream], Gathered | None] = names["gather"]
        return gather

    def gather(self, arguments: Sequence[Any], stream: Stream) -> Gathered:
        """Check the arguments of a call; return (values to pack, device index).

        Args:
            arguments: tensors and Python numbers.
            stream: function that returns the stream handle for a device index. It is called once,
                after all checks.

        Raises:
            ArgumentError, DTypeError, ShapeError, DeviceError: an argument does not match the
                signature that the kernel was compiled for.
        """
        try:
            gathered = self._generated(arguments, stream)
        except (TypeError, ValueError, AttributeError):
            gathered = None
        return self.checked(arguments, stream) if gathered is None else gathered

    def checked(self, arguments: Sequence[Any], stream: Stream) -> Gathered:
        """Slow path of `gather`: check every argument and name the wrong one in the error.

        The stride of an axis of size 1 has no effect, so a stride that does not match is replaced.
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
    """Return the `struct` format letters of an argument, one string per C struct.

    A number or a stream has one string. A tensor has three strings: for its address, its dynamic
    sizes and its dynamic strides.
    """
    if isinstance(spec, NumberSpec):
        return [NUMBERS[spec.kind]]
    if isinstance(spec, StreamSpec):
        return ["Q"]
    parts = [[n for n in part if isinstance(n, Dim)] for part in (spec.shape, spec.stride)]
    return ["Q", *("".join("i" if n.width == 32 else "q" for n in part) for part in parts)]


def _padded(code: str, size: int, align: int) -> tuple[str, int]:
    """Return a `struct` format and its size, padded to a multiple of `align` bytes."""
    return code + "x" * (-size % align), size + -size % align


def _gatherer(specs: Sequence[Spec]) -> Iterator[str]:
    """Generate the source lines of the function `gather` (see the module docstring)."""
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
    """Generate the lines that check tensor `i`; append the names of its values to `values`."""
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
        f"not p{i} and device >= 0",
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
    """Check a number argument and return it; `name` is its name in error messages."""
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
    """Check a tensor argument; return its address, dynamic sizes and dynamic strides."""
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
    if address % spec.align or (not address and x.is_cuda and x.numel()):
        raise misplaced(name, address, spec.align)
    return [address, *(n for n, want in zip(sizes, extents, strict=True) if isinstance(want, Dim))]


def misplaced(name: str, address: int, align: int) -> ArgumentError:
    """Return the error for a tensor whose address is 0 or not a multiple of `align` bytes."""
    if not address:
        return ArgumentError(
            f"{name}: it has no memory, as after `t.untyped_storage().resize_(0)`; allocate its "
            "storage before the call"
        )
    return ArgumentError(
        f"{name}: its address {address:#x} is not a multiple of {align} bytes, for which the "
        "kernel was compiled"
    )


def _effective_strides(x: torch.Tensor, spec: TensorSpec) -> list[int]:
    """Return the strides of `x`, with mismatched strides of axes of size 1 replaced."""
    strides = list(x.stride())
    for axis, (size, want) in enumerate(zip(x.shape, spec.stride, strict=False)):
        if size <= 1 and not _fits(strides[axis], want):
            if isinstance(want, int):
                strides[axis] = want
            else:
                strides[axis] += -strides[axis] % want.divisibility
    return strides


def _fits(n: int, want: Extent) -> bool:
    """Return whether the size or stride `n` matches the constant or `Dim` of the spec."""
    if isinstance(want, int):
        return n == want
    return n % want.divisibility == 0 and -(1 << want.width - 1) <= n < 1 << want.width - 1
