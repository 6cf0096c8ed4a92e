"""The shortest way of a backward: that of a call that was made before, for tensors alike.

torch answers for all tensors at once, as in `quick`; what to launch is known from the backward before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnkit.util.torch_state import alike, only_devices

# Query, key, value, out, gradient of out, LSE, captured tensors, gradient of the LSE if there is
# one -> gradients of query, key, value and of the score's tensors, float32, where they are wanted;
# None where it cannot be made so.
Again: TypeAlias = Callable[[Sequence[Tensor]], list[Tensor] | None]

_Kind: TypeAlias = tuple[torch.Size, torch.dtype]

_ENTRIES = 4
_ATTEMPTS = 32  # after which no more is learned

_recording: Callable[[], bool] = torch._C.is_grad_enabled
_modes: Callable[[], int] = torch._C._len_torch_function_stack


@dataclass(frozen=True, eq=False, slots=True)
class _Entry:
    """A backward that was made.

    Attributes:
        same: whether tensors are like its own.
        scale, wanted: of it.
        with_lse: whether the LSE had a gradient.
        again: how it is made again.
        count: of its tensors.
        kinds: shapes and dtypes of the gradients of the score's tensors, None where none is wanted.
    """

    same: Callable[..., bool]
    scale: float
    wanted: list[bool]
    with_lse: bool
    again: Again
    count: int
    kinds: tuple[_Kind | None, ...]


class Backwards:
    """The backwards of a forward that was settled."""

    def __init__(self) -> None:
        self._entries: tuple[_Entry, ...] = ()
        self._attempts = 0

    def made(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        saved: Sequence[Tensor],
        scale: float,
        wanted: list[bool],
    ) -> tuple[Tensor | None, ...] | None:
        """The gradients of query, key, value and the score's tensors, if one like it was made.

        Args:
            grad_out, grad_lse: gradients of the output and of the LSE; None for none.
            saved: query, key, value, output, LSE, and what score and mask capture.
            scale: softmax scale.
            wanted: for each tensor of the score, whether its gradient is.
        """
        if _recording() or forward_ad._current_level >= 0 or (_modes() and not only_devices()):
            return None
        tensors = _ordered(grad_out, grad_lse, saved)
        for entry in self._entries:
            if (
                entry.scale == scale
                and entry.with_lse is (grad_lse is not None)
                and entry.wanted == wanted
                and entry.count == len(tensors)
                and entry.same(*tensors)
            ):
                found = entry.again(tensors)
                return found and _as_wanted(found, entry.kinds)  # type: ignore[return-value]
        return None

    def learn(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        saved: Sequence[Tensor],
        scale: float,
        wanted: list[bool],
        again: Callable[[], Again | None],
    ) -> None:
        """Remember a backward that was made, undisturbed and without a graph of its own.

        Args:
            grad_out, grad_lse, saved, scale, wanted: as of `made`.
            again: finds how it is made again.
        """
        if self._attempts >= _ATTEMPTS:
            return
        self._attempts += 1
        found = again()
        tensors = _ordered(grad_out, grad_lse, saved)
        same = None if found is None else alike(tensors)
        if found is None or same is None:
            return
        scores = zip(saved[5:], wanted, strict=False)
        kinds = tuple([(t.shape, t.dtype) if need else None for t, need in scores])
        with_lse = grad_lse is not None
        entry = _Entry(same, scale, wanted, with_lse, found, len(tensors), kinds)
        self._entries = (*self._entries, entry)[-_ENTRIES:]


def _ordered(grad_out: Tensor, grad_lse: Tensor | None, saved: Sequence[Tensor]) -> list[Tensor]:
    query, key, value, out, lse, *captured = saved
    tensors = [query, key, value, out, grad_out, lse, *captured]
    if grad_lse is not None:
        tensors.append(grad_lse)
    return tensors


def _as_wanted(found: list[Tensor], kinds: Sequence[_Kind | None]) -> tuple[Tensor | None, ...]:
    if not kinds:
        return tuple(found)
    own: list[Tensor | None] = [*found[:3]]
    totals = iter(found[3:])
    for kind in kinds:
        own.append(None if kind is None else next(totals).view(kind[0]).to(kind[1]))
    return tuple(own)
