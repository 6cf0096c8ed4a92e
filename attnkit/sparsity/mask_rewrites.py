"""Rewrite the boolean structure of a mask so that tile classification is exact more often.

There are three rules:

* equate: `eq(A(q), B(kv)) and X  =  eq(A(q), B(kv)) and X[B := A]`. If A and B differ, both
  conjunctions are False, so the replacement is sound. For example, `start[doc[kv]]` becomes
  `start[doc[q]]`, which is one-sided and cancels.
* regroup: order the members of an `and` (or of an `or`) by side, so that the members of one side
  become one one-sided expression, which is tabulated exactly.
* gate: `C(kv) and A(q) <= B(kv)  =  A(q) + (0 if C(kv) else P) <= B(kv)`, with a penalty P that is
  larger than all integers: if C is False, so is the comparison. One table then holds both
  conditions, so they are evaluated together. The rule also applies to conditions on q, to every
  comparison of q with kv in the conjunction, and to `or`, with a penalty -P if C is True.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from attnkit.graph import ir, simplify
from attnkit.graph.affine import Side, Sides, comparable
from attnkit.graph.ir import BOOL, I32, Node
from attnkit.util import caches

# The product _FAR * _TIMES exceeds every difference of two int32 numbers.
_FAR, _TIMES = 1 << 30, 16


@lru_cache(maxsize=256)
def equate(root: Node, sides: Sides) -> Node:
    """Replace B by A in every conjunction that contains `A(q) == B(kv)` (rule `equate`).

    If the equality is False, the result may evaluate loads and divisions at values that the
    original expression never reaches. Check the bounds of the result before use.
    """
    return _rewrite(root, lambda op, m: _equate_members(m, sides) if op == "and" else m)


caches.register(equate.cache_clear)


def regroup(root: Node, sides: Sides) -> Node:
    """Order the members of every `and` and `or` by side (rule `regroup`)."""
    return _rewrite(root, lambda op, members: _by_side(op, members, sides))


def gate(root: Node, sides: Sides) -> Node:
    """Merge conditions on one side into comparisons of q with kv (rule `gate`).

    The rule applies to every `and` and `or`. Use the result only for interval arithmetic on tiles,
    which computes sums exactly, because some sums leave int32.
    """
    done: set[Node] = set()  # gated comparisons: a second penalty might cancel the first
    return _rewrite(root, lambda op, members: _gate_members(op, members, sides, done))


def _rewrite(root: Node, rule: Callable[[str, list[Node]], list[Node]]) -> Node:
    """Apply `rule` to the members of every `and` and `or`, inner ones first.

    `a | b | c` is one group: the rule is applied once to its three members, and not to `a | b`.
    """
    nodes = ir.topo(root)
    inside = {a for n in nodes if _joins(n) for a in n.args if a.op == n.op}
    needed = {a for n in nodes for a in n.args if not _joins(n) or a.op != n.op} | {root}
    done: dict[Node, Node] = {}
    for n in nodes:
        if n.type != BOOL or not any(a.type == BOOL for a in n.args):
            done[n] = n
        elif not _joins(n):
            done[n] = ir.with_args(n, tuple(done[a] for a in n.args))
        elif n not in inside or n in needed:
            done[n] = _chain(n.op, rule(n.op, [done[m] for m in members(n)]))
    return done[root]


def _joins(n: Node) -> bool:
    return n.type == BOOL and n.op in ("and", "or")


def members(n: Node) -> list[Node]:
    """Return the operands of nested nodes of one operation: a, b, c of `a & b & c`."""
    operands: list[Node] = []
    stack = [n]
    while stack:
        m = stack.pop()
        if m.op == n.op and m.type == BOOL:
            stack.extend(reversed(m.args))
        else:
            operands.append(m)
    return list(dict.fromkeys(operands))


def _chain(op: str, members: Sequence[Node]) -> Node:
    result = members[0]
    for m in members[1:]:
        result = simplify.build(op, result, m)
    return result


def _by_side(op: str, members: Sequence[Node], sides: Sides) -> list[Node]:
    groups: dict[Side, list[Node]] = {side: [] for side in Side}
    for m in members:
        groups[sides.side(m)].append(m)
    mixed = groups.pop(Side.MIXED)
    return [_chain(op, group) for group in groups.values() if group] + mixed


def _gate_members(op: str, members: list[Node], sides: Sides, done: set[Node]) -> list[Node]:
    """Merge the conditions on one side into the comparisons of q with kv."""
    gates = [m for m in members if sides.side(m) in (Side.Q, Side.KV, Side.CONST)]
    known, remaining = set(members), []
    for m in members:
        if sides.side(m) in (Side.Q, Side.KV, Side.CONST):
            continue
        if gates and m not in done and _can_be_gated(m, op, sides):
            comparison = _with_gates(m, gates, op)
            if sides.side(comparison) is Side.MIXED:  # else tables would evaluate it in int32
                done.add(comparison)
                m = comparison
        remaining.append(m)
    return members if known.issuperset(remaining) else remaining


def _can_be_gated(n: Node, op: str, sides: Sides) -> bool:
    """Return whether `n` compares q terms with kv terms and a penalty can decide it (`gate`)."""
    if not comparable(n) or (n.op == "eq" and op == "or"):
        return False
    present = {sides.side(m) for m, _ in sides.difference(n).terms}
    return present - {Side.CONST} == {Side.Q, Side.KV}


def _with_gates(comparison: Node, gates: Sequence[Node], op: str) -> Node:
    left, right = comparison.args
    for condition in gates:
        far = (0, _FAR) if op == "and" else (-_FAR, 0)
        penalty = ir.node("where", condition, *(ir.const(x) for x in far))
        left = ir.node("add", left, ir.node("mul", penalty, ir.const(_TIMES)))
    return ir.node(comparison.op, left, right)


def _equate_members(members: Sequence[Node], sides: Sides) -> list[Node]:
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
    return [m if m in defining else ir.substitute(m, mapping) for m in members]
