"""Run repeated backwards by a fast path: check guards, then relaunch.

One tensor guard of torch compares all tensors at once, as in `fast_path`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from attnkit.runtime.prepared_call import BackwardRelaunch
from attnkit.runtime.reuse.entries import Entries
from attnkit.splice import BackwardInputs
from attnkit.util.torch_private import (
    function_mode_count,
    grad_enabled,
    in_forward_ad,
    only_devices,
    tensor_guard,
)

_ShapeAndDtype: TypeAlias = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True, eq=False, slots=True)
class _Entry:
    """Describes a backward that has run.

    Attributes:
        guard: tells whether tensors are like those of this backward.
        scale, needs_grad: arguments of this backward.
        with_lse: whether the LSE had a gradient.
        relaunch: runs it for other tensors.
        count: number of tensors of this backward.
        captured: shape and dtype of each gradient of the score's tensors, None where none is
            needed.
    """

    guard: Callable[..., bool]
    scale: float
    needs_grad: list[bool]
    with_lse: bool
    relaunch: BackwardRelaunch
    count: int
    captured: tuple[_ShapeAndDtype | None, ...]


class BackwardReuse:
    """Relaunch the backwards of one prepared call."""

    def __init__(self) -> None:
        self.entries: Entries[_Entry] = Entries()

    def try_fast_path(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        saved: Sequence[Tensor],
        scale: float,
        needs_grad: list[bool],
    ) -> tuple[Tensor | None, ...] | None:
        """Relaunch an earlier backward of this kind; return None if there is none.

        Args:
            grad_out, grad_lse: gradients of the output and of the LSE; None for none.
            saved: query, key, value, output, LSE, and the tensors that score and mask capture.
            scale: softmax scale.
            needs_grad: whether the gradient is needed, for each tensor that the score captures.

        Returns:
            The gradients of query, key, value and the score's tensors.
        """
        if grad_enabled() or in_forward_ad() or (function_mode_count() and not only_devices()):
            return None
        tensors = _in_order(grad_out, grad_lse, saved)
        for entry in self.entries.all:
            if (
                entry.scale == scale
                and entry.with_lse is (grad_lse is not None)
                and entry.needs_grad == needs_grad
                and entry.count == len(tensors)
                and entry.guard(*tensors)
            ):
                gradients = entry.relaunch(tensors)
                return None if gradients is None else _shaped(gradients, entry.captured)
        return None

    def remember(
        self,
        inputs: BackwardInputs,
        saved: Sequence[Tensor],
        find_relaunch: Callable[[], BackwardRelaunch | None],
    ) -> None:
        """Store how to relaunch a backward that has run; none of its tensors is intercepted.

        Args:
            inputs: its tensors.
            saved: tensors of the forward, as in `try_fast_path`.
            find_relaunch: returns the relaunch, None if there is none.
        """
        if not self.entries.may_learn():
            return
        relaunch = find_relaunch()
        tensors = _in_order(inputs.grad_out, inputs.grad_lse, saved)
        guard = None if relaunch is None else tensor_guard(tensors)
        if relaunch is None or guard is None:
            return
        needs_grad = list(inputs.needs_grad)
        scores = zip(saved[5:], needs_grad, strict=False)
        captured = tuple([(t.shape, t.dtype) if need else None for t, need in scores])
        with_lse = inputs.grad_lse is not None
        self.entries.add(
            _Entry(guard, inputs.scale, needs_grad, with_lse, relaunch, len(tensors), captured)
        )


def _in_order(grad_out: Tensor, grad_lse: Tensor | None, saved: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in the order that a `BackwardRelaunch` takes."""
    query, key, value, out, lse, *captured = saved
    tensors = [query, key, value, out, grad_out, lse, *captured]
    if grad_lse is not None:
        tensors.append(grad_lse)
    return tensors


def _shaped(
    gradients: list[Tensor], captured: Sequence[_ShapeAndDtype | None]
) -> tuple[Tensor | None, ...]:
    """Reshape and cast the gradients of the score's tensors; insert None where none is needed."""
    if not captured:
        return tuple(gradients)
    result: list[Tensor | None] = [*gradients[:3]]
    remaining = iter(gradients[3:])
    for kind in captured:
        result.append(None if kind is None else next(remaining).view(kind[0]).to(kind[1]))
    return tuple(result)
