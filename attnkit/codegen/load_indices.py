"""Decide which load indices a kernel wraps (negative indices) and which it clamps.

`sparsity.index_bounds` proves that every index stays inside its tensor. Some of these proofs depend
on captured data: that of `table[ids[q]]` depends on the numbers in `ids`. Such data may be edited
unnoticed before the kernel runs. So the kernel clamps an index of this kind to the bounds of the
tensor: at worst it reads wrong numbers, but never out of bounds. Indices whose range follows from
the sequence lengths alone are not clamped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from attnkit.codegen.nonnegative import NOTHING, Known, ranges_of
from attnkit.graph import ir
from attnkit.graph.ir import Node


@dataclass(frozen=True)
class LoadIndices:
    """Holds the loads whose indices a kernel wraps, and the loads whose indices it clamps.

    Attributes:
        wrap: loads whose index may be negative and then counts from the end of the axis; None for
            all loads. Arguments and nonnegative constants never wrap.
        clamp: loads whose index, where it depends on captured data, is clamped to the tensor.
    """

    wrap: frozenset[Node] | None = None
    clamp: frozenset[Node] = frozenset()

    def wraps(self, load: Node) -> bool:
        """Return whether an index of `load` may be negative, and then counts from the end."""
        return self.wrap is None or load in self.wrap

    def with_new_loads(
        self, nodes: Iterable[Node | None], given: Iterable[Node | None]
    ) -> LoadIndices:
        """Return a copy that also wraps the indices of loads that are in `nodes`, not in `given`.

        A rewrite of the graphs for which this was computed may have made such loads.
        """
        if self.wrap is None:
            return self
        loads, known = (
            {n for n in ir.topo(*(r for r in roots if r is not None)) if n.op == "load"}
            for roots in (nodes, given)
        )
        return replace(self, wrap=self.wrap | (loads - known))

    def flags(self, nodes: Iterable[Node]) -> list[tuple[bool, bool]]:
        """Return (whether it wraps, whether it is clamped) for each load among `nodes`."""
        return [(self.wraps(n), n in self.clamp) for n in nodes if n.op == "load"]


def wrapping_unless_tables(roots: Iterable[Node]) -> frozenset[Node] | None:
    """Return `LoadIndices.wrap` of a kernel that wraps the indices of all loads but of tables.

    The index of a table by distance, q - kv + kv_last, is never negative.

    Returns:
        None, for all loads, if `roots` read no table.
    """
    loads = [n for n in ir.topo(*roots) if n.op == "load"]
    wrap = frozenset(n for n in loads if "kv_last" not in ir.reads(*n.args))
    return None if len(wrap) == len(loads) else wrap


def data_bound(
    roots: Iterable[Node],
    sizes: Mapping[str, int],
    shapes: Sequence[Sequence[int]],
    known: Known = NOTHING,
) -> frozenset[Node]:
    """Return the loads whose indices are in bounds only because of values of captured data.

    Args:
        roots: expressions, all of whose load indices are proven to be in bounds.
        sizes: number of values of b, h, q and kv; each goes from 0 to its size - 1.
        shapes: shapes of the captured tensors by slot.
        known: values of loads from tables of numbers, which nobody edits.
    """
    roots = tuple(roots)
    ranges = ranges_of(roots, sizes, known)
    found = []
    for n in ir.topo(*roots):
        if n.op != "load":
            continue
        for index, size in zip(n.args, shapes[int(str(n.attr))], strict=True):
            found_range = ranges[index]
            inside = found_range is not None and -size <= found_range[0] <= found_range[1] < size
            if reads_data(index) and not inside:
                found.append(n)
    return frozenset(found)


def reads_data(n: Node) -> bool:
    """Return whether an expression depends on captured data."""
    return bool(ir.slots(n))
