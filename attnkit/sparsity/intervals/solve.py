"""Solve a mask for kv: compute from its graph the spans that each row keeps.

Negations are pushed down to the comparisons. A conjunction narrows a window member by member. A
disjunction is the union of what its members keep inside the window. A comparison is solved for kv
by inverting affine sums, floor divisions, shifts, abs, min, max and where. If an expression cannot
be inverted, but depends on kv alone or on q - kv alone, its values are searched (`tables`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

from attnkit.graph.affine import KV, Affine, Side, Sides, comparable
from attnkit.graph.ir import BOOL, F32, Node, const
from attnkit.graph.simplify import build, negate
from attnkit.sparsity.intervals.spans import (
    EVERYTHING,
    NOTHING,
    Span,
    SpanAlgebra,
    Spans,
    rows_where,
    to_node,
)
from attnkit.sparsity.intervals.tables import Refusal, RowTables
from attnkit.sparsity.mask_rewrites import members

_MAX_STEPS = 4000
_MAX_SPANS = 64
_ROW = (Side.CONST, Side.Q)
_SEARCHED = (Side.KV, Side.DIAGONAL)

_ONE = Affine((), 1)


class Solver:
    """Solves bool expressions for kv, inside a window of kv positions of each row."""

    def __init__(self, sides: Sides, algebra: SpanAlgebra, tables: RowTables) -> None:
        self._sides = sides
        self._algebra = algebra
        self._tables = tables
        self._steps = 0

    def solve(self, n: Node, keep: bool = True, window: Spans = EVERYTHING) -> Spans:
        """Return the part of the window where a bool expression equals `keep`.

        Raises:
            Refusal: the solver finds no union of few intervals.
        """
        self._step()
        if not window:
            return NOTHING
        side = self._sides.side(n)
        if side in _ROW:
            gate = self._sides.alone(n)
            return self._algebra.meet(window, rows_where(gate if keep else negate(gate)))
        try:
            return self._bounded(self._by_structure(n, keep, window))
        except Refusal:
            if side not in _SEARCHED:
                raise
        return self._by_values(n, keep, window)

    def _step(self) -> None:
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise Refusal("its logic is too deep")

    def _bounded(self, spans: Spans) -> Spans:
        if len(spans) > _MAX_SPANS:
            raise Refusal(f"its rows are unions of more than {_MAX_SPANS} intervals")
        return spans

    # --- logic

    def _by_structure(self, n: Node, keep: bool, window: Spans) -> Spans:
        if comparable(n):
            return self._compare(n, keep, window)
        if n.op == "not":
            return self.solve(n.args[0], not keep, window)
        if n.op == "where":
            return self._choose(n.args[0], n.args[1], n.args[2], keep, window)
        if any(a.type != BOOL for a in n.args) or len(n.args) != 2:
            raise Refusal(self._unknown(n))
        a, b = n.args
        if n.op in ("and", "or"):
            every = keep == (n.op == "and")
            return (self._every if every else self._any)(n.op, members(n), keep, window)
        if n.op == "xor":
            return self._choose(a, negate(b), b, keep, window)
        if n.op == "eq":
            return self._choose(a, b, negate(b), keep, window)
        # False < True: a < b is ~a & b, a <= b is ~a | b
        op = {"lt": "and", "le": "or"}[n.op]
        return self.solve(build(op, negate(a), b), keep, window)

    def _choose(self, c: Node, a: Node, b: Node, keep: bool, window: Spans) -> Spans:
        """Return the part of the window where `where(c, a, b)` equals `keep`.

        The operands of an xor are swapped if only `b` is known per row.
        """
        if self._sides.side(c) not in _ROW and self._sides.side(b) in _ROW and a is negate(b):
            c, a, b = b, negate(c), c  # c ^ b = b ^ c
        then = self.solve(a, keep, self.solve(c, True, window))
        other = self.solve(b, keep, self.solve(c, False, window))
        return self._algebra.join(then, other)

    def _every(self, op: str, members: Sequence[Node], keep: bool, window: Spans) -> Spans:
        """Narrow the window by each member, and retry refused members in the narrower window."""
        waiting = list(members)
        while waiting:
            refused: dict[Node, Refusal] = {}
            for m in waiting:
                try:
                    window = self.solve(m, keep, window)
                except Refusal as refusal:
                    refused[m] = refusal
            left = list(refused)
            if left == waiting:
                left, window = self._grouped(op, members, left, keep, window)
                if left == waiting:
                    raise refused[left[0]]
            waiting = left
        return window

    def _any(self, op: str, members: Sequence[Node], keep: bool, window: Spans) -> Spans:
        union = NOTHING
        refused: dict[Node, Refusal] = {}
        for m in members:
            try:
                union = self._bounded(self._algebra.join(union, self.solve(m, keep, window)))
            except Refusal as refusal:
                refused[m] = refusal
        while refused:
            first = next(iter(refused))
            group = self._group(first, members)
            if len(group) < 2:
                raise refused[first]
            more = self._by_values(reduce(lambda a, b: build(op, a, b), group), keep, window)
            union = self._bounded(self._algebra.join(union, more))
            refused = {m: r for m, r in refused.items() if m not in group}
        return union

    def _group(self, n: Node, members: Sequence[Node]) -> list[Node]:
        """Return the members on the side of `n`, or none if that side cannot be searched."""
        side = self._sides.side(n)
        return [m for m in members if self._sides.side(m) is side] if side in _SEARCHED else []

    def _grouped(
        self, op: str, members: Sequence[Node], refused: list[Node], keep: bool, window: Spans
    ) -> tuple[list[Node], Spans]:
        """Solve refused members of one side by a common search, which may find fewer intervals.

        Returns:
            The members that are still refused, and the narrowed window.
        """
        for n in refused:
            group = self._group(n, members)
            if len(group) > 1:
                joined = reduce(lambda a, b: build(op, a, b), group)
                try:
                    window = self._by_values(joined, keep, window)
                except Refusal:
                    continue
                return [m for m in refused if m not in group], window
        return refused, window

    def _by_values(self, n: Node, keep: bool, window: Spans) -> Spans:
        """Solve an expression of kv alone, or of q - kv alone, by evaluating every position."""
        side = self._sides.side(n)
        search = self._tables.where_kv if side is Side.KV else self._tables.where_diagonal
        return search(n, keep, window)

    # --- comparisons of integers

    def _compare(self, n: Node, keep: bool, window: Spans) -> Spans:
        sums = self._sides.difference(n)
        zero, one = Affine((), 0), _ONE
        if n.op == "eq":
            if keep:
                return self._between(sums, zero, one, window)
            below = self._between(sums, None, zero, window)
            return self._algebra.join(below, self._between(sums, one, None, window))
        limit = zero if n.op == "lt" else one  # a < b: a - b < 0; a <= b: a - b < 1
        if keep:
            return self._between(sums, None, limit, window)
        return self._between(sums, limit, None, window)

    def _between(
        self, sums: Affine, low: Affine | None, high: Affine | None, window: Spans
    ) -> Spans:
        """Return the part of the window where `low <= sums < high`.

        The ends `low` and `high` depend on the row alone. None means no limit.
        """
        terms = [(n, c) for n, c in sums.terms if self._sides.side(n) not in _ROW]
        row = Affine(tuple(t for t in sums.terms if t not in terms), sums.offset).scaled(-1)
        low, high = (None if x is None else x.plus(row) for x in (low, high))
        if not terms:
            return self._gate(low, high, window)
        if len(terms) == 1:
            n, c = terms[0]
            return self._inverted(n, *self._divided(low, high, c), window)
        return self._searched(terms, low, high, window)

    def _gate(self, low: Affine | None, high: Affine | None, window: Spans) -> Spans:
        """Return the window in rows where `low <= 0 < high`, and nothing in other rows."""
        for op, x in (("le", low), ("gt", high)):
            if x is not None:
                gate = build(op, self._node(x), const(0))
                window = self._algebra.meet(window, rows_where(gate))
        return window

    def _divided(
        self, low: Affine | None, high: Affine | None, c: int
    ) -> tuple[Affine | None, Affine | None]:
        """Return limits (low, high) of x that are equivalent to `low <= c * x < high`."""
        if c < 0:  # 1 - high <= -c * x < 1 - low
            low, high = (None if x is None else _ONE.plus(x.scaled(-1)) for x in (high, low))
        if abs(c) == 1:
            return low, high
        up = Affine((), abs(c) - 1)  # x >= ceil(low / c), x < ceil(high / c)
        ends = [
            None
            if x is None
            else self._sides.affine(build("fdiv", self._node(x.plus(up)), const(abs(c))))
            for x in (low, high)
        ]
        return ends[0], ends[1]

    def _node(self, sums: Affine) -> Node:
        return to_node(Affine(tuple((self._sides.alone(n), c) for n, c in sums.terms), sums.offset))

    def _searched(
        self,
        terms: Sequence[tuple[Node, int]],
        low: Affine | None,
        high: Affine | None,
        window: Spans,
    ) -> Spans:
        if any(self._sides.side(n) is not Side.KV for n, _ in terms):
            shown = " + ".join(self._tables.formula(n) for n, _ in terms)
            raise Refusal(f"`{shown}` depends on q and kv together")
        first, stop = (None if x is None else self._node(x) for x in (low, high))
        if low is not None and high is not None and low.plus(_ONE) == high and first is not None:
            return self._tables.equal(tuple(terms), first, window)
        return self._tables.between(tuple(terms), first, stop, window)

    def _inverted(self, n: Node, low: Affine | None, high: Affine | None, window: Spans) -> Spans:
        """Return the part of the window where `low <= n < high`, for a node that depends on kv."""
        self._step()
        if n is KV:
            lows = () if low is None else (self._node(low),)
            highs = () if high is None else (self._node(high),)
            return self._algebra.meet(window, (Span(lows, highs),))
        rule = _INVERSES.get(n.op)
        try:
            if rule is not None:
                return self._bounded(rule(self, n, low, high, window))
        except Refusal:
            if self._sides.side(n) is not Side.KV:
                raise
        return self._searched([(n, 1)], low, high, window)

    # --- inverses: each returns the part of the window where `low <= n < high`, for one operation

    def _inside(self, n: Node, low: Affine | None, high: Affine | None, window: Spans) -> Spans:
        return self._between(self._sides.affine(n), low, high, window)

    def _quotient(self, n: Node, low: Affine | None, high: Affine | None, window: Spans) -> Spans:
        x, by = n.args
        number = int(by.attr) if by.op == "const" else -1  # type: ignore[arg-type]
        if number < (0 if n.op == "shr" else 1):
            raise Refusal(self._unknown(n))
        size = 1 << number if n.op == "shr" else number
        # x // s >= low is x >= s * low, x // s < high is x < s * high
        low, high = (None if end is None else end.scaled(size) for end in (low, high))
        return self._inside(x, low, high, window)

    def _abs(self, n: Node, low: Affine | None, high: Affine | None, window: Spans) -> Spans:
        x = n.args[0]
        if high is not None:  # -high < x < high
            window = self._inside(x, _ONE.plus(high.scaled(-1)), high, window)
        if low is None:
            return window
        above = self._inside(x, low, None, window)
        below = self._inside(x, None, _ONE.plus(low.scaled(-1)), window)
        return self._algebra.join(above, below)

    def _least(self, n: Node, low: Affine | None, high: Affine | None, window: Spans) -> Spans:
        """Return the part of the window where `low <= min(x, y) < high`, or the same for max.

        For min, both arguments are at least `low` and one is below `high`. For max, both are below
        `high` and one is at least `low`.
        """
        ends = ((low, None), (None, high))
        every, some = ends if n.op == "min" else ends[::-1]
        if every != (None, None):
            for x in n.args:
                window = self._inside(x, every[0], every[1], window)
        if some == (None, None):
            return window
        parts = [self._inside(x, some[0], some[1], window) for x in n.args]
        return self._algebra.join(*parts)

    def _where(self, n: Node, low: Affine | None, high: Affine | None, window: Spans) -> Spans:
        c, a, b = n.args
        then = self._inside(a, low, high, self.solve(c, True, window))
        other = self._inside(b, low, high, self.solve(c, False, window))
        return self._algebra.join(then, other)

    def _cast(self, n: Node, low: Affine | None, high: Affine | None, window: Spans) -> Spans:
        c = n.args[0]
        if c.type != BOOL:
            raise Refusal(self._unknown(n))
        parts = []
        for keep in (False, True):  # low <= keep < high
            shift = Affine((), -int(keep))
            ends = [None if x is None else x.plus(shift) for x in (low, high)]
            parts.append(self._gate(ends[0], ends[1], self.solve(c, keep, window)))
        return self._algebra.join(*parts)

    def _unknown(self, n: Node) -> str:
        shown = self._tables.formula(n)
        if n.args and n.args[0].type == F32:
            return f"`{shown}` compares floats that depend on q and kv"
        return f"`{shown}` cannot be solved for kv"


_Inverse = Callable[[Solver, Node, Affine | None, Affine | None, Spans], Spans]
_INVERSES: dict[str, _Inverse] = {
    "fdiv": Solver._quotient,
    "shr": Solver._quotient,
    "abs": Solver._abs,
    "min": Solver._least,
    "max": Solver._least,
    "where": Solver._where,
    "cast": Solver._cast,
}
