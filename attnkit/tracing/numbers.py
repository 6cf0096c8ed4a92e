"""Represent Python numbers that are known only when a call runs, and insert them into a graph.

Inside torch.compile a number that changes from call to call is an input of the compiled graph. A
trace represents it by `Unknown`, and the graph by a `number` node. `with_numbers` replaces these
nodes by constants when the values are known. The result means what a trace with these constants
means, because an operation that treats some numbers in another way calls `known`, which raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnkit.errors import BoundsError
from attnkit.graph import ir
from attnkit.graph.ir import F32, I32, Node, Type, const
from attnkit.graph.simplify import build, cast, power
from attnkit.tracing.int_ranges import INT32, USUAL, IntRanges


@dataclass(frozen=True)
class Unknown:
    """Represents a Python number of which only the type is known.

    Attributes:
        index: position among the unknown numbers of that type.
        type: I32 for an int, F32 for a float.
    """

    index: int
    type: Type


def known(number: bool | int | float | Unknown | None) -> bool | int | float | None:
    """Return `number` unless it is unknown.

    Raises:
        TypeError: the number is unknown.
    """
    if isinstance(number, Unknown):
        raise TypeError("the operation depends on the value of a number that is not known")
    return number


def with_numbers(root: Node, ints: Sequence[int], floats: Sequence[float]) -> Node:
    """Replace the number nodes of a graph by constants; return the simplified graph.

    Args:
        root: the graph.
        ints: values of the numbers of type I32, by index.
        floats: values of the numbers of type F32, by index.

    Raises:
        BoundsError: an int that is combined with integers needs more than 32 bits.
    """
    done: dict[Node, Node] = {}
    changed: set[Node] = set()
    ranges = IntRanges(position=USUAL)
    for n in ir.topo(root):
        args = tuple(done[a] for a in n.args)
        if n.op == "number" or not changed.isdisjoint(n.args):
            changed.add(n)
        if n.op == "number":
            index = int(n.attr)  # type: ignore[arg-type]
            done[n] = const(float(floats[index]) if n.type == F32 else int(ints[index]))
        elif n.op == "cast" and n.type == F32 and args[0].op == "const":
            done[n] = cast(args[0], F32)  # a float may be larger than an int32
        elif n.op == "round" and args[0].op == "const":
            dtype = getattr(torch, str(n.attr))
            done[n] = const(torch.tensor(args[0].attr, dtype=dtype).item())
        else:
            for before, after in zip(n.args, args, strict=True):
                if before.op == "number":
                    _check_int32(after)
            done[n] = power(*args) if n.op == "pow" else rebuilt(n, args)
            if n in changed:
                done[n] = _without_wrap(done[n], ranges)
    if root.op == "number":
        _check_int32(done[root])
    return done[root]


def _without_wrap(n: Node, ranges: IntRanges) -> Node:
    """Return a `wrap_` operation as the plain one, by which tiles are classified, if it cannot wrap.

    The trace has assumed that the number is large.
    """
    if n.op not in ("wrap_add", "wrap_sub", "wrap_mul", "wrap_neg"):
        return n
    plain = build(n.op.removeprefix("wrap_"), *n.args)
    low, high = ranges.of(plain)
    return plain if INT32[0] <= low and high <= INT32[1] else n


def _check_int32(n: Node) -> None:
    if n.type == I32 and not -(2**31) <= int(n.attr) < 2**31:  # type: ignore[arg-type]
        raise BoundsError(
            f"the integer {n.attr} that a score_mod or mask_mod reads does not fit into 32 bits, and "
            "positions are int32; write float(...) around it"
        )


def rebuilt(n: Node, args: tuple[Node, ...], op: str | None = None) -> Node:
    """Return a copy of node `n` with the arguments `args` and, if given, the operation `op`."""
    op = op or n.op
    if args == n.args and op == n.op:
        return n
    if op == "load":
        return ir.load(int(n.attr), n.type, args)  # type: ignore[arg-type]
    if op == "cast":
        return cast(args[0], n.type)
    return ir.node("round", *args, attr=n.attr) if op == "round" else build(op, *args)
