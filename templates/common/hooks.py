"""What a variant gives to a GPU kernel: values, emitted while the kernel is traced.

Hooks are plain Python objects. A kernel calls their methods while it is traced; they return
scalars of the DSL (Float32, Int32, Boolean) and tuples of them. What is known once a head, a row,
a column or a block is asked for once, and handed back to the hooks that follow. All positions are
Int32 and lie inside the tensors: the kernel clamps those of rows and columns beyond the ends.

Scores are in units of log2: a kernel computes probabilities as 2**(x * factor + block - maximum).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

Value: TypeAlias = Any  # a scalar of the DSL
Values: TypeAlias = tuple[Any, ...]


class Site(Protocol):
    """Where a tile is: given to every hook.

    Attributes:
        tensors: captured tensors, kernel arguments; one of no dimensions has shape (1,).
        b, h: batch element and query head.
        q_len, kv_len: lengths.
        scale: softmax scale, natural units.
        origin: a position within the tile, from which distances along kv are best counted.
        steps: offsets of the thread's rows, and of its columns, from their first: elements whose
            offsets differ by the same number have the same q - kv. None if that is not known.
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
    """The functions of a variant's forward.

    Attributes:
        intervals: intervals a row keeps, for `ends`; None if the mask has no such form.
        has_mask: False if every score is kept.
        raw: whether x is the raw score, and `factor` does all there is to do.
        blind: whether x does not depend on the score at all.
        ahead: whether `columns` or `relatives` give values that are best asked for early, such as
            loads.
        selects: whether x is chosen by a condition on the score.
        row_factor: whether scores are multiplied by a number of their row.
        effort: about how many instructions x takes.
        listed: block lists overrule the mask: blocks that they keep whole are not masked.
    """

    intervals: int | None
    has_mask: bool
    raw: bool
    blind: bool
    ahead: bool
    selects: bool
    row_factor: bool
    effort: int
    listed: bool

    def head(self, site: Any) -> Values:
        """Values of a tile, once a tile."""
        ...

    def row(self, site: Any, head: Values, q: Value) -> Values:
        """Values of one row, once a tile."""
        ...

    def held(self, site: Any, head: Values, offsets: Sequence[Value]) -> Values:
        """For columns at these offsets from a block's first: what is the same in every block."""
        ...

    def block(self, site: Any, head: Values, kv: Value) -> Value:
        """One value for a block whose first column is kv: added to all of its x, or None."""
        ...

    def columns(
        self, site: Any, head: Values, kv: Sequence[Value], masked: bool
    ) -> Sequence[Values]:
        """Values of columns, once a block; what `keep` needs only if the block is masked."""
        ...

    def relatives(
        self,
        site: Any,
        head: Values,
        rows: Sequence[tuple[Value, Values]],
        columns: Sequence[tuple[Value, Value, Values]],
        places: Sequence[tuple[int, int]],
    ) -> Any:
        """What `element` needs that depends on q - kv, once a block; may be asked for before the
        scores are there."""
        ...

    def element(
        self,
        site: Any,
        head: Values,
        rows: Sequence[tuple[Value, Values]],
        columns: Sequence[tuple[Value, Value, Values]],
        places: Sequence[tuple[int, int, Value]],
        relatives: Any,
    ) -> list[Value]:
        """x of scores, in units such that p = 2**(x * factor + block - maximum).

        Args:
            rows: (q, values of `row`) of this thread's rows.
            columns: (kv, value of `held`, values of `columns`) of this thread's columns.
            places: (which row, which column, raw score q . k) of each element.
        """
        ...

    def factor(self, site: Any, head: Values) -> Value:
        """What x is multiplied by, above 0 and the same for a tile; None stands for 1."""
        ...

    def ends(self, site: Any, head: Values, q: Value) -> Sequence[tuple[Value, Value]]:
        """The intervals [low, high) of kv that row q keeps."""
        ...

    def keep(
        self,
        site: Any,
        head: Values,
        rows: Sequence[tuple[Value, Values]],
        columns: Sequence[tuple[Value, Value, Values]],
        places: Sequence[tuple[int, int]],
    ) -> list[Value]:
        """Whether scores are kept (Boolean), for masks without intervals."""
        ...

    def lse(self, site: Any, head: Values, row: Values) -> Value:
        """What the row adds to its LSE (natural units) and leaves out of x, or None."""
        ...


class BackwardHooks(ForwardHooks, Protocol):
    """The functions of a variant's backward: the score again, its slope, and gradients.

    The tile is a kv tile: its columns are asked for once, and its first column is the origin, so
    that `block` is not used. Rows come two at a time, with `row` asked for in every block. `ends`
    is asked for columns: the intervals of q that a column keeps. What is linear in kv - q is in no
    other hook than `distance`.

    Attributes:
        sloped: whether the derivative of the mod by the score is other than 1.
        learned: for each load of a captured tensor that gets a gradient, the level at which its
            index is known: "head", "row", "column", "relative" (q - kv) or "element".
        slots: for each such load, the number of its gradient in `totals`.
        gathers: whether a captured tensor is read for every score, or every q - kv.
        distant: whether `distance` gives something.
    """

    sloped: bool
    gathers: bool
    distant: bool
    learned: tuple[str, ...]
    slots: tuple[int, ...]

    def both(
        self,
        site: Any,
        head: Values,
        rows: Sequence[tuple[Value, Values]],
        columns: Sequence[tuple[Value, Value, Values]],
        places: Sequence[tuple[int, int, Value]],
        steps: Sequence[int] | None = None,
        shared: dict[Any, Values] | None = None,
    ) -> tuple[list[Value], list[Value] | None]:
        """x of scores as in `element`, and the derivatives of the mod by the score.

        Args:
            steps: of each element, q - kv less that of the thread's first.
            shared: what depends on q - kv alone, by step; added to.

        None instead of the derivatives if they are 1.
        """
        ...

    def distance(self, site: Any, head: Values) -> Value:
        """What the exponent has for each step of kv - q, log2 units, or None."""
        ...

    def adjoint(
        self,
        site: Any,
        head: Values,
        rows: Sequence[tuple[Value, Values]],
        columns: Sequence[tuple[Value, Value, Values]],
        places: Sequence[tuple[int, int, Value, Value]],
    ) -> tuple[list[Value], list[list[Value]]]:
        """Gradients of scores, and for each learned load those of its values; needed if `learned`.

        Args:
            places: (row, column, raw score q . k, gradient of the modified score) of each element.

        Returns:
            Gradients of the raw scores times the softmax scale, and those of the loads.
        """
        ...

    def place(
        self, i: int, site: Any, shape: Sequence[Value], q: Value | None, kv: Value | None
    ) -> tuple[Value, ...]:
        """The index of learned load i in its tensor, of this shape; q and kv as its level says."""
        ...
