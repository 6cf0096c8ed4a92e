"""At which level a value is known: the reason why a mod is nearly free.

Each node gets the smallest level at which it is known. A template computes head values once per
head, row values once per query tile, column values once per kv tile, and element values per score.
`linear` splits a score_mod that is linear in the score into `score * factor + bias`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from attnkit.graph import ir
from attnkit.graph.ir import Node, const
from attnkit.graph.simplify import build

Level: TypeAlias = Literal["const", "head", "row", "column", "element"]

LEVELS: tuple[Level, ...] = ("const", "head", "row", "column", "element")

# Levels as sets of what they may read; joining two levels is the union of the sets.
_READS: dict[Level, frozenset[str]] = {
    "const": frozenset(),
    "head": frozenset("bh"),
    "row": frozenset({"b", "h", "q"}),
    "column": frozenset({"b", "h", "kv"}),
}


def level_of(names: frozenset[str]) -> Level:
    """The smallest level that knows all the named arguments."""
    for level, known in _READS.items():
        if names <= known:
            return level
    return "element"


@dataclass(frozen=True)
class Staging:
    """Levels of the nodes of one expression.

    Attributes:
        root: the expression.
        levels: level of every node below the root.
        hoisted: maximal sub-expressions below the element level that element nodes use, constants
            left out, in evaluation order: what a template computes ahead.
    """

    root: Node
    levels: dict[Node, Level]
    hoisted: tuple[Node, ...]

    def at(self, level: Level) -> tuple[Node, ...]:
        """The hoisted values of a level."""
        return tuple(n for n in self.hoisted if self.levels[n] == level)

    def operations(self, level: Level) -> int:
        """How many operations (leaves not counted) run at a level."""
        leaves = ("arg", "const")
        return sum(lv == level and n.op not in leaves for n, lv in self.levels.items())

    def table(self, names: tuple[str, ...] = ()) -> str:
        """The staging table that `explain` prints."""
        lines = []
        for level in LEVELS[1:]:
            shown = [self.root] if self.levels[self.root] == level else list(self.at(level))
            if shown:
                text = "; ".join(ir.formula(n, names) for n in shown)
                lines.append(f"{level:8}{self.operations(level):4} ops   {text}")
        return "\n".join(lines) or "const"

    def __str__(self) -> str:
        return self.table()


def stage(root: Node) -> Staging:
    """Give every node of an expression its level."""
    read: dict[Node, frozenset[str]] = {}
    order = ir.topo(root)
    for n in order:
        own = frozenset({str(n.attr)}) if n.op == "arg" else frozenset()
        read[n] = own.union(*(read[a] for a in n.args))
    levels = {n: level_of(read[n]) for n in order}
    used = dict.fromkeys(
        a for n in order if levels[n] == "element" for a in n.args if levels[a] != "element"
    )
    hoisted = tuple(n for n in used if n.op not in ("const", "arg"))
    return Staging(root, levels, hoisted)


@dataclass(frozen=True)
class Linear:
    """A score_mod written as `score * factor + bias`, both free of the score."""

    factor: Node
    bias: Node


def linear(root: Node) -> Linear | None:
    """Split a score_mod that is linear in the score, or None where it is not.

    `where(c, score + x, -inf)` is not split: as a sum it would let a NaN score through.
    """
    parts: dict[Node, Linear | None] = {}  # of the nodes that read the score
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
