"""Define how a variant plugs into the GPU kernels: hooks emit code while a kernel is traced.

Hooks are plain Python objects. A kernel calls their methods while it is traced; they return scalars
of the DSL (Float32, Int32, Boolean) and tuples of them. The kernel asks once for the values of a
head, a row, a column or a block, and passes them to later hooks. All positions are Int32 and lie
inside the tensors: the kernel clamps those of rows and columns beyond the ends.

Scores are in units of log2: a kernel computes probabilities as 2**(x * factor + block - maximum),
where x is the modified score that `score` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

Value: TypeAlias = Any  # a scalar of the DSL
Values: TypeAlias = tuple[Any, ...]


class Site(Protocol):
    """Describes where a tile is; every hook receives one.

    Attributes:
        tensors: captured tensors, arguments of the kernel; a scalar has shape (1,).
        b, h: batch element and query head.
        q_len, kv_len: sequence lengths.
        scale: softmax scale, natural units.
        origin: position along kv within the tile, from which distances are counted.
        steps: offsets of the thread's rows from its first row, and of its columns from its first
            column. Scores whose two offsets have the same difference have the same q - kv. None if
            not known.
    """

    tensors: Sequence[Any]
    b: Value
    h: Value
    q_len: Value
    kv_len: Value
    scale: Value
    origin: Value
    steps: tuple[Sequence[int], Sequence[int]] | None


class ForwardHooks(Protocol):
    """Emits the score mod and the mask of a forward.

    Attributes:
        intervals: how many intervals of kv a row keeps, for `kept_intervals`; None if the mask has
            no such form.
        has_mask: False if no score is masked.
        only_scales: x is the raw score; `factor` is all that the mod does.
        ignores_score: x does not depend on the score.
        prefetches: `columns` or `relatives` take long, such as loads: the kernel calls them early.
        branches_on_score: a condition on the score selects x.
        row_factor: scores are multiplied by a value of their row.
        instruction_estimate: estimate of the instructions that compute x.
        lists_override_mask: block lists overrule the mask, which is not applied to their FULL
            blocks.
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

    def head(self, site: Any) -> Values:
        """Compute the values that depend on the head alone; called once per tile."""
        ...

    def row(self, site: Any, head: Values, q: Value) -> Values:
        """Compute the values that depend on row q and the head; called once per tile."""
        ...

    def fixed_columns(self, site: Any, head: Values, offsets: Sequence[Value]) -> Values:
        """Compute the values of columns that are the same in every block.

        Args:
            offsets: of the columns from the block's first column.
        """
        ...

    def block(self, site: Any, head: Values, kv: Value) -> Value:
        """Return what to add to every x of the block whose first column is kv, or None."""
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
        """Compute the values of q - kv that `score` needs; called once per block.

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
    ) -> list[Value]:
        """Compute x from raw scores, such that p = 2**(x * factor + block - maximum).

        Args:
            rows: (q, values of `row`) of this thread's rows.
            columns: (kv, value of `fixed_columns`, values of `columns`) of this thread's columns.
            places: (index into rows, index into columns, raw score q . k) of each score.
            relatives: what the hook of that name has returned.
        """
        ...

    def factor(self, site: Any, head: Values) -> Value:
        """Return the factor of x, positive and the same for a whole tile; None for 1."""
        ...

    def kept_intervals(self, site: Any, head: Values, q: Value) -> Sequence[tuple[Value, Value]]:
        """Return the intervals [low, high) of kv that row q keeps."""
        ...

    def keep(
        self,
        site: Any,
        head: Values,
        rows: Sequence[tuple[Value, Values]],
        columns: Sequence[tuple[Value, Value, Values]],
        places: Sequence[tuple[int, int]],
    ) -> list[Value]:
        """Return whether the mask keeps each score (Boolean); for masks without intervals."""
        ...

    def lse_offset(self, site: Any, head: Values, row: Values) -> Value:
        """Return the term of the row's LSE that x leaves out, in natural units, or None."""
        ...


class BackwardHooks(ForwardHooks, Protocol):
    """Emits the recomputed score, its derivative, and gradients, for a backward.

    A tile is a kv block: the kernel asks for its columns once, and its first column is the origin,
    so that `block` is not used. Rows come two at a time, with `row` called in every block.
    `kept_intervals` is called for columns and returns the intervals of q that a column keeps. Only
    `distance_term` has the terms that are linear in kv - q.

    Attributes:
        has_derivative: whether the derivative of the mod by the score differs from 1.
        gradient_levels: for each load of a captured tensor that wants a gradient, the level at
            which its index is known: "head", "row", "column", "relative" (q - kv) or "element".
        gradient_slots: for each such load, the index of its gradient in the kernel's `totals`.
        loads_per_score: whether a captured tensor is read for every score or every q - kv.
        has_distance_term: whether `distance_term` returns a term.
    """

    has_derivative: bool
    loads_per_score: bool
    has_distance_term: bool
    gradient_levels: tuple[str, ...]
    gradient_slots: tuple[int, ...]

    def score_and_derivative(
        self,
        site: Any,
        head: Values,
        rows: Sequence[tuple[Value, Values]],
        columns: Sequence[tuple[Value, Value, Values]],
        places: Sequence[tuple[int, int, Value]],
        steps: Sequence[int] | None = None,
        shared: dict[Any, Values] | None = None,
    ) -> tuple[list[Value], list[Value] | None]:
        """Compute x as `score` does, and the derivatives of the mod by the score.

        Args:
            steps: q - kv of each score, minus q - kv of the thread's first score.
            shared: values that depend on q - kv alone, by step; the hook reads and extends it.

        Returns:
            x, and the derivatives; None for these if they are 1.
        """
        ...

    def distance_term(self, site: Any, head: Values) -> Value:
        """Return what the exponent gains when kv - q grows by 1, in log2 units, or None."""
        ...

    def dscore(
        self,
        site: Any,
        head: Values,
        rows: Sequence[tuple[Value, Values]],
        columns: Sequence[tuple[Value, Value, Values]],
        places: Sequence[tuple[int, int, Value, Value]],
    ) -> tuple[list[Value], list[list[Value]]]:
        """Compute the gradients of raw scores, and of the values that each learned load reads.

        Called only if `gradient_levels` is not empty.

        Args:
            places: (row, column, raw score q . k, gradient of the modified score) of each score.

        Returns:
            Gradients of the raw scores times the softmax scale, and those of the loads.
        """
        ...

    def gradient_index(
        self, i: int, site: Any, shape: Sequence[Value], q: Value | None, kv: Value | None
    ) -> tuple[Value, ...]:
        """Return the index that learned load i reads in a tensor of this shape.

        Args:
            q, kv: position of the score; None where the level of the load does not need it.
        """
        ...
