"""Represent the kv positions that each row keeps, as unions of spans with symbolic ends.

In rows where all its gates are True, a `Span` keeps the positions that are not below any of its
`lows` and are below all of its `highs`. In other rows it keeps nothing. Ends and gates are
expressions of b, h, q and captured tensors. An intersection is exact: it collects the ends. A union
of two spans becomes one span only if that is provably the same set.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import reduce
from typing import NamedTuple, TypeAlias

from attnkit.graph.affine import Affine, Sides
from attnkit.graph.ir import I32, Node, const
from attnkit.graph.simplify import TRUE, build, negate

ZERO = const(0)
UNLIMITED = const(2**31 - 1)  # an end beyond every position


class Span(NamedTuple):
    """Keeps kv with `low <= kv < high` for all lows and highs, in rows where all gates are True."""

    lows: tuple[Node, ...] = ()
    highs: tuple[Node, ...] = ()
    gates: tuple[Node, ...] = ()


Spans: TypeAlias = tuple[Span, ...]

EVERYTHING: Spans = (Span(),)
NOTHING: Spans = ()


def rows_where(gate: Node) -> Spans:
    """Return spans that keep every position in rows where `gate` is True, and none elsewhere."""
    if gate.op == "const":
        return EVERYTHING if gate.attr else NOTHING
    return (Span(gates=(gate,)),)


def ends(span: Span) -> tuple[Node, Node]:
    """Return one low and one high end of a span. In rows where a gate is False, high is 0."""
    low = _folded("max", span.lows) if span.lows else ZERO
    high = _folded("min", span.highs) if span.highs else UNLIMITED
    return low, build("where", _folded("and", span.gates), high, ZERO) if span.gates else high


def to_node(sums: Affine) -> Node:
    """Return the expression of an affine sum as a person would write it: `q - 5`, not `q + -5`."""
    result: Node | None = None
    for n, c in sorted(sums.terms, key=lambda term: term[1] < 0):
        part = n if abs(c) == 1 else build("mul", n, const(abs(c)))
        if result is None:
            result = part if c > 0 else build("neg", part)
        else:
            result = build("add" if c > 0 else "sub", result, part)
    if result is None:
        return const(sums.offset)
    if sums.offset and result.op == "neg":
        return build("sub", const(sums.offset), result.args[0])  # -x + c = c - x
    op = "add" if sums.offset > 0 else "sub"
    return build(op, result, const(abs(sums.offset)))


class SpanAlgebra:
    """Computes intersections and unions of spans, and simplifies them by proven facts."""

    def __init__(self, sides: Sides) -> None:
        self._sides = sides

    def at_most(self, a: Node, b: Node) -> bool:
        """Return whether the expressions alone prove `a <= b` in every row."""
        if b is UNLIMITED or self._is_nonnegative(b, a):
            return True
        if a.op == "max" and a.type == I32:
            return all(self.at_most(x, b) for x in a.args)
        if b.op == "min":
            return all(self.at_most(a, x) for x in b.args)
        if a.op == "min" and any(self.at_most(x, b) for x in a.args):
            return True
        return b.op == "max" and any(self.at_most(a, x) for x in b.args)

    def _is_nonnegative(self, b: Node, a: Node) -> bool:
        sums = self._sides.affine(b).plus(self._sides.affine(a).scaled(-1))
        return sums.offset >= 0 and all(n.op == "arg" and c > 0 for n, c in sums.terms)

    def meet(self, a: Spans, b: Spans) -> Spans:
        """Return the intersection of two unions of spans."""
        common: Spans = NOTHING
        for x in a:
            for y in b:
                both = self._both(x, y)
                if both is not None:
                    common = self.join(common, (both,))
        return common

    def _both(self, x: Span, y: Span) -> Span | None:
        gates = tuple(dict.fromkeys((*x.gates, *y.gates)))
        if any(negate(g) in gates for g in gates):
            return None
        lows = self._tightest((*x.lows, *y.lows), lambda a, b: self.at_most(b, a))
        lows = tuple(n for n in lows if not self.at_most(n, ZERO))  # kv >= 0 anyway
        highs = self._tightest((*x.highs, *y.highs), self.at_most)
        if any(self.at_most(high, low) for low in (*lows, ZERO) for high in highs):
            return None
        return Span(lows, highs, gates)

    @staticmethod
    def _tightest(nodes: Iterable[Node], implies: Callable[[Node, Node], bool]) -> tuple[Node, ...]:
        """Return the ends that no other end implies."""
        kept: list[Node] = []
        for n in dict.fromkeys(nodes):
            if not any(implies(m, n) for m in kept):
                kept = [m for m in kept if not implies(n, m)] + [n]
        return tuple(kept)

    def join(self, a: Spans, b: Spans) -> Spans:
        """Return the union of two unions of spans."""
        spans = list(a)
        for new in b:
            merged = new
            changed = True
            while changed:
                changed = False
                for i, old in enumerate(spans):
                    union = self._merged(old, merged)
                    if union is not None:
                        merged, changed = union, True
                        del spans[i]
                        break
            spans.append(merged)
        return tuple(spans)

    def _merged(self, x: Span, y: Span) -> Span | None:
        """Return one span that is provably the union of two, or None if none is known."""
        if self._inside(x, y):
            return y
        if self._inside(y, x):
            return x
        if set(x.gates) == set(y.gates):
            return self._hull(x, y)
        return self._chosen(x, y)

    def _inside(self, x: Span, y: Span) -> bool:
        return (
            set(y.gates) <= set(x.gates)
            and all(any(self.at_most(low, own) for own in (*x.lows, ZERO)) for low in y.lows)
            and all(any(self.at_most(own, high) for own in x.highs) for high in y.highs)
        )

    def _hull(self, x: Span, y: Span) -> Span | None:
        """Return the union of two spans with equal gates, or None if it may not be one span."""
        same_low, same_high = set(x.lows) == set(y.lows), set(x.highs) == set(y.highs)
        touch = all(
            self.at_most(low, high) for low in (*x.lows, *y.lows) for high in (*x.highs, *y.highs)
        )  # each span's own ends too, because an empty span far away would extend the hull
        if not (same_low or same_high or touch):
            return None
        lows: tuple[Node, ...] = x.lows
        highs: tuple[Node, ...] = x.highs
        if not same_low:
            lows = (build("min", _folded("max", x.lows), _folded("max", y.lows)),) if (
                x.lows and y.lows
            ) else ()  # fmt: skip
        if not same_high:
            highs = (build("max", _folded("min", x.highs), _folded("min", y.highs)),) if (
                x.highs and y.highs
            ) else ()  # fmt: skip
        return Span(lows, highs, x.gates)

    def _chosen(self, x: Span, y: Span) -> Span | None:
        """Return the union of two spans as `where(gate, x, y)`, or None if no gate selects one.

        A gate selects one if the other span has its negation, or if one span keeps whole rows.
        """
        common = tuple(g for g in x.gates if g in y.gates)
        opposed = next((g for g in x.gates if negate(g) in y.gates), None)
        if opposed is not None:
            done = {*common, opposed, negate(opposed)}
            first = ends(_without(x, done))
            gate = opposed
        elif not x.lows and not x.highs:
            done = set(common)
            first = ZERO, UNLIMITED
            gate = _folded("and", [g for g in x.gates if g not in common])
        elif not y.lows and not y.highs:
            return self._chosen(y, x)
        else:
            return None
        second = ends(_without(y, done))
        low, high = (build("where", gate, a, b) for a, b in zip(first, second, strict=True))
        return Span(() if low is ZERO else (low,), () if high is UNLIMITED else (high,), common)


def _without(span: Span, gates: Collection[Node]) -> Span:
    return Span(span.lows, span.highs, tuple(g for g in span.gates if g not in gates))


def _folded(op: str, nodes: Sequence[Node]) -> Node:
    return reduce(lambda a, b: build(op, a, b), nodes) if nodes else TRUE
