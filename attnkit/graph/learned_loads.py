"""Find the loads of captured tensors whose gradients a backward kernel must sum.

Adding the same number to all scores of a row does not change the row's softmax. Its gradient is
therefore the gradient of the row's LSE: the sum over the row of P (dP - delta + dLSE) is dLSE,
because delta is the sum of P dP. Without a gradient of the LSE it is 0, and needs no kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

from attnkit.graph import ir
from attnkit.graph.adjoint import adjoint
from attnkit.graph.ir import Node, arg, const
from attnkit.graph.simplify import build
from attnkit.graph.staging import Level, level_of

_OF_ROWS = (Level.CONSTANT, Level.HEAD, Level.ROW)


def learned_loads(
    root: Node | None, needs_grad: Sequence[bool], lse_gradient: bool
) -> tuple[tuple[Node, Node], ...]:
    """Return the float loads whose gradients are needed and not 0, with their cotangents.

    Args:
        root: the score_mod; None if there is none.
        needs_grad: for each captured tensor of the score, whether its gradient is needed.
        lse_gradient: whether the LSE has a gradient.
    """
    if root is None or not any(needs_grad):
        return ()
    return tuple(
        (load, cotangent)
        for load, cotangent in adjoint(root).loads
        if needs_grad[int(str(load.attr))] and (lse_gradient or not shifts_rows(load, cotangent))
    )


def shifts_rows(load: Node, cotangent: Node) -> bool:
    """Return whether a change of the load adds the same number to all scores of a row.

    Args:
        load: a load of the score_mod.
        cotangent: its cotangent, for the cotangent `grad` of the score_mod.
    """
    parts = *load.args, unit_gradient(cotangent)
    return all(level_of(n) in _OF_ROWS for n in parts)


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
