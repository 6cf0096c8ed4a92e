"""Run a prepared forward: allocate the outputs, then launch or relaunch the kernels.

No function here synchronizes with the GPU. All of them may run during CUDA graph capture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from attnkit.jit.kernel import Source
from attnkit.jit.relaunch import Relaunch
from attnkit.splice.captured_arguments import (
    CapturedArgument,
    CapturedSlot,
    own_tensors,
    read_captured,
    readable,
)
from attnkit.splice.counters import zero_counters
from attnkit.splice.data_check import CheckTable
from attnkit.splice.graph_capture import is_capturing, keep_while_replayable
from attnkit.splice.kernel_call import Captured, ForwardOutputs, RepeatedForward
from attnkit.splice.tma import loadable
from attnkit.util.torch_private import (
    device_index,
    fast_empty_strided,
    is_stream_capturing,
    stream_of,
)

# Function that runs a kernel: (source, arguments, indices of outputs, indices of arguments that
# change from call to call) -> a function that relaunches the kernel, or None.
Runner: TypeAlias = Callable[
    [Source, Sequence[object], tuple[int, ...], Sequence[int]], Relaunch | None
]
_SMALL = 1 << 18  # rows whose LSE a relaunch may keep for itself: 1 MiB a stream
_OUTPUTS = (3, 4, 5)
_TENSORS = (0, 1, 2, 3, 4, 5)  # query, key, value, output, LSE, row maxima
COUNTER, _PARTS, _CAPTURED = 9, (10, 11), 12


class CombineKernel(NamedTuple):
    """Describes the launch of the combine kernel, which merges the partial results of split KV.

    Attributes:
        source: the kernel.
        tables: `split` and `split_ptr` of the `WorkList`: the (b, h, tile) of each split row of
            tiles, and the first partial result of each.
        sink: number of the attention sink among the captured tensors of the call, of which it is
            the last that a caller passes; None without a sink.
    """

    source: Source
    tables: tuple[Tensor, Tensor]
    sink: int | None = None


@dataclass(frozen=True, eq=False)
class ForwardCall:
    """Callable that runs a prepared forward on tensors of fixed shapes, strides and dtypes.

    Attributes:
        run: function that runs a kernel.
        source: the forward kernel.
        device: device of all tensors.
        dtype: dtype of query, key, value and output.
        shape, strides: shape and strides of the output.
        direct: whether the kernel can write an output with these strides without a copy.
        tma_strides: whether query, key and value have strides that TMA can read.
        tables: work tiles, PARTIAL runs and FULL runs of the work list.
        parts: shapes of the partial outputs of split rows, and of their LSEs.
        captured: the captured tensors that the kernel reads.
        numbers: query heads per kv head, and number of CTAs.
        combine: the combine kernel; None if no row is split.
        need_max: whether the call returns the row maxima.
        need_entropy: whether the call returns the entropies of the rows.
        check: what the kernel compares with fingerprints; `captured` ends with its table.
        spare: placeholders for the partial results if no row is split; empty if some row is split.
        relaunch: function that relaunches this call; None until its kernels have run.
    """

    run: Runner
    source: Source
    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    direct: bool
    tma_strides: bool
    tables: tuple[Tensor, Tensor, Tensor]
    parts: tuple[tuple[int, ...], tuple[int, ...]]
    captured: tuple[CapturedArgument, ...]
    numbers: tuple[int, int]
    combine: CombineKernel | None
    need_max: bool
    need_entropy: bool
    check: CheckTable | None = None
    spare: tuple[Tensor, ...] = field(init=False)
    relaunch: RepeatedForward | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        # kernels take no empty tensors; if no row is split, these are neither written nor read
        none = () if self.combine else tuple(self._empty(s) for s in self.parts)
        object.__setattr__(self, "spare", none)

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, captured: Captured, scale: float
    ) -> ForwardOutputs:
        """Run the call on the current stream; return out, LSE, row maxima and entropies or None."""
        if self.relaunch is not None:
            outputs = self.relaunch(query, key, value, captured, scale)
            if outputs is not None:
                return outputs
        # a relaunch passes the caller's addresses, so it cannot copy tensors
        addresses = query.data_ptr() | key.data_ptr() | value.data_ptr()
        repeatable = self.tma_strides and not addresses & 15
        if not repeatable:
            query, key, value = loadable(query), loadable(key), loadable(value)
        out = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        target = (
            out if self.direct else torch.empty(self.shape, dtype=self.dtype, device=self.device)
        )
        lse = self._empty(self.shape[:3])
        statistics = None if self.statistics is None else self._empty(self.statistics)
        capturing = is_capturing(self.device)
        counter = zero_counters(self.device, capturing)
        tensors = read_captured(self.captured, captured, self.device)
        if capturing:
            memory = [] if self.check is None else self.check.memory()
            own = own_tensors(self.captured, tensors)
            keep_while_replayable(self.device, (self, own, memory))
        parts = self.spare or tuple(self._empty(s) for s in self.parts)
        arguments = (
            query,
            key,
            value,
            target,
            lse,
            lse if statistics is None else statistics,
            *self.tables,
            counter,
            *parts,
            *tensors,
            scale,
            *self.numbers,
        )
        main = self.run(self.source, arguments, _OUTPUTS, tuple(self._changing()))
        combine = None
        if self.combine is not None:
            sinks = [] if self.combine.sink is None else [tensors[self.combine.sink]]
            combined = (*parts, *self.combine.tables, target, lse, *sinks)
            changing = (0, 1, *range(4, len(combined)))
            combine = self.run(self.combine.source, combined, (), changing)
        if target is not out:
            out.copy_(target)
        elif repeatable and self.relaunch is None and main is not None:
            relaunch = repeated_forward(self, captured, main, combine)
            object.__setattr__(self, "relaunch", relaunch)
        return out, lse, *self.split_statistics(statistics)

    @property
    def statistics(self) -> tuple[int, ...] | None:
        """Return the shape of the tensor in which the kernel writes statistics; None for none.

        It is that of the row maxima. With entropies it has one more axis: entropies, then maxima.
        """
        rows = self.shape[:3]
        if self.need_entropy:
            return 1 + self.need_max, *rows
        return rows if self.need_max else None

    def split_statistics(self, written: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return the row maxima and the entropies that the call returns, from what was written."""
        if written is None or not self.need_entropy:
            return written, None
        return written[1] if self.need_max else None, written[0]

    def _changing(self) -> Iterator[int]:
        """Yield the indices of the kernel's arguments that change from call to call."""
        yield from _TENSORS
        yield COUNTER
        if self.combine is not None:
            yield from _PARTS
        for i, argument in enumerate(self.captured):
            if isinstance(argument, CapturedSlot):
                yield _CAPTURED + i
        yield _CAPTURED + len(self.captured)  # the scale


