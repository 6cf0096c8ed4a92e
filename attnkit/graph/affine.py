"""Classify expressions as functions of q, kv or q - kv, and convert integer sums to affine form.

An expression over (q, kv) is *one-sided* when it depends on q alone, on kv alone, on the diagonal
d = q - kv alone, or on neither. b and h count as constants, because they never vary inside a tile.
A one-sided expression can be tabulated exactly in O(length), which makes classification both exact
and cheap. Integer sums are first converted to affine normal form, so that terms cancel:
`(doc[q] + q) - (doc[q] + kv)` is `q - kv`, which depends on the diagonal.

The affine rules hold for exact integers, so they are valid only where no node leaves int32.
`sparsity.index_bounds.check_bounds` proves that before any use for a mask.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable
from typing import NamedTuple

from attnkit.graph import ir
from attnkit.graph.ir import BOOL, I32, Node


class Side(enum.Enum):
    """Enumerates what an expression can depend on inside a tile, where b and h are constant."""

    CONST = "const"
    Q = "q"
    KV = "kv"
    DIAGONAL = "q - kv"
    MIXED = "mixed"


_ARG_SIDE = {"q": Side.Q, "kv": Side.KV, "b": Side.CONST, "h": Side.CONST}

# Larger products are not expanded, so that sums of intervals cannot leave int64.
_MAX_COEFFICIENT = 1 << 20
_MAX_OFFSET = 1 << 40

Q = ir.arg("q")
KV = ir.arg("kv")

Terms = tuple[tuple[Node, int], ...]


class Affine(NamedTuple):
    """Represents the integer sum `sum(coefficient * node) + offset`.

    Nodes are distinct and coefficients are not zero.
    """

    terms: Terms
    offset: int

    def scaled(self, factor: int) -> Affine:
        """Return the sum multiplied by the integer `factor`."""
        if factor == 0:
            return Affine((), 0)
        return Affine(tuple((n, c * factor) for n, c in self.terms), self.offset * factor)

    def plus(self, other: Affine) -> Affine:
        """Return the sum of `self` and `other` without the terms that cancel."""
        total = dict(self.terms)
        for n, c in other.terms:
            total[n] = total.get(n, 0) + c
        terms = tuple((n, c) for n, c in total.items() if c)
        return Affine(terms, self.offset + other.offset)


def is_diagonal_pair(terms: Iterable[tuple[Node, int]]) -> bool:
    """Return whether the terms are exactly `c * q` and `-c * kv` for some c."""
    coefficients = dict(terms)
    return set(coefficients) == {Q, KV} and coefficients[Q] == -coefficients[KV]


class Sides:
    """Computes the `Side` and the `Affine` form of nodes and caches both per node."""

    def __init__(self) -> None:
        self._affine: dict[Node, Affine] = {}
        self._side: dict[Node, Side] = {}

    def side(self, n: Node) -> Side:
        """Return what `n` depends on inside a tile."""
        self._visit(n)
        return self._side[n]

    def affine(self, n: Node) -> Affine:
        """Return the affine form of an i32 node. A node that is not a sum becomes its only term."""
        self._visit(n)
        return self._affine[n]

    def difference(self, comparison: Node) -> Affine:
        """Return the affine form of `left - right` for a comparison of two i32 nodes."""
        left, right = comparison.args
        return self.affine(left).plus(self.affine(right).scaled(-1))

    def join(self, nodes: Iterable[Node]) -> Side:
        """Return the side of a function of `nodes`, without considering terms that cancel."""
        sides = {self.side(n) for n in nodes} - {Side.CONST}
        if not sides:
            return Side.CONST
        return sides.pop() if len(sides) == 1 else Side.MIXED

    def alone(self, n: Node) -> Node:
        """Rewrite a one-sided node so that it reads only the argument of its side.

        Terms that cancel are dropped. For a node on the diagonal, argument `q` of the result stands
        for d = q - kv.
        """
        side = self.side(n)
        if side is Side.MIXED:
            raise AssertionError("a mixed expression has no one-sided form")
        replaced: dict[Node, Node] = {}
        for m in ir.topo(n):
            here = self._side[m]
            if here is not side and here is not Side.CONST:
                continue
            if m.args and self.join(m.args) is Side.MIXED:
                replaced[m] = self._rebuild(m, replaced)
        return ir.substitute(n, replaced)

    def __len__(self) -> int:
        return len(self._side)

    def _visit(self, root: Node) -> None:
        stack = [root]
        while stack:  # not `ir.topo`: the arguments of a visited node have been visited too
            n = stack[-1]
            missing = [] if n in self._side else [a for a in n.args if a not in self._side]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            if n not in self._side:
                if n.type == I32:
                    self._affine[n] = self._affine_of(n)
                self._side[n] = self._side_of(n)

    def _affine_of(self, n: Node) -> Affine:
        form: Affine | None = None
        if n.op == "const":
            form = Affine((), int(n.attr))  # type: ignore[arg-type]
        elif n.op in ("add", "sub"):
            sign = 1 if n.op == "add" else -1
            form = self._affine[n.args[0]].plus(self._affine[n.args[1]].scaled(sign))
        elif n.op == "neg":
            form = self._affine[n.args[0]].scaled(-1)
        elif n.op == "mul":
            for factor, other in (n.args, n.args[::-1]):
                if factor.op == "const":
                    form = self._affine[other].scaled(int(factor.attr))  # type: ignore[arg-type]
        if form is None or abs(form.offset) > _MAX_OFFSET:
            return Affine(((n, 1),), 0)
        if any(abs(c) > _MAX_COEFFICIENT for _, c in form.terms):
            return Affine(((n, 1),), 0)
        return form

    def _side_of(self, n: Node) -> Side:
        if n.op == "arg":
            return _ARG_SIDE.get(str(n.attr), Side.MIXED)
        side = self.join(n.args)
        if side is not Side.MIXED:
            return side
        sums = self._sum_under(n)
        return side if sums is None else self._side_of_sum(n, sums)

    def _sum_under(self, n: Node) -> Affine | None:
        if n.op in ("lt", "le", "eq") and n.args[0].type == I32:
            return self.difference(n)
        return self._affine[n] if n.type == I32 else None

    def _side_of_sum(self, n: Node, sums: Affine) -> Side:
        if any(m is n for m, _ in sums.terms):
            return Side.MIXED
        kinds: dict[Side, list[tuple[Node, int]]] = {side: [] for side in Side}
        for m, c in sums.terms:
            kinds[self._side[m]].append((m, c))
        kinds.pop(Side.CONST)
        present = [side for side, terms in kinds.items() if terms]
        if len(present) <= 1:
            return present[0] if present else Side.CONST
        if not kinds[Side.MIXED] and is_diagonal_pair(kinds[Side.Q] + kinds[Side.KV]):
            return Side.DIAGONAL
        return Side.MIXED

    def _rebuild(self, m: Node, replaced: dict[Node, Node]) -> Node:
        sums = self._sum_under(m)
        if sums is None:
            raise AssertionError(f"{m.op} is one-sided but no sum")
        # Terms of a comparison that have a negative coefficient stay on the right, because the
        # difference of two int32 numbers may leave int32.
        sides: tuple[list[Node], list[Node]] = ([], [])
        for n, c in sums.terms:
            if n is KV and self._side[m] is Side.DIAGONAL:
                continue  # c * q - c * kv = c * d, and q stands for d
            right = m.type != I32 and c < 0
            factor = ir.const(-c if right else c)
            sides[right].append(ir.node("mul", ir.substitute(n, replaced), factor))
        left, right_terms = sides
        if m.type != I32 and left and not right_terms and abs(sums.offset) < 1 << 31:
            return ir.node(m.op, _sum(left), ir.const(-sums.offset))
        total = _sum([ir.const(sums.offset), *left])
        return total if m.type == I32 else ir.node(m.op, total, _sum([*right_terms, ir.const(0)]))


def _sum(nodes: Iterable[Node]) -> Node:
    return functools.reduce(lambda a, b: ir.node("add", a, b), nodes)


def comparable(n: Node) -> bool:
    """Return whether `n` compares two integers."""
    return n.type == BOOL and n.op in ("lt", "le", "eq") and n.args[0].type == I32
