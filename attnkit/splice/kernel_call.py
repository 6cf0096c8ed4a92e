"""Define the arguments of a template's forward and backward.

A `KernelCall` serves all calls of one kind. `ForwardInputs` and `BackwardInputs` hold the tensors
of one call.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from attnkit.schedule.targets import TemplateSpec
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.splice.data_check import DataCheck
from attnkit.splice.program import Program

# Out, LSE, row maxima or None, entropies of the rows or None.
ForwardOutputs: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class KernelCall:
    """Describes a kernel call: the template, the graphs that it computes, the tiles to visit.

    Attributes:
        template: a plan's template, such as "cpu", "sm90", "emulate:sm90" or "sm90:ordered".
        program: the score and mask graphs.
        runs: tiles to visit, whose sizes equal the kernel's tile sizes or are multiples of them;
            None for all tiles.
        need_max: whether the forward also returns the row maxima.
        need_entropy: whether the forward also returns the entropies of the rows.
        tables: whether GPU kernels read what the score_mod computes of q - kv from tables, see
            `splice.distance_values`; None to decide by the number of scores.
        check: captured data that the kernels compare with its fingerprints, if they can; None if
            nothing is compared or if another kernel compares it.
    """

    template: str
    program: Program
    runs: BlockRuns | None
    need_max: bool = False
    need_entropy: bool = False
    tables: bool | None = None
    check: DataCheck | None = None

    @functools.cached_property
    def spec(self) -> TemplateSpec:
        """Return the parsed name of the template."""
        return TemplateSpec.parse(self.template)


class Captured(NamedTuple):
    """Holds the tensors that the score_mod and the mask_mod capture, in order of their slots.

    If `Program.dropout` is set, the state of dropout follows the tensors of the score_mod. If
    `Program.sink` is set, the attention sink [Hq] follows.
    It may be indexed as a tuple: `captured[0]` for the score_mod, `captured[1]` for the mask_mod.
    """

    scores: Sequence[Tensor]
    masks: Sequence[Tensor]


class RepeatedForward(Protocol):
    """Function that relaunches a forward that has run."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        captured: Captured,
        scale: float,
        keeps_lse: bool = True,
    ) -> ForwardOutputs | None:
        """Relaunch the kernels; return None, without side effects, if that is impossible.

        Args:
            query, key, value, captured, scale: as in `ForwardInputs`.
            keeps_lse: False if the caller does not use the returned LSE, which the next call may
                then overwrite. That saves an allocation.
        """


@dataclass(frozen=True, eq=False)
class ForwardInputs:
    """Holds the tensors and the scale of a forward call.

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
    """Holds the tensors and the scale of a backward call.

    Attributes:
        query, key, value: inputs of the forward, see `ForwardInputs`.
        out: output of the forward, [B, Hq, Sq, Dv].
        lse: LSE of the forward, [B, Hq, Sq].
        grad_out: gradient of `out`.
        grad_lse: gradient of `lse`; None for zero.
        captured: tensors that the score and the mask capture.
        needs_grad: for each tensor that the score captures, whether its gradient is needed.
        scale: softmax scale.
        sink: the attention sink [Hq]. It is None without a sink, and before `without_sink`, when
            the sink is the last of the score's tensors.
        needs_sink_grad: whether the gradient of `sink` is needed.
        dropout: the state of dropout. It is None without dropout, and before `without_dropout`,
            when the state is the last of the score's tensors, or the last but the sink.
        entropy: entropies of the rows, [B, Hq, Sq], an output of the forward; None if their
            gradient is zero.
        grad_entropy: gradient of `entropy`; None for zero.
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
    sink: Tensor | None = None
    needs_sink_grad: bool = False
    entropy: Tensor | None = None
    grad_entropy: Tensor | None = None
    dropout: Tensor | None = None

    def without_dropout(self) -> BackwardInputs:
        """Return the inputs, after `without_sink`, with the state moved to `dropout`."""
        *scores, state = self.captured.scores
        captured = Captured(tuple(scores), self.captured.masks)
        needs_grad = self.needs_grad[:-1]
        return replace(self, captured=captured, needs_grad=needs_grad, dropout=state)

    def without_sink(self) -> BackwardInputs:
        """Return the inputs with the last of the score's tensors, the sink, moved to `sink`."""
        *scores, sink = self.captured.scores
        *needs_grad, needed = self.needs_grad
        captured = Captured(tuple(scores), self.captured.masks)
        return replace(
            self, captured=captured, needs_grad=needs_grad, sink=sink, needs_sink_grad=needed
        )

    @classmethod
    def of(
        cls,
        forward: ForwardInputs,
        outputs: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor | None],
        needs_grad: Sequence[bool],
        entropy: tuple[Tensor, Tensor] | None = None,
    ) -> BackwardInputs:
        """Build the inputs of a backward from the inputs and outputs of its forward.

        Args:
            forward: inputs of the forward.
            outputs: output and LSE of the forward.
            grads: gradients of the output and of the LSE.
            needs_grad: see the attribute.
            entropy: entropies of the rows and their gradient; None for a gradient of zero.
        """
        rows, grad_rows = entropy or (None, None)
        return cls(
            forward.query,
            forward.key,
            forward.value,
            *outputs,
            *grads,
            captured=forward.captured,
            needs_grad=needs_grad,
            scale=forward.scale,
            entropy=rows,
            grad_entropy=grad_rows,
        )
