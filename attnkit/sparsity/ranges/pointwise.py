"""Evaluate one-sided expressions at every position, and return intervals.

Integers, bools, loads and constants are exact. Floating-point results are intervals, because the
`log` of another machine may differ in the last place and truncate to the neighbouring integer. The
rules of `eval_interval` bound all values that are computed from such results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnkit.graph import ir
from attnkit.graph.affine import Side
from attnkit.graph.ir import F32, Node
from attnkit.sparsity.ranges.boxes import Boxes
from attnkit.sparsity.ranges.eval_interval import Interval, clamp_int32, transfer
from attnkit.sparsity.ranges.tables import Domain


def point_intervals(
    domain: Domain, boxes: Boxes, nodes: Sequence[Node], side: Side, start: int, stop: int
) -> list[Interval]:
    """Return the interval of each node at some points, for nodes of one side or constant nodes.

    Args:
        domain: positions and captured tensors.
        boxes: range queries on the same domain.
        nodes: one-sided nodes; all their sub-expressions must be proven in bounds.
        side: the side.
        start, stop: range of points, counted from the side's first position.

    Returns:
        One interval per node, [b or 1, h or 1, points or 1].
    """
    forms = [domain.sides.alone(n) for n in nodes]
    known = domain.evaluate(_portable(forms), side, start, stop)
    intervals: dict[Node, Interval] = {}
    for n in ir.topo(*forms):
        if n in known:
            value = known[n]
            value = value.to(torch.int64) if value.dtype == torch.int32 else value
            intervals[n] = value, value
        elif n.op == "load":
            intervals[n] = boxes.load(n, [intervals[a] for a in n.args])
        else:
            result = transfer(n, [intervals[a] for a in n.args], domain.dtype)
            intervals[n] = clamp_int32(result) if n.type == ir.I32 else result
    return [intervals[n] for n in forms]


def _portable(roots: Sequence[Node]) -> list[Node]:
    """Return the nodes that have the same value on every machine."""
    portable: dict[Node, bool] = {}
    for n in ir.topo(*roots):
        exact = n.type != F32 or n.op in ("arg", "const", "load")
        portable[n] = exact and all(portable[a] for a in n.args)
    return [n for n, yes in portable.items() if yes]
