"""Define the hooks of a variant: methods that emit its code while a GPU kernel is traced.

Hooks are plain Python objects. A kernel calls their methods while it is traced. The methods return
DSL scalars (Float32, Int32, Boolean) and tuples of them. The kernel asks once for the values of a
head, a row, a column or a block, and passes them to later hooks. All positions are Int32 and inside
the tensors: the kernel clamps the positions of rows and columns beyond the ends.

Scores are in log2 units: a kernel computes probabilities as 2**((x + block) * factor - maximum),
where x is the modified score that `score` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

Value: TypeAlias = Any  # a scalar of the DSL
Values: TypeAlias = tuple[Any, ...]


class Site(Protocol):
    """Describes the position of a tile; every hook receives one.

    Attributes:
        tensors: captured tensors, which are kernel arguments; a scalar has shape (1,).
        b, h: batch element and query head.
        q_len, kv_len: sequence lengths.
        scale: softmax scale, natural units.
        origin: position from which distances are counted: the first row of a forward tile, the
            first column of a backward tile.
        steps: offsets of the thread's rows from its first row, and of its columns from its first
            column; None if not known. Scores with the same difference of the two offsets have the
            same q - kv.
        column_group: columns whose step divided by this rounds down to the same integer have the
            same kv // column_group; a power of two, 1 if nothing is known.
    """

    tensors: Sequence[Any]
    b: Value
    h: Value
    q_len: Value
    kv_len: Value
    scale: Value
    origin: Value
    steps: tuple[Sequence[int], Sequence[int]] | None
    column_group: int


class ForwardHooks(Protocol):
    """Emits the code of the score mod and the mask for a forward.

    Attributes:
        intervals: number of kv intervals that a row keeps, for `kept_intervals`; None if the mask
            has no such form.
        has_mask: False if no score is masked.
        only_scales: whether x is the raw score and the mod only multiplies by `factor`.
        ignores_score: whether x does not depend on the raw score.
        prefetches: whether `columns` or `relatives` have a long latency, such as loads; the kernel
            then calls them early.
        branches_on_score: whether x is selected by a condition on the raw score.
        row_factor: whether scores are multiplied by a value of their row.
        instruction_estimate: estimated number of instructions that compute x.
        lists_override_mask: whether block lists take precedence over the mask, which is then not
            applied to their FULL blocks.
        has_sink: whether the hook `sink` returns a value.
        has_dropout: whether the hook `dropout` returns a tensor.
    """

    intervals: int | None
    has_mask: bool
    only_scales: bool
    ignores_score: bool
    prefetches: bool
    branches_on_score: bool
    row_factor: bool
    instruction_estimate: int
    lists_override_mask: bool
    has_sink: bool
    has_dropout: bool

    def head(self, site: Any) -> Values:
        """Compute the values that depend only on the head; called once per tile."""
        ...

    def row(self, site: Any, head: Values, q: Value) -> Values:
        """Compute the values that depend on row `q` and the head; called once per tile."""
        ...

    def pair_table(self, site: Any) -> tuple[int, Any]:
        """Return the number of a captured tensor, and its part of which each score reads an entry.

        Called only if the config says that there is such a tensor. The part belongs to the head,
        and is indexed by a value of the row and a value of the column: [rows, columns]. A kernel
        may replace the tensor in `Site.tensors` by a copy of the part.
        """
        ...

    def pair_classes(self, columns: Sequence[tuple[Value, Value, Values]]) -> list[Value] | None:
        """Return the index of each column in the part of `pair_table`; None if each has its own."""
        ...

    def pair_values(
        self,
        site: Any,
        rows: Sequence[tuple[Value, Values]],
        columns: Sequence[tuple[Value, Value, Values]],
    ) -> Any:
        """Return `pairs` of the method `score`, if all columns have one index in `pair_table`."""
        ...

    def fixed_columns(self, site: Any, head: Values, offsets: Sequence[Value]) -> Values:
        """Compute the values that depend only on a column's offset in its block.

        Args:
            offsets: offsets of the columns from the block's first column.
        """
        ...

    def column_slope(self, head: Values) -> Value:
        """Return the number to add to x per column, counted from the column given to `block`.

        Called only if the config says that an MMA adds this term, which `fixed_columns` then lacks.
        """
        ...

    def column_terms(self, site: Any, head: Values, kv: Sequence[Value]) -> list[Value]:
        """Return the term to add to x in each column `kv`.

        Called only if the config says that an MMA adds this term. Then x does not include it.
        """
        ...

    def block(self, site: Any, head: Values, kv: Value) -> Value:
        """Return the term to add to all scores of a block whose columns count from `kv`, or None."""
        ...

    def columns(
        self, site: Any, head: Values, kv: Sequence[Value], masked: bool
    ) -> Sequence[Values]:
        """Compute the values that depend on a column and the head; called once per block.

        Args:
            masked: whether to include the values that only `keep` needs.
        """
        ...

    def relatives(
        self,
        site: Any,
        head: Values,
        rows: Sequence[tuple[Value, Values]],
        columns: Sequence[tuple[Value, Value, Values]],
        places: Sequence[tuple[int, int]],
    ) -> Any:
        """Compute the values that `score` needs of each q - kv; called once per block.

        The kernel may call it before the scores are computed.
        """
        ...

    def score(
        self,
        site: Any,
        head: Values,
        rows: Sequence[tuple[Value, Values]],
        columns: Sequence[tuple[Value, Value, Values]],
        places: Sequence[tuple[int, int, Value]],
        relatives: Any,
        pairs: Any = None,
    ) -> list[Value]:
        """Compute x from raw scores, such that p = 2**((x + block) * factor - maximum).

        Args:
            rows: (q, values of `row`) of this thread's rows.
            columns: (kv, value of `fixed_columns`, values of `columns`) of this thread's columns.
            places: (index into rows, index into columns, raw score q . k) of each score.
            relatives: what the `relatives` hook returned.
            pairs: what the `pair_values` hook returned, if all columns have one index.
        """
        ...

    def initial_scores(
        self,
        site: Any,
        head: Values,
        rows: Sequence[tuple[Value, Values]],
        columns: Sequence[tuple[Value, Value, Values]],
        places: Sequence[tuple[int, int]],
        known: Any = None,
    ) -> list[Value]:
        """Compute the bias of each score, divided by `factor`.

        Called only if the config says `bias_first`. Then x does not include the bias.

        Args:
            places: (row, column) of each score.
            known: for each score, what `bias_row` returned; None to load the bias here.
        """
        ...

    def bias_row(
        self, site: Any, q: Value, kv: Value, offsets: Sequence[Any], paired: bool
    ) -> list[Any]:
        """Load the bias of several scores of row `q`, for `initial_scores`.

        Called only if `bias_is_along_rows` returns True.

        Args:
            kv: a column.
            offsets: columns of the scores, counted from `kv`.
            paired: load two neighbouring columns at once, see `pairs_are_aligned`.
        """
        ...

    def bias_is_along_rows(self, site: Any) -> bool:
        """Return whether the biases of a row are neighbours in memory."""
        ...

    def pairs_are_aligned(self, site: Any) -> Value:
        """Return whether two biases, the first in an even column, are aligned for one load (Boolean)."""
        ...

    def bias_place(self, site: Any, q: Value, kv: Value) -> Any:
        """Return a pointer to the bias of the score at (q, kv), if there is only one bias."""
        ...

    def bias_is_by_batch(self) -> bool:
        """Return whether batch elements read different elements of the bias."""
        ...

    def bias_type(self, site: Any) -> Any:
        """Return the type of the biases in memory, if there is only one bias."""
        ...

    def scores_of_biases(
        self, site: Any, head: Values, rows: Any, columns: Any, places: Any, biases: Sequence[Value]
    ) -> list[Any]:
        """Return what `initial_scores` returns, if there is only one bias.

        `biases` holds that of each score in `places`, as it is in memory.
        """
        ...

    def factor(self, site: Any, head: Values) -> Value:
        """Return the positive factor of x for the whole tile, or None for 1."""
        ...

    def kept_intervals(self, site: Any, head: Values, q: Value) -> Sequence[tuple[Value, Value]]:
        """Return the kv intervals [low, high) that row `q` keeps."""
        ...

    def keep(
        self,
        site: Any,
        head: Values,
        rows: Sequence[tuple[Value, Values]],
        columns: Sequence[tuple[Value, Value, Values]],
        places: Sequence[tuple[int, int]],
    ) -> list[Value]:
        """Return whether the mask keeps each score (Boolean), for masks without intervals."""
        ...

    def lse_offset(self, site: Any, head: Values, row: Values) -> Value:
        """Return the term that x leaves out of the row's LSE, in natural units, or None."""
        ...

    def sink(self, tensors: Sequence[Any], h: Value) -> Value:
        """Return the attention sink of query head `h`, in natural units, or None.

        The kernel adds it to the denominator of each row once. The backward does not call this
        hook, because its LSE includes the sink.

        Args:
            tensors: captured tensors, as in `Site`.
        """
        ...

    def dropout(self, tensors: Sequence[Any]) -> Any:
        """Return the state of dropout, an int64 tensor [2], or None; only forwards call this hook.

        Args:
            tensors: captured tensors, as in `Site`.
        """
        ...


