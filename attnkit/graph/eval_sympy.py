"""Convert expressions to sympy, for readable formulas and for derivatives that tests compare.

Nothing here calls `sympy.simplify`, which takes seconds on a softcap. Importing this module does
not import sympy; the functions do.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from attnkit.graph import ir
from attnkit.graph.ir import BOOL, F32, I32, Node

_NOT_NEGATIVE = ("b", "h", "q", "kv")
_SHORT = 6  # significant digits up to which a constant is shown as a fraction


def to_sympy(root: Node, names: Sequence[str] = ()) -> Any:
    """Convert an expression of the graph to a sympy expression.

    Args:
        root: the expression.
        names: names of the captured tensors by slot; `t0`, `t1`, ... where missing.

    Returns:
        A sympy expression, or a sympy Boolean if the root is bool. Arguments are symbols of their
        names (see `symbol`), a load is an application of an undefined function, bit operations and
        roundings are functions that sympy does not interpret.
    """
    values: dict[Node, Any] = {}
    for n in ir.topo(root):
        args = [values[a] for a in n.args]
        values[n] = _leaf(n, args, names) if n.op in _LEAVES else _operations()[n.op](n, *args)
    return values[root]


def symbol(name: str) -> Any:
    """Return the sympy symbol of an argument: b, h, q and kv are integers >= 0, all others real."""
    import sympy

    if name in _NOT_NEGATIVE:
        return sympy.Symbol(name, integer=True, nonnegative=True)
    return sympy.Symbol(name, real=True)


def derivative(root: Node, names: Sequence[str] = ()) -> Any:
    """Return the sympy derivative of a score expression with respect to the score.

    `floor` and conversions to integer have derivative 0.
    """
    return to_sympy(root, names).diff(symbol("score"))


def describe(root: Node, names: Sequence[str] = (), *, width: int = 100) -> str:
    """Format an expression as a formula, and its derivative by the score if it is not bool.

    Args:
        root: the expression.
        names: names of the captured tensors by slot.
        width: largest number of columns of the two-dimensional form; a wider formula is written on
            one line.
    """
    if root.type == BOOL:
        return _lay_out("keep", to_sympy(root, names), width)
    formula = _lay_out("score'", to_sympy(root, names), width)
    return formula + "\n" + _lay_out("d score' / d score", derivative(root, names), width)


def _lay_out(label: str, value: Any, width: int) -> str:
    import sympy

    lines = sympy.pretty(value, use_unicode=True, wrap_line=False).split("\n")
    if max(map(len, lines)) + len(label) + 3 > width:
        lines = [str(value)]
    heads = [" " * (len(label) + 3)] * len(lines)
    heads[(len(lines) - 1) // 2] = f"{label} = "
    return "\n".join((head + line).rstrip() for head, line in zip(heads, lines, strict=True))


_LEAVES = ("arg", "const", "load")


def _leaf(n: Node, args: Sequence[Any], names: Sequence[str]) -> Any:
    import sympy

    if n.op == "arg":
        return symbol(str(n.attr))
    if n.op == "const":
        return _number(n.attr)
    slot = int(n.attr)  # type: ignore[arg-type]
    name = names[slot] if slot < len(names) else f"t{slot}"
    kind = {"integer": True} if n.type == I32 else {"real": True}
    value = sympy.Function(name, **kind)(*args) if args else sympy.Symbol(name, **kind)
    return sympy.Ne(value, 0) if n.type == BOOL else value


def _number(value: Any) -> Any:
    import sympy

    if isinstance(value, bool):
        return sympy.true if value else sympy.false
    if isinstance(value, int):
        return sympy.Integer(value)
    if math.isnan(value):
        return sympy.nan
    if math.isinf(value):
        return sympy.oo if value > 0 else -sympy.oo
    if float(f"{value:.{_SHORT}g}") == value:
        return sympy.Rational(repr(value))  # 0.1 reads as 1/10
    return sympy.Float(value)


@functools.cache
def _opaque(name: str, slope: int = 0, integer: bool = False) -> Any:
    """Return a subclass of `sympy.Function` that stays unevaluated and has derivative `slope`.

    Its values are real, and integers if `integer` is set.
    """
    import sympy

    def fdiff(self: Any, argindex: int = 1) -> Any:
        return sympy.Integer(slope)

    body = {"fdiff": fdiff, "is_real": True, "is_integer": integer or None}
    return type(name, (sympy.Function,), body)


@functools.cache
def _with_slope() -> Any:
    """Return a subclass of `sympy.Function` for a value with a derivative of its own by `x`."""
    import sympy

    def fdiff(self: Any, argindex: int = 1) -> Any:
        return self.args[2] if argindex == 2 else sympy.Integer(0)

    return type("with_slope", (sympy.Function,), {"fdiff": fdiff, "is_real": True})


@functools.cache
def _stepwise(name: str) -> Any:
    """Return a subclass of sympy's `floor` or `Mod` whose derivative is 0.

    The derivative is right for `floor`, and for `Mod` of integers. sympy defines none for its own.
    """
    import sympy

    return type(name, (getattr(sympy, name),), {"_eval_derivative": lambda self, s: sympy.S.Zero})


def _cast(n: Node, a: Any) -> Any:
    import sympy

    source = n.args[0].type
    if n.type == source:
        return a
    if n.type == BOOL:
        return sympy.Ne(a, 0)
    if source == BOOL:
        return sympy.Piecewise((sympy.Integer(1), a), (sympy.Integer(0), True))
    return _opaque("trunc", integer=True)(a) if (source, n.type) == (F32, I32) else a


def _remainder(n: Node, a: Any, b: Any) -> Any:
    if n.type == I32:
        return _stepwise("Mod")(a, b)
    return a - b * _stepwise("floor")(a / b)


def _wrapped(a: Any) -> Any:
    return _stepwise("Mod")(a + 2**31, 2**32) - 2**31


def _where(n: Node, c: Any, a: Any, b: Any) -> Any:
    import sympy

    return sympy.ITE(c, a, b) if n.type == BOOL else sympy.Piecewise((a, c), (b, True))


def _bits(logical: str) -> Callable[..., Any]:
    def convert(n: Node, a: Any, b: Any) -> Any:
        import sympy

        if n.type == BOOL:
            return getattr(sympy, logical)(a, b)
        return _opaque(f"bit{logical.lower()}", integer=True)(a, b)

    return convert


def _equal(n: Node, a: Any, b: Any) -> Any:
    import sympy

    return sympy.Equivalent(a, b) if n.args[0].type == BOOL else sympy.Eq(a, b)


def _less(n: Node, a: Any, b: Any) -> Any:
    import sympy

    if n.args[0].type == BOOL:
        return sympy.And(sympy.Not(a), b)
    return sympy.Lt(a, b)


def _at_most(n: Node, a: Any, b: Any) -> Any:
    import sympy

    if n.args[0].type == BOOL:
        return sympy.Or(sympy.Not(a), b)
    return sympy.Le(a, b)


@functools.cache
def _operations() -> dict[str, Callable[..., Any]]:
    """Return the conversion function of each op; it takes the node and its converted arguments."""
    import sympy as s

    floor = _stepwise("floor")
    return {
        "add": lambda n, a, b: a + b,
        "sub": lambda n, a, b: a - b,
        "mul": lambda n, a, b: a * b,
        "neg": lambda n, a: -a,
        "abs": lambda n, a: s.Abs(a),
        "min": lambda n, a, b: s.Min(a, b),
        "max": lambda n, a, b: s.Max(a, b),
        "fdiv": lambda n, a, b: floor(a / b),
        "mod": _remainder,
        "wrap_add": lambda n, a, b: _wrapped(a + b),
        "wrap_sub": lambda n, a, b: _wrapped(a - b),
        "wrap_mul": lambda n, a, b: _wrapped(a * b),
        "wrap_neg": lambda n, a: _wrapped(-a),
        "wrap_abs": lambda n, a: _wrapped(s.Abs(a)),
        "tdiv": lambda n, a, b: _opaque("trunc", integer=True)(a / b),
        "div": lambda n, a, b: a / b,
        "pow": lambda n, a, b: a**b,
        "exp": lambda n, a: s.exp(a),
        "exp2": lambda n, a: s.Integer(2) ** a,
        "expm1": lambda n, a: s.exp(a) - 1,
        "log": lambda n, a: s.log(a),
        "log2": lambda n, a: s.log(a) / s.log(2),
        "log1p": lambda n, a: s.log(1 + a),
        "sqrt": lambda n, a: s.sqrt(a),
        "rsqrt": lambda n, a: 1 / s.sqrt(a),
        "tanh": lambda n, a: s.tanh(a),
        "sigmoid": lambda n, a: 1 / (1 + s.exp(-a)),
        "sin": lambda n, a: s.sin(a),
        "cos": lambda n, a: s.cos(a),
        "erf": lambda n, a: s.erf(a),
        "erfinv": lambda n, a: s.erfinv(a),
        "lgamma": lambda n, a: s.re(s.loggamma(a)),  # complex below 0
        "digamma": lambda n, a: s.digamma(a),
        "hypot": lambda n, a, b: s.sqrt(a**2 + b**2),
        "atan2": lambda n, a, b: s.atan(a) if b == 1 else s.atan2(a, b),
        "floor": lambda n, a: floor(a),
        "with_slope": lambda n, a, x, slope: _with_slope()(a, x, slope),
        "round": lambda n, a: _opaque(str(n.attr), slope=1)(a),
        "and": _bits("And"),
        "or": _bits("Or"),
        "xor": _bits("Xor"),
        "shl": lambda n, a, b: _opaque("shl", integer=True)(a, b),
        "shr": lambda n, a, b: _opaque("shr", integer=True)(a, b),
        "not": lambda n, a: s.Not(a),
        "lt": _less,
        "le": _at_most,
        "eq": _equal,
        "where": _where,
        "cast": _cast,
    }
