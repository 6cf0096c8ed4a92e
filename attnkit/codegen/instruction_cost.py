"""Estimate the number of GPU instructions that an expression takes."""

from __future__ import annotations

from attnkit.graph import ir
from attnkit.graph.ir import Node
from attnkit.graph.staging import Level, is_relative, level_of

# Instructions of operations that take more than one. Counted in the machine code of Blackwell
# kernels (DSL 4.8.1) that `attnkit.codegen.emit_cute.emit` emits with `fast=True`.
_TAKES = {
    "with_slope": 0,
    "tanh": 3,
    "exp2": 5,
    "log2": 5,
    "sqrt": 5,
    "rsqrt": 5,
    "div": 6,
    "exp": 6,
    "log": 6,
    "sigmoid": 8,
    "expm1": 18,
    "erf": 24,
    "hypot": 32,
    "atan2": 34,
    "log1p": 50,
    "erfinv": 73,
    "pow": 75,
    "lgamma": 136,
    "digamma": 130,
    "sin": 80,
    "cos": 80,
}
# Instructions of a load whose index depends on row, column or distance alone, and of other loads.
_LOAD, _FAR_LOAD = 5, 7
# A warp holds one row or a few, so values of rows and heads are computed once for many scores.
_COUNTED = (Level.COLUMN, Level.RELATIVE, Level.ELEMENT)
_DIVIDES = ("fdiv", "mod", "tdiv")
_BY_CONSTANT, _BY_INT, _BY_FLOAT = 9, 20, 60


def instructions(*roots: Node) -> int:
    """Estimate the instructions per score that the expressions `roots` take together.

    Values that are computed once per row or less often are not counted. Shared sub-expressions are
    counted once.
    """
    counted: set[Node] = set()
    for root in roots:
        counted.update(n for n in ir.topo(root) if _is_counted(n))
    return sum(map(_takes, counted))


def _is_counted(n: Node) -> bool:
    # the tables of predicted clocks assume that products with the scale count for each score
    return level_of(n) in _COUNTED or "scale" in ir.reads(n)


def _takes(n: Node) -> int:
    if n.op in ("arg", "const"):
        return 0
    if n.op in _DIVIDES:
        if n.type == ir.F32:
            return _BY_FLOAT
        return _BY_CONSTANT if n.args[1].op == "const" else _BY_INT
    if n.op == "load":
        return _FAR_LOAD if {"q", "kv"} <= ir.reads(n) and not is_relative(n) else _LOAD
    return _TAKES.get(n.op, 1)
