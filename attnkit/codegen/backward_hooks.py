"""Implement the hooks of GPU backward kernels with the graphs of a variant.

`GraphBackward` implements `attnkit.templates.common.hooks.BackwardHooks`, the only interface that
kernels use. Its methods are plain Python that runs while a kernel is traced.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cutlass import Int32

from attnkit.codegen.block_loads import BlockLoads, reads_by_row_and_column
from attnkit.codegen.emit_cute import LOAD_INDICES, emit, load_place
from attnkit.codegen.forward_hooks import Columns, Ends, GraphForward, Rows
from attnkit.codegen.learned_indices import LearnedIndices, slots
from attnkit.codegen.load_indices import LoadIndices
from attnkit.codegen.score_form import (
    NumberFacts,
    score_form,
    split_row,
    unscaled,
    weight_form,
)
from attnkit.codegen.staged_emitter import Element, Stages, Values, head_arguments
from attnkit.graph import ir
from attnkit.graph.adjoint import adjoint
from attnkit.graph.ir import Node, arg, const
from attnkit.graph.learned_loads import learned_loads, unit_gradient
from attnkit.graph.staging import Level, column_axis, index_level, index_repeats, level_of

_ONE = const(1.0)
_GRAD = arg("grad")


class GraphBackward(GraphForward, LearnedIndices):
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
        row_sums: whether the kernel sums gradients times scores over rows, see
            `graph.learned_loads`.
        large: numbers of captured tensors whose gradient has offsets of more than 31 bits.
        indices: which loads wrap negative indices, and which are clamped.
        softmax: whether a softmax makes the weights; otherwise the modified scores are the weights.
        facts: what is known of numbers that the score_mod reads from tables; None without tables.
        one_hot: whether the kernel sums the gradient of the only learned load in an MMA with a
            one-hot matrix, so that it is not among the loads of the attributes. The load has
            `reads_pair`, and its gradient is that of the score.
        bias_first: whether the kernel loads the bias to the accumulator of S, see the hook
            `initial_scores`. Requires `adds_full_bias`.
        stored: numbers of captured tensors whose gradient is stored, see `gradient_is_stored`.
        led: those whose gradient batch element 0 stores, see `gradient_is_led`.

    Attributes:
        has_derivative: whether the derivative of the score_mod with respect to the score is not 1.
        gradient_levels: for each load whose gradient is summed score by score, the staging level of
            its index, at least `Level.HEAD`.
        row_factors: whether the factor of a row is left out of the gradients that are multiplied
            by K, see `graph.learned_loads`.
        gradient_slots: for each load with a gradient, the number of its tensor among the tensors
            that need a gradient.
        gradient_repeats: for each load with a gradient, whether several scores of a row or of a
            diagonal may read the same element, see `index_repeats`. False for `large` tensors.
        gradient_is_dscore: whether the gradient of the score, and of every load with a gradient, is
            that of the modified score, as for a learned bias.
        gradient_by_block: for each load with a gradient, whether it may read one element per column
            in all rows of a q block, see `block_loads`. It does so where all rows have the same
            `row_values`.
        gradient_is_stored: for each load with a gradient, whether the kernel stores it, because
            every score of the call has its own element.
        gradient_is_led: for each load with a gradient, whether batch element 0 stores it and the
            others add theirs, because every score of a batch element has its own element.
        loads_per_score: whether a captured tensor is read for every score, or every q - kv.
        loads_per_element: whether one is read for every score, at a place that depends on more than
            q - kv.
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
        row_sums: bool = False,
        large: Collection[int] = (),
        indices: LoadIndices = LOAD_INDICES,
        softmax: bool = True,
        facts: NumberFacts | None = None,
        one_hot: bool = False,
        bias_first: bool = False,
        stored: Collection[int] = (),
        led: Collection[int] = (),
    ) -> None:
        tables = frozenset[int]() if facts is None else facts.tables
        dscore = _GRAD if root is None else adjoint(root).dscore
        learned = learned_loads(root, needs_grad, row_sums, softmax)
        by_score = learned.scores
        if one_hot:
            ((self._one_hot, _),) = by_score
            (self._one_hot_slot,) = slots((self._one_hot,), needs_grad)
            by_score = ()
        self._loads = tuple(load for load, _ in by_score)
        self.gradient_slots = slots(self._loads, needs_grad)
        self._cotangents = tuple(unscaled(c, tables) for _, c in by_score)
        self.row_factors = bool(learned.factors)
        self._dscore = unscaled(dscore, tables)
        self._slope = unscaled(unit_gradient(dscore), tables)
        gradients = self._dscore, *self._cotangents
        self.has_derivative = self._slope is not _ONE
        # with a derivative of the score_mod, no registers are left for a separate distance term
        if softmax:
            form = score_form(root, separate_distance=not self.has_derivative, facts=facts)
            _, form = split_row(form)  # the preprocess subtracts these terms from the LSE
        else:
            form = weight_form(root, split_sigmoid=False, facts=facts)
        nodes = (form.factor, form.bias, form.slope, form.distance, self._slope, *gradients)
        given = [root, mask, *(n for pair in ends or () for n in pair)]
        indices = indices.with_new_loads(nodes, given)
        super().__init__(
            form,
            mask,
            ends,
            scores=scores,
            lists_override_mask=lists_override_mask,
            positive=positive,
            indices=indices,
            bias_first=bias_first,
        )
        parts = [n for n in (form.factor, form.bias, form.slope) if n is not None]
        self.has_distance_term = form.distance is not None
        self.gradient_levels: tuple[str, ...] = tuple(index_level(load) for load in self._loads)
        self.gradient_is_dscore = all(one is _GRAD for one in gradients)
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
        # a sigmoid may be the weight itself, of which subnormal values do not matter
        self._score = Stages(scored, indices, flush=not softmax)
        self._adjoint = Stages(adjoints, indices, flush=not softmax)
        self._block_loads = BlockLoads(
            (*self._score.roots, *self._adjoint.roots), indices, reads_by_row_and_column
        )
        self.gradient_by_block: tuple[bool, ...] = tuple(
            repeats and load in self._block_loads.loads
            for load, repeats in zip(self._loads, self.gradient_repeats, strict=True)
        )
        read = [int(str(load.attr)) for load in self._loads]
        self.gradient_is_stored: tuple[bool, ...] = tuple(slot in stored for slot in read)
        self.gradient_is_led: tuple[bool, ...] = tuple(slot in led for slot in read)
        emitted = ir.topo(*self._score.roots, *self._mask_stages.roots)
        levels = {level_of(n) for n in emitted if n.op == "load"}
        self.loads_per_element = Level.ELEMENT in levels
        self.loads_per_score = self.loads_per_element or Level.RELATIVE in levels

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

    def row_values(self, site: Any, q: Any) -> Values:
        """Emit the values of row `q` on which the loads of `block_values` depend."""
        scores, _ = self._tensors(site)
        return self._block_loads.row_values(site, scores, q)

    def block_values(self, site: Any, q: Any, columns: Columns) -> list[dict[Node, Any]]:
        """Emit, for each column, the loads of a q block whose rows have equal `row_values`.

        Args:
            site, columns: see `templates.common.hooks`.
            q: position of one of the rows.
        """
        scores, _ = self._tensors(site)
        return [self._block_loads.values(site, scores, q, kv) for kv, *_ in columns]

    def score_and_derivative(
        self,
        site: Any,
        head: Values,
        rows: Rows,
        columns: Columns,
        places: Sequence[Any],
        steps: Sequence[int] | None = None,
        shared: dict[Any, Values] | None = None,
        known: Sequence[Mapping[Node, Any]] | None = None,
    ) -> tuple[list[Any], list[Any] | None]:
        """Emit the modified score x, as in the forward, and the derivative of the score_mod.

        Args:
            site, head, rows, columns: see `templates.common.hooks`.
            places: (row, column, score q . k) of each element.
            steps: for each element, a number that identifies its q - kv. Elements with equal steps
                have equal q - kv.
            shared: step -> values that depend on q - kv alone. The values of new steps are added.
            known: what `block_values` returned, if the rows have equal `row_values`.

        Returns:
            x of each element; and the derivatives with respect to the score, None if all are 1.
        """
        scores, _ = self._tensors(site)
        elements = [_element(rows, columns, r, j, 0, s, known=known) for r, j, s in places]
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
        self,
        site: Any,
        head: Values,
        rows: Rows,
        columns: Columns,
        places: Sequence[Any],
        known: Sequence[Mapping[Node, Any]] | None = None,
    ) -> tuple[list[Any], list[list[Any]], list[list[Any]]]:
        """Emit the gradients of the scores q . k * scale, and of the value of each learned load.

        A learned load reads a captured tensor that needs a gradient.

        Args:
            site, head, rows, columns: see `templates.common.hooks`.
            places: (row, column, score q . k, gradient of the modified score) of each element.
            known: what `block_values` returned, if the rows have equal `row_values`.

        Returns:
            The gradient of each score; for each learned load a list of one gradient per element;
            and for each learned load a list of one `known` of `gradient_index` per element, which
            is empty if its index is not computed here.
        """
        scores, _ = self._tensors(site)
        elements = [_element(rows, columns, r, j, 3, s, g, known) for r, j, s, g in places]
        values = self._adjoint.elements(site, scores, head[4], elements, {})
        loads = len(self.gradient_levels)
        grads = [[v[1 + i] for v in values] for i in range(loads)]
        indices, at = [], 1 + loads
        for count in self._staged_indices:
            indices.append([tuple(v[at : at + count]) for v in values] if count else [])
            at += count
        return [v[0] for v in values], grads, indices

    def column_class(self, site: Any, kv: Any) -> Any:
        """Emit the index that column `kv` has in the table of `one_hot`."""
        axis = column_axis(self._one_hot)
        return self._one_hot_place(site, slice(axis, axis + 1), kv=kv)[0]

    def class_gradient(self, totals: Sequence[Any]) -> tuple[Any, int]:
        """Return the gradient of the table of `one_hot`, and its axis of classes."""
        return totals[self._one_hot_slot], column_axis(self._one_hot)

    def class_place(self, site: Any, q: Any) -> tuple[Any, ...]:
        """Emit the index of the first entry of the table of `one_hot` to which row `q` adds."""
        axis, count = column_axis(self._one_hot), len(self._one_hot.args)
        before = self._one_hot_place(site, slice(0, axis), q=q)
        after = self._one_hot_place(site, slice(axis + 1, count), q=q)
        return (*before, Int32(0), *after)

    def _one_hot_place(self, site: Any, axes: slice, **positions: Any) -> list[Any]:
        scores, _ = self._tensors(site)
        env = head_arguments(site, self._one_hot.args[axes]) | positions
        return load_place(self._one_hot, env, scores, self.indices, axes)

    def row_slope(self, site: Any, head: Values, row: Values) -> Any:
        """Emit the derivative of the score_mod in a row, if it depends on the row alone.

        Args:
            site, head: see `templates.common.hooks`.
            row: values of the row, from the hook `row`.
        """
        scores, _ = self._tensors(site)
        memo = dict(zip(self._score.nodes_at(Level.HEAD), head[0], strict=True))
        memo.update(zip(self._score.nodes_at(Level.ROW), row[0], strict=True))
        env = head_arguments(site, (self._slope,))
        return emit([self._slope], env, scores, fast=True, indices=self.indices, memo=memo)[0]


def _element(
    rows: Rows, columns: Columns, r: int, j: int, part: int, score: Any, grad: Any = None,
    known: Sequence[Mapping[Node, Any]] | None = None,
) -> Element:  # fmt: skip
    """Build the `Element` in row `r` and column `j` of the thread.

    Args:
        rows, columns: positions and values of the thread's rows and columns.
        r, j: index of the row, index of the column.
        part: index among the values of a row or a column: 0 for the score, 3 for the adjoint.
        score, grad: score q . k, and gradient of the modified score.
        known: values of loads in each column, see `GraphBackward.block_values`.
    """
    q, row = rows[r]
    kv, _, column = columns[j]
    values = None if known is None else known[j]
    return Element(q, kv, row[part], column[part], None, score, grad, values)
