"""Replace constants of graphs by loads from tables of numbers, which a kernel reads at run time.

A kernel with a number as a constant is the fastest, and serves this number only. `with_tables`
makes the graphs of a kernel that serves all values: it loads the number once for each work tile.

These constants stay, most because their value picks the code: infinity, NaN, Booleans, exponents
and bases of powers, divisors and moduli of integer and floor divisions, shift counts, operands of
bit operations, arguments of atan2, and floats beyond 2**100 or below 2**-100.

A float divisor becomes a factor, its reciprocal, as it does where the kernel has it as a constant.
An integer that is subtracted becomes one that is added, so that both signs have one kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from attnkit.graph import ir
from attnkit.graph.ir import BOOL, F32, I32, Node, const, load

_FIXED_OPERANDS = frozenset("pow fdiv mod tdiv shl shr and or xor atan2".split())
_LARGEST = 2.0**100  # so that products of a few numbers are finite, and their reciprocals too


class Number(NamedTuple):
    """Identifies a number of some graphs: a constant argument of an operation.

    Equal constants in two places are two numbers, which may differ for other values of a parameter.

    Attributes:
        user: the operation.
        at: index of the argument.
    """

    user: Node
    at: int

    @property
    def constant(self) -> Node:
        """Return the constant node that holds the number."""
        return self.user.args[self.at]

    @property
    def inverted(self) -> bool:
        """Return whether the number is a divisor, so that its reciprocal is meant."""
        return self.user.op == "div" and self.at == 1

    @property
    def negated(self) -> bool:
        """Return whether the number is an integer that is subtracted, so that -number is added."""
        return self.user.op == "sub" and self.at == 1 and self.constant.type == I32

    @property
    def op(self) -> str:
        """Return the operation that replaces the user's, with `value` as its argument."""
        return "mul" if self.inverted else "add" if self.negated else self.user.op

    @property
    def value(self) -> int | float:
        """Return the value that a table stores: the number, its reciprocal or its negative."""
        value = self.constant.attr
        assert isinstance(value, int | float)
        return 1.0 / value if self.inverted else -value if self.negated else value


class NumberTables(NamedTuple):
    """Holds graphs that read numbers from tables.

    Attributes:
        roots: the graphs.
        floats, ints: contents of the tables, float32 and int32. The slots of tables that are not
            empty follow those of the captured tensors, in this order.
        known: the integer loads from the tables, with their values.
    """

    roots: tuple[Node | None, ...]
    floats: tuple[float, ...]
    ints: tuple[int, ...]
    known: tuple[tuple[Node, int], ...]


def numbers_of(roots: Sequence[Node | None]) -> tuple[Number, ...]:
    """Return the numbers of graphs that a kernel may read at run time.

    Their order depends on the structure of the graphs alone, not on the values.
    """
    nodes = ir.topo(*(n for n in roots if n is not None))
    return tuple(number for n in nodes for number in _numbers(n))


def with_tables(
    roots: Sequence[Node | None], chosen: Collection[Number], first: int
) -> NumberTables:
    """Replace numbers of graphs by loads.

    Args:
        roots: the graphs.
        chosen: numbers from `numbers_of(roots)`.
        first: number of slots that captured tensors occupy.
    """
    floats = [n for n in chosen if n.constant.type == F32]
    ints = [n for n in chosen if n.constant.type == I32]
    slots = {F32: first, I32: first + bool(floats)}
    loads = {
        n: load(slots[n.constant.type], n.constant.type, [const(i)])
        for group in (floats, ints)
        for i, n in enumerate(group)
    }
    done: dict[Node, Node] = {}
    for n in ir.topo(*(r for r in roots if r is not None)):
        places = [Number(n, at) for at in range(len(n.args))]
        args = tuple(loads.get(p) or done[a] for p, a in zip(places, n.args, strict=True))
        op = next((p.op for p in places if p in loads and p.op != n.op), n.op)
        done[n] = ir.with_args(n, args) if op == n.op else ir.node(op, *args)
    return NumberTables(
        tuple(None if r is None else done[r] for r in roots),
        tuple(float(n.value) for n in floats),
        tuple(int(n.value) for n in ints),
        tuple((loads[n], int(n.value)) for n in ints),
    )


def _numbers(n: Node) -> Iterator[Number]:
    """Yield the numbers among the arguments of `n`."""
    if n.op in _FIXED_OPERANDS:
        return
    for at, a in enumerate(n.args):
        if a.op == "const" and a.type != BOOL:
            number = Number(n, at)
            if _is_parameter(a, number.inverted):
                yield number


def _is_parameter(constant: Node, inverted: bool) -> bool:
    value = constant.attr
    assert isinstance(value, int | float)
    if constant.type == I32:
        return -(2**31) < value < 2**31  # so that its negative is one too
    if value == 0:
        return not inverted
    return 1 / _LARGEST < abs(value) < _LARGEST  # false for NaN