def repeated_forward(
    call: ForwardCall, captured: Captured, main: Relaunch, combine: Relaunch | None
) -> RepeatedForward:
    """Build a function that relaunches `call` on other tensors of the same shapes and strides.

    Args:
        call: a call that has run.
        captured: the captured tensors of that run.
        main, combine: functions that relaunch its kernels.

    Returns:
        A function of query, key, value, captured tensors and scale. It returns None, without side
        effects, if another device is current, if a CUDA graph is being captured, or if TMA cannot
        read an address.
    """
    if call.combine is None and call.statistics is None:
        return _repeated_alone(call, captured, main)
    make = fast_empty_strided(call.device)
    shape, strides, dtype = call.shape, call.strides, call.dtype
    row_shape, row_strides = shape[:3], _compact(shape[:3])
    parts = [(s, _compact(s)) for s in call.parts] if combine is not None else []
    has_sink = call.combine is not None and call.combine.sink is not None
    sinks = slice(-1, None) if has_sink else slice(0)
    statistics = call.statistics
    statistics_strides = _compact(statistics or ())
    find_stream, read = _stream_finder(call), _address_reader(call, captured)

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        captured: Captured,
        scale: float,
        keeps_lse: bool = True,
    ) -> ForwardOutputs | None:
        q, k, v = query.data_ptr(), key.data_ptr(), value.data_ptr()
        found = find_stream(q | k | v)
        if found is None:
            return None
        stream, counter = found
        out = make(shape, strides, dtype)
        lse = make(row_shape, row_strides, torch.float32)
        written = None
        if statistics is not None:
            written = make(statistics, statistics_strides, torch.float32)
        o, l = out.data_ptr(), lse.data_ptr()
        addresses = [q, k, v, o, l, l if written is None else written.data_ptr(), counter]
        if combine is not None:
            split = [make(s, t, torch.float32) for s, t in parts]
            addresses += [t.data_ptr() for t in split]
        copies = read(captured, addresses)  # kept alive until the launch
        main(stream, addresses, (scale,))
        del copies
        if combine is not None:
            combine(stream, [*addresses[7:9], o, l, *addresses[sinks]])
        if written is None:
            return out, lse, None, None
        return out, lse, *call.split_statistics(written)

    return run


