"""Kernels of a call, run again for other tensors of the same geometry: their launches with new
addresses.

What a call has made and launched is looked at once: each address that a kernel was given lies in a
tensor that the caller brings, in one that the call makes, or in one that stays, such as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from attnkit.jit.relaunch import Relaunch
from attnkit.util.torch_fast import device_index, is_captured, maker, stream_of

_STEP = 256  # bytes, between tensors in one piece of memory


@dataclass(frozen=True)
class Ran:
    """A launch that was made.

    Attributes:
        repeated: gives quicker launches like it, of which the arguments of these indices change.
        arguments: its tensors and numbers.
    """

    repeated: Callable[[Sequence[Any], Sequence[int]], Relaunch | None]
    arguments: Sequence[Any]


@dataclass(frozen=True)
class Made:
    """Tensors of a call.

    Attributes:
        given: those that the caller brings, in the order of a replay.
        returned: new ones that the caller gets.
        zeroed: the same, which are zero before the kernels run.
        working: new ones that nobody sees afterwards.
        kept: those of every call.
        cleared: from which byte on the first of `working` is zero before the kernels run; None if
            it need not be.
    """

    given: Sequence[Tensor]
    returned: Sequence[Tensor]
    zeroed: Sequence[Tensor]
    working: Sequence[Tensor]
    kept: Sequence[Tensor]
    cleared: int | None = None


@dataclass(frozen=True, eq=False)
class Replay:
    """A call that can be made again: a function of the tensors that the caller brings.

    It makes new tensors to return and to work in, and takes every number as it was. It is for
    tensors of the same shapes, strides and dtypes on the same device, which it does not check.

    Attributes:
        launches: of each kernel how it is launched again, and its addresses among all of a call.
        returned, zeroed: shapes, strides and dtypes of the tensors that are returned.
        starts, size: where the tensors to work in begin in one piece of memory, in bytes.
        cleared: the bytes of it that are set to zero.
        offsets: addresses inside of tensors: which one, and how far from its start, in bytes.
        counter: the tensor that kernels count with, of the current stream.
        aligned: how many of the given tensors are read by TMA.
        device: of all tensors.
        kept: what the kernels read at every call.
    """

    launches: Sequence[tuple[Relaunch, Callable[[Sequence[int]], Any]]]
    returned: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    zeroed: Sequence[tuple[tuple[int, ...], torch.dtype]]
    starts: Sequence[int]
    size: int
    cleared: slice
    offsets: Sequence[tuple[int, int]]
    counter: Callable[[], Tensor]
    aligned: int
    device: torch.device
    kept: Sequence[Tensor]
    _counters: dict[int, Tensor] = field(default_factory=dict)  # by stream

    def __post_init__(self) -> None:
        object.__setattr__(self, "_make", maker(self.device))

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor] | None:
        """The tensors of `returned` and `zeroed`, on the current stream.

        None, and nothing is done, on another current device, while a CUDA graph is captured, or if
        an address is off a multiple of 16 bytes that may not be.
        """
        index, make = self.device.index, self._make  # type: ignore[attr-defined]
        if device_index() != index or is_captured():
            return None
        pool = [t.data_ptr() for t in given]
        bits = 0
        for address in pool[: self.aligned]:
            bits |= address
        if bits & 15:
            return None
        stream = stream_of(index)
        count = self._counters.get(stream)
        if count is None:
            count = self._counters[stream] = self.counter()
        found = [make(*m) for m in self.returned]
        for shape, dtype in self.zeroed:
            found.append(torch.zeros(shape, dtype=dtype, device=self.device))
        space = make((self.size,), (1,), torch.uint8)
        base = space.data_ptr()
        if self.cleared.stop:
            space[self.cleared].zero_()
        pool += [count.data_ptr(), *[t.data_ptr() for t in found], *[base + n for n in self.starts]]
        for which, offset in self.offsets:
            pool.append(pool[which] + offset)
        for again, pick in self.launches:
            again(stream, pick(pool))
        return found


def replay(
    ran: Sequence[Ran],
    made: Made,
    counter: Callable[[], Tensor],
    aligned: int,
    device: torch.device,
) -> Replay | None:
    """How to make a call again; None if one of its addresses lies in none of its tensors.

    Args:
        ran: the launches.
        made: the tensors; those that are given have different addresses.
        counter, aligned, device: see `Replay`.
    """
    place = _places(made, counter())
    starts, size = _starts(made.working)
    moving = len(made.given) + 1 + len(made.returned) + len(made.zeroed) + len(made.working)
    launches = []
    offsets: dict[tuple[int, int], int] = {}  # to their place among the addresses
    for one in ran:
        changing, at = [], []
        for i, a in enumerate(one.arguments):
            if not isinstance(a, Tensor):
                continue
            found = place(a)
            if found is None:
                return None
            which, offset = found
            if which >= 0:
                changing.append(i)
                new = moving + len(offsets)
                at.append(offsets.setdefault(found, new) if offset else which)
        again = one.repeated(one.arguments, changing)
        if again is None or len(at) < 2:  # an itemgetter of one gives no tuple
            return None
        launches.append((again, itemgetter(*at)))
    return Replay(
        launches,
        [(tuple(t.shape), t.stride(), t.dtype) for t in made.returned],
        [(tuple(t.shape), t.dtype) for t in made.zeroed],
        starts,
        size,
        slice(0, 0) if made.cleared is None else slice(made.cleared, _bytes(made.working[0])),
        tuple(offsets),
        counter,
        aligned,
        device,
        tuple(made.kept),
    )


def _starts(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each tensor begins in one piece of memory, in bytes, and how long that is."""
    starts, size = [], 0
    for t in tensors:
        starts.append(size)
        size += -(-_bytes(t) // _STEP) * _STEP
    return starts, max(1, size)


def _bytes(t: Tensor) -> int:
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.element_size() if t.numel() else 0


def _places(made: Made, counter: Tensor) -> Callable[[Tensor], tuple[int, int] | None]:
    """Finds where an argument lies: which of the moving tensors, or -1, and bytes from its start."""
    moving = [*made.given, counter, *made.returned, *made.zeroed, *made.working]
    known = {t.data_ptr(): i for i, t in enumerate(moving)}
    own = [(t.data_ptr(), _bytes(t), i) for i, t in enumerate(moving) if i > len(made.given)]
    kept = {t.data_ptr() for t in made.kept}

    def place(t: Tensor) -> tuple[int, int] | None:
        address = t.data_ptr()
        if address in known:
            return known[address], 0
        for start, size, i in own:
            if start <= address < start + size:
                return i, address - start
        return (-1, 0) if address in kept else None

    return place
