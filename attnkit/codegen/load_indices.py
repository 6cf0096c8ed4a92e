"""Say how the indices of loads are emitted: which may be negative, and which are clamped.

`sparsity.index_bounds` proves that every index stays inside its tensor. Some of these proofs depend on
captured data, as that of `table[ids[q]]` on the numbers in `ids`. Data may be edited in a way that
nobody sees before the kernel runs. So a kernel clamps such an index to its tensor, and reads wrong
numbers at worst, but never outside. An index whose range follows from the lengths alone costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from attnkit.codegen.nonnegative import ranges_of
from attnkit.graph import ir
from attnkit.graph.ir import Node


@dataclass(frozen=True)
class LoadIndices:
    """Says how the indices of loads are emitted.

    Attributes:
        wrap: loads whose index may be negative and then counts from the end; None: every load.
            Arguments and nonnegative constants never wrap.
        clamp: loads whose index is clamped to its tensor where it depends on captured data.
    """

    wrap: frozenset[Node] | None = None
    clamp: frozenset[Node] = frozenset()

    def flags(self, nodes: Iterable[Node]) -> list[tuple[bool, bool]]:
        """Return for each load among the nodes whether it wraps, and whether it is clamped."""
        return [
            (self.wrap is None or n in self.wrap, n in self.clamp) for n in nodes if n.op == "load"
        ]


def data_bound(
    roots: Iterable[Node], sizes: Mapping[str, int], shapes: Sequence[Sequence[int]]
) -> frozenset[Node]:
    """Return the loads below the roots whose index stays inside its tensor only by captured data.

    Args:
        roots: expressions whose indices are proven to be in range.
        sizes: number of values of b, h, q and kv; each goes from 0 to its size - 1.
        shapes: shapes of the captured tensors by slot.
    """
    roots = tuple(roots)
    ranges = ranges_of(roots, sizes)
    found = []
    for n in ir.topo(*roots):
        if n.op != "load":
            continue
        for index, size in zip(n.args, shapes[int(str(n.attr))], strict=True):
            known = ranges[index]
            if reads_data(index) and (known is None or known[0] < -size or known[1] >= size):
                found.append(n)
    return frozenset(found)


def reads_data(n: Node) -> bool:
    """Return whether an expression depends on captured data."""
    return bool(ir.slots(n))
