"""Replace what a score_mod computes of q - kv alone by tables that are evaluated before a kernel.

An expression of level "relative" has one value for each distance q - kv (and b and h, if it reads
them), but a kernel evaluates it for every diagonal of every tile: the logarithms of Kerple or of
T5's buckets, thousands of times. `distance_tables` replaces such an expression by a load from a
table [B, H, q_len + kv_len - 1] (without B or H if it does not read b or h), at the index
q - kv + kv_len - 1. A kernel reads that table along diagonals. It also sums the table's gradient
along diagonals, because no two diagonals read the same element.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from attnkit.codegen.instruction_cost import instructions
from attnkit.codegen.score_form import sum_of, terms
from attnkit.graph import ir
from attnkit.graph.ir import F32, Node, arg, load
from attnkit.graph.simplify import build
from attnkit.graph.staging import Level, hoisted, index_level, index_repeats, level_of

# A load from a table takes about 5 instructions for a diagonal, and its gradient a few more.
_LEAST_INSTRUCTIONS = 16


class DistanceTables(NamedTuple):
    """Holds a score_mod that reads tables by distance, and the expressions of these tables.

    Attributes:
        score: the score_mod. Its slots are those of `kept`, then one for each table.
        kept: slots, in the original score_mod, of the captured tensors that `score` still reads.
        expressions: the f32 expression of each table, in terms of the original slots. It reads q
            and kv only as q - kv.
    """

    score: Node
    kept: tuple[int, ...]
    expressions: tuple[Node, ...]

    @property
    def loads(self) -> frozenset[Node]:
        """Return the loads of `score` that read a table."""
        first = len(self.kept)
        return frozenset(n for n in ir.topo(self.score) if n.op == "load" and _slot(n) >= first)

    def describe(self, names: tuple[str, ...] = ()) -> str:
        """Format the tables as text, one per line.

        Args:
            names: names of the captured tensors by slot; `t0`, `t1`, ... where missing.
        """
        return "\n".join(
            f"table[{', '.join([*axes(e), 'q - kv'])}] = {ir.formula(e, names)}"
            for e in self.expressions
        )


def axes(expression: Node) -> tuple[str, ...]:
    """Return which of b and h an expression reads: the axes of its table before the distances."""
    return tuple(sorted(ir.reads(expression) & {"b", "h"}))


@functools.lru_cache(maxsize=1024)
def distance_tables(score: Node) -> DistanceTables | None:
    """Replace expensive expressions of q - kv by loads from tables.

    Two kinds are expensive: expressions of many instructions, and loads that read one element for
    several distances, such as T5's buckets, because their gradients would be summed score by score.
    Terms that are added to the score and load anything by distance become one table together.

    Args:
        score: the score_mod.

    Returns:
        The rewritten score_mod and the tables; None if there is nothing to replace.
    """
    expressions: list[Node] = []
    unused = max(ir.slots(score), default=-1) + 1  # slots from here on stand for tables
    rest, added = _split(score)
    if added is not None:
        expressions.append(added)
    if rest is not None:
        relative = hoisted([rest])[Level.RELATIVE]
        expressions += [n for n in relative if n.type == F32 and _is_expensive(n)]
    if not expressions:
        return None
    expressions = list(dict.fromkeys(expressions))
    loads = {e: _table_load(unused + i, e) for i, e in enumerate(expressions)}
    parts = [] if rest is None else [ir.substitute(rest, loads)]
    parts += [] if added is None else [loads[added]]
    staged = sum_of(parts)
    assert staged is not None
    used = ir.slots(staged)
    kept = tuple(s for s in used if s < unused)
    return DistanceTables(ir.renumber(staged, used.index), kept, tuple(expressions))


def _split(score: Node) -> tuple[Node | None, Node | None]:
    """Split a score_mod into two terms, the second of which becomes a table.

    A term is None if it has no part. The parts keep their order, so that equal score_mods give
    equal results.
    """
    every = list(terms(score))
    relative = [t for t in every if level_of(t) is Level.RELATIVE]
    if not any(map(_is_expensive, relative)):
        return score, None
    tabled = [t for t in relative if _is_expensive(t) or any(_relative_loads(t))]
    return sum_of([t for t in every if t not in tabled]), sum_of(tabled)


def _is_expensive(n: Node) -> bool:
    """Return whether a relative expression is better evaluated once per distance."""
    return any(map(index_repeats, _relative_loads(n))) or instructions(n) >= _LEAST_INSTRUCTIONS


def _relative_loads(n: Node) -> Iterable[Node]:
    return (x for x in ir.topo(n) if x.op == "load" and index_level(x) is Level.RELATIVE)


def _table_load(slot: int, expression: Node) -> Node:
    distance = build("sub", arg("q"), arg("kv"))
    index = build("add", distance, arg("kv_last"))
    return load(slot, F32, [*map(arg, axes(expression)), index])


def _slot(n: Node) -> int:
    return int(str(n.attr))
