"""Relaunch a kernel with other addresses and numbers, without checking or packing the rest.

Every repeated call of `flex_attention` on a GPU ends here, so the launch is Python text that is
generated for the arguments that change, and compiled once for each layout of them. For a kernel
with two tensors that change, its stream and a number, the text is

    def relaunch(stream, addresses, numbers=()):
        a0, a1, = addresses
        if a0 & 15: raise misplaced('a tensor', a0, 16)
        if a1 & 15: raise misplaced('a tensor', a1, 16)
        try: values = free.pop()
        except IndexError: values = fresh()
        words = values.words
        words[0] = a0
        words[7] = a1
        words[15] = stream
        if numbers != values.numbers or 0 in numbers: values.write(numbers)
        launch(values.frame)
        free.append(values)

A loop over the addresses would do the same and takes twice the time: 1.7 us instead of 0.85 us for
five addresses, a number and the stream, where a whole call of `flex_attention` takes about 11 us.

The memory that holds the values of a call is kept, and the next call writes only what changes. One
call at a time uses it; calls of other threads that are under way have their own.
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
    """Launches a kernel as before, with some arguments replaced; does not wait for it."""

    def __call__(
        self, stream: int, addresses: Sequence[int], numbers: Sequence[int | float] = ()
    ) -> None:
        """Launch.

        Args:
            stream: handle of a stream of the current device, which is that of the arguments.
            addresses: of the tensors that change. They must have the device, dtypes, shapes and
                strides of the earlier ones: that is not checked.
            numbers: those that change.

        Raises:
            ArgumentError: an address is not aligned as the kernel needs it, or a number does not
                fit its type.
            LaunchError: CUDA refuses.
        """


def relauncher(
    entry: Entry, signature: Signature, arguments: Sequence[Any], changing: Sequence[int]
) -> Relaunch:
    """Build the function that launches a kernel again.

    Args:
        entry: the kernel, loaded on the device of the arguments.
        signature: of the kernel.
        arguments: those of an earlier call; they are checked. Tensors that do not change must live
            as long as the result is used.
        changing: indices of the arguments that each call passes, in increasing order.

    Raises:
        ArgumentError, DTypeError, ShapeError, DeviceError: as `Signature.gather`.
    """
    first, _ = signature.gather(arguments, lambda device: 0)
    tensors: list[tuple[int, int]] = []
    numbers: list[tuple[int, struct.Struct]] = []
    stream = None
    indices, changes = iter(range(signature.arity)), set(changing)
    for spec, offset in zip(signature.specs, signature.layout[1], strict=False):
        if isinstance(spec, StreamSpec):
            stream = offset // 8
        elif next(indices) not in changes:
            continue
        elif isinstance(spec, TensorSpec):
            tensors.append((offset // 8, spec.align - 1))
        elif isinstance(spec, NumberSpec):
            numbers.append((offset, struct.Struct("<" + NUMBERS[spec.kind])))
    free: list[_Values] = []  # not in use now
    names: dict[str, Any] = {
        "free": free,
        "fresh": lambda: _Values(signature, first, numbers),
        "launch": entry.launch,
        "misplaced": misplaced,
    }
    exec(_code(tuple(tensors), stream), names)
    relaunch: Relaunch = names["relaunch"]
    return relaunch


class _Values:
    """The values of a call in memory, as the previous call has left them.

    Args:
        signature: of the kernel.
        values: all values of a call, see `Signature.gather`.
        numbers: offset in bytes and format of each number that changes.
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
        for (offset, kind), number in zip(self._formats, numbers, strict=True):
            try:
                kind.pack_into(self.frame.values, offset, number)
            except (struct.error, OverflowError):
                raise ArgumentError(
                    f"a number of a kernel call, {number!r}, does not fit its type"
                ) from None
        self.numbers = numbers


@functools.lru_cache(maxsize=256)
def _code(tensors: tuple[tuple[int, int], ...], stream: int | None) -> types.CodeType:
    """Generate the text at the top of this file, and compile it.

    Args:
        tensors: of each tensor that changes, where its address is written, in words of 8 bytes, and
            which of the address's bits must be zero.
        stream: where the stream is written, in words; None for a kernel without one.
    """
    names = [f"a{i}" for i in range(len(tensors))]
    lines = [f"{''.join(f'{a}, ' for a in names) or '()'} = addresses"]
    for a, (_, bits) in zip(names, tensors, strict=True):
        if bits:
            lines.append(f"if {a} & {bits}: raise misplaced('a tensor', {a}, {bits + 1})")
    lines += ["try: values = free.pop()", "except IndexError: values = fresh()"]
    lines.append("words = values.words")
    lines += [f"words[{at}] = {a}" for a, (at, _) in zip(names, tensors, strict=True)]
    if stream is not None:
        lines.append(f"words[{stream}] = stream")
    # 0.0 == -0.0, so equality does not show a change of a zero's sign: zeros are always written
    lines.append("if numbers != values.numbers or 0 in numbers: values.write(numbers)")
    lines += ["launch(values.frame)", "free.append(values)"]
    text = "\n    ".join(["def relaunch(stream, addresses, numbers=()):", *lines])
    return compile(text, "<relaunch>", "exec")


caches.register(_code.cache_clear)