def _repeated_alone(call: ForwardCall, captured: Captured, main: Relaunch) -> RepeatedForward:
    """Build the function of `repeated_forward` for one kernel that writes only output and LSE.

    Most calls are of this kind, so that this function does nothing that they do not need.
    """
    make = fast_empty_strided(call.device)
    shape, strides, dtype, rows = call.shape, call.strides, call.dtype, call.shape[:3]
    row_strides, single = _compact(rows), torch.float32
    find_stream, read = _stream_finder(call), _address_reader(call, captured)
    reads, few = bool(call.captured), math.prod(rows) <= _SMALL
    kept: dict[int, Tensor] = {}  # stream -> LSE of calls that do not return it

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        captured: Captured,
        scale: float,
        keeps_lse: bool = True,
    ) -> ForwardOutputs | None:
        q, k, v = query.data_ptr(), key.data_ptr(), value.data_ptr()
        found = find_stream(q | k | v)
        if found is None:
            return None
        stream, counter = found
        if keeps_lse or not few:
            lse = make(rows, row_strides, single)
        else:  # kernels of one stream run in order, so that they can share it
            lse = kept.get(stream)  # type: ignore[assignment]
            if lse is None:
                lse = kept[stream] = make(rows, row_strides, single)
        out, l = make(shape, strides, dtype), lse.data_ptr()
        addresses = [q, k, v, out.data_ptr(), l, l, counter]
        copies = read(captured, addresses) if reads else None  # kept alive until the launch
        main(stream, addresses, (scale,))
        del copies
        return out, lse, None, None

    return run


def _stream_finder(call: ForwardCall) -> Callable[[int], tuple[int, int] | None]:
    """Return a function that finds (the current stream, the address of its tile counter).

    It takes the bits that are set in any address of query, key and value. It returns None if TMA
    cannot read such an address, another device is current, or a CUDA graph is being captured.
    """
    device, index, on_gpu = call.device, call.device.index, call.device.type == "cuda"
    counters: dict[int, tuple[tuple[int, int], Tensor]] = {}

    def find(addresses: int) -> tuple[int, int] | None:
        if addresses & 15:
            return None
        if on_gpu:
            if device_index() != index or is_stream_capturing():
                return None
            stream = stream_of(index)
        else:
            stream = get_ident()  # what a thread launches on the CPU runs in order
        known = counters.get(stream)
        if known is None:
            zero = zero_counters(device, False)
            known = counters[stream] = (stream, zero.data_ptr()), zero
        return known[0]

    return find


def _address_reader(
    call: ForwardCall, captured: Captured
) -> Callable[[Captured, list[int]], list[Tensor]]:
    """Return a function that appends the addresses of the captured tensors to a list.

    It returns the copies of those on other devices, which the caller keeps until the launch.

    Args:
        call: a call that has run.
        captured: the captured tensors of that run.
    """
    device = call.device
    slots = [
        (a.graph, a.slot, captured[a.graph][a.slot].device == device)
        for a in call.captured
        if isinstance(a, CapturedSlot)
    ]

    def read(captured: Captured, addresses: list[int]) -> list[Tensor]:
        copies: list[Tensor] = []
        for graph, slot, near in slots:
            t = captured[graph][slot]
            if not near:
                t = readable(t, device)
                copies.append(t)
            addresses.append(t.data_ptr())
        return copies

    return read


def _compact(shape: Sequence[int]) -> tuple[int, ...]:
    strides, size = [], 1
    for n in reversed(shape):
        strides.append(size)
        size *= max(1, n)
    return tuple(reversed(strides))
