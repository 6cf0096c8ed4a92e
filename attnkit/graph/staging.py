"""Assign to each node of an expression the level (head, row, column, ...) at which it is computed.

Each node gets the lowest level at which its value is known. A template computes head values once
per head, row values once per query tile, column values once per kv tile, relative values once per
distance, and element values once per score. `linear` splits a score_mod that is linear in the score
into `score * factor + bias`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from attnkit.graph import ir
from attnkit.graph.ir import F32, I32, Node, const
from attnkit.graph.simplify import build


class Level(StrEnum):
    """Enumerates the levels at which kernels compute values, by the indices that a value needs.

    It is a string enum because templates compare the levels that hooks report, without importing
    the graph.
    """

    CONSTANT = "constant"  # known when the kernel is compiled
    HEAD = "head"  # captured tensors, b, h and the softmax scale
    ROW = "row"  # as HEAD, and q
    COLUMN = "column"  # as HEAD, and kv
    RELATIVE = "relative"  # as HEAD, and q - kv: one value per diagonal
    ELEMENT = "element"  # q and kv in any other way, the score or its gradient


_HEAD = frozenset({"b", "h", "scale", "kv_last"})
_READS = {Level.HEAD: _HEAD, Level.ROW: _HEAD | {"q"}, Level.COLUMN: _HEAD | {"kv"}}


def level_of(n: Node) -> Level:
    """Return the lowest level at which the value of an expression is known."""
    if n.op == "const":
        return Level.CONSTANT
    names = ir.reads(n)
    for level, known in _READS.items():
        if names <= known:
            return level
    return Level.RELATIVE if is_relative(n) else Level.ELEMENT


def hoisted(roots: Sequence[Node]) -> dict[Level, tuple[Node, ...]]:
    """Return, by level, the sub-expressions that a kernel computes once for several scores.

    These are the largest sub-expressions below the element level that a value of another level
    uses, and the roots below the element level. Arguments and constants are left out.
    """
    order = ir.topo(*roots)
    levels = {n: level_of(n) for n in order}
    values: dict[Level, dict[Node, None]] = {
        level: {} for level in Level if level not in (Level.CONSTANT, Level.ELEMENT)
    }
    used = [(None, r) for r in roots] + [(n, a) for n in order for a in n.args]
    for user, n in used:
        level = levels[n]
        if level is Level.ELEMENT or n.op in ("arg", "const"):
            continue
        if user is None or levels[user] is not level:
            values[level][n] = None
    return {level: tuple(nodes) for level, nodes in values.items()}


def index_level(load: Node) -> Level:
    """Return the lowest level at which all indices of a load are known."""
    levels = {level_of(n) for n in load.args} - {Level.CONSTANT, Level.HEAD}
    if not levels:
        return Level.HEAD
    return levels.pop() if len(levels) == 1 else Level.ELEMENT


def index_repeats(load: Node) -> bool:
    """Return whether a load may read one element for several diagonals or scores.

    Examples are table[bucket(q - kv)], and table[doc[q], doc[kv]]. The result is False only if the
    indices prove the opposite: a relative load reads at a sum with q - kv, so each diagonal has its
    own element; an element load reads at two independent sums of q and kv, so each score has.
    """
    found = [_coefficients(n) if n.type == I32 else None for n in load.args]
    sums = [c for c in found if c is not None and c != (0, 0)]
    if index_level(load) is Level.RELATIVE:
        return not sums
    return not any(a * d != b * c for (a, b), (c, d) in itertools.combinations(sums, 2))


def reads_along_kv(load: Node) -> bool:
    """Return whether the next kv is the next element of the last axis, as in table[h, q, kv + 3]."""
    found = [_coefficients(n) if n.type == I32 else None for n in load.args]
    steps = [None if c is None else c[1] for c in found]
    return bool(steps) and steps[-1] == 1 and not any(step != 0 for step in steps[:-1])


def reads_rows(load: Node) -> bool:
    """Return whether a load reads whole rows at equal distances, as in table[h, q + 3, kv].

    Examples of others are table[h, order[q], kv] and table[h, q, kv + 3], which begins in column 3.
    """
    equal = all(n.type == I32 and _coefficients(n) is not None for n in load.args)
    return equal and reads_along_kv(load) and load.args[-1] is ir.arg("kv")


def reads_pair(load: Node) -> bool:
    """Return whether a load reads an entry of a float table for each pair of a row and a column.

    An example is table[h, types[q], types[kv]]: the last two indices are known in a row and in a
    column, one each, and the others in a head.
    """
    levels = [level_of(a) for a in load.args]
    of_head = all(level in (Level.CONSTANT, Level.HEAD) for level in levels[:-2])
    of_pair = len(levels) > 1 and set(levels[-2:]) == {Level.ROW, Level.COLUMN}
    return load.type == F32 and of_pair and of_head


def column_axis(load: Node) -> int:
    """Return which axis of a table of pairs the value of the column indexes."""
    return next(i for i, a in enumerate(load.args) if level_of(a) is Level.COLUMN)


def pair_load(roots: Sequence[Node]) -> Node | None:
    """Return the first load with `reads_pair` whose tensor no other load reads; None for none."""
    loads = [n for n in ir.topo(*roots) if n.op == "load"]
    slots = [n.attr for n in loads]
    found = (n for n in loads if reads_pair(n) and slots.count(n.attr) == 1)
    return next(found, None)


def is_relative(n: Node) -> bool:
    """Return whether an expression reads q and kv only as q - kv, and does not read the score."""
    relative: dict[Node, bool] = {}
    for part in ir.topo(n):
        factors = _coefficients(part) if part.type == I32 else None
        if factors is None and part.op in ("lt", "le", "eq") and part.args[0].type == I32:
            factors = _coefficients(ir.node("sub", *part.args))
        if factors is not None and (factors[0] or factors[1]):
            relative[part] = factors[0] == -factors[1]
        elif part.op == "arg":
            relative[part] = part.attr not in ("q", "kv", "score", "grad")
        else:
            relative[part] = all(relative[a] for a in part.args)
    return relative[n]


def _coefficients(n: Node) -> tuple[int, int] | None:
    """Return the coefficients of q and kv in `n`, or None if they occur outside of integer sums."""
    if n.op == "arg" and n.attr in ("q", "kv"):
        return (1, 0) if n.attr == "q" else (0, 1)
    names = ir.reads(n)
    if names & {"score", "grad"}:
        return None
    if not names & {"q", "kv"}:
        return 0, 0
    if n.op in ("add", "sub", "neg"):
        parts = [_coefficients(a) for a in n.args]
        if any(p is None for p in parts):
            return None
        sign = -1 if n.op in ("sub", "neg") else 1
        (a, b), (c, d) = (parts[0], parts[1]) if len(parts) == 2 else ((0, 0), parts[0])  # type: ignore[misc]
        return a + sign * c, b + sign * d
    return None


class Staging(NamedTuple):
    """Holds the level of every node of one expression.

    Attributes:
        root: the expression.
        levels: level of the root and of every node below it.
        hoisted: values that a template computes once for several scores, see `hoisted`.
    """

    root: Node
    levels: dict[Node, Level]
    hoisted: dict[Level, tuple[Node, ...]]

    def operations(self, level: Level) -> int:
        """Return the number of operations at `level`, without arguments and constants."""
        leaves = ("arg", "const")
        return sum(lv is level and n.op not in leaves for n, lv in self.levels.items())

    def table(self, names: tuple[str, ...] = ()) -> str:
        """Format the staging table that `explain` prints."""
        lines = []
        shown = self.hoisted | {self.levels[self.root]: (self.root,)}
        for level in list(Level)[1:]:
            if shown.get(level):
                text = "; ".join(ir.formula(n, names) for n in shown[level])
                lines.append(f"{level:8}{self.operations(level):4} ops   {text}")
        return "\n".join(lines) or str(Level.CONSTANT)

    def __str__(self) -> str:
        return self.table()


def stage(root: Node) -> Staging:
    """Compute the level of every node of an expression, and its hoisted values."""
    levels = {n: level_of(n) for n in ir.topo(root)}
    return Staging(root, levels, hoisted([root]))


class Linear(NamedTuple):
    """Represents a score_mod as `score * factor + bias`; neither part reads the score."""

    factor: Node
    bias: Node


def linear(root: Node) -> Linear | None:
    """Split a score_mod into `score * factor + bias`; return None if it is not linear in the score.

    `where(c, score + x, -inf)` is not split: as a sum it would let a NaN score through.
    """
    parts: dict[Node, Linear | None] = {}  # for each node that reads the score
    for n in ir.topo(root):
        if n.op == "arg" and n.attr == "score":
            parts[n] = Linear(const(1.0), const(0.0))
        elif any(a in parts for a in n.args):
            parts[n] = _split(n, parts)
    return parts.get(root)


def _split(n: Node, parts: dict[Node, Linear | None]) -> Linear | None:
    if n.op == "neg":
        inner = parts[n.args[0]]
        return inner and Linear(build("neg", inner.factor), build("neg", inner.bias))
    if n.op not in ("add", "sub", "mul", "div"):
        return None
    a, b = n.args
    if n.op in ("add", "sub"):
        zero = const(0.0)
        first, second = parts.get(a, Linear(zero, a)), parts.get(b, Linear(zero, b))
        if first is None or second is None:
            return None
        return Linear(
            build(n.op, first.factor, second.factor), build(n.op, first.bias, second.bias)
        )
    inner, other = (parts[a], b) if a in parts else (parts[b], a)
    if inner is None or other in parts or (n.op == "div" and other is a):
        return None  # score * score, or x / score
    none = inner.bias is const(0.0)
    bias = inner.bias if none else build(n.op, inner.bias, other)
    return Linear(build(n.op, inner.factor, other), bias)
