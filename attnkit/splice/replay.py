"""Relaunch all kernels of a call with the addresses of other tensors of the same geometry.

`prepare_replay` analyses the tensors and launches of one call. Each address that a kernel received
belongs to a tensor that the caller passes, to a tensor that the call allocates, or to a tensor that
all calls share, such as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attnkit.jit.relaunch import Relaunch
from attnkit.util.torch_private import (
    device_index,
    fast_empty_strided,
    is_stream_capturing,
    stream_of,
)

# Function that relaunches a call on the tensors that its caller passes. It returns the outputs and
# the zeroed tensors of the call; None, without side effects, if it cannot.
Replayed: TypeAlias = Callable[[Sequence[Tensor]], list[Tensor] | None]

_STEP = 256  # alignment in bytes of tensors within one allocation


@dataclass(frozen=True)
class Launch:
    """Describes one kernel launch of a call.

    Attributes:
        relauncher: (arguments, indices of the arguments that change) -> a function that relaunches
            the kernel, or None.
        arguments: the kernel's tensors and numbers.
    """

    relauncher: Callable[[Sequence[Any], Sequence[int]], Relaunch | None]
    arguments: Sequence[Any]


@dataclass(frozen=True)
class CallTensors:
    """Holds the tensors of a call, grouped by who allocates and who initializes them.

    Attributes:
        inputs: tensors that the caller passes, in the order in which a replay takes them.
        outputs: new tensors that the call returns.
        zeroed: new tensors that the call returns and that must be zero before the kernels run,
            except for those of `written`.
        written: indices of `zeroed` tensors of which the kernels write every element.
        workspace: new tensors that only the kernels use.
        tables: tensors that are the same in every call.
        cleared: the first tensor of `workspace` must be zero from this byte on before the kernels
            run; None if it need not be.
        copied: indices of `workspace` tensors, each with the table that it must equal before the
            kernels run.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    zeroed: Sequence[Tensor]
    workspace: Sequence[Tensor]
    tables: Sequence[Tensor]
    cleared: int | None = None
    copied: Sequence[tuple[int, Tensor]] = ()
    written: Sequence[int] = ()


@dataclass(frozen=True, eq=False)
class Replay:
    """Callable that relaunches the kernels of an analysed call on new input tensors.

    Each call allocates new outputs and a new workspace, and passes the same numbers as the analysed
    call. The inputs must have the same shapes, strides, dtypes and device, which is not checked.

    Attributes:
        launches: for each kernel, a function that relaunches it, and a function that selects its
            addresses from the addresses of the call.
        outputs: shapes, strides and dtypes of the tensors to return.
        zeroed: the same of tensors to return after these, and whether to set them to zero.
        starts, size: first byte of each tensor of the workspace within one allocation, and the
            bytes of that allocation.
        cleared: bytes of the allocation to set to zero.
        copied: bytes of the allocation to overwrite, each with the bytes of a table.
        offsets: addresses inside tensors, as (index of the tensor, bytes from its start).
        counter: function that returns the counters of kernels on the current stream.
        aligned: number of inputs that TMA reads. They are the first inputs.
        device: device of all tensors.
        tables: tensors that every call reads. This reference keeps their addresses valid.
    """

    launches: Sequence[tuple[Relaunch, Callable[[Sequence[int]], Any]]]
    outputs: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    zeroed: Sequence[tuple[Any, bool]]
    starts: Sequence[int]
    size: int
    cleared: slice
    copied: Sequence[tuple[slice, Tensor]]
    offsets: Sequence[tuple[int, int]]
    counter: Callable[[], Tensor]
    aligned: int
    device: torch.device
    tables: Sequence[Tensor]
    _counters: dict[int, Tensor] = field(default_factory=dict)  # counters by stream

    def __post_init__(self) -> None:
        object.__setattr__(self, "_make", fast_empty_strided(self.device))

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        """Relaunch the call on the current stream; return its `outputs` and `zeroed` tensors.

        In the emulator, each thread counts as a stream. The result is None, and nothing is
        launched, if another device is current, if a CUDA graph is being captured, or if the address
        of a tensor that TMA reads is not a multiple of 16 bytes.
        """
        index, make = self.device.index, self._make  # type: ignore[attr-defined]
        if index is not None and (device_index() != index or is_stream_capturing()):
            return None
        pool = [t.data_ptr() for t in inputs]
        bits = 0
        for address in pool[: self.aligned]:
            bits |= address
        if bits & 15:
            return None
        stream = get_ident() if index is None else stream_of(index)
        count = self._counters.get(stream)
        if count is None:
            count = self._counters[stream] = self.counter()
        outputs = [make(*m) for m in self.outputs]
        for geometry, clear in self.zeroed:
            outputs.append(make(*geometry).zero_() if clear else make(*geometry))
        space = make((self.size,), (1,), torch.uint8)
        base = space.data_ptr()
        if self.cleared.stop:
            space[self.cleared].zero_()
        for part, table in self.copied:
            space[part].copy_(table)
        pool += [
            count.data_ptr(),
            *[t.data_ptr() for t in outputs],
            *[base + n for n in self.starts],
        ]
        for which, offset in self.offsets:
            pool.append(pool[which] + offset)
        for relaunch, pick in self.launches:
            relaunch(stream, pick(pool))
        return outputs


