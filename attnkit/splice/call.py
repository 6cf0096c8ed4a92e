"""A call of the Hopper forward kernel that was prepared: what is left to do at each repetition.

Nothing here waits for the GPU, and all of it may be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attnkit.jit.relaunch import Relaunch
from attnkit.splice.kernel_call import Captured
from attnkit.util.tensor_cache import VersionedCache
from attnkit.util.torch_fast import device_index, is_captured, maker, stream_of

# Which captured tensor a kernel reads: of the score (0) or of the mask (1), and its slot; or an
# own tensor. And whether the kernel takes it as it is.
Place: TypeAlias = tuple[int, int | Tensor, bool]
# Runs a kernel: its source, the arguments, which of them are outputs, and which would change if it
# were run again. Gives back how to run it again, None if in the same way.
Run: TypeAlias = Callable[[Any, Sequence[Any], tuple[int, ...], Sequence[int]], Relaunch | None]
# A `Call` as a function; None where it cannot make the call.
Repeated: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, Captured, float], tuple[Tensor, Tensor, Tensor | None] | None
]

OWN = 2
_OUTPUTS = (3, 4, 5)
_TENSORS = (0, 1, 2, 3, 4, 5)  # query, key, value, output, LSE, row maxima
_COUNTER, _PARTS, _CAPTURED = 9, (10, 11), 12

_counters: dict[tuple[int, int], Tensor] = {}
_moved: VersionedCache[Tensor] = VersionedCache(64)
# A CUDA graph reads the tables of the calls in it at every replay, and does not say when it is gone.
_in_graphs: dict[tuple[int, ...], Any] = {}


@dataclass(frozen=True, eq=False)
class Combining:
    """How the parts of split rows are put together.

    Attributes:
        source: the kernel.
        tables: what it reads.
    """

    source: Any
    tables: tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Call:
    """A forward call for tensors of given shapes, strides and dtype.

    Attributes:
        run: how a kernel is run.
        source: the kernel.
        device: of all tensors.
        dtype: of query, key, value and output.
        shape, strides: of the output.
        direct: whether the kernel can write an output with these strides.
        loadable: whether query, key and value can be read by TMA, their addresses apart.
        tables: of the work list.
        parts: shapes of the parts of split rows and of their statistics.
        places: the captured tensors that the kernel reads.
        numbers: query heads per kv head, and CTAs.
        combining: the kernel for split rows, None if there are none.
        need_max: whether the row maxima are returned.
        emulated: the kernel is executed on the CPU.
        again: the quicker way of a call that was made before, if there is one.
    """

    run: Run
    source: Any
    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    direct: bool
    loadable: bool
    tables: tuple[Tensor, Tensor, Tensor]
    parts: tuple[tuple[int, ...], tuple[int, ...]]
    places: tuple[Place, ...]
    numbers: tuple[int, int]
    combining: Combining | None
    need_max: bool
    emulated: bool
    spare: tuple[Tensor, ...] = field(init=False)
    again: Repeated | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        # a kernel takes no empty tensor; where nothing is split, this is neither written nor read
        none = () if self.combining else tuple(self._empty(s) for s in self.parts)
        object.__setattr__(self, "spare", none)

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, captured: Captured, scale: float
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """out, LSE and the row maxima or None; on the current stream."""
        if self.again is not None:
            found = self.again(query, key, value, captured, scale)
            if found is not None:
                return found
        same = self.loadable and not (
            (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15 or self.emulated
        )
        if not same:
            query, key, value = loadable(query), loadable(key), loadable(value)
        out = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        target = (
            out if self.direct else torch.empty(self.shape, dtype=self.dtype, device=self.device)
        )
        lse = self._empty(self.shape[:3])
        top = self._empty(self.shape[:3]) if self.need_max else lse
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        counter = _counter(self.device, capturing)
        tensors = self._read(captured)
        if capturing:
            moved = [t for t in tensors if t.numel() == 1]
            _in_graphs[tuple(map(id, (self, *moved)))] = self, moved
        parts = self.spare or tuple(self._empty(s) for s in self.parts)
        arguments = (
            *(query, key, value, target, lse, top, *self.tables, counter, *parts, *tensors),
            *(scale, *self.numbers),
        )
        again = self.run(self.source, arguments, _OUTPUTS, tuple(self._changing()))
        combine = None
        if self.combining is not None:
            joined = self.combining
            given = (*parts, *joined.tables, target, lse)
            combine = self.run(joined.source, given, (), (0, 1, 4, 5))
        if target is not out:
            out.copy_(target)
        elif same and self.again is None and again is not None:
            object.__setattr__(self, "again", repeated(self, captured, again, combine))
        return out, lse, top if self.need_max else None

    def _changing(self) -> Iterator[int]:
        """Which arguments of the kernel are not the same at every call."""
        yield from _TENSORS
        yield _COUNTER
        if self.combining is not None:
            yield from _PARTS
        for i, (which, _, _) in enumerate(self.places):
            if which != OWN:
                yield _CAPTURED + i
        yield _CAPTURED + len(self.places)  # the scale

    def _read(self, captured: Captured) -> list[Any]:
        """The captured tensors that the kernel reads."""
        found: list[Any] = []
        for which, slot, plain in self.places:
            if which == OWN:
                found.append(slot)
            else:
                t = captured[which][slot]  # type: ignore[index]
                found.append(t if plain else readable(t, self.device))
        return found


def repeated(call: Call, captured: Captured, again: Relaunch, combine: Relaunch | None) -> Repeated:
    """The same call for other tensors of the same geometry: as little as can be done for it.

    Args:
        call: one that was made.
        captured: tensors of the score and of the mask that it was made with.
        again, combine: run its kernels again.

    Returns:
        A function of query, key, value, captured tensors and scale that makes the call, or gives
        None where that is not as before: on another device, while a CUDA graph is captured, with
        addresses that a kernel cannot read.
    """
    make = maker(call.device)
    shape, strides, dtype = call.shape, call.strides, call.dtype
    row_shape, row_strides = shape[:3], _compact(shape[:3])
    parts = [(s, _compact(s)) for s in call.parts] if combine is not None else []
    device, index, need_max = call.device, call.device.index, call.need_max
    places = [
        (which, slot, captured[which][slot].device == device)
        for which, slot, _ in call.places
        if not isinstance(slot, Tensor)
    ]
    on_gpu = device.type == "cuda"
    counters: dict[int, int] = {}  # by stream its counter's address

    def run(
        query: Tensor, key: Tensor, value: Tensor, captured: Captured, scale: float
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        q, k, v = query.data_ptr(), key.data_ptr(), value.data_ptr()
        stream = 0
        if on_gpu:
            if device_index() != index or is_captured():
                return None
            stream = stream_of(index)
        if (q | k | v) & 15:
            return None
        counter = counters.get(stream)
        if counter is None:
            counter = counters[stream] = _counter(device, False).data_ptr()
        out = make(shape, strides, dtype)
        lse = make(row_shape, row_strides, torch.float32)
        top = make(row_shape, row_strides, torch.float32) if need_max else None
        o, l = out.data_ptr(), lse.data_ptr()
        addresses = [q, k, v, o, l, l if top is None else top.data_ptr(), counter]
        if combine is not None:
            split = [make(s, t, torch.float32) for s, t in parts]
            addresses += [t.data_ptr() for t in split]
        kept: list[Tensor] = []
        for which, slot, near in places:
            t = captured[which][slot]
            if not near:
                t = readable(t, device)
                kept.append(t)
            addresses.append(t.data_ptr())
        again(stream, addresses, (scale,))
        if combine is not None:
            combine(stream, [*addresses[7:9], o, l])
        return out, lse, top

    return run


def _compact(shape: Sequence[int]) -> tuple[int, ...]:
    strides, size = [], 1
    for n in reversed(shape):
        strides.append(size)
        size *= max(1, n)
    return tuple(reversed(strides))


def is_loadable(t: Tensor) -> bool:
    """Whether TMA can read or write a tensor: contiguous rows, the rest in steps of 16 bytes."""
    return t.data_ptr() % 16 == 0 and steps(t.shape, t.stride(), t.element_size())


def steps(shape: Sequence[int], strides: Sequence[int], size: int) -> bool:
    """The same of shape and strides, for elements of `size` bytes."""
    return strides[-1] == 1 and all(
        s % (16 // size) == 0 and (s > 0 or n == 1)
        for n, s in zip(shape[:-1], strides[:-1], strict=True)
    )


def loadable(t: Tensor) -> Tensor:
    """A tensor, copied where TMA cannot read it."""
    t = t.detach()
    return t if is_loadable(t) else t.contiguous().clone() if t.is_contiguous() else t.contiguous()


def is_plain(t: Tensor, device: torch.device) -> bool:
    """Whether a kernel takes a captured tensor as it is."""
    return t.device == device and t.dtype != torch.bool and t.ndim > 0


def readable(t: Tensor, device: torch.device) -> Tensor:
    """A captured tensor as a kernel takes it."""
    t = t.detach() if t.requires_grad else t
    if t.device != device:
        t = _moved.get(device, [t], lambda: t.to(device))
    if t.dtype == torch.bool:
        t = t.view(torch.uint8)
    return t.reshape(1) if t.ndim == 0 else t


def _counter(device: torch.device, capturing: bool) -> Tensor:
    """A zero that a kernel counts up and leaves at zero; one a stream, as kernels may overlap."""
    if device.index is None or capturing:
        return torch.zeros(1, dtype=torch.int32, device=device)
    at = device.index, stream_of(device.index)
    found = _counters.get(at)
    if found is None:
        found = _counters[at] = torch.zeros(1, dtype=torch.int32, device=device)
    return found
