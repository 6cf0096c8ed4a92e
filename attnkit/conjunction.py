"""Rewrites of a mask's logic that make classification exact more often.

Two rules, both for the boolean structure only:

* equate: `eq(A(q), B(kv)) and X  =  eq(A(q), B(kv)) and X[B := A]`. Where A and B differ both
  sides are false, so replacing is sound; `start[doc[kv]]` becomes `start[doc[q]]`, one-sided,
  and cancels.
* regroup: the members of an `and` (or of an `or`) are ordered by side, so that those on one side
  become one one-sided expression, tabulated exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

from attnkit import expr, rewrite
from attnkit.expr import BOOL, I32, Node
from attnkit.sided import Side, Sides


def equated(root: Node, sides: Sides) -> Node:
    """Apply `equate` to every conjunction.

    The result may evaluate loads and divisions at values that the original never reached, where
    the equality fails: check its bounds before using it.
    """
    return _rebuilt(root, sides, equate=True)


def regrouped(root: Node, sides: Sides) -> Node:
    """Apply `regroup` to every `and` and `or`."""
    return _rebuilt(root, sides, equate=False)


def _rebuilt(root: Node, sides: Sides, *, equate: bool) -> Node:
    done: dict[Node, Node] = {}
    for n in expr.topo(root):
        if n.type != BOOL or not any(a.type == BOOL for a in n.args):
            done[n] = n
        elif n.op in ("and", "or"):
            members = [done[m] for m in _members(n)]
            if not equate:
                members = _by_side(n.op, members, sides)
            elif n.op == "and":
                members = _equate(members, sides)
            done[n] = _chain(n.op, members)
        else:
            mapping = {a: done[a] for a in n.args if done.get(a, a) is not a}
            done[n] = expr.substitute(n, mapping) if mapping else n
    return done[root]


def _members(n: Node) -> list[Node]:
    """The members of a chain of one operation, left to right."""
    found: list[Node] = []
    stack = [n]
    while stack:
        m = stack.pop()
        if m.op == n.op and m.type == BOOL:
            stack.extend(reversed(m.args))
        else:
            found.append(m)
    return list(dict.fromkeys(found))


def _chain(op: str, members: Sequence[Node]) -> Node:
    result = members[0]
    for m in members[1:]:
        result = rewrite.build(op, result, m)
    return result


def _by_side(op: str, members: Sequence[Node], sides: Sides) -> list[Node]:
    groups: dict[Side, list[Node]] = {side: [] for side in Side}
    for m in members:
        groups[sides.side(m)].append(m)
    mixed = groups.pop(Side.MIXED)
    return [_chain(op, group) for group in groups.values() if group] + mixed


def _equate(members: Sequence[Node], sides: Sides) -> list[Node]:
    mapping: dict[Node, Node] = {}
    defining: set[Node] = set()
    for m in members:
        if m.op != "eq" or m.args[0].type not in (I32, BOOL):
            continue  # equal floats may still differ: 0.0 == -0.0
        left, right = m.args
        if (sides.side(left), sides.side(right)) == (Side.KV, Side.Q):
            left, right = right, left
        if (sides.side(left), sides.side(right)) != (Side.Q, Side.KV) or right in mapping:
            continue
        mapping[right] = left
        defining.add(m)
    return [m if m in defining else expr.substitute(m, mapping) for m in members]
