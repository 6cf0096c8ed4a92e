"""The values of a call that differs from an earlier one in addresses and numbers only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnkit.compiled_signature import Gathered, Signature, Stream
from attnkit.compiled_specs import Dim, NumberSpec, StreamSpec, TensorSpec


class Repeat:
    """Gathers the values of calls like one that was made before.

    Args:
        signature: what the kernel takes.
        arguments: those of the call, which are checked.

    Raises:
        ArgumentError, DTypeError, ShapeError, DeviceError: as `Signature.gather`.
    """

    def __init__(self, signature: Signature, arguments: Sequence[Any]) -> None:
        values, self._device = signature.gather(arguments, lambda device: 0)
        self._values = list(values)
        self._signature = signature
        self._tensors: list[tuple[int, int, int]] = []  # argument, place of its address, alignment
        self._numbers: list[tuple[int, int]] = []  # argument, place
        self._streams: list[int] = []
        place = argument = 0
        for spec in signature.specs:
            if isinstance(spec, StreamSpec):
                self._streams.append(place)
                place += 1
                continue
            if isinstance(spec, TensorSpec):
                self._tensors.append((argument, place, spec.align))
                place += sum(isinstance(n, Dim) for n in (*spec.shape, *spec.stride))
            elif isinstance(spec, NumberSpec):
                self._numbers.append((argument, place))
            place += 1
            argument += 1

    def gather(self, arguments: Sequence[Any], stream: Stream) -> Gathered:
        """The values of a call, and its device.

        Args:
            arguments: tensors with the device, dtypes, shapes and strides of the earlier call,
                which is not checked, and numbers.
            stream: called once, at last, with the device.

        Raises:
            ArgumentError: an address is not aligned as the kernel needs it.
        """
        values = self._values.copy()
        for argument, place, align in self._tensors:
            address = arguments[argument].data_ptr()
            if address % align:
                return self._signature.checked(arguments, stream)
            values[place] = address
        for argument, place in self._numbers:
            values[place] = arguments[argument]
        for place in self._streams:
            values[place] = stream(self._device)
        return values, self._device
