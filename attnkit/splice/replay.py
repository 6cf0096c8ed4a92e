"""Relaunch all kernels of a call for other tensors of the same geometry, with new addresses only.

The tensors and launches of one call are analysed once. Each address that a kernel was given lies
in a tensor that the caller brings, in one that the call makes, or in one that stays, as a table does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from attnkit.jit.relaunch import Relaunch
from attnkit.util.torch_private import (
    device_index,
    fast_empty_strided,
    is_stream_capturing,
    stream_of,
)

_STEP = 256  # bytes, between tensors in one block of memory


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel.

    Attributes:
        relauncher: (arguments, indices of those that change) -> the relaunch of the kernel.
        arguments: its tensors and numbers.
    """

    relauncher: Callable[[Sequence[Any], Sequence[int]], Relaunch | None]
    arguments: Sequence[Any]


@dataclass(frozen=True)
class CallTensors:
    """Tensors of a call.

    Attributes:
        inputs: those that the caller brings, in the order of a replay.
        outputs: new ones that the caller gets.
        zeroed: the same, which are zero before the kernels run.
        workspace: new ones that only the kernels use.
        tables: tensors that are the same in every call.
        cleared: from which byte on the first of `workspace` is zero before the kernels run; None if
            it need not be.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    zeroed: Sequence[Tensor]
    workspace: Sequence[Tensor]
    tables: Sequence[Tensor]
    cleared: int | None = None


@dataclass(frozen=True, eq=False)
class Replay:
    """Relaunch a call, as a function of the tensors that the caller brings.

    It makes new outputs and a new workspace, and takes every number as it was. It is for tensors of
    the same shapes, strides and dtypes on the same device, which it does not check.

    Attributes:
        launches: for each kernel its relaunch, and its addresses among all of a call.
        outputs, zeroed: shapes, strides and dtypes of the tensors that are returned.
        starts, size: where the tensors of the workspace begin in one block of memory, in bytes.
        cleared: the bytes of it that are set to zero.
        offsets: addresses inside of tensors: which one, and how far from its start, in bytes.
        counter: gives the tensor that kernels count with on the current stream.
        aligned: how many of the inputs are read by TMA.
        device: of all tensors.
        tables: what the kernels read at every call.
    """

    launches: Sequence[tuple[Relaunch, Callable[[Sequence[int]], Any]]]
    outputs: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    zeroed: Sequence[tuple[tuple[int, ...], torch.dtype]]
    starts: Sequence[int]
    size: int
    cleared: slice
    offsets: Sequence[tuple[int, int]]
    counter: Callable[[], Tensor]
    aligned: int
    device: torch.device
    tables: Sequence[Tensor]
    _counters: dict[int, Tensor] = field(default_factory=dict)  # by stream

    def __post_init__(self) -> None:
        object.__setattr__(self, "_make", fast_empty_strided(self.device))

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        """The tensors of `outputs` and `zeroed`, on the current stream.

        None, and nothing is done, on another current device, while a CUDA graph is captured, or if
        an address is off a multiple of 16 bytes that may not be.
        """
        index, make = self.device.index, self._make  # type: ignore[attr-defined]
        if device_index() != index or is_stream_capturing():
            return None
        pool = [t.data_ptr() for t in inputs]
        bits = 0
        for address in pool[: self.aligned]:
            bits |= address
        if bits & 15:
            return None
        stream = stream_of(index)
        count = self._counters.get(stream)
        if count is None:
            count = self._counters[stream] = self.counter()
        outputs = [make(*m) for m in self.outputs]
        for shape, dtype in self.zeroed:
            outputs.append(torch.zeros(shape, dtype=dtype, device=self.device))
        space = make((self.size,), (1,), torch.uint8)
        base = space.data_ptr()
        if self.cleared.stop:
            space[self.cleared].zero_()
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
    """Prepare the replay of a call; None if one of its addresses lies in none of its tensors.

    Args:
        launches: of its kernels.
        tensors: of the call; its inputs have different addresses.
        counter, aligned, device: see `Replay`.
    """
    place = _places(tensors, counter())
    starts, size = _starts(tensors.workspace)
    moving = sum(map(len, (tensors.inputs, tensors.outputs, tensors.zeroed, tensors.workspace))) + 1
    relaunches = []
    offsets: dict[tuple[int, int], int] = {}  # to their place among the addresses
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
        if relaunch is None or len(at) < 2:  # an itemgetter of one gives no tuple
            return None
        relaunches.append((relaunch, itemgetter(*at)))
    cleared = tensors.cleared
    return Replay(
        relaunches,
        [(tuple(t.shape), t.stride(), t.dtype) for t in tensors.outputs],
        [(tuple(t.shape), t.dtype) for t in tensors.zeroed],
        starts,
        size,
        slice(0, 0) if cleared is None else slice(cleared, _bytes(tensors.workspace[0])),
        tuple(offsets),
        counter,
        aligned,
        device,
        tuple(tensors.tables),
    )


def _starts(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each tensor begins in one block of memory, in bytes, and how long that is."""
    starts, size = [], 0
    for t in tensors:
        starts.append(size)
        size += -(-_bytes(t) // _STEP) * _STEP
    return starts, max(1, size)


def _bytes(t: Tensor) -> int:
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.element_size() if t.numel() else 0


def _places(tensors: CallTensors, counter: Tensor) -> Callable[[Tensor], tuple[int, int] | None]:
    """Find where an argument lies: which of the moving tensors, or -1, and bytes from its start."""
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
