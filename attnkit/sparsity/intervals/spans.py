"""Sets of kv positions per row, as unions of spans with symbolic ends.

A `Span` is what a row keeps if all its gates are true: the positions not below any of `lows` and
below all of `highs`. Ends and gates are expressions of b, h, q and captured tensors. Intersections
are exact by collecting ends; unions are joined into one span where that is provably the same set.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

from attnkit.graph.affine import Affine, Sides
from attnkit.graph.ir import I32, Node, const
from attnkit.graph.simplify import TRUE, build, negate

ZERO = const(0)
UNLIMITED = const(2**31 - 1)  # an end behind every position


@dataclass(frozen=True)
class Span:
    """kv with `kv >= low` for all lows and `kv < high` for all highs, where all gates are true."""

    lows: tuple[Node, ...] = ()
    highs: tuple[Node, ...] = ()
    gates: tuple[Node, ...] = ()


Spans: TypeAlias = tuple[Span, ...]

EVERYTHING: Spans = (Span(),)
NOTHING: Spans = ()


def gated(gate: Node) -> Spans:
    """Everything in rows where a row-level bool is true, nothing in others."""
    if gate.op == "const":
        return EVERYTHING if gate.attr else NOTHING
    return (Span(gates=(gate,)),)


def ends(span: Span) -> tuple[Node, Node]:
    """A span as one low and one high end; an empty one, if a gate is false, ends at 0."""
    low = _folded("max", span.lows) if span.lows else ZERO
    high = _folded("min", span.highs) if span.highs else UNLIMITED
    return low, build("where", _folded("and", span.gates), high, ZERO) if span.gates else high


def summed(sums: Affine) -> Node:
    """An affine sum as an expression, written as a person would: `q - 5`, not `q + -5`."""
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


class Algebra:
    """Intersection and union of spans, simplified by what can be proven about their ends."""

    def __init__(self, sides: Sides) -> None:
        self._sides = sides

    def at_most(self, a: Node, b: Node) -> bool:
        """Whether `a <= b` is certain in every row, as far as the expressions alone tell."""
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
        """What is in both."""
        found: Spans = NOTHING
        for x in a:
            for y in b:
                both = self._both(x, y)
                if both is not None:
                    found = self.join(found, (both,))
        return found

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
        """The ends that no other one implies."""
        kept: list[Node] = []
        for n in dict.fromkeys(nodes):
            if not any(implies(m, n) for m in kept):
                kept = [m for m in kept if not implies(n, m)] + [n]
        return tuple(kept)

    def join(self, a: Spans, b: Spans) -> Spans:
        """What is in either."""
        spans = list(a)
        for new in b:
            merged = new
            again = True
            while again:
                again = False
                for i, old in enumerate(spans):
                    union = self._merged(old, merged)
                    if union is not None:
                        merged, again = union, True
                        del spans[i]
                        break
            spans.append(merged)
        return tuple(spans)

    def _merged(self, x: Span, y: Span) -> Span | None:
        """One span that is the union of two, where that is certain."""
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
        """Of two spans with the same gates: they begin or end together, or surely touch."""
        same_low, same_high = set(x.lows) == set(y.lows), set(x.highs) == set(y.highs)
        touch = all(
            self.at_most(low, high) for low in (*x.lows, *y.lows) for high in (*x.highs, *y.highs)
        )  # also the ends of each: an empty span far away would stretch the hull
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
        """`where(gate, x, y)`: gates exclude each other, or one span is a whole row."""
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
