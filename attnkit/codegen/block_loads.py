"""Emit a load once for several scores that read the same element.

In the backward, all rows of a q block may read the same element. The index of
table[q // 64 - kv // 64 + 8] or of table[documents[q], documents[kv]] combines values of the row
with values of the column. Values of the row are mostly equal in a whole q block. The load then
depends on the column alone there: a thread reads the table once per column instead of once per
score, and sums the gradients of a column before it adds them at the one element.

In the forward, groups of columns may read the same element, such as 64 columns of kv // 64. A
thread then reads the table once per row and group (`column_group`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attnkit.codegen.load_indices import LoadIndices
from attnkit.codegen.staged_emitter import Element, Stages
from attnkit.graph import ir
from attnkit.graph.ir import Node
from attnkit.graph.staging import Level, level_of


class BlockLoads:
    """Emits the loads of expressions for which `shared` is true.

    Args:
        roots: the expressions.
        indices: which loads wrap negative indices, and which are clamped.
        shared: `reads_by_row_and_column` or `reads_by_group`.

    Attributes:
        loads: the loads.
    """

    def __init__(
        self, roots: Sequence[Node], indices: LoadIndices, shared: Callable[[Node], bool]
    ) -> None:
        self.loads = tuple(n for n in ir.topo(*roots) if shared(n))
        places = [a for n in self.loads for a in n.args if a.op not in ("arg", "const")]
        self._nodes = tuple(dict.fromkeys([*self.loads, *places]))
        self._stages = Stages(self._nodes, indices)

    def row_values(self, site: Any, tensors: Sequence[Any], q: Any) -> tuple[Any, ...]:
        """Emit the values of row `q` in the indices of the loads."""
        stages = self._stages
        return stages.row(site, tensors, stages.head(site, tensors), q)

    def values(self, site: Any, tensors: Sequence[Any], q: Any, kv: Any) -> dict[Node, Any]:
        """Emit the loads and their indices at row `q` and column `kv`; return them by node."""
        stages = self._stages
        head = stages.head(site, tensors)
        row = stages.row(site, tensors, head, q)
        column = stages.column(site, tensors, head, kv)
        (found,) = stages.elements(site, tensors, head, [Element(q, kv, row, column)], {})
        return dict(zip(self._nodes, found, strict=True))


def reads_by_row_and_column(n: Node) -> bool:
    """Return whether `n` is a load whose index depends on q through values of the row alone.

    The index also depends on kv, and it does not depend on the score. Loads at q itself, such as
    table[q, kv], do not count: no two rows have the same index.
    """
    if n.op != "load" or level_of(n) is not Level.ELEMENT or ir.reads(n) & {"score", "grad"}:
        return False
    for part in ir.topo(*n.args):
        level = level_of(part)
        if level is Level.RELATIVE:
            return False
        if level is Level.ELEMENT and any(a.op == "arg" and a.attr == "q" for a in part.args):
            return False
    return not any(a.op == "arg" and a.attr == "q" for a in n.args)


def reads_by_group(n: Node) -> bool:
    """Return whether `n` is a load that reads one element for 8 or more columns of a row."""
    if n.op != "load" or level_of(n) is not Level.ELEMENT or ir.reads(n) & {"score", "grad"}:
        return False
    return column_group(n) >= 8


def column_group(n: Node) -> int:
    """Return the largest g for which `n` is the same in all columns of a row with equal kv // g.

    g is a power of two, at most 64.
    """
    groups: dict[Node, int] = {}
    for part in ir.topo(n):
        if part.op == "arg" and part.attr == "kv":
            groups[part] = 1
        elif _divides_columns(part):
            divisor = int(part.args[1].attr)  # type: ignore[arg-type]
            groups[part] = min(divisor & -divisor, 64)
        else:
            groups[part] = min((groups[a] for a in part.args), default=64)
    return groups[n]


def _divides_columns(n: Node) -> bool:
    """Return whether `n` is kv // c for a positive constant c."""
    if n.op not in ("fdiv", "tdiv"):
        return False
    position, divisor = n.args
    positive = divisor.op == "const" and isinstance(divisor.attr, int) and divisor.attr > 0
    return positive and position.op == "arg" and position.attr == "kv"
