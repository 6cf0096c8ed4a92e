"""What is decided once for all calls of one kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from attnkit.splice import Attention, BackwardInputs, Captured, KernelCall

# Out, LSE and the row maxima or None.
ForwardResult: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
# Relaunches a forward for query, key, value, captured tensors and scale; None where it cannot, and
# then it has done nothing.
Relaunch: TypeAlias = Callable[[Tensor, Tensor, Tensor, Captured, float], ForwardResult | None]
# Relaunches a backward for query, key, value, out, gradient of out, LSE, captured tensors, and the
# gradient of the LSE if there is one. Gives the gradients of query, key and value, and float32
# gradients of the score's tensors where they are needed; None where it cannot.
BackwardRelaunch: TypeAlias = Callable[[Sequence[Tensor]], list[Tensor] | None]


class BackwardCache(Protocol):
    """The remembered backwards of a prepared call; `reuse.backward` has the one that is used."""

    def try_fast_path(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        saved: Sequence[Tensor],
        scale: float,
        needs_grad: list[bool],
    ) -> tuple[Tensor | None, ...] | None:
        """Relaunch a remembered backward; None if none is like this one."""

    def remember(
        self,
        inputs: BackwardInputs,
        saved: Sequence[Tensor],
        find_relaunch: Callable[[], BackwardRelaunch | None],
    ) -> None:
        """Remember a backward that has run."""


@dataclass(eq=False)
class PreparedCall:
    """A call that is ready to run, for tensors of one geometry.

    Attributes:
        kernel_call: which template computes which graphs on which tiles.
        backward: relaunches of its backward.
        attention: the template's forward; None until it is prepared for tensors of this geometry.
        is_dense: whether `attention` is the dense oracle, which autograd records by itself.
    """

    kernel_call: KernelCall
    backward: BackwardCache
    attention: Attention | None = None
    is_dense: bool = False