def prepare_replay(
    launches: Sequence[Launch],
    tensors: CallTensors,
    counter: Callable[[], Tensor],
    aligned: int,
    device: torch.device,
) -> Replay | None:
    """Build the `Replay` of a call; return None if a kernel reads a tensor not in `tensors`.

    Args:
        launches: launches of the call's kernels.
        tensors: tensors of the call. Its inputs must have different addresses.
        counter, aligned, device: see `Replay`.
    """
    place = _places(tensors, counter())
    starts, size = _starts(tensors.workspace)
    moving = sum(map(len, (tensors.inputs, tensors.outputs, tensors.zeroed, tensors.workspace))) + 1
    relaunches = []
    offsets: dict[tuple[int, int], int] = {}  # location -> index among the addresses
    for launch in launches:
        changing, at = [], []
        for i, a in enumerate(launch.arguments):
            if not isinstance(a, Tensor):
                continue
            location = place(a)
            if location is None:
                return None
            which, offset = location
            if which >= 0:
                changing.append(i)
                new = moving + len(offsets)
                at.append(offsets.setdefault(location, new) if offset else which)
        relaunch = launch.relauncher(launch.arguments, changing)
        if relaunch is None or not at:
            return None
        relaunches.append((relaunch, _picker(at)))
    cleared = tensors.cleared
    return Replay(
        relaunches,
        [(tuple(t.shape), t.stride(), t.dtype) for t in tensors.outputs],
        [
            ((tuple(t.shape), t.stride(), t.dtype), i not in tensors.written)
            for i, t in enumerate(tensors.zeroed)
        ],
        starts,
        size,
        slice(0, 0) if cleared is None else slice(cleared, _bytes(tensors.workspace[0])),
        [(slice(starts[i], starts[i] + _bytes(t)), t.view(torch.uint8)) for i, t in tensors.copied],
        tuple(offsets),
        counter,
        aligned,
        device,
        tuple(tensors.tables),
    )


def _picker(at: Sequence[int]) -> Callable[[Sequence[int]], Any]:
    """Return a function that selects the addresses with these indices."""
    if len(at) > 1:
        return itemgetter(*at)
    only = at[0]  # itemgetter with one index returns no tuple
    return lambda addresses: (addresses[only],)


def _starts(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return the offset of each tensor within one shared allocation, and its size, in bytes."""
    starts, size = [], 0
    for t in tensors:
        starts.append(size)
        size += -(-_bytes(t) // _STEP) * _STEP
    return starts, max(1, size)


def _bytes(t: Tensor) -> int:
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.element_size() if t.numel() else 0


def _places(tensors: CallTensors, counter: Tensor) -> Callable[[Tensor], tuple[int, int] | None]:
    """Return a function: kernel argument -> (index of its tensor in the call, offset in bytes).

    The index is -1 for tables, whose addresses never change. The function returns None for tensors
    that are not in `tensors`.
    """
    moving = [*tensors.inputs, counter, *tensors.outputs, *tensors.zeroed, *tensors.workspace]
    known = {t.data_ptr(): i for i, t in enumerate(moving)}
    new = [(t.data_ptr(), _bytes(t), i) for i, t in enumerate(moving) if i > len(tensors.inputs)]
    tables = {t.data_ptr() for t in tensors.tables}

    def place(t: Tensor) -> tuple[int, int] | None:
        address = t.data_ptr()
        if address in known:
            return known[address], 0
        for start, size, i in new:
            if start <= address < start + size:
                return i, address - start
        return (-1, 0) if address in tables else None

    return place
