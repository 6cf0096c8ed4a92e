"""Find a small table that a score_mod reads for each pair of a row's and a column's value.

`table[h, types[q], types[kv]]` reads one entry for each score. The entries of a warp's scores lie
in several rows of the table, which are in the same banks of the first-level cache. A kernel that
copies the part of one head to shared memory, with rows of odd length, reads them several times as
fast.
"""

from __future__ import annotations

from collections.abc import Sequence

from attnkit.graph import ir
from attnkit.graph.ir import F32, Node
from attnkit.graph.staging import Level, level_of

_OF_HEAD = (Level.CONSTANT, Level.HEAD)
_PAIR = {Level.ROW, Level.COLUMN}


def reads_pair(load: Node) -> bool:
    """Return whether a load reads an entry of a float table for each pair of a row and a column.

    The last two indices are known in a row and in a column, one each, and the others in a head.
    """
    levels = [level_of(a) for a in load.args]
    of_head = all(level in _OF_HEAD for level in levels[:-2])
    return load.type == F32 and len(levels) > 1 and set(levels[-2:]) == _PAIR and of_head


def column_axis(load: Node) -> int:
    """Return which axis of a table of pairs the value of the column indexes."""
    return next(i for i, a in enumerate(load.args) if level_of(a) is Level.COLUMN)


def pair_load(roots: Sequence[Node]) -> Node | None:
    """Return the first load with `reads_pair` whose tensor no other load reads; None for none."""
    loads = [n for n in ir.topo(*roots) if n.op == "load"]
    slots = [n.attr for n in loads]
    found = (n for n in loads if reads_pair(n) and slots.count(n.attr) == 1)
    return next(found, None)
