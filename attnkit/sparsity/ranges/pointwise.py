"""One-sided expressions at every position, as intervals.

Integers, bools, loads and constants are evaluated, exactly. Floating-point results are kept as
intervals, because another machine's `log` may differ in the last place and be truncated to the
neighbouring integer; what is derived from them is bounded by the rules of `interval.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnkit.graph import ir
from attnkit.graph.affine import Side
from attnkit.graph.ir import F32, Node
from attnkit.sparsity.ranges.boxes import Boxes
from attnkit.sparsity.ranges.eval_interval import Interval, clamped, transfer
from attnkit.sparsity.ranges.tables import Domain


def point_intervals(
    domain: Domain, boxes: Boxes, nodes: Sequence[Node], side: Side, start: int, stop: int
) -> list[Interval]:
    """Intervals [b or 1, h or 1, points or 1] of nodes of one side, or constant ones.

    Args:
        domain: the points; `start` to `stop` count from the side's first position.
        boxes: range queries on the same domain.
        nodes: one-sided nodes whose every sub-expression is proven to be in bounds.
    """
    forms = [domain.sides.alone(n) for n in nodes]
    solid = _solid(forms)
    known = domain.evaluated(solid, side, start, stop)
    found: dict[Node, Interval] = {}
    for n in ir.topo(*forms):
        if n in known:
            value = known[n]
            value = value.to(torch.int64) if value.dtype == torch.int32 else value
            found[n] = value, value
        elif n.op == "load":
            found[n] = boxes.load(n, [found[a] for a in n.args])
        else:
            result = transfer(n, [found[a] for a in n.args], domain.dtype)
            found[n] = clamped(result) if n.type == ir.I32 else result
    return [found[n] for n in forms]


def _solid(roots: Sequence[Node]) -> list[Node]:
    """Nodes that every machine computes alike."""
    solid: dict[Node, bool] = {}
    for n in ir.topo(*roots):
        plain = n.type != F32 or n.op in ("arg", "const", "load")
        solid[n] = plain and all(solid[a] for a in n.args)
    return [n for n, yes in solid.items() if yes]
