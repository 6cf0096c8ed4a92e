"""Sort the loads of learned tensors by how a backward kernel may sum their gradients.

The gradient of a load is the sum over its scores of dF times the derivative of the modified score
F. Two kinds need no work per score:

- A load that shifts whole rows, such as `table[h, q]` in `score + table[h, q]`. A shift does not
  change the softmax of a row. The sum of dF over a row is therefore the gradient of the row's LSE:
  the sum of P (dP - delta + dLSE) is dLSE, because delta is the sum of P dP and P sums to 1.
- A load that multiplies whole rows of raw scores, such as `table[h, q]` in `score * table[h, q]`.
  It needs the sum T of dF * score over a row. With A = dF K, the row's dQ without its factor, T is
  scale * Q . A.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attnkit.graph import ir
from attnkit.graph.adjoint import adjoint
from attnkit.graph.ir import Node, arg, const
from attnkit.graph.simplify import build
from attnkit.graph.staging import Level, index_level, level_of, linear

Loads = tuple[tuple[Node, Node], ...]  # (load, its cotangent)

_OF_ROWS = (Level.CONSTANT, Level.HEAD, Level.ROW)
_ZERO = const(0.0)


class LearnedLoads(NamedTuple):
    """Holds the float loads whose gradients are needed, each with a cotangent.

    The cotangents are expressions of `grad`, which stands for a different sum in each field. A load
    of a mod that both shifts and multiplies rows is in two fields.

    Attributes:
        shifts: `grad` is the sum of dF over a row.
        factors: `grad` is the sum of dF * score over a row. If there are any, the main kernel
            sums A, and the postprocess multiplies it by the derivative of the score_mod.
        scores: `grad` is dF of one score.
    """

    shifts: Loads
    factors: Loads
    scores: Loads


def learned_loads(
    root: Node | None, needs_grad: Sequence[bool], row_sums: bool = False, softmax: bool = True
) -> LearnedLoads:
    """Sort the loads of a score_mod whose tensors need a gradient.

    Args:
        root: the score_mod; None if there is none.
        needs_grad: for each captured tensor of the score, whether its gradient is needed.
        row_sums: whether the kernels sum dF * score over rows. They do so for all loads of a
            score_mod or for none, because another load needs work per score anyway.
        softmax: whether a softmax follows. Without one a shift of a row changes its output, and all
            loads need work per score.
    """
    if root is None or not any(needs_grad):
        return LearnedLoads((), (), ())
    found = adjoint(root)
    loads = [(n, c) for n, c in found.loads if needs_grad[int(str(n.attr))]]
    if not softmax:
        return LearnedLoads((), (), tuple(loads))
    shifts = tuple((n, c) for n, c in loads if _shifts_rows(n, c))
    rest = tuple(pair for pair in loads if pair not in shifts)
    row_slope = level_of(unit_gradient(found.dscore)) in _OF_ROWS
    parts = [_row_factor(n, c) for n, c in rest] if row_sums and row_slope else []
    split = [(load, part) for (load, _), part in zip(rest, parts, strict=False) if part is not None]
    if not rest or len(split) < len(rest):
        return LearnedLoads(shifts, (), rest)
    more = tuple((load, shift) for load, (shift, _) in split if shift is not _ZERO)
    factors = tuple((load, factor) for load, (_, factor) in split)
    return LearnedLoads(shifts + more, factors, ())


def _shifts_rows(load: Node, cotangent: Node) -> bool:
    """Return whether a change of the load adds the same number to all scores of a row."""
    parts = *load.args, unit_gradient(cotangent)
    return all(level_of(n) in _OF_ROWS for n in parts)


def _row_factor(load: Node, cotangent: Node) -> tuple[Node, Node] | None:
    """Split a cotangent grad * (a + score * b), a and b of rows, into (grad * a, grad * b).

    The result is None for other cotangents, and for a load whose index is not known in its row.
    """
    split = linear(unit_gradient(cotangent))
    if split is None or index_level(load) not in _OF_ROWS:
        return None
    if any(level_of(n) not in _OF_ROWS for n in split):
        return None
    shift = _ZERO if split.bias is _ZERO else build("mul", arg("grad"), split.bias)
    return shift, build("mul", arg("grad"), split.factor)


def unit_gradient(cotangent: Node) -> Node:
    """Return the derivative that a cotangent is the multiple of: `cotangent` with `grad` = 1."""
    mapping: dict[Node, Node] = {}
    for n in ir.topo(cotangent):
        if n is arg("grad"):
            mapping[n] = const(1.0)
        elif not n.args or all(mapping[a] is a for a in n.args):
            mapping[n] = n
        elif n.op in ("load", "cast", "round"):
            mapping[n] = ir.substitute(n, {a: mapping[a] for a in n.args})
        else:
            mapping[n] = build(n.op, *(mapping[a] for a in n.args))
    return mapping[cotangent]
