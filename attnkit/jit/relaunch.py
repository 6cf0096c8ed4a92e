"""Relaunch a kernel with new addresses and numbers: the fast path of repeated calls on a GPU.

Unchanged arguments are neither checked nor packed again. The launch function is Python source that
is generated for the arguments that change. It is compiled once for each layout of these arguments.
For a kernel in which two tensors and a number change, the source is

    def relaunch(stream, addresses, numbers=()):
        a0, a1, = addresses
        if (a0 | a1) & 15 or not (a0 and a1): check(addresses)
        try: values = free.pop()
        except IndexError: values = fresh()
        words = values.words
        try:
            words[0] = a0
            words[7] = a1
            words[15] = stream
            if numbers != values.numbers or 0 in numbers: values.write(numbers)
            launch(values.frame)
        finally: free.append(values)

A loop over the addresses would take twice the time: 1.7 us instead of 0.85 us for five addresses, a
number and the stream. A whole call of `flex_attention` takes about 11 us.

Each call reuses the argument buffer of an earlier call and writes only the values that change.
Concurrent calls from several threads use separate buffers.
"""

from __future__ import annotations

import functools
import struct
import types
from collections.abc import Sequence
from typing import Any, Protocol

from attnkit.errors import ArgumentError
from attnkit.jit.abi import Signature, misplaced
from attnkit.jit.arg_specs import NUMBERS, NumberSpec, StreamSpec, TensorSpec
from attnkit.jit.loader import Entry, Frame
from attnkit.util import caches


class Relaunch(Protocol):
    """Function that launches a kernel again, asynchronously, with some arguments replaced."""

    def __call__(
        self, stream: int, addresses: Sequence[int], numbers: Sequence[int | float] = ()
    ) -> None:
        """Launch the kernel on a stream with new addresses and numbers.

        Args:
            stream: handle of a stream of the current device. The arguments must be on this device.
            addresses: addresses of the tensors that change. The tensors must have the device,
                dtypes, shapes and strides of the earlier ones; this is not checked.
            numbers: the numbers that change.

        Raises:
            ArgumentError: an address does not have the required alignment, or a number is out of
                the range of its type.
            LaunchError: CUDA reports an error.
        """


def relauncher(
    entry: Entry, signature: Signature, arguments: Sequence[Any], changing: Sequence[int]
) -> Relaunch:
    """Return a function that launches a kernel again with new values of the `changing` arguments.

    Args:
        entry: the kernel, loaded on the device of the arguments.
        signature: the kernel's signature.
        arguments: the arguments of an earlier call, which are checked. The caller must keep the
            tensors that do not change alive as long as it uses the result.
        changing: indices of the arguments that each call passes, in increasing order.

    Raises:
        ArgumentError, DTypeError, ShapeError, DeviceError: see `Signature.gather`.
    """
    first, _ = signature.gather(arguments, lambda device: 0)
    tensors: list[tuple[int, int, bool]] = []
    numbers: list[tuple[int, struct.Struct]] = []
    stream = None
    places, changes = iter(enumerate(arguments)), set(changing)
    for spec, offset in zip(signature.specs, signature.layout[1], strict=False):
        if isinstance(spec, StreamSpec):
            stream = offset // 8
            continue
        index, argument = next(places)
        if index not in changes:
            continue
        if isinstance(spec, TensorSpec):
            tensors.append((offset // 8, spec.align - 1, argument.numel() > 0))
        elif isinstance(spec, NumberSpec):
            numbers.append((offset, struct.Struct("<" + NUMBERS[spec.kind])))
    free: list[_Values] = []  # buffers that no call is using
    names: dict[str, Any] = {
        "free": free,
        "fresh": lambda: _Values(signature, first, numbers),
        "launch": entry.launch,
        "check": functools.partial(_check, tuple(tensors)),
    }
    exec(_code(tuple(tensors), stream), names)
    relaunch: Relaunch = names["relaunch"]
    return relaunch


def _check(tensors: Sequence[tuple[int, int, bool]], addresses: Sequence[int]) -> None:
    """Raise an ArgumentError for the first address that a kernel cannot take.

    Args:
        tensors: see `_code`.
        addresses: their addresses.
    """
    for address, (_, bits, has_memory) in zip(addresses, tensors, strict=True):
        if address & bits or (has_memory and not address):
            raise misplaced("a tensor", address, bits + 1)


class _Values:
    """Argument buffer of a relaunch, which keeps the values of the previous call.

    Args:
        signature: the kernel's signature.
        values: all values of a call, see `Signature.gather`.
        numbers: (offset in bytes, struct format) of each number that changes.
    """

    def __init__(
        self,
        signature: Signature,
        values: Sequence[Any],
        numbers: Sequence[tuple[int, struct.Struct]],
    ) -> None:
        self.frame = Frame(signature)
        self.frame.pack(self.frame.values, 0, *values)
        self.words = memoryview(self.frame.values).cast("B").cast("Q")
        self.numbers: Sequence[int | float] | None = None
        self._formats = numbers

    def write(self, numbers: Sequence[int | float]) -> None:
        """Write the numbers that change to the argument buffer.

        Raises:
            ArgumentError: a number is out of the range of its type.
        """
        self.numbers = None  # an error below leaves some numbers written and others not
        for (offset, kind), number in zip(self._formats, numbers, strict=True):
            try:
                kind.pack_into(self.frame.values, offset, number)
            except (struct.error, OverflowError):
                raise ArgumentError(
                    f"a number of a kernel call, {number!r}, does not fit its type"
                ) from None
        self.numbers = numbers


@functools.lru_cache(maxsize=256)
def _code(tensors: tuple[tuple[int, int, bool], ...], stream: int | None) -> types.CodeType:
    """Generate and compile the source of `relaunch` (see the module docstring).

    Args:
        tensors: for each tensor that changes, the offset of its address in the argument buffer (in
            8-byte words), a mask of the address bits that must be zero, and whether the address
            must not be 0.
        stream: offset of the stream in words; None for a kernel without a stream argument.
    """
    names = [f"a{i}" for i in range(len(tensors))]
    lines = [f"{''.join(f'{a}, ' for a in names) or '()'} = addresses"]
    aligned: dict[int, list[str]] = {}  # addresses by the bits that must be zero in them
    for a, (_, bits, _) in zip(names, tensors, strict=True):
        aligned.setdefault(bits, []).append(a)
    faults = [f"({' | '.join(group)}) & {bits}" for bits, group in aligned.items() if bits]
    filled = [a for a, (_, _, has_memory) in zip(names, tensors, strict=True) if has_memory]
    if filled:
        faults.append(f"not ({' and '.join(filled)})")
    if faults:
        lines.append(f"if {' or '.join(faults)}: check(addresses)")
    lines += ["try: values = free.pop()", "except IndexError: values = fresh()"]
    lines += ["words = values.words", "try:"]
    lines += [f"    words[{at}] = {a}" for a, (at, *_) in zip(names, tensors, strict=True)]
    if stream is not None:
        lines.append(f"    words[{stream}] = stream")
    # 0.0 == -0.0, so the comparison misses a change of a zero's sign: zeros are always written
    lines.append("    if numbers != values.numbers or 0 in numbers: values.write(numbers)")
    lines += ["    launch(values.frame)", "finally: free.append(values)"]
    text = "\n    ".join(["def relaunch(stream, addresses, numbers=()):", *lines])
    return compile(text, "<relaunch>", "exec")


caches.register(_code.cache_clear)
