"""Convert the captured tensors of a call to kernel arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from attnkit.splice.kernel_call import Captured
from attnkit.util import caches
from attnkit.util.tensor_cache import VersionedCache

SCORE, MASK = 0, 1

# (dtype, rank, whether rows are contiguous): the compile-time properties of a captured tensor.
TensorKind: TypeAlias = tuple[str, int, bool]

DROPOUT_STATE: tuple[TensorKind, ...] = (("int64", 1, True),)

_moved: VersionedCache[Tensor] = VersionedCache(64)
caches.register(_moved.clear)


class CapturedSlot(NamedTuple):
    """Identifies the captured tensor that each call passes as one kernel argument.

    Attributes:
        graph: the graph that captures it, `SCORE` or `MASK`.
        slot: index among the tensors of that graph.
        as_is: whether the kernel takes the tensor itself; if not, it takes `readable(tensor)`.
    """

    graph: int
    slot: int
    as_is: bool


# A slot, which each call fills with its own tensor, or a table that all calls share.
CapturedArgument: TypeAlias = CapturedSlot | Tensor


def captured_slot(
    graph: int, slot: int, captured: Captured, device: torch.device
) -> CapturedArgument:
    """Return the `CapturedSlot` of tensor `slot` of `graph`, with `captured` as an example."""
    t = captured[graph][slot]
    return CapturedSlot(graph, slot, t.device == device and t.dtype != torch.bool and t.ndim > 0)


def read_captured(
    arguments: Sequence[CapturedArgument], captured: Captured, device: torch.device
) -> list[Tensor]:
    """Return the tensors to pass for `arguments` in a call, converted with `readable`."""
    tensors = []
    for a in arguments:
        if isinstance(a, CapturedSlot):
            t = captured[a.graph][a.slot]
            a = t if a.as_is else readable(t, device)
        tensors.append(a)
    return tensors


def own_tensors(arguments: Sequence[CapturedArgument], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return those `tensors` from `read_captured` that attnkit owns: tables and copies."""
    pairs = zip(arguments, tensors, strict=True)
    return [t for a, t in pairs if not (isinstance(a, CapturedSlot) and a.as_is)]


def readable(t: Tensor, device: torch.device) -> Tensor:
    """Return `t` on `device` as a kernel reads it: bool viewed as uint8, a 0-d tensor as [1]."""
    t = on_device(t, device)
    if t.dtype == torch.bool:
        t = t.view(torch.uint8)
    return t.reshape(1) if t.ndim == 0 else t


def on_device(t: Tensor, device: torch.device) -> Tensor:
    """Return `t` detached and on `device`; a copy is cached until the data changes."""
    t = t.detach() if t.requires_grad else t
    return t if t.device == device else _moved.get(device, [t], lambda: t.to(device))


def tensor_kinds(tensors: Sequence[Tensor]) -> tuple[TensorKind, ...]:
    """Return the compile-time kind of each tensor: (dtype, rank, whether rows are contiguous)."""
    return tuple(
        (str(t.dtype).removeprefix("torch."), t.ndim, t.ndim == 0 or t.stride(-1) == 1)
        for t in tensors
    )
