"""Define `PreparedCall`, the result of preparation that all calls with the same key share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from attnkit.runtime.data_guard import DataGuard
from attnkit.splice import Attention, BackwardInputs, Captured, KernelCall

# Function that relaunches a backward on query, key, value, out, gradient of out, LSE, captured
# tensors, and the gradient of the LSE if there is one. It returns the gradients of query, key and
# value, and the float32 gradients that the score's tensors need. It returns None, without side
# effects, if a relaunch is impossible.
BackwardRelaunch: TypeAlias = Callable[[Sequence[Tensor]], list[Tensor] | None]

# Query, key, captured tensors, scale -> the sums of the weights of each key, [B, Hq, Skv].
ColumnSums: TypeAlias = Callable[[Tensor, Tensor, Captured, float], Tensor]


class BackwardCache(Protocol):
    """Protocol of the fast path of backwards, which `reuse.backward.BackwardReuse` implements."""

    def try_fast_path(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        saved: Sequence[Tensor],
        scale: float,
        needs_grad: list[bool],
    ) -> tuple[Tensor | None, ...] | None:
        """Compute gradients by relaunching an earlier backward; return None if no entry fits."""

    def remember(
        self,
        inputs: BackwardInputs,
        saved: Sequence[Tensor],
        find_relaunch: Callable[[], BackwardRelaunch | None],
    ) -> None:
        """Store an entry for a backward that has run, so that it can be relaunched."""


@dataclass(eq=False)
class PreparedCall:
    """Holds a call that is ready to run on tensors of fixed shapes, strides, dtypes and devices.

    Attributes:
        kernel_call: the template, the graphs and the tiles.
        backward: fast path of the backward.
        guard: guard of the data from which the tiles were derived.
        attention: function that runs the forward; None until it is prepared.
        is_dense: whether `attention` is the dense reference, which autograd itself differentiates.
        launches_check: whether `guard.check` has to run before each forward.
        column_sums: function that sums the weights of each key in the dense reference; None for
            other backends, where `runtime.column_sums` does.
    """

    kernel_call: KernelCall
    backward: BackwardCache
    guard: DataGuard
    attention: Attention | None = None
    is_dense: bool = False
    launches_check: bool = False
    column_sums: ColumnSums | None = None
