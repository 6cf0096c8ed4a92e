"""Define the prepared call, which holds what is decided once for all calls with the same key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from attnkit.runtime.data_guard import DataGuard
from attnkit.splice import Attention, BackwardInputs, Captured, KernelCall

# Out, LSE and the row maxima or None.
ForwardResult: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
# Relaunches a forward for query, key, value, captured tensors and scale. Returns None, without side
# effects, if it cannot.
Relaunch: TypeAlias = Callable[[Tensor, Tensor, Tensor, Captured, float], ForwardResult | None]
# Relaunches a backward for query, key, value, out, gradient of out, LSE, captured tensors, and the
# gradient of the LSE if there is one. Returns the gradients of query, key and value, and float32
# gradients of the score's tensors where they are needed; None, without side effects, if it cannot.
BackwardRelaunch: TypeAlias = Callable[[Sequence[Tensor]], list[Tensor] | None]


class BackwardCache(Protocol):
    """Relaunches backwards of a prepared call; `reuse.backward` implements this interface."""

    def try_fast_path(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        saved: Sequence[Tensor],
        scale: float,
        needs_grad: list[bool],
    ) -> tuple[Tensor | None, ...] | None:
        """Relaunch an earlier backward of this kind; return None if there is none."""

    def remember(
        self,
        inputs: BackwardInputs,
        saved: Sequence[Tensor],
        find_relaunch: Callable[[], BackwardRelaunch | None],
    ) -> None:
        """Store how to relaunch a backward that has run."""


@dataclass(eq=False)
class PreparedCall:
    """Holds a call that is ready to run, for tensors of fixed shapes, strides, dtypes and devices.

    Attributes:
        kernel_call: which template computes which graphs on which tiles.
        backward: fast path of its backward.
        guard: checks the data from which it was derived.
        attention: the template's forward; None until it is prepared.
        is_dense: whether `attention` is the dense oracle, which autograd differentiates directly.
    """

    kernel_call: KernelCall
    backward: BackwardCache
    guard: DataGuard
    attention: Attention | None = None
    is_dense: bool = False