class BackwardHooks(ForwardHooks, Protocol):
    """Emits the code of the recomputed score, its derivative and the gradients for a backward.

    A tile is a kv block. The kernel calls `columns` once per tile. The tile's first column is the
    origin, so that `block` is not used. The kernel calls `row` in every q block, with two rows at a
    time. `kept_intervals` takes a column and returns the intervals of q that the column keeps.
    Terms that are linear in kv - q come from `distance_term` only.

    Attributes:
        has_derivative: whether the derivative of the mod with respect to the score differs from 1.
        gradient_levels: for each learned load (a load of a captured tensor that requires grad)
            whose gradient is summed score by score, the level at which its index is known: "head",
            "row", "column", "relative" (q - kv) or "element".
        row_factors: whether the derivative of the mod depends on the row alone and is left out of
            dS in dQ = dS K. The postprocess then multiplies dQ by it.
        gradient_slots: for each learned load, the index of its gradient in the kernel's `totals`.
        gradient_repeats: for each learned load at level "relative" or "element", whether several
            diagonals or scores may read the same element of its tensor; False at other levels.
        gradient_by_block: for each learned load, whether it may read one element per column in all
            rows of a q block. It does so where all rows have the same `row_values`.
        gradient_is_stored: for each learned load, whether the kernel stores the gradient of every
            score that it visits, because no other score reads the same element. The gradient is
            not zero before.
        gradient_is_led: for each learned load, whether batch elements share its elements, so that
            batch element 0 stores the gradients and the others add theirs.
        gradient_is_dscore: whether the gradient of the score, and of every learned load, is that of
            the modified score: `dscore` would return what it got.
        loads_per_score: whether a captured tensor is read for every score or every q - kv.
        loads_per_element: whether one is read for every score, at a place that depends on more than
            q - kv.
        has_distance_term: whether `distance_term` returns a term.
    """

    has_derivative: bool
    gradient_by_block: tuple[bool, ...]
    gradient_is_stored: tuple[bool, ...]
    gradient_is_led: tuple[bool, ...]
    gradient_is_dscore: bool
    loads_per_score: bool
    loads_per_element: bool
    has_distance_term: bool
    row_factors: bool
    gradient_levels: tuple[str, ...]
    gradient_slots: tuple[int, ...]
    gradient_repeats: tuple[bool, ...]

    def score_and_derivative(
        self,
        site: Any,
        head: Values,
        rows: Sequence[tuple[Value, Values]],
        columns: Sequence[tuple[Value, Value, Values]],
        places: Sequence[tuple[int, int, Value]],
        steps: Sequence[int] | None = None,
        shared: dict[Any, Values] | None = None,
        known: Any = None,
    ) -> tuple[list[Value], list[Value] | None]:
        """Compute x as `score` does, and the derivatives of the mod with respect to the score.

        Args:
            steps: q - kv of each score, minus q - kv of the thread's first score.
            shared: cache of values that depend only on q - kv, by step; the hook reads and extends
                it.
            known: what `block_values` returned, if all rows have the same `row_values`.

        Returns:
            x and the derivatives; the derivatives are None if they are all 1.
        """
        ...

    def row_values(self, site: Any, q: Value) -> Values:
        """Return the values of row `q` on which the loads of `block_values` depend."""
        ...

    def block_values(
        self, site: Any, q: Value, columns: Sequence[tuple[Value, Value, Values]]
    ) -> Any:
        """Return `known` of the other methods, for a block of rows with the `row_values` of `q`."""
        ...

    def row_slope(self, site: Any, head: Values, row: Values) -> Value:
        """Return the derivative of the mod in a row; called only if `row_factors`."""
        ...

    def distance_term(self, site: Any, head: Values) -> Value:
        """Return the slope of the exponent in kv - q, in log2 units, or None for 0."""
        ...

    def dscore(
        self,
        site: Any,
        head: Values,
        rows: Sequence[tuple[Value, Values]],
        columns: Sequence[tuple[Value, Value, Values]],
        places: Sequence[tuple[int, int, Value, Value]],
        known: Any = None,
    ) -> tuple[list[Value], list[list[Value]], list[list[Any]]]:
        """Compute the gradients of the raw scores and of the values that each learned load reads.

        Called only if `gradient_levels` is not empty.

        Args:
            places: (row, column, raw score q . k, gradient of the modified score) of each score.
            known: what `block_values` returned, if all rows have the same `row_values`.

        Returns:
            The gradients of the raw scores times the softmax scale; the gradients of the loads; and
            for each load at level "element" whose index repeats, the index at each score, `known`
            of `gradient_index` (an empty list for other loads).
        """
        ...

    def column_class(self, site: Any, kv: Value) -> Value:
        """Return the class of column `kv`: its index in a learned table that `one_hot` is for.

        Called, as the next two methods, only if the config says `one_hot`.
        """
        ...

    def class_gradient(self, totals: Sequence[Any]) -> tuple[Any, int]:
        """Return the gradient of that table, and its axis of classes.

        Args:
            totals: gradients of the captured tensors that need one.
        """
        ...

    def class_place(self, site: Any, q: Value) -> tuple[Value, ...]:
        """Return the index of the entry of class 0 to which row `q` adds."""
        ...

    def gradient_index(
        self,
        i: int,
        site: Any,
        shape: Sequence[Value],
        q: Value | None,
        kv: Value | None,
        known: Any = None,
    ) -> tuple[Value, ...]:
        """Return the index that learned load `i` reads in a tensor of shape `shape`.

        Args:
            q, kv: position of the score; None where the level of the load does not need it.
            known: what `dscore` returned for the score; None to compute the index.
        """
        ...


class RowHooks(Protocol):
    """Emits the code of values of whole rows for the kernels before and after a main backward.

    Attributes:
        gradient_levels: for each learned load whose gradient follows from a sum over a row, the
            level at which its index is known: "head" or "row".
        gradient_slots: for each of them, the index of its gradient in the kernel's `totals`.
    """

    gradient_levels: tuple[str, ...]
    gradient_slots: tuple[int, ...]

    def value(self, site: Any, q: Value) -> Value:
        """Return the value of row `q`, or None.

        For the preprocess this is the term that shifts the row's scores, in natural units; for the
        postprocess the derivative of the mod with respect to the score.
        """
        ...

    def gradients(self, site: Any, q: Value, total: Value) -> list[Value]:
        """Compute the gradients of the learned loads from a sum over row `q`.

        Args:
            total: for the preprocess, the sum of the gradients of the modified scores; for the
                postprocess, the sum of these gradients times the scores.
        """
        ...

    def gradient_index(
        self,
        i: int,
        site: Any,
        shape: Sequence[Value],
        q: Value | None,
        kv: Value | None,
        known: Any = None,
    ) -> tuple[Value, ...]:
        """Return the index that learned load `i` reads, see `BackwardHooks.gradient_index`."""
        ...
