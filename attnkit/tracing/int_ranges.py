"""Compute ranges of integer nodes in a trace from dtypes, constants and operations alone."""

from __future__ import annotations

from attnkit.graph import ir
from attnkit.graph.ir import BOOL, F32, Node

Range = tuple[int, int]

INT32: Range = (-(2**31), 2**31 - 1)

# Positions and captured int32 numbers are assumed to be below this bound, so that their sums do not
# wrap and keep the forms by which tiles are classified. If larger numbers would exceed int32, the
# call is rejected.
USUAL = 1 << 22


class IntRanges:
    """Computes and caches the ranges of integer and bool nodes.

    A range that exceeds int32 shows that the operation may wrap.

    Args:
        position: largest value of the arguments b, h, q and kv.
    """

    def __init__(self, position: int) -> None:
        self._position = (0, position)
        self._ranges: dict[Node, Range] = {}

    def set(self, n: Node, low: int, high: int) -> None:
        """Set the range of a node, such as a load from a captured uint8 tensor."""
        self._ranges[n] = low, high

    def of(self, n: Node) -> Range:
        """Return the (smallest, largest) value of an integer or bool node."""
        for m in ir.topo(n):
            if m not in self._ranges:
                self._ranges[m] = self._compute(m)
        return self._ranges[n]

    def _compute(self, n: Node) -> Range:
        if n.type == BOOL:
            return 0, 1
        if n.op == "arg":
            return self._position
        if n.op == "const" and n.type != F32:
            return int(n.attr), int(n.attr)  # type: ignore[arg-type]
        if n.type == F32 or n.op in ("load", "number") or any(a.type == F32 for a in n.args):
            return INT32
        if n.op == "where":
            (_, a, b) = (self._ranges[x] for x in n.args)
            return min(a[0], b[0]), max(a[1], b[1])
        return _operation(n.op, [self._ranges[x] for x in n.args])


def _operation(op: str, args: list[Range]) -> Range:
    a, b = args[0], args[-1]
    if op == "neg":
        return -a[1], -a[0]
    if op == "abs":
        return (0 if a[0] <= 0 <= a[1] else min(map(abs, a))), max(map(abs, a))
    if op == "cast":
        return a
    if op == "add":
        return a[0] + b[0], a[1] + b[1]
    if op == "sub":
        return a[0] - b[1], a[1] - b[0]
    if op in ("mul", "shl"):
        if op == "shl":
            b = (1 << min(max(b[0], 0), 31), 1 << min(max(b[1], 0), 31))
        ends = [x * y for x in a for y in b]
        return min(ends), max(ends)
    if op in ("min", "max"):
        pick = min if op == "min" else max
        return pick(a[0], b[0]), pick(a[1], b[1])
    if op == "mod":
        return min(0, b[0] + 1), max(0, b[1] - 1)
    if op in ("fdiv", "tdiv"):
        largest = max(map(abs, a))
        return (min(0, a[0]) if b[0] > 0 else -largest), (max(0, a[1]) if b[0] > 0 else largest)
    if op == "shr" and 0 <= b[0] <= b[1] < 32:
        return min(x >> y for x in a for y in b), max(x >> y for x in a for y in b)
    if op == "and" and max(a[0], b[0]) >= 0:
        return 0, min(x[1] for x in (a, b) if x[0] >= 0)
    if op in ("and", "or", "xor"):
        bits = max((~x if x < 0 else x).bit_length() for x in (*a, *b))
        return (0 if min(a[0], b[0]) >= 0 else -(1 << bits)), (1 << bits) - 1
    return INT32
