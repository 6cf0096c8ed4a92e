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
PAIR = {Level.ROW, Level.COLUMN}


def pair_load(roots: Sequence[Node]) -> Node | None:
    """Return the load of a table of pairs, or None if there is none.

    The last two indices are known in a row and in a column, one each, and the others in a head.
    Nothing else reads the tensor. If several loads are of this kind, the result is the first one.
    """
    loads = [n for n in ir.topo(*roots) if n.op == "load"]
    slots = [n.attr for n in loads]
    for n in loads:
        levels = [level_of(a) for a in n.args]
        of_pair = set(levels[-2:]) == PAIR and all(level in _OF_HEAD for level in levels[:-2])
        if n.type == F32 and len(levels) > 1 and of_pair and slots.count(n.attr) == 1:
            return n
    return None
