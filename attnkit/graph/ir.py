"""Define the nodes of the expression graph, their types and their text form.

Nodes are interned: two nodes with the same operation, type, attribute and arguments are the same
object. So equality is identity, common subexpressions are shared, and a root node is a cache key.
This module does not compute values. `eval_torch`, `eval_sympy`, `attnkit.sparsity.ranges` and
`attnkit.codegen` evaluate or translate the graph.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, TypeAlias

Type: TypeAlias = Literal["i32", "f32", "bool"]
Attr: TypeAlias = int | float | bool | str | None

I32: Type = "i32"
F32: Type = "f32"  # the compute dtype: float32, or float64 where the query is float64
BOOL: Type = "bool"

# The arguments of a user's function; `grad`, the cotangent of a score in adjoint graphs; `scale`,
# the softmax scale in the forms that kernels compute, where `score` is q . k without the scale; and
# `kv_last`, the position of the last key, which is added to q - kv in the index of a table by
# distance.
ARG_TYPES: dict[str, Type] = {
    "score": F32,
    "scale": F32,
    "b": I32,
    "h": I32,
    "q": I32,
    "kv": I32,
    "grad": F32,
    "kv_last": I32,
}

# op -> (argument types, result type). Letters: "i", "f", "b" are i32, f32 and bool; "T" is any
# type, "n" is i32 or f32, "w" is i32 or bool. A letter that occurs twice is the same type twice.
# `load` takes one i32 per dimension of its tensor.
SIGNATURES: dict[str, tuple[str, str]] = {
    "add": ("nn", "n"),
    "sub": ("nn", "n"),
    "mul": ("nn", "n"),
    "neg": ("n", "n"),
    "abs": ("n", "n"),
    "min": ("nn", "n"),  # NaN in either argument gives NaN, as torch.minimum
    "max": ("nn", "n"),
    "fdiv": ("nn", "n"),  # rounds towards minus infinity
    "mod": ("nn", "n"),  # sign of the divisor
    "tdiv": ("ii", "i"),  # rounds towards zero
    # The results of these are taken modulo 2**32; others must stay in int32, which is proven.
    "wrap_add": ("ii", "i"),
    "wrap_sub": ("ii", "i"),
    "wrap_mul": ("ii", "i"),
    "wrap_neg": ("i", "i"),
    "wrap_abs": ("i", "i"),
    "div": ("ff", "f"),
    "pow": ("ff", "f"),
    "exp": ("f", "f"),
    "exp2": ("f", "f"),
    "expm1": ("f", "f"),
    "log": ("f", "f"),
    "log2": ("f", "f"),
    "log1p": ("f", "f"),
    "sqrt": ("f", "f"),
    "rsqrt": ("f", "f"),
    "tanh": ("f", "f"),
    "sigmoid": ("f", "f"),
    "sin": ("f", "f"),
    "cos": ("f", "f"),
    "erf": ("f", "f"),
    "erfinv": ("f", "f"),
    "lgamma": ("f", "f"),  # log(abs(gamma(x)))
    "digamma": ("f", "f"),  # its derivative, which only the adjoint makes
    "hypot": ("ff", "f"),
    "atan2": ("ff", "f"),  # the angle of the point (second argument, first argument)
    "floor": ("f", "f"),
    # (value, x, slope) is the value; its derivative is `slope` by x, and 0 by all else
    "with_slope": ("fff", "f"),
    # attr "float16", "bfloat16", "float32" or "float64": round to that precision, keep the type
    "round": ("f", "f"),
    "and": ("ww", "w"),
    "or": ("ww", "w"),
    "xor": ("ww", "w"),
    "shl": ("ii", "i"),
    "shr": ("ii", "i"),  # arithmetic
    "not": ("b", "b"),
    "lt": ("TT", "b"),
    "le": ("TT", "b"),
    "eq": ("TT", "b"),
    "where": ("bTT", "T"),
    "cast": ("T", "*"),  # float to int truncates, anything to bool is `!= 0`
}

_LETTERS: dict[str, tuple[Type, ...]] = {
    "i": (I32,),
    "f": (F32,),
    "b": (BOOL,),
    "n": (I32, F32),
    "w": (I32, BOOL),
    "T": (I32, F32, BOOL),
}


class Node:
    """Represents one operation or leaf of the expression graph. Nodes are immutable.

    Create nodes with `node`, `const`, `arg` and `load`, which intern them.

    Attributes:
        op: a key of `SIGNATURES`, or one of the leaves "arg", "const", "load", "number".
        type: "i32", "f32" or "bool".
        args: the argument nodes.
        attr: name of an arg, value of a const, slot of a load, index of a number, dtype of a round;
            else None.
    """

    __slots__ = ("__weakref__", "args", "attr", "op", "type")

    op: str
    type: Type
    args: tuple[Node, ...]
    attr: Attr

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Node is immutable")

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return parse, (text(self),)

    def __deepcopy__(self, memo: object) -> Node:
        return self

    def __repr__(self) -> str:
        return formula(self)


_table: weakref.WeakValueDictionary[object, Node] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _intern(op: str, type_: Type, args: tuple[Node, ...], attr: Attr) -> Node:
    # float.hex distinguishes -0.0 from 0.0 and equates NaN with NaN; the arguments hash by identity
    key = (op, type_, attr.hex() if isinstance(attr, float) else attr, args)
    existing = _table.get(key)
    if existing is not None:
        return existing
    with _lock:
        existing = _table.get(key)
        if existing is None:
            existing = Node()
            for name, value in (("op", op), ("type", type_), ("args", args), ("attr", attr)):
                object.__setattr__(existing, name, value)
            _table[key] = existing
    return existing


def arg(name: str) -> Node:
    """Return the leaf node of an argument: score, b, h, q, kv, grad or scale."""
    return _intern("arg", ARG_TYPES[name], (), name)


def const(value: bool | int | float) -> Node:
    """Return the node of a constant. Python bool, int and float give type bool, i32 and f32."""
    if isinstance(value, bool):
        return _intern("const", BOOL, (), value)
    if isinstance(value, int):
        return _intern("const", I32, (), value)
    return _intern("const", F32, (), float(value))


def number(index: int, type_: Type) -> Node:
    """Return the node of a number that is known only when a call runs.

    Such a node exists in graphs that torch.compile holds. `tracing.numbers.with_numbers` replaces it
    before anything evaluates the graph.

    Args:
        index: position among the numbers of that type.
        type_: I32 for a Python int, F32 for a Python float.
    """
    return _intern("number", type_, (), index)


def load(slot: int, type_: Type, index: Sequence[Node]) -> Node:
    """Return the node that loads one element of captured tensor `slot`.

    Negative indices count from the end.
    """
    if any(i.type != I32 for i in index):
        raise AssertionError("a load takes i32 indices")
    return _intern("load", type_, tuple(index), slot)


def node(op: str, *args: Node, attr: Attr = None, to: Type | None = None) -> Node:
    """Return the node of an operation after checking the types of its arguments.

    Args:
        op: a key of `SIGNATURES`.
        args: argument nodes, types as in `SIGNATURES`.
        attr: only for "round".
        to: result type, only for "cast".
    """
    letters, result = SIGNATURES[op]
    if len(args) != len(letters):
        raise AssertionError(f"{op} takes {len(letters)} arguments, got {len(args)}")
    bound: dict[str, Type] = {}
    for letter, a in zip(letters, args, strict=True):
        if a.type not in _LETTERS[letter] or bound.setdefault(letter, a.type) != a.type:
            raise AssertionError(f"{op} got argument types {[x.type for x in args]}")
    if op == "cast":
        if to is None:
            raise AssertionError("cast needs a result type")
        return _intern(op, to, args, None)
    type_ = bound[result] if result in bound else _LETTERS[result][0]
    return _intern(op, type_, args, attr)


def topo(*roots: Node) -> list[Node]:
    """Return all nodes that the roots depend on, arguments before users, in a fixed order."""
    return list(_topo(roots))


@lru_cache(maxsize=1024)
def _topo(roots: tuple[Node, ...]) -> tuple[Node, ...]:
    seen: set[Node] = set()
    order: list[Node] = []
    stack: list[tuple[Node, bool]] = [(r, False) for r in reversed(roots)]
    while stack:
        n, ready = stack.pop()
        if ready:
            order.append(n)
        elif n not in seen:
            seen.add(n)
            stack.append((n, True))
            stack.extend((a, False) for a in reversed(n.args) if a not in seen)
    # the stack may hold a node twice before its first visit: keep its first completion only
    return tuple(dict.fromkeys(order))


def clear_caches() -> None:
    """Clear the cache of `topo`. Nodes stay interned."""
    _topo.cache_clear()


def reads(*roots: Node) -> frozenset[str]:
    """Return the names of the arguments that the roots depend on."""
    return frozenset(str(n.attr) for n in topo(*roots) if n.op == "arg")


def slots(*roots: Node) -> tuple[int, ...]:
    """Return the slots of the captured tensors that the roots load from, in ascending order."""
    return tuple(sorted({int(n.attr) for n in topo(*roots) if n.op == "load"}))  # type: ignore[arg-type]


def with_args(n: Node, args: tuple[Node, ...]) -> Node:
    """Return `n` with its arguments replaced by `args`, which must have the same types."""
    return n if args == n.args else _intern(n.op, n.type, args, n.attr)


def substitute(root: Node, mapping: dict[Node, Node]) -> Node:
    """Return `root` with every node in `mapping` replaced by its value, a node of the same type."""
    done: dict[Node, Node] = dict(mapping)
    for n in topo(root):
        if n not in done:
            args = tuple(done[a] for a in n.args)
            done[n] = n if args == n.args else _intern(n.op, n.type, args, n.attr)
    return done[root]


def renumber(root: Node, slot: Callable[[int], int]) -> Node:
    """Return `root` with the slot `s` of every load replaced by `slot(s)`."""
    done: dict[Node, Node] = {}
    for n in topo(root):
        args = tuple(done[a] for a in n.args)
        attr = slot(int(n.attr)) if n.op == "load" else n.attr  # type: ignore[arg-type]
        done[n] = _intern(n.op, n.type, args, attr)
    return done[root]


def text(*roots: Node) -> str:
    """Serialize a graph as canonical one-line text, from which `parse` returns the same nodes.

    Equal texts mean equal graphs, so the text can be stored, hashed and sent to other processes.
    """
    order = topo(*roots)
    number = {n: i for i, n in enumerate(order)}
    parts = []
    for n in order:
        attr = n.attr.hex() if isinstance(n.attr, float) else n.attr
        parts.append(" ".join([n.op, n.type, str(attr), *(str(number[a]) for a in n.args)]))
    parts.append("out " + " ".join(str(number[r]) for r in roots))
    return ";".join(parts)


def parse_all(source: str) -> tuple[Node, ...]:
    """Parse the output of `text` and return the roots in their order."""
    nodes: list[Node] = []
    *lines, out = source.split(";")
    for line in lines:
        op, type_, attr, *args = line.split(" ")
        nodes.append(
            _intern(op, _type(type_), tuple(nodes[int(a)] for a in args), _attr(op, type_, attr))
        )
    return tuple(nodes[int(i)] for i in out.split(" ")[1:])


def parse(source: str) -> Node:
    """Parse the output of `text` for one root and return the root."""
    (root,) = parse_all(source)
    return root


def _type(name: str) -> Type:
    for known in (I32, F32, BOOL):
        if name == known:
            return known
    raise AssertionError(f"unknown type {name!r}")


def _attr(op: str, type_: str, source: str) -> Attr:
    if op in ("arg", "round"):
        return source
    if op in ("load", "number"):
        return int(source)
    if op != "const":
        return None
    if type_ == F32:
        return float.fromhex(source)
    return int(source) if type_ == I32 else source == "True"


# Operations that `formula` writes infix, with their binding strength; others are function calls.
_INFIX = {
    "eq": ("==", 1), "lt": ("<", 1), "le": ("<=", 1), "or": ("|", 2), "xor": ("^", 3),
    "and": ("&", 4), "shl": ("<<", 5), "shr": (">>", 5), "add": ("+", 6), "sub": ("-", 6),
    "mul": ("*", 7), "div": ("/", 7), "fdiv": ("//", 7), "mod": ("%", 7), "pow": ("**", 9),
    "wrap_add": ("+", 6), "wrap_sub": ("-", 6), "wrap_mul": ("*", 7),
}  # fmt: skip
_ATOM = 10


def formula(root: Node, names: Sequence[str] = ()) -> str:
    """Format an expression as one line of Python-like text.

    Args:
        root: the expression.
        names: names of the captured tensors by slot; `t0`, `t1`, ... where missing.
    """
    shown: dict[Node, tuple[str, int]] = {}
    for n in topo(root):
        shown[n] = _show(n, shown, names)
        if len(shown[n][0]) > _MAX_TEXT:  # shared parts may repeat exponentially often
            shown[n] = f"<{n.op} of {len(topo(n))} nodes>", _ATOM
    return shown[root][0]


_MAX_TEXT = 2000


def _show(n: Node, shown: dict[Node, tuple[str, int]], names: Sequence[str]) -> tuple[str, int]:
    def operand(i: int, strength: int) -> str:
        body, binding = shown[n.args[i]]
        return body if binding >= strength else f"({body})"

    if n.op == "arg":
        return str(n.attr), _ATOM
    if n.op == "const":
        return str(n.attr), (_ATOM if _is_plain(n.attr) else 8)
    if n.op == "number":
        return f"{n.type}_{n.attr}", _ATOM
    if n.op == "load":
        slot = int(n.attr)  # type: ignore[arg-type]
        name = names[slot] if slot < len(names) else f"t{slot}"
        return (f"{name}[{', '.join(shown[a][0] for a in n.args)}]" if n.args else name), _ATOM
    if n.op in _INFIX:
        sign, strength = _INFIX[n.op]
        left = strength + (strength == 1)  # comparisons do not chain
        return f"{operand(0, left)} {sign} {operand(1, strength + 1)}", strength
    if n.op in ("neg", "wrap_neg"):
        return f"-{operand(0, 8)}", 8
    if n.op == "not":
        return f"~{operand(0, 8)}", 8
    if n.op == "with_slope" and n.args[1].op == "const":
        return f"detach({shown[n.args[0]][0]})", _ATOM
    name = {"cast": str(n.type), "round": str(n.attr), "wrap_abs": "abs"}.get(n.op, n.op)
    return f"{name}({', '.join(shown[a][0] for a in n.args)})", _ATOM


def _is_plain(value: Attr) -> bool:
    return not isinstance(value, int | float) or value >= 0
