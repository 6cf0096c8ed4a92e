"""A call of the Hopper forward kernel that was prepared: what is left to do at each repetition.

Nothing here waits for the GPU, and all of it may be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attnkit.splice.program import Lists
from attnkit.versions import VersionedCache

# Which captured tensor a kernel reads: of the score (0) or of the mask (1), and its slot; or an
# own tensor. And whether the kernel takes it as it is.
Place: TypeAlias = tuple[int, int | Tensor, bool]
# Runs a kernel: its source, the arguments, and which of them are outputs. Gives back how to run it
# again with arguments of the same shapes and strides, None if in the same way.
Again: TypeAlias = Callable[[Sequence[Any]], None]
Run: TypeAlias = Callable[[Any, Sequence[Any], tuple[int, ...]], Again | None]

OWN = 2
_OUTPUTS = (3, 4, 5)

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
    _again: dict[Any, Again] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        # a kernel takes no empty tensor; where nothing is split, this is neither written nor read
        none = () if self.combining else tuple(self._empty(s) for s in self.parts)
        object.__setattr__(self, "spare", none)

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, captured: Lists, scale: float
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """out, LSE and the row maxima or None; on the current stream."""
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
        self._run(self.source, arguments, _OUTPUTS, same)
        if self.combining is not None:
            joined = self.combining
            self._run(joined.source, (*parts, *joined.tables, target, lse), (), same)
        if target is not out:
            out.copy_(target)
        return out, lse, top if self.need_max else None

    def _read(self, captured: Lists) -> list[Any]:
        """The captured tensors that the kernel reads."""
        found: list[Any] = []
        for which, slot, plain in self.places:
            if which == OWN:
                found.append(slot)
            else:
                t = captured[which][slot]  # type: ignore[index]
                found.append(t if plain else readable(t, self.device))
        return found

    def _run(
        self, source: Any, arguments: Sequence[Any], outputs: tuple[int, ...], same: bool
    ) -> None:
        """Run a kernel; `same`: with the strides of all other calls where that is so."""
        again = self._again.get(source) if same else None
        if again is not None:
            again(arguments)
            return
        again = self.run(source, arguments, outputs)
        if again is not None and same:
            self._again[source] = again


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


def _stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


# The handle without an object around it, where torch has it.
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _stream)


def _counter(device: torch.device, capturing: bool) -> Tensor:
    """A zero that a kernel counts up and leaves at zero; one a stream, as kernels may overlap."""
    if device.index is None or capturing:
        return torch.zeros(1, dtype=torch.int32, device=device)
    at = device.index, _stream(device.index)
    found = _counters.get(at)
    if found is None:
        found = _counters[at] = torch.zeros(1, dtype=torch.int32, device=device)
    return found
