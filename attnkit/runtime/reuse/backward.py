"""Fast path of repeated backwards: check guards, then relaunch the kernels.

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
    """Describes a backward that has run and can be relaunched.

    Attributes:
        guard: function that returns whether tensors have the same geometry as in this backward.
        scale, needs_grad: arguments of this backward.
        with_lse: whether the LSE had a gradient.
        relaunch: function that relaunches the backward on other tensors.
        count: number of tensors that `guard` and `relaunch` take.
        captured: for each tensor that the score captures, the shape and dtype of its gradient, or
            None if the gradient is not needed.
    """

    guard: Callable[..., bool]
    scale: float
    needs_grad: list[bool]
    with_lse: bool
    relaunch: BackwardRelaunch
    count: int
    captured: tuple[_ShapeAndDtype | None, ...]


class BackwardReuse:
    """Fast path of the backwards of one prepared call; implements `BackwardCache`.

    Attributes:
        entries: backwards that can be relaunched.
    """

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
        """Compute gradients by relaunching an earlier backward; return None if no entry fits.

        Args:
            grad_out: gradient of the output.
            grad_lse: gradient of the LSE, or None.
            saved: query, key, value, output, LSE, and the tensors that score and mask capture.
            scale: softmax scale.
            needs_grad: for each tensor that the score captures, whether its gradient is needed.

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
        """Store an entry for a backward that has run, so that `try_fast_path` can relaunch it.

        Args:
            inputs: tensors of the backward, none of them intercepted by a mode or a subclass.
            saved: tensors of the forward, as in `try_fast_path`.
            find_relaunch: function that returns the relaunch function, or None.
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
    """Return the tensors of a backward in the order in which a `BackwardRelaunch` takes them."""
    query, key, value, out, lse, *captured = saved
    tensors = [query, key, value, out, grad_out, lse, *captured]
    if grad_lse is not None:
        tensors.append(grad_lse)
    return tensors


def _shaped(
    gradients: list[Tensor], captured: Sequence[_ShapeAndDtype | None]
) -> tuple[Tensor | None, ...]:
    """Reshape and cast the gradients of captured tensors; insert None for gradients not needed."""
    if not captured:
        return tuple(gradients)
    result: list[Tensor | None] = [*gradients[:3]]
    remaining = iter(gradients[3:])
    for kind in captured:
        result.append(None if kind is None else next(remaining).view(kind[0]).to(kind[1]))
    return tuple(result)
