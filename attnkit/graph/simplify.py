"""Build nodes with type promotion, constant folding and a few exact identities.

The tracer, the adjoint and the rewrites of masks build nodes by `build(op, ...)`. Every rule is
exact for all inputs, NaN and infinities included (a zero may lose its sign). The algebra of a rule
is in its trailing comment; `tests/graph/test_simplify.py` checks each rule on random values.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from attnkit.graph import ir
from attnkit.graph.ir import BOOL, F32, I32, Node, Type, const

_RANK: dict[Type, int] = {BOOL: 0, I32: 1, F32: 2}
_ORDER: tuple[Type, ...] = (BOOL, I32, F32)

TRUE = const(True)
FALSE = const(False)


def cast(n: Node, to: Type) -> Node:
    """Cast a node to type `to`. Float to int truncates, and any type to bool is `!= 0`."""
    if n.type == to:
        return n
    if n.op == "const":
        value = n.attr
        if to == BOOL:
            return const(bool(value))  # bool(NaN) is True, as in torch
        if to == F32:
            return const(float(value))  # type: ignore[arg-type]
        if math.isfinite(value):  # type: ignore[arg-type]
            return const(int(value))  # type: ignore[arg-type]
    if to == BOOL:
        return negate(build("eq", n, cast(const(0), n.type)))  # bool(x) = ~(x == 0)
    return ir.node("cast", n, to=to)


def promote(*nodes: Node, least: Type = BOOL) -> tuple[Node, ...]:
    """Cast all nodes to the largest of their types and `least`, where bool < i32 < f32."""
    to = _ORDER[max(_RANK[least], *(_RANK[n.type] for n in nodes))]
    return tuple(cast(n, to) for n in nodes)


def without_gradient(n: Node) -> Node:
    """Return a float node of the same value, whose derivative is 0."""
    return build("with_slope", n, const(0.0), const(0.0))


def value_only(root: Node) -> Node:
    """Return an expression of the same value, without the nodes that change its derivative."""
    done: dict[Node, Node] = {}
    for n in ir.topo(root):
        args = tuple(done[a] for a in n.args)
        done[n] = args[0] if n.op == "with_slope" else ir.with_args(n, args)
    return done[root]


def negate(n: Node) -> Node:
    """Return the logical not of a bool node."""
    if n.op == "not":
        return n.args[0]  # ~~x = x
    if n.op == "const":
        return const(not n.attr)
    return ir.node("not", n)


def build(op: str, *args: Node) -> Node:
    """Build the simplified node of an operation.

    The arguments are promoted as torch promotes scalars.

    Args:
        op: a key of `ir.SIGNATURES` except cast and round, or a derived comparison: "gt", "ge" or
            "ne".
        args: the arguments.
    """
    if op in ("gt", "ge"):
        return build({"gt": "lt", "ge": "le"}[op], args[1], args[0])  # a > b = b < a
    if op == "ne":
        return negate(build("eq", *args))  # a != b = ~(a == b)
    letters = ir.SIGNATURES[op][0]
    if op == "where":
        args = (cast(args[0], BOOL), *promote(*args[1:]))
    elif op == "not":
        return negate(cast(args[0], BOOL))
    elif "f" in letters:
        args = tuple(cast(a, F32) for a in args)
    elif "n" in letters:
        args = promote(*args, least=I32)
    else:
        args = promote(*args)
    if all(a.op == "const" for a in args):
        folded = _fold(op, args)
        if folded is not None:
            return folded
    rule = _RULES.get(op)
    simplified = rule(*args) if rule else None
    return ir.node(op, *args) if simplified is None else simplified


# Exponents for which torch calls another function than pow; the results differ at -inf.
_ROOTS = {0.5: "sqrt", -0.5: "rsqrt"}


def power(a: Node, b: Node) -> Node:
    """Build the node of `a ** b` on floats, which torch computes as a root for some constants."""
    root = _ROOTS.get(float(b.attr)) if b.op == "const" else None  # type: ignore[arg-type]
    return build("pow", a, b) if root is None else build(root, a)


def _fold(op: str, args: tuple[Node, ...]) -> Node | None:
    """Fold an operation on constants, or return None if Python might not give the exact result."""
    if op in _FOLD_ANY or (args[0].type != F32 and op in _FOLD_INT):
        function = _FOLD_ANY.get(op) or _FOLD_INT[op]
        if op in ("fdiv", "mod", "tdiv") and not args[1].attr:
            return None  # division by zero stays; `sparsity.index_bounds` refuses it
        value = function(*(a.attr for a in args))
        if op.startswith("wrap_"):
            value = int32(int(value))
        if isinstance(value, int) and not -(2**31) <= value < 2**31:
            return None  # leaves int32: stays; `sparsity.index_bounds` refuses it
        return const(value)
    return None


def int32(value: int) -> int:
    """Return `value` modulo 2**32 as a signed int32 number."""
    return (value + 2**31) % 2**32 - 2**31


_FOLD_ANY: dict[str, Callable[..., bool | int | float]] = {
    "neg": lambda a: -a,
    "abs": abs,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "eq": lambda a, b: a == b,
}
_FOLD_INT: dict[str, Callable[..., bool | int | float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "min": min,
    "max": max,
    "fdiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "tdiv": lambda a, b: int(math.copysign(1, a) * math.copysign(1, b)) * (abs(a) // abs(b)),
    "wrap_add": lambda a, b: a + b,
    "wrap_sub": lambda a, b: a - b,
    "wrap_mul": lambda a, b: a * b,
    "wrap_neg": lambda a: -a,
    "wrap_abs": abs,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}


def _is(n: Node, value: float) -> bool:
    return n.op == "const" and n.attr == value and n.type != BOOL


def _add(a: Node, b: Node) -> Node | None:
    if _is(b, 0):
        return a  # x + 0 = x
    if _is(a, 0):
        return b  # 0 + x = x
    return None


def _sub(a: Node, b: Node) -> Node | None:
    if _is(b, 0):
        return a  # x - 0 = x
    if a is b and a.type == I32:
        return const(0)  # x - x = 0 (integers only: inf - inf is NaN)
    return None


def _mul(a: Node, b: Node) -> Node | None:
    if _is(b, 1):
        return a  # x * 1 = x
    if _is(a, 1):
        return b  # 1 * x = x
    if a.type == I32 and (_is(a, 0) or _is(b, 0)):
        return const(0)  # x * 0 = 0 (integers only: NaN * 0 is NaN)
    return None


def _div(a: Node, b: Node) -> Node | None:
    if _is(b, 1):
        return a  # x / 1 = x
    if (
        b.op == "const"
        and b.attr
        and math.isfinite(float(b.attr))
        and abs(math.frexp(float(b.attr))[0]) == 0.5
    ):
        inverse = 1.0 / float(b.attr)
        if 2.0**-100 < abs(inverse) < 2.0**100:
            return build("mul", a, const(inverse))  # x / 2^n = x * 2^-n, exact
    return None


def _by_one(a: Node, b: Node) -> Node | None:
    return a if _is(b, 1) and a.type == I32 else None  # x // 1 = x


def _mod(a: Node, b: Node) -> Node | None:
    return const(0) if _is(b, 1) and a.type == I32 else None  # x % 1 = 0


def _idempotent(a: Node, b: Node) -> Node | None:
    return a if a is b else None  # min(x, x) = x, and likewise max


def _and(a: Node, b: Node) -> Node | None:
    for x, y in ((a, b), (b, a)):
        if x.op == "const" and x.type == BOOL:
            return y if x.attr else FALSE  # True & x = x, False & x = False
    return a if a is b else None  # x & x = x


def _or(a: Node, b: Node) -> Node | None:
    for x, y in ((a, b), (b, a)):
        if x.op == "const" and x.type == BOOL:
            return TRUE if x.attr else y  # True | x = True, False | x = x
    return a if a is b else None  # x | x = x


def _xor(a: Node, b: Node) -> Node | None:
    for x, y in ((a, b), (b, a)):
        if x.op == "const" and x.type == BOOL:
            return negate(y) if x.attr else y  # True ^ x = ~x, False ^ x = x
    return None


def _neg(a: Node) -> Node | None:
    return a.args[0] if a.op == "neg" else None  # -(-x) = x


def _abs(a: Node) -> Node | None:
    return (
        build("abs", a.args[0]) if a.op == "neg" else (a if a.op == "abs" else None)
    )  # |-x| = |x|


def _reflexive(a: Node, b: Node) -> Node | None:
    return TRUE if a is b and a.type != F32 else None  # x <= x, x == x (not NaN: integers)


def _irreflexive(a: Node, b: Node) -> Node | None:
    return FALSE if a is b else None  # x < x = False, NaN included


def _where(c: Node, a: Node, b: Node) -> Node | None:
    if c.op == "const":
        return a if c.attr else b  # where(True, a, b) = a
    if a is b:
        return a  # where(c, a, a) = a
    if c.op == "not":
        return build("where", c.args[0], b, a)  # where(~c, a, b) = where(c, b, a)
    return None


def _pow(a: Node, b: Node) -> Node | None:
    if b.op == "const" and b.attr in (0.0, 1.0, 2.0, 3.0, 4.0):
        result = const(1.0)
        for _ in range(int(b.attr)):
            result = build("mul", result, a)
        return result  # x ** 3 = x * x * x
    if b.op == "const" and b.attr == -1.0:
        return build("div", const(1.0), a)  # x ** -1 = 1 / x
    if a.op == "const" and a.attr in (2.0, 0.5, 4.0, 0.25):
        power = math.log2(float(a.attr))
        return build("exp2", build("mul", b, const(power)))  # (2^n) ** x = exp2(n x), n x exact
    return None


def _with_slope(value: Node, x: Node, slope: Node) -> Node | None:
    plain = value_only(value), x, value_only(slope)  # derivatives of these do not matter
    if plain != (value, x, slope):
        return build("with_slope", *plain)
    return value if value.op == "const" and x.op == "const" else None  # nothing to derive


_RULES: dict[str, Callable[..., Node | None]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "fdiv": _by_one,
    "tdiv": _by_one,
    "mod": _mod,
    "min": _idempotent,
    "max": _idempotent,
    "and": _and,
    "or": _or,
    "xor": _xor,
    "neg": _neg,
    "abs": _abs,
    "le": _reflexive,
    "eq": _reflexive,
    "lt": _irreflexive,
    "where": _where,
    "pow": _pow,
    "with_slope": _with_slope,
}
