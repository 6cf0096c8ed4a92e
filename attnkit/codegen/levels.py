"""At which level of a kernel an expression is known: a reading of the graph, without the DSL.

Levels: "head" (b, h and the scale), "row" (and q), "column" (and kv), "relative" (q - kv, so that
one value serves a diagonal of a thread's elements), "element".
"""

from __future__ import annotations

from attnkit.codegen.score_form import is_relative
from attnkit.graph import ir
from attnkit.graph.ir import Node

_READS = (
    ("head", frozenset({"b", "h", "scale"})),
    ("row", frozenset({"b", "h", "scale", "q"})),
    ("column", frozenset({"b", "h", "scale", "kv"})),
)


def level_of(n: Node) -> str:
    """The level at which an expression is known."""
    names = ir.reads(n)
    for level, known in _READS:
        if names <= known:
            return level
    return "relative" if is_relative(n) else "element"


def index_level(load: Node) -> str:
    """The level at which a load's index is known."""
    levels = {level_of(n) for n in load.args}
    for level in ("head", "row", "column", "relative"):
        if levels <= {"head", level}:
            return level
    return "element"
