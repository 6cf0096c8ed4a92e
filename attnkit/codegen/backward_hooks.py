"""Implement the hooks of GPU backward kernels with the graphs of a variant.

`GraphBackward` implements `attnkit.templates.common.hooks.BackwardHooks`, the only interface that
kernels use. Its methods are plain Python that runs while a kernel is traced.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from cutlass import Int32, select_

from attnkit.codegen.emit_cute import LOAD_INDICES, clamped, emit
from attnkit.codegen.forward_hooks import Columns, Ends, GraphForward, Rows
from attnkit.codegen.load_indices import LoadIndices
from attnkit.codegen.score_form import score_form, unscaled
from attnkit.codegen.staged_emitter import Element, Stages, Values
from attnkit.graph import ir
from attnkit.graph.adjoint import adjoint
from attnkit.graph.ir import Node, arg, const
from attnkit.graph.simplify import build
from attnkit.graph.staging import Level, index_level, index_repeats, level_of

_ONE = const(1.0)


class GraphBackward(GraphForward):
    """Backward hooks: emit the score_mod, its derivative, the mask, captured tensors' gradients.

    Args:
        root: the score_mod; None if there is none.
        mask: bool expression; None to keep everything.
        ends: bounds of the intervals of q that the mask keeps in each column, as expressions of the
            same captured tensors in which `q` stands for the column's position; None if the mask
            has no such form.
        scores: number of captured tensors of the score. The tensors of the mask follow them.
        lists_override_mask: whether block lists override the mask, so that it is not applied to
            FULL blocks.
        positive: whether the softmax scale is above 0.
        needs_grad: for each captured tensor of the score, whether its gradient is needed.
        large: numbers of captured tensors whose gradient has offsets of more than 31 bits.
        indices: which loads wrap negative indices, and which are clamped.

    Attributes:
        has_derivative: whether the derivative of the score_mod with respect to the score is not 1.
        gradient_levels: for each load with a gradient, the staging level of its index, at least
            `Level.HEAD`.
        gradient_slots: for each load with a gradient, the number of its tensor among the tensors
            that need a gradient.
        gradient_repeats: for each load with a gradient, whether several scores of a row or of a
            diagonal may read the same element, see `index_repeats`. False for `large` tensors.
        loads_per_score: whether a captured tensor is read for every score, or every q - kv.
        has_distance_term: whether the kernel itself adds a term `distance * (kv - q)` to x, see
            `distance_term`. This requires that the derivative of the score_mod is 1.
    """

    def __init__(
        self,
        root: Node | None,
        mask: Node | None,
        ends: Ends | None,
        *,
        scores: int,
        lists_override_mask: bool = False,
        positive: bool = True,
        needs_grad: Sequence[bool] = (),
        large: Collection[int] = (),
        indices: LoadIndices = LOAD_INDICES,
    ) -> None:
        loads: tuple[tuple[Node, Node], ...] = ()
        dscore = arg("grad")
        if root is not None:
            derivative = adjoint(root)
            dscore = derivative.dscore
            learned = [i for i, need in enumerate(needs_grad) if need]
            loads = tuple((n, c) for n, c in derivative.loads if int(str(n.attr)) in learned)
            self.gradient_slots = tuple(learned.index(int(str(n.attr))) for n, _ in loads)
        else:
            self.gradient_slots = ()
        self._loads = tuple(load for load, _ in loads)
        self._cotangents = tuple(unscaled(c) for _, c in loads)
        self._dscore = unscaled(dscore)
        self._slope = unscaled(_with_unit_gradient(dscore))
        self.has_derivative = self._slope is not _ONE
        # with a derivative of the score_mod, no registers are left for a separate distance term
        form = score_form(root, separate_distance=not self.has_derivative)
        super().__init__(
            form,
            mask,
            ends,
            scores=scores,
            lists_override_mask=lists_override_mask,
            positive=positive,
            indices=indices,
        )
        parts = [n for n in (form.factor, form.bias, form.slope) if n is not None]
        self.has_distance_term = form.distance is not None
        self.gradient_levels: tuple[str, ...] = tuple(index_level(load) for load in self._loads)
        self.gradient_repeats: tuple[bool, ...] = tuple(
            level in (Level.RELATIVE, Level.ELEMENT)
            and index_repeats(load)
            and int(str(load.attr)) not in large
            for load, level in zip(self._loads, self.gradient_levels, strict=True)
        )
        adjoints = [self._dscore, *self._cotangents] if self.gradient_levels else []
        # the stages compute the indices, so that one of a row or of a column is computed once
        staged = zip(self._loads, self.gradient_levels, self.gradient_repeats, strict=True)
        self._staged_indices: tuple[int, ...] = tuple(
            len(load.args) if repeats and level is Level.ELEMENT else 0
            for load, level, repeats in staged
        )
        for load, count in zip(self._loads, self._staged_indices, strict=True):
            adjoints += load.args[:count]
        # one set of stages, so that the score_mod and its derivative share sub-expressions
        scored = [*parts, self._slope] if self.has_derivative else parts
        self._score = Stages(scored, indices)
        self._adjoint = Stages(adjoints, indices)
        self.loads_per_score = any(
            n.op == "load" and level_of(n) in (Level.RELATIVE, Level.ELEMENT)
            for n in ir.topo(*self._score.roots, *self._mask_stages.roots)
        )

    def head(self, site: Any) -> Values:
        """Emit the values that depend on the head alone; called once per tile."""
        scores, _ = self._tensors(site)
        distance = None
        if self.form.distance is not None:
            env = {"b": site.b, "h": site.h, "scale": site.scale}
            distance = emit([self.form.distance], env, scores, fast=True, indices=self.indices)[0]
        return (*super().head(site), self._adjoint.head(site, scores), distance)

    def distance_term(self, site: Any, head: Values) -> Any:
        """Return the factor of (kv - q) in the distance term of x; None if there is no term."""
        return head[5]

    def row(self, site: Any, head: Values, q: Any) -> Values:
        """Emit the values that depend on row `q` and the head."""
        scores, _ = self._tensors(site)
        return (*super().row(site, head, q), self._adjoint.row(site, scores, head[4], q))

    def columns(self, site: Any, head: Values, kv: Sequence[Any], masked: bool) -> list[Values]:
        """Emit the values that depend on each column `kv`; those of the mask only if `masked`."""
        scores, _ = self._tensors(site)
        return [
            (*values, None, self._adjoint.column(site, scores, head[4], at))
            for values, at in zip(super().columns(site, head, kv, masked), kv, strict=True)
        ]

    def score_and_derivative(
        self,
        site: Any,
        head: Values,
        rows: Rows,
        columns: Columns,
        places: Sequence[Any],
        steps: Sequence[int] | None = None,
        shared: dict[Any, Values] | None = None,
    ) -> tuple[list[Any], list[Any] | None]:
        """Emit the modified score x, as in the forward, and the derivative of the score_mod.

        Args:
            site, head, rows, columns: see `templates.common.hooks`.
            places: (row, column, score q . k) of each element.
            steps: for each element, a number that identifies its q - kv. Elements with equal steps
                have equal q - kv.
            shared: step -> values that depend on q - kv alone. The values of new steps are added.

        Returns:
            x of each element; and the derivatives with respect to the score, None if all are 1.
        """
        scores, _ = self._tensors(site)
        elements = [_element(rows, columns, r, j, 0, s) for r, j, s in places]
        if steps is not None and shared is not None:
            elements = [replace(e, step=at) for e, at in zip(elements, steps, strict=True)]
            new = [e for e in elements if e.step not in shared]
            shared.update(self._score.relatives(site, scores, head[0], new))
        values = self._score.elements(site, scores, head[0], elements, shared or {})
        slopes = None if self._slope is _ONE else [value[-1] for value in values]
        if self.only_scales:
            return [s for _, _, s in places], slopes
        return self._combine(columns, places, values), slopes

    def dscore(
        self, site: Any, head: Values, rows: Rows, columns: Columns, places: Sequence[Any]
    ) -> tuple[list[Any], list[list[Any]], list[list[Any]]]:
        """Emit the gradients of the scores q . k * scale, and of the value of each learned load.

        A learned load reads a captured tensor that needs a gradient.

        Args:
            site, head, rows, columns: see `templates.common.hooks`.
            places: (row, column, score q . k, gradient of the modified score) of each element.

        Returns:
            The gradient of each score; for each learned load a list of one gradient per element;
            and for each learned load a list of one `known` of `gradient_index` per element, which
            is empty if its index is not computed here.
        """
        scores, _ = self._tensors(site)
        elements = [_element(rows, columns, r, j, 3, s, g) for r, j, s, g in places]
        values = self._adjoint.elements(site, scores, head[4], elements, {})
        loads = len(self._loads)
        grads = [[v[1 + i] for v in values] for i in range(loads)]
        indices, at = [], 1 + loads
        for count in self._staged_indices:
            indices.append([tuple(v[at : at + count]) for v in values] if count else [])
            at += count
        return [v[0] for v in values], grads, indices

    def gradient_index(
        self,
        i: int,
        site: Any,
        shape: Sequence[Any],
        q: Any,
        kv: Any,
        known: Sequence[Any] | None = None,
    ) -> tuple[Any, ...]:
        """Emit the index, one Int32 per axis, at which learned load `i` reads its tensor.

        The kernel adds the gradient of the load at the same index.

        Args:
            i: number of the load.
            site: see `templates.common.hooks`.
            shape: shape of the tensor. A negative index counts from the end of its axis.
            q, kv: positions; None if the index does not depend on them.
            known: the values of the index, from `dscore`; None to compute them.
        """
        load, values = self._loads[i], known
        if values is None:
            scores, _ = self._tensors(site)
            env = {"b": site.b, "h": site.h, "scale": site.scale}
            env |= {} if q is None else {"q": q}
            env |= {} if kv is None else {"kv": kv}
            values = emit(load.args, env, scores, fast=True, indices=self.indices)
        zero = Int32(0)
        if not values:
            return (zero,)  # a number: a tensor of shape (1,)
        places = [
            select_(Int32(at) < zero, Int32(at) + Int32(size), Int32(at))
            for at, size in zip(values, shape, strict=True)
        ]
        if load in self.indices.clamp:
            places = [clamped(*part) for part in zip(load.args, places, shape, strict=True)]
        return tuple(places)


def _element(
    rows: Rows, columns: Columns, r: int, j: int, part: int, score: Any, grad: Any = None
) -> Element:
    """Build the `Element` in row `r` and column `j` of the thread.

    Args:
        rows, columns: positions and values of the thread's rows and columns.
        r, j: index of the row, index of the column.
        part: index among the values of a row or a column: 0 for the score, 3 for the adjoint.
        score, grad: score q . k, and gradient of the modified score.
    """
    q, row = rows[r]
    kv, _, column = columns[j]
    return Element(q, kv, row[part], column[part], None, score, grad)


def _with_unit_gradient(dscore: Node) -> Node:
    """Return the derivative of the score_mod: `dscore` with `grad` = 1, simplified."""
    mapping: dict[Node, Node] = {}
    for n in ir.topo(dscore):
        if n is arg("grad"):
            mapping[n] = _ONE
        elif not n.args or all(mapping[a] is a for a in n.args):
            mapping[n] = n
        elif n.op in ("load", "cast", "round"):
            mapping[n] = ir.substitute(n, {a: mapping[a] for a in n.args})
        else:
            mapping[n] = build(n.op, *(mapping[a] for a in n.args))
    return mapping[dscore]
