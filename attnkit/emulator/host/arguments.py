"""Pack run-time values for the C interface of a compiled function of the CuTe DSL.

A tensor becomes a C structure of its pointer, dynamic shapes and dynamic strides. The fake tensor
with which the function was compiled says which of them are dynamic, and how wide they are. Numbers
are passed by pointer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from attnkit.emulator.machine.global_memory import GlobalMemory, Pointers, Undefined
from attnkit.errors import ArgumentError, ShapeError

_SCALARS = {
    "Int8": "<b",
    "Uint8": "<B",
    "Int16": "<h",
    "Uint16": "<H",
    "Int32": "<i",
    "Uint32": "<I",
    "Int64": "<q",
    "Uint64": "<Q",
    "Float32": "<f",
    "Float64": "<d",
    "Boolean": "<?",
    "bool": "<?",
    "int": "<i",
    "float": "<f",
}


def is_stream(spec: Any) -> bool:
    """Return whether a compile-time argument stands for a CUDA stream."""
    return "stream" in type(spec).__name__.lower()


def pack_all(specs: Sequence[Any], values: Sequence[Any], memory: GlobalMemory) -> list[bytes]:
    """Return the bytes of each C argument.

    Args:
        specs: arguments with which the function was compiled.
        values: run-time arguments, one for each of `specs` that is not a stream.

    Raises:
        ArgumentError, ShapeError: a value does not fit what the kernel was compiled for.
    """
    passed = [s for s in specs if not is_stream(s)]
    if len(values) != len(passed):
        raise ArgumentError(f"{len(values)} arguments: the kernel was compiled for {len(passed)}")
    remaining, out, number = iter(values), [], 0
    for spec in specs:
        if is_stream(spec):
            out.append(struct.pack("<Q", 0))
            continue
        out += _pack(spec, next(remaining), memory, f"argument {number}")
        number += 1
    return out


def _pack(spec: Any, value: Any, memory: GlobalMemory, name: str) -> Iterator[bytes]:
    """Yield the bytes of each C argument into which one argument is packed."""
    if spec is None:
        return
    if isinstance(spec, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(spec):
            raise ArgumentError(f"{name}: expected a sequence of {len(spec)}, got {value!r:.80}")
        for i, (s, v) in enumerate(zip(spec, value, strict=True)):
            yield from _pack(s, v, memory, f"{name}[{i}]")
        return
    if hasattr(spec, "dynamic_shapes_mask"):
        yield _tensor(spec, value, memory, name)
        return
    kind = getattr(spec, "kind", type(spec).__name__)
    if kind in _SCALARS:
        number = getattr(value, "value", value)
        if not isinstance(number, int | float):
            raise ArgumentError(f"{name}: expected a number for {kind}, got {type(value).__name__}")
        whole = _SCALARS[kind][1] in "bBhHiIqQ?"
        yield struct.pack(_SCALARS[kind], int(number) if whole else float(number))
        return
    raise ArgumentError(f"{name}: a compile-time value of type {kind} cannot be packed")


def _tensor(spec: Any, value: Any, memory: GlobalMemory, name: str) -> bytes:
    """Return the bytes of a tensor's C structure; add the tensor to global memory as `name`."""
    undefined = isinstance(value, Undefined)
    array = value.array if undefined or isinstance(value, Pointers) else value
    if isinstance(value, Pointers):
        value.add_targets(name, memory)
    address = memory.add(name, array, undefined=undefined)
    shape = tuple(int(n) for n in array.shape)
    if len(shape) != len(tuple(spec.shape)):
        raise ShapeError(f"{name}: shape {shape}, expected rank {len(tuple(spec.shape))}")
    for n, want in zip(shape, tuple(spec.shape), strict=True):
        if isinstance(want, int) and want != n:
            raise ShapeError(f"{name}: shape {shape}, compiled for {tuple(spec.shape)}")
    if hasattr(array, "stride"):
        strides = [int(s) for s in array.stride()]
    else:
        strides = [s // array.itemsize for s in array.strides]
    narrow = 32 if getattr(spec, "_use_32bit_stride", False) else 64
    out = struct.pack("<Q", address)
    for fields in (
        _dynamic(shape, spec.shape, spec.dynamic_shapes_mask, 32),
        _dynamic(strides, spec.stride, spec.dynamic_strides_mask, narrow),
    ):  # shapes and strides are two structures, aligned and padded as in C
        align = max((width // 8 for _, width in fields), default=1)
        out += b"\0" * (-len(out) % align)
        for number, width in fields:
            out += b"\0" * (-len(out) % (width // 8))
            out += number.to_bytes(width // 8, "little", signed=True)
        out += b"\0" * (-len(out) % align)
    return out


def _dynamic(
    values: Sequence[int], spec: Sequence[Any], mask: Sequence[int], width: int
) -> list[tuple[int, int]]:
    """Return (value, bits) of the dynamic entries.

    Args:
        width: number of bits of an entry whose entry in `spec` has no width of its own.
    """
    return [
        (v, int(getattr(s, "width", width)))
        for v, s, d in zip(values, tuple(spec), mask, strict=True)
        if d
    ]
