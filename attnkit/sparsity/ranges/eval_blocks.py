"""Evaluate a mask on whole tiles by interval arithmetic, with tables for one-sided expressions.

`compile_blocks` turns a graph into a short list of steps, each with a recipe:

* Exact: a one-sided value, looked up in its table;
* Total: an integer sum, from one table for its q terms, one for its kv terms, one for its diagonal
  terms, and the intervals of the remaining mixed terms;
* Compare: two such sums, moved to opposite sides of the comparison so that only [rows, 1] and
  [1, columns] tensors meet;
* Apply: any other operation, by the rules of `eval_interval` (loads by `boxes`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.affine import KV, Affine, Q, Side, Sides, comparable, is_diagonal_pair
from attnkit.graph.ir import BOOL, I32, Node
from attnkit.sparsity.ranges.boxes import Boxes
from attnkit.sparsity.ranges.eval_interval import Interval, clamp_int32, transfer
from attnkit.sparsity.ranges.gather import Lead
from attnkit.sparsity.ranges.tables import Key, Tables, key_of


class At(NamedTuple):
    """Selects the tiles to evaluate.

    Attributes:
        q, kv: int64 block indices that broadcast together.
        lead: int64 indices of each tile into the domain's `b` and `h`, which broadcast with them;
            None for the tiles of every (b, h).
    """

    q: Tensor
    kv: Tensor
    lead: Lead | None = None


@dataclass(frozen=True)
class Exact:
    """Recipe that looks up the range of one key."""

    key: Key


@dataclass(frozen=True)
class Total:
    """Recipe that computes `sum(keys) + sum(coefficient * node) + offset`."""

    keys: tuple[Key, ...]
    others: tuple[tuple[Node, int], ...]
    offset: int


@dataclass(frozen=True)
class Compare:
    """Recipe that computes `left op right` of two totals; only kv terms are on the right."""

    left: Total
    right: Total


@dataclass(frozen=True)
class Apply:
    """Recipe that applies the operation of the node to the intervals of its arguments."""


Recipe = Exact | Total | Compare | Apply


@dataclass(frozen=True)
class Blocks:
    """Holds a bool expression compiled for evaluation on tiles.

    Attributes:
        root: the bool expression.
        steps: nodes with their recipes, arguments before users.
        keys: every key that the recipes look up.
    """

    root: Node
    steps: tuple[tuple[Node, Recipe], ...]
    keys: tuple[Key, ...]

    def run(self, tables: Tables, boxes: Boxes, at: At) -> Interval:
        """Return whether the root must be True everywhere, and may be True somewhere, in each tile.

        Args:
            tables: ranges of at least `keys`.
            boxes: range queries on the same domain.
            at: the tiles.

        Returns:
            (must, may): whether the root is True at every position of the tile, and whether it may
            be True at some position. Bool tensors that broadcast to the shape of the tiles, after
            [b or 1, h or 1] if `at` has no `lead`.
        """
        values: dict[Node, Interval] = {}
        for n, recipe in self.steps:
            values[n] = self._step(n, recipe, values, tables, boxes, at)
        return values[self.root]

    def _step(
        self,
        n: Node,
        recipe: Recipe,
        values: dict[Node, Interval],
        tables: Tables,
        boxes: Boxes,
        at: At,
    ) -> Interval:
        dtype = tables.domain.dtype
        if isinstance(recipe, Exact):
            return tables.look_up(recipe.key, *at)
        if isinstance(recipe, Total):
            return clamp_int32(_total(recipe, values, tables, at))
        if isinstance(recipe, Compare):
            sums = [_total(t, values, tables, at) for t in (recipe.left, recipe.right)]
            must, may = transfer(n, sums, dtype)
            equal = tables.equal.get(n)
            return (must, may) if equal is None else (must, equal.among(may, *at))
        args = [values[a] for a in n.args]
        if n.op == "load":
            return boxes.load(n, args)
        result = transfer(n, args, dtype)
        return clamp_int32(result) if n.type == I32 else result


def _total(total: Total, values: dict[Node, Interval], tables: Tables, at: At) -> Interval:
    parts = [tables.look_up(key, *at) for key in total.keys]
    for n, c in total.others:
        low, high = values[n]
        parts.append((low * c, high * c) if c > 0 else (high * c, low * c))
    if not parts:
        offset = at.q.new_full((), total.offset)
        return offset, offset
    low, high = parts[0]
    if total.offset:
        low, high = low + total.offset, high + total.offset
    for part in parts[1:]:
        low, high = low + part[0], high + part[1]
    return low, high


def compile_blocks(root: Node, sides: Sides) -> Blocks:
    """Compile a bool expression for tiles: choose a recipe for every node that the root needs."""
    recipes: dict[Node, Recipe] = {}
    stack = [root]
    while stack:
        n = stack.pop()
        if n not in recipes:
            recipes[n] = _recipe(n, sides)
            stack.extend(_needs(n, recipes[n]))
    steps = tuple((n, recipes[n]) for n in ir.topo(root) if n in recipes)
    keys = dict.fromkeys(key for _, recipe in steps for key in _keys(recipe))
    return Blocks(root, steps, tuple(keys))


def _recipe(n: Node, sides: Sides) -> Recipe:
    if comparable(n):
        difference = sides.difference(n)
        if sides.side(n) is Side.MIXED or _is_plain(n, difference):
            return _comparison(difference, sides)
    if _band(n, sides) is not None:
        return Apply()
    if sides.side(n) is not Side.MIXED:
        return Exact(key_of(n, sides.side(n)))
    if n.type == I32 and sides.affine(n).terms != ((n, 1),):
        return _grouped(sides.affine(n), sides)
    return Apply()


def _is_plain(n: Node, difference: Affine) -> bool:
    """Return whether block ends decide a one-sided comparison, so that it needs no table."""
    if any(m not in (Q, KV) for m, _ in difference.terms):
        return False
    return n.op != "eq" or all(abs(c) == 1 for _, c in difference.terms)  # no value is skipped


def _band(n: Node, sides: Sides) -> tuple[float, float] | None:
    """Return the (least, greatest) q - kv that a conjunction of plain comparisons keeps.

    The result is None if the node is no such conjunction, or keeps nothing. A band needs no table:
    the values of q - kv in a tile form an interval, and three intervals of which any two intersect
    have a common point.
    """
    if n.type == BOOL and n.op == "and":
        parts = [_band(a, sides) for a in n.args]
        if parts[0] is None or parts[1] is None:
            return None
        low, high = max(p[0] for p in parts if p), min(p[1] for p in parts if p)
        return (low, high) if low <= high else None
    if n.op not in ("lt", "le") or not comparable(n):
        return None
    sums = sides.difference(n)
    c = dict(sums.terms).get(Q, 0)
    if not is_diagonal_pair(sums.terms) or abs(c) != 1:
        return None
    limit = -sums.offset - (n.op == "lt")  # c * (q - kv) <= limit
    return (-math.inf, limit) if c > 0 else (-limit, math.inf)


def _grouped(sums: Affine, sides: Sides) -> Total:
    """Convert an affine sum to a `Total`, with the terms of each side collected in one key."""
    groups: dict[Side, list[tuple[Node, int]]] = {side: [] for side in Side}
    for n, c in sums.terms:
        groups[sides.side(n)].append((n, c))
    q, kv, diagonal = groups[Side.Q], groups[Side.KV], groups[Side.DIAGONAL]
    if diagonal and is_diagonal_pair(q + kv):  # c * q - c * kv joins the diagonal terms
        diagonal.append((ir.node("sub", Q, KV), q[0][1]))
        q.clear()
        kv.clear()
    keys = tuple(
        Key(side, tuple(terms))
        for side, terms in groups.items()
        if terms and side is not Side.MIXED
    )
    return Total(keys, tuple(groups[Side.MIXED]), sums.offset)


def _comparison(difference: Affine, sides: Sides) -> Compare:
    total = _grouped(difference, sides)
    left = tuple(key for key in total.keys if key.side is not Side.KV)
    right = tuple(
        Key(Side.KV, tuple((n, -c) for n, c in key.terms))
        for key in total.keys
        if key.side is Side.KV
    )
    return Compare(Total(left, total.others, total.offset), Total(right, (), 0))


def _needs(n: Node, recipe: Recipe) -> list[Node]:
    if isinstance(recipe, Apply):
        return list(n.args)
    return [m for total in _totals(recipe) for m, _ in total.others]


def _totals(recipe: Recipe) -> Iterator[Total]:
    if isinstance(recipe, Total):
        yield recipe
    elif isinstance(recipe, Compare):
        yield recipe.left
        yield recipe.right


def _keys(recipe: Recipe) -> Iterator[Key]:
    if isinstance(recipe, Exact):
        yield recipe.key
    for total in _totals(recipe):
        yield from total.keys


def is_exact(n: Node, sides: Sides, equal: Collection[Node] = ()) -> bool:
    """Return whether (must, may) of `n` is exact, so that undecided tiles are PARTIAL.

    It is exact for one-sided values, for `<` and `<=` between a q value and a kv value, which vary
    independently, and for `and` and `or` of a condition on q with a condition on kv.

    Args:
        n: a node of the compiled graph.
        sides: sides of its nodes.
        equal: equalities that are exact (see `Tables.equal`).
    """
    if sides.side(n) is not Side.MIXED or n in equal:
        return True
    if n.op == "not":
        return is_exact(n.args[0], sides, equal)
    if n.op in ("lt", "le") and n.args[0].type == I32:
        total = _grouped(sides.difference(n), sides)
        return not total.others and Side.DIAGONAL not in {key.side for key in total.keys}
    if n.type == BOOL and n.op in ("and", "or"):
        return _independent([sides.side(a) for a in n.args])
    return False


def _independent(sides: Sequence[Side]) -> bool:
    return set(sides) <= {Side.Q, Side.KV, Side.CONST}
