"""Implement the hooks of the kernels that run before and after a main backward kernel, by row.

Both hold a share of the work on learned tensors that needs no work per score, see
`graph.learned_loads`. `RowShifts` belongs to the preprocess, `RowFactors` to the postprocess.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnkit.codegen.emit_cute import LOAD_INDICES, emit
from attnkit.codegen.learned_indices import LearnedIndices, slots
from attnkit.codegen.load_indices import LoadIndices
from attnkit.codegen.score_form import score_form, split_row
from attnkit.graph.adjoint import adjoint
from attnkit.graph.ir import Node
from attnkit.graph.learned_loads import Loads, learned_loads, unit_gradient
from attnkit.graph.staging import index_level


class RowHooks(LearnedIndices):
    """Hooks of a row: emit a value of the row, and the gradients of loads from a sum over the row.

    Implements `templates.common.hooks.RowHooks`.

    Args:
        value: expression of the row and the head; None for none.
        loads: learned loads, with cotangents in which `grad` is the sum over the row.
        needs_grad: for each captured tensor of the score, whether its gradient is needed.
        indices: which loads wrap negative indices, and which are clamped.

    Attributes:
        gradient_levels: for each load, the staging level of its index: "head" or "row".
        gradient_slots: for each load, the number of its tensor among those that need a gradient.
    """

    def __init__(
        self, value: Node | None, loads: Loads, needs_grad: Sequence[bool], indices: LoadIndices
    ) -> None:
        self._value = value
        self._loads = tuple(load for load, _ in loads)
        self._cotangents = [c for _, c in loads]
        self.indices = indices
        self.gradient_levels: tuple[str, ...] = tuple(index_level(n) for n in self._loads)
        self.gradient_slots = slots(self._loads, needs_grad)

    def _tensors(self, site: Any) -> tuple[Any, Any]:
        return site.tensors, ()

    def value(self, site: Any, q: Any) -> Any:
        """Emit the value of row `q`; None if there is none."""
        return None if self._value is None else self._emit([self._value], site, q)[0]

    def gradients(self, site: Any, q: Any, total: Any) -> list[Any]:
        """Emit the gradient of each load from `total`, the sum over row `q`."""
        return self._emit(self._cotangents, site, q, {"grad": total})

    def _emit(
        self, roots: Sequence[Node], site: Any, q: Any, more: dict[str, Any] | None = None
    ) -> list[Any]:
        env = {"b": site.b, "h": site.h, "scale": site.scale, "q": q, **(more or {})}
        return emit(roots, env, site.tensors, fast=True, indices=self.indices)


def row_shifts(
    root: Node | None,
    needs_grad: Sequence[bool] = (),
    row_sums: bool = False,
    indices: LoadIndices = LOAD_INDICES,
) -> RowHooks | None:
    """Return the hooks of the preprocess: the terms that shift rows; None if there are none.

    The value is the sum of these terms, natural units. The sum over a row is that of dF.

    Args:
        root: the score_mod; None if there is none.
        needs_grad, row_sums: see `learned_loads`.
        indices: which loads wrap negative indices, and which are clamped.
    """
    loads = learned_loads(root, needs_grad, row_sums).shifts
    value, _ = split_row(score_form(root))
    if value is None and not loads:
        return None
    return RowHooks(value, loads, needs_grad, indices)


def row_factors(
    root: Node | None,
    needs_grad: Sequence[bool] = (),
    row_sums: bool = False,
    indices: LoadIndices = LOAD_INDICES,
) -> RowHooks | None:
    """Return the hooks of the postprocess: the factors of rows; None if the kernel applies them.

    The value is the derivative of the score_mod. The sum over a row is that of dF * score.

    Args:
        root, needs_grad, row_sums, indices: see `row_shifts`.
    """
    loads = learned_loads(root, needs_grad, row_sums)
    if root is None or not loads.factors:
        return None
    slope = unit_gradient(adjoint(root).dscore)
    return RowHooks(slope, loads.factors, needs_grad, indices)
