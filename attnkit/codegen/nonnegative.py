"""Find the loads whose indices may be negative, by interval arithmetic on b, h, q and kv.

A negative index counts from the end of the axis. Wrapping it costs a kernel a comparison and a
selection per load, which it can skip if the range of the index is nonnegative. An expression
without a known range may be negative.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from attnkit.graph import ir
from attnkit.graph.ir import BOOL, I32, Node, arg

Range: TypeAlias = tuple[int, int] | None
Known: TypeAlias = Mapping[Node, int]  # integer loads whose value is known

NOTHING: Known = MappingProxyType({})


def wrapping(
    roots: Iterable[Node], sizes: Mapping[str, int], known: Known = NOTHING
) -> frozenset[Node]:
    """Return the loads in `roots` that may have a negative index.

    Args:
        roots: expressions.
        sizes: number of values of b, h, q and kv; each goes from 0 to its size - 1.
        known: values of loads from tables of numbers.
    """
    roots = tuple(roots)
    ranges = ranges_of(roots, sizes, known)
    loads = []
    for n in ir.topo(*roots):
        if n.op == "load":
            lows = [ranges[i] for i in n.args]
            if any(r is None or r[0] < 0 for r in lows):
                loads.append(n)
    return frozenset(loads)


def ranges_of(
    roots: Iterable[Node], sizes: Mapping[str, int], known: Known = NOTHING
) -> dict[Node, Range]:
    """Return the (lowest, highest) value of each integer or bool node in `roots`; None if unknown.

    Args:
        roots: expressions.
        sizes: number of values of b, h, q and kv; each goes from 0 to its size - 1.
        known: values of loads from tables of numbers.
    """
    ranges: dict[Node, Range] = {n: (value, value) for n, value in known.items()}
    for n in ir.topo(*roots):
        if n not in ranges:
            ranges[n] = _range(n, ranges, sizes)
    return ranges


def _range(n: Node, ranges: Mapping[Node, Range], sizes: Mapping[str, int]) -> Range:
    if n.type == BOOL:
        return 0, 1
    if n.type != I32:
        return None
    if n.op == "const":
        return int(str(n.attr)), int(str(n.attr))
    if n is arg("kv_last"):
        return sizes["kv"] - 1, sizes["kv"] - 1
    if n.op == "arg":
        return 0, sizes[str(n.attr)] - 1
    if n.op == "load":
        return None
    if n.op == "where":
        a, b = ranges[n.args[1]], ranges[n.args[2]]
        return None if a is None or b is None else (min(a[0], b[0]), max(a[1], b[1]))
    arguments = [ranges[a] for a in n.args]
    if n.op in ("min", "max"):
        return _clamp(n.op, arguments[0], arguments[1])
    if n.op == "mod" and arguments[1] is not None and arguments[1][0] > 0:
        return 0, arguments[1][1] - 1
    parts = [r for r in arguments if r is not None]
    if len(parts) < len(arguments):
        return None
    return _arithmetic(n.op, parts)


def _clamp(op: str, a: Range, b: Range) -> Range:
    if a is None or b is None:
        one = a or b
        low, high = -(2**31), 2**31 - 1
        if one is None:
            return None
        return (low, one[1]) if op == "min" else (one[0], high)
    pick = min if op == "min" else max
    return pick(a[0], b[0]), pick(a[1], b[1])


def _arithmetic(op: str, parts: list[tuple[int, int]]) -> Range:
    a, b = parts[0], parts[-1]
    if op == "neg":
        return -a[1], -a[0]
    if op == "abs":
        low = 0 if a[0] <= 0 <= a[1] else min(abs(a[0]), abs(a[1]))
        return low, max(abs(a[0]), abs(a[1]))
    if op == "cast":
        return a
    if op == "add":
        return a[0] + b[0], a[1] + b[1]
    if op == "sub":
        return a[0] - b[1], a[1] - b[0]
    if op == "mul":
        ends = [x * y for x in a for y in b]
        return min(ends), max(ends)
    if op == "fdiv" and b[0] > 0:
        ends = [x // y for x in a for y in b]
        return min(ends), max(ends)
    return None
