"""Launches that differ from an earlier one in some addresses and numbers only.

All else stays where it was written: memory that holds the values of a call is kept and used again,
by one call at a time.
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


class Again(Protocol):
    """Launches a kernel as before but for some arguments; does not wait for it."""

    def __call__(
        self, stream: int, addresses: Sequence[int], numbers: Sequence[int | float] = ()
    ) -> None:
        """Launch.

        Args:
            stream: handle of a stream of the current device, which is that of the arguments.
            addresses: of the tensors that change, which have the device, dtypes, shapes and
                strides of the earlier ones: that is not checked.
            numbers: those that change.

        Raises:
            ArgumentError: an address is not aligned as the kernel needs it, or a number does not
                fit its type.
            LaunchError: CUDA refuses.
        """


def repeated(
    entry: Entry, signature: Signature, arguments: Sequence[Any], changing: Sequence[int]
) -> Again:
    """How to launch a kernel again.

    Args:
        entry: the kernel, loaded on the device of the arguments.
        signature: what it takes.
        arguments: those of an earlier call, which are checked. What does not change must live as
            long as this is used.
        changing: the arguments, by index in increasing order, that are given at each call.

    Raises:
        ArgumentError, DTypeError, ShapeError, DeviceError: as `Signature.gather`.
    """
    first, _ = signature.gather(arguments, lambda device: 0)
    tensors: list[tuple[int, int]] = []
    numbers: list[tuple[int, struct.Struct]] = []
    stream = None
    own, wanted = iter(range(signature.arity)), set(changing)
    for spec, offset in zip(signature.specs, signature.layout[1], strict=False):
        if isinstance(spec, StreamSpec):
            stream = offset // 8
        elif next(own) not in wanted:
            continue
        elif isinstance(spec, TensorSpec):
            tensors.append((offset // 8, spec.align - 1))
        elif isinstance(spec, NumberSpec):
            numbers.append((offset, struct.Struct("<" + NUMBERS[spec.kind])))
    free: list[_Values] = []  # not in use now; calls of other threads may be under way
    names: dict[str, Any] = {
        "free": free,
        "fresh": lambda: _Values(signature, first, numbers),
        "launch": entry.launch,
        "misplaced": misplaced,
    }
    exec(_code(tuple(tensors), stream), names)
    again: Again = names["again"]
    return again


class _Values:
    """Memory of a call, as the one before has left it."""

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
        self._places = numbers  # in bytes

    def write(self, numbers: Sequence[int | float]) -> None:
        for (at, kind), number in zip(self._places, numbers, strict=True):
            try:
                kind.pack_into(self.frame.values, at, number)
            except (struct.error, OverflowError):
                raise ArgumentError(
                    f"a number of a kernel call, {number!r}, does not fit its type"
                ) from None
        self.numbers = numbers


@functools.lru_cache(maxsize=256)
def _code(tensors: tuple[tuple[int, int], ...], stream: int | None) -> types.CodeType:
    """`again` as straight-line Python, as it is on the path of every call.

    Args:
        tensors: where each address is written, in words, and its bits that are zero.
        stream: where the stream is.
    """
    given = [f"a{i}" for i in range(len(tensors))]
    lines = [f"{''.join(f'{a}, ' for a in given) or '()'} = addresses"]
    for a, (_, bits) in zip(given, tensors, strict=True):
        if bits:
            lines.append(f"if {a} & {bits}: raise misplaced('a tensor', {a}, {bits + 1})")
    lines += ["try: values = free.pop()", "except IndexError: values = fresh()"]
    lines.append("words = values.words")
    lines += [f"words[{at}] = {a}" for a, (at, _) in zip(given, tensors, strict=True)]
    if stream is not None:
        lines.append(f"words[{stream}] = stream")
    # zeros of either sign are equal
    lines.append("if numbers != values.numbers or 0 in numbers: values.write(numbers)")
    lines += ["launch(values.frame)", "free.append(values)"]
    text = "\n    ".join(["def again(stream, addresses, numbers=()):", *lines])
    return compile(text, "<repeat>", "exec")
