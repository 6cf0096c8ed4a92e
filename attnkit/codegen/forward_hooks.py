"""Implement the hooks of GPU forward kernels with the graphs of a variant.

`GraphForward` implements `attnkit.templates.common.hooks.ForwardHooks`, the only interface that
kernels use. Its methods are plain Python that runs while a kernel is traced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import cutlass
from cutlass import Float32

from attnkit.codegen.bias_loads import BiasLoads, factor_of
from attnkit.codegen.block_loads import BlockLoads, column_group, reads_by_group
from attnkit.codegen.emit_cute import LOAD_INDICES, emit, load_place
from attnkit.codegen.instruction_cost import instructions
from attnkit.codegen.load_indices import LoadIndices
from attnkit.codegen.score_form import ScoreForm
from attnkit.codegen.staged_emitter import Element, Stages, Values, head_arguments
from attnkit.graph import ir
from attnkit.graph.ir import Node
from attnkit.graph.staging import Level, column_axis, pair_load

Ends: TypeAlias = tuple[tuple[Node, Node], ...]
Rows: TypeAlias = Sequence[tuple[Any, Values]]
Columns: TypeAlias = Sequence[tuple[Any, Any, Values]]

# Replaces factors nearer to zero where a slope is divided by the factor: scores times either factor
# round to zero, and quotients of common slopes stay far from the end of float32.
MIN_FACTOR = 2.0**-90
MIN_BIAS_FACTOR = 2.0**-40  # the same for a bias, which may be larger than a slope


class GraphForward:
    """Forward hooks: emit the score_mod and the mask of a variant.

    Args:
        form: the score_mod.
        mask: bool expression; None to keep everything.
        ends: bounds of the intervals of kv that the mask keeps in each row, as expressions of the
            same captured tensors; None if the mask has no such form.
        scores: number of captured tensors of the score. The tensors of the mask follow them.
        lists_override_mask: whether block lists override the mask, so that it is not applied to
            FULL blocks.
        sink: whether the last captured tensor is an attention sink [Hq].
        dropout: whether the last captured tensor, or the last but the sink, is the state of dropout.
        positive: whether the softmax scale is above 0.
        slope_in_mma: whether the kernel adds the part of the slope's term that differs from column
            to column, see the hook `column_slope`. The form must be `only_slope`, and the softmax
            scale above 0.
        bias_first: whether the kernel adds the bias before the score is complete, see the hook
            `initial_scores`. The form must be `full_bias`.
        columns_in_mma: whether the kernel adds the bias, which depends on the column, see the hook
            `column_terms`. The form must be `only_column`, and the softmax scale above 0.
        indices: which loads wrap negative indices, and which are clamped.
    """

    def __init__(
        self,
        form: ScoreForm,
        mask: Node | None,
        ends: Ends | None,
        *,
        scores: int,
        lists_override_mask: bool = False,
        sink: bool = False,
        dropout: bool = False,
        positive: bool = True,
        slope_in_mma: bool = False,
        bias_first: bool = False,
        columns_in_mma: bool = False,
        indices: LoadIndices = LOAD_INDICES,
    ) -> None:
        self.form, self._mask, self._ends, self._scores = form, mask, ends, scores
        self.lists_override_mask = lists_override_mask
        self.has_mask = mask is not None
        self.has_sink = sink
        self.has_dropout = dropout
        self.intervals = None if ends is None else len(ends)
        self._slope_in_mma = slope_in_mma
        self._bias_first = bias_first
        self._columns_in_mma = columns_in_mma
        self.only_scales = (
            slope_in_mma or columns_in_mma or ((bias_first or form.plain) and positive)
        )
        parts = [n for n in (form.factor, form.bias, form.slope) if n is not None]
        self.indices = indices
        self._score = Stages(parts, indices)
        self._group_loads = BlockLoads(parts, indices, reads_by_group)
        self._column_group = min((column_group(n) for n in self._group_loads.loads), default=1)
        self._bias_loads = BiasLoads(parts, indices)
        self._pair_load = pair_load(parts)
        self._pair_loads = BlockLoads(parts, indices, lambda n: n is self._pair_load)
        self._mask_stages = Stages([mask] if mask is not None and ends is None else [], indices)
        self.ignores_score = form.factor is None and (
            form.bias is None or "score" not in ir.reads(form.bias)
        )
        self.branches_on_score = any(
            n.op == "where" and "score" in ir.reads(n.args[0]) for n in ir.topo(*parts)
        )
        self.instruction_estimate = instructions(*parts)
        self.row_factor = form.factor is not None and "q" in ir.reads(form.factor)
        self.prefetches = not columns_in_mma and bool(
            self._score.nodes_at(Level.COLUMN) or self._score.nodes_at(Level.RELATIVE)
        )

    def _tensors(self, site: Any) -> tuple[Any, Any]:
        return site.tensors[: self._scores], site.tensors[self._scores :]

    def pair_table(self, site: Any) -> tuple[int, Any]:
        """Return the slot of the table of pairs, and the part [rows, columns] that a head reads.

        The score_mod must read such a table, see `graph.staging.pair_load`. The entries of a warp's
        scores lie in several rows of it, which may be in the same banks of the first-level cache. A
        kernel reads a copy with rows of odd length faster.
        """
        load = self._pair_load
        assert load is not None
        scores, _ = self._tensors(site)
        slot, env = int(str(load.attr)), head_arguments(site, load.args[:-2])
        at = load_place(load, env, scores, self.indices, slice(0, -2))
        return slot, scores[slot][(*at, None, None)]

    def pair_classes(self, columns: Columns) -> list[Any] | None:
        """Return the index of each column in the table of pairs; None if each has its own."""
        load, known = self._pair_load, self._score.nodes_at(Level.COLUMN)
        assert load is not None
        index = load.args[column_axis(load)]
        if index not in known:  # kv itself
            return None
        return [values[0][known.index(index)] for _, _, values in columns]

    def pair_values(self, site: Any, rows: Rows, columns: Columns) -> list[Mapping[Node, Any]]:
        """Emit, for each row, its entry in the table of pairs, if all columns have one index."""
        scores, _ = self._tensors(site)
        return [self._pair_loads.values(site, scores, q, columns[0][0]) for q, _ in rows]

    def head(self, site: Any) -> Values:
        """Emit the values that depend on the head alone; called once per tile."""
        scores, masks = self._tensors(site)
        score_values = self._score.head(site, scores)
        slope: Any = None
        factor: Any = None
        memo = dict(zip(self._score.nodes_at(Level.HEAD), score_values, strict=True))
        env = {"b": site.b, "h": site.h, "scale": site.scale}
        options: dict[str, Any] = {"fast": True, "indices": self.indices, "memo": memo}
        if self.form.slope is not None:
            slope = emit([self.form.slope], env, scores, **options)[0]
        if (self.only_scales or self._bias_first) and self.form.factor is not None:
            factor = emit([self.form.factor], env, scores, **options)[0]
        if self._bias_first or self._columns_in_mma:
            # the bias is divided by it; scores times either factor round to zero beside a bias
            small = cutlass.max(factor, -factor) < Float32(MIN_BIAS_FACTOR)
            factor = cutlass.select_(small, Float32(MIN_BIAS_FACTOR), factor)
        if self._slope_in_mma:
            # x is in units of the raw score here, so that the slope is divided by the factor
            factor = cutlass.max(factor, Float32(MIN_FACTOR))
            slope = slope / factor
        return score_values, self._mask_stages.head(site, masks), slope, factor

    def row(self, site: Any, head: Values, q: Any) -> Values:
        """Emit the values that depend on row `q` and the head."""
        scores, masks = self._tensors(site)
        score_values = self._score.row(site, scores, head[0], q)
        term = None
        if self.form.row is not None:
            env = {"b": site.b, "h": site.h, "q": q, "kv": site.origin}
            term = emit([self.form.row], env, scores, fast=True, indices=self.indices)[0]
        return score_values, self._mask_stages.row(site, masks, head[1], q), term

    def fixed_columns(self, site: Any, head: Values, offsets: Sequence[Any]) -> Values:
        """Emit the term added to x in each column, given `offsets` from the start of any block."""
        slope = None if self._slope_in_mma else head[2]
        return tuple(None if slope is None else slope * Float32(o) for o in offsets)

    def column_slope(self, head: Values) -> Any:
        """Return the number to add to x per column, counted from some column of a block, by an MMA."""
        return head[2]

    def column_terms(self, site: Any, head: Values, kv: Sequence[Any]) -> list[Any]:
        """Emit the bias of each column `kv`, divided by the factor of the scores."""
        assert self.form.bias is not None
        scores, _ = self._tensors(site)
        at, inverse = self._score.nodes_at(Level.COLUMN).index(self.form.bias), 1.0 / head[3]
        return [self._score.column(site, scores, head[0], x)[at] * inverse for x in kv]

    def block(self, site: Any, head: Values, kv: Any) -> Any:
        """Emit the term added to all x of a block whose columns are counted from `kv`; None for 0."""
        slope = head[2]
        return None if slope is None else slope * Float32(kv - site.origin)

    def columns(self, site: Any, head: Values, kv: Sequence[Any], masked: bool) -> list[Values]:
        """Emit the values that depend on each column `kv`; those of the mask only if `masked`."""
        scores, masks = self._tensors(site)
        return [
            (
                self._score.column(site, scores, head[0], at),
                self._mask_stages.column(site, masks, head[1], at) if masked else (),
            )
            for at in kv
        ]

    def relatives(
        self, site: Any, head: Values, rows: Rows, columns: Columns, places: Sequence[Any]
    ) -> Any:
        """Emit the values that several scores share, for `score`.

        Returns:
            The values that depend on q - kv alone, by step; and the loads that read one element for
            a group of columns, by `_group`.
        """
        scores, _ = self._tensors(site)
        elements = [_element(site, rows, columns, r, j, 0) for r, j in places]
        values = self._score.relatives(site, scores, head[0], elements)
        loads: dict[Any, Mapping[Node, Any]] = {}
        for r, j in places:
            group = self._group(site, r, j)
            if group is not None and group not in loads:
                q, kv = rows[r][0], columns[j][0]
                loads[group] = self._group_loads.values(site, scores, q, kv)
        return values, loads

    def initial_scores(
        self, site: Any, head: Values, rows: Rows, columns: Columns, places: Sequence[Any],
        known: Sequence[Mapping[Node, Any]] | None = None,
    ) -> list[Any]:  # fmt: skip
        """Emit the bias of each element in `places`, divided by the factor of the scores.

        Args:
            site, head, rows, columns: see `templates.common.hooks`.
            places: (row, column) of each element.
            known: for each element, what `bias_row` returned; None to load it here.
        """
        scores, _ = self._tensors(site)
        elements = [
            _element(site, rows, columns, r, j, 0, known=None if known is None else known[i])
            for i, (r, j) in enumerate(places)
        ]
        values = self._score.elements(site, scores, head[0], elements, {})
        inverse = Float32(1.0) / head[3]
        return [value[1] * inverse for value in values]  # the first is the factor

    def bias_row(
        self, site: Any, q: Any, kv: Any, offsets: Sequence[Any], paired: bool
    ) -> list[Mapping[Node, Any]]:
        """Emit the loads of the bias in row `q`, see `BiasLoads.row`."""
        return self._bias_loads.row(site, self._tensors(site)[0], q, kv, offsets, paired)

    def pairs_are_aligned(self, site: Any) -> Any:
        """Emit whether two biases, the first in an even column, are aligned for one load."""
        return self._bias_loads.pairs_are_aligned(site, self._tensors(site)[0])

    def bias_is_along_rows(self, site: Any) -> bool:
        """Return whether the biases of a row are neighbours in memory, as `bias_row` requires."""
        return self._bias_loads.along_rows(self._tensors(site)[0])

    def bias_is_by_batch(self) -> bool:
        """Return whether batch elements read different elements of the bias."""
        return self._bias_loads.by_batch()

    def bias_place(self, site: Any, q: Any, kv: Any) -> Any:
        """Emit a pointer to the bias of the score at (q, kv)."""
        (place,) = self._bias_loads.places(site, self._tensors(site)[0], q, kv)
        return place

    def bias_type(self, site: Any) -> Any:
        """Return the type of the biases in memory."""
        return self._bias_loads.dtype(self._tensors(site)[0])

    def scores_of_biases(
        self, site: Any, head: Values, rows: Rows, columns: Columns, places: Sequence[Any],
        biases: Sequence[Any],
    ) -> list[Any]:  # fmt: skip
        """Emit what `initial_scores` returns, from biases that are already loaded."""
        (load,) = self._bias_loads.loads
        factor = None if self.form.bias is None else factor_of(load, self.form.bias)
        if factor is None:
            known = [{load: x} for x in biases]
            return self.initial_scores(site, head, rows, columns, places, known)
        # one multiplication for each score; the compiler may not join two
        number = Float32(factor) / head[3]
        return [x * number for x in biases]

    def _group(self, site: Any, r: int, j: int) -> tuple[int, int] | None:
        """Return the row and group of columns whose scores read the same elements; None if none."""
        width = min(self._column_group, site.column_group)
        return (r, site.steps[1][j] // width) if width >= 8 else None

    def score(
        self,
        site: Any,
        head: Values,
        rows: Rows,
        columns: Columns,
        places: Sequence[Any],
        relatives: Any,
        pairs: Sequence[Mapping[Node, Any]] | None = None,
    ) -> list[Any]:
        """Emit the modified score x of each element in `places`, see `score_form`."""
        scores, _ = self._tensors(site)
        if self._bias_first:  # and the scale is not above 0
            return [s * head[3] for _, _, s in places]
        distances, loads = relatives
        known = [
            loads.get(self._group(site, r, j)) if pairs is None else pairs[r] for r, j, _ in places
        ]
        elements = [
            _element(site, rows, columns, r, j, 0, s, values)
            for (r, j, s), values in zip(places, known, strict=True)
        ]
        values = self._score.elements(site, scores, head[0], elements, distances)
        return self._combine(columns, places, values)

    def _combine(self, columns: Columns, places: Sequence[Any], values: Any) -> list[Any]:
        """Emit score * factor + term of the column + bias for each element."""
        result = []
        for (_, j, s), value in zip(places, values, strict=True):
            parts = iter(value)
            factor = next(parts) if self.form.factor is not None else None
            bias = next(parts) if self.form.bias is not None else None
            x = None if factor is None else s * factor
            for term in (columns[j][1], bias):
                if term is not None:
                    x = term if x is None else x + term
            result.append(x)
        return result

    def factor(self, site: Any, head: Values) -> Any:
        """Return the factor by which the kernel multiplies x; None for 1."""
        return head[3] if self.only_scales else None

    def kept_intervals(self, site: Any, head: Values, q: Any) -> list[tuple[Any, Any]]:
        """Emit the intervals (low, high) of kv that the mask keeps in row `q`: low <= kv < high."""
        _, masks = self._tensors(site)
        env = {"b": site.b, "h": site.h, "q": q}
        memo: dict[Node, Any] = {}
        values = emit(
            [n for pair in self._ends or () for n in pair],
            env,
            masks,
            fast=True,
            indices=LoadIndices(None, self.indices.clamp),
            memo=memo,
        )
        return list(zip(values[::2], values[1::2], strict=True))

    def keep(
        self, site: Any, head: Values, rows: Rows, columns: Columns, places: Sequence[Any]
    ) -> list[Any]:
        """Emit one Boolean per element of `places`: whether the mask keeps it."""
        _, masks = self._tensors(site)
        elements = [_element(site, rows, columns, r, j, 1) for r, j in places]
        relatives = self._mask_stages.relatives(site, masks, head[1], elements)
        return [v[0] for v in self._mask_stages.elements(site, masks, head[1], elements, relatives)]

    def lse_offset(self, site: Any, head: Values, row: Values) -> Any:
        """Return the term that the kernel adds to the LSE of a row after the softmax, or None."""
        return row[2]

    def sink(self, tensors: Sequence[Any], h: Any) -> Any:
        """Return the attention sink of head `h`, the last captured tensor, or None."""
        return tensors[-1][h] if self.has_sink else None

    def dropout(self, tensors: Sequence[Any]) -> Any:
        """Return the state of dropout, the last captured tensor but the sink, or None."""
        return tensors[-2 if self.has_sink else -1] if self.has_dropout else None


def _element(
    site: Any, rows: Rows, columns: Columns, r: int, j: int, part: int, score: Any = None,
    known: Mapping[Node, Any] | None = None,
) -> Element:  # fmt: skip
    """Build the `Element` in row `r` and column `j` of the thread.

    Args:
        site, rows, columns: see `templates.common.hooks`.
        r, j: index of the row, index of the column.
        part: index among the values of a row or a column: 0 for the score, 1 for the mask.
        score: score q . k.
        known: values of loads that other elements share.
    """
    q, row = rows[r]
    kv, _, column = columns[j]
    steps = site.steps
    step = None if steps is None else steps[0][r] - steps[1][j]
    return Element(q, kv, row[part], column[part], step, score, known=known)
