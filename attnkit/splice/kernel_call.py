"""Define the records that a template's forward and backward take.

`KernelCall` is decided once for all calls of one kind; `ForwardInputs` and `BackwardInputs` are the
tensors of one call.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from attnkit.schedule.targets import TemplateSpec
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.splice.program import Program


@dataclass(frozen=True)
class KernelCall:
    """A template, the graphs that it computes, and the tiles that it visits.

    Attributes:
        template: of a plan, such as "cpu", "sm90", "emulate:sm90" or "sm90:ordered".
        program: the graphs.
        runs: tiles to visit, in a kernel's tile sizes or multiples; None for all.
        need_max: whether the forward also returns the row maxima.
    """

    template: str
    program: Program
    runs: BlockRuns | None
    need_max: bool = False

    @functools.cached_property
    def spec(self) -> TemplateSpec:
        """The name of the template, parsed."""
        return TemplateSpec.parse(self.template)


class Captured(NamedTuple):
    """Tensors that the graphs capture, by slot.

    A tuple, so that `captured[0]` is the score's and `captured[1]` the mask's where an index says
    which.
    """

    scores: Sequence[Tensor]
    masks: Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class ForwardInputs:
    """Tensors of a forward call.

    Attributes:
        query: [B, Hq, Sq, D].
        key: [B or 1, Hkv, Skv, D].
        value: [B or 1, Hkv, Skv, Dv].
        captured: tensors that the score and the mask capture.
        scale: softmax scale.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    captured: Captured
    scale: float


@dataclass(frozen=True, eq=False)
class BackwardInputs:
    """Tensors of a backward call.

    Attributes:
        query, key, value: as in `ForwardInputs`.
        out: output of the forward, [B, Hq, Sq, Dv].
        lse: its log-sum-exp, [B, Hq, Sq].
        grad_out: gradient of `out`.
        grad_lse: gradient of `lse`; None for zero.
        captured: tensors that the score and the mask capture.
        needs_grad: whether the gradient is needed, for each tensor that the score captures.
        scale: softmax scale.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None
    captured: Captured
    needs_grad: Sequence[bool]
    scale: float

    @classmethod
    def of(
        cls,
        forward: ForwardInputs,
        outputs: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor | None],
        needs_grad: Sequence[bool],
    ) -> BackwardInputs:
        """Return the inputs of a forward's backward.

        Args:
            forward: inputs of the forward.
            outputs: its output and LSE.
            grads: their gradients.
            needs_grad: as of the class.
        """
        return cls(
            forward.query,
            forward.key,
            forward.value,
            *outputs,
            *grads,
            captured=forward.captured,
            needs_grad=needs_grad,
            scale=forward.scale,
        )
