"""Differentiate a score expression in reverse mode. The gradients are graph expressions too.

The rules are those of torch.autograd (`derivatives.yaml`), also at ties and for non-finite values.
At a tie `max` and `min` give half to each side. `abs` gives 0 at 0. `where` gives exactly 0 to the
branch that it does not select. Integers and `floor` have gradient 0. One rule differs: `round`
passes the gradient on without rounding, while torch rounds it too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from attnkit.graph import ir
from attnkit.graph.ir import F32, Node, const
from attnkit.graph.simplify import build, negate

Rule: TypeAlias = Callable[[Node, Node], Node]  # (node, its cotangent) -> an argument's cotangent

_ZERO = const(0.0)


@dataclass(frozen=True)
class Adjoint:
    """Holds the gradients of a score expression as expressions of its arguments and of `grad`.

    Attributes:
        dscore: cotangent of the argument `score`.
        loads: (load, its cotangent) for every float load that the root depends on differentiably.
            The gradient of a captured tensor is the sum of the cotangents of its loads over all
            (b, h, q, kv), each added at the index of its load.
    """

    dscore: Node
    loads: tuple[tuple[Node, Node], ...]

    def describe(self, names: Sequence[str] = ()) -> str:
        """Format the gradients as text, one per line.

        Args:
            names: names of the captured tensors by slot; `t0`, `t1`, ... where missing.
        """
        lines = [f"d score = {ir.formula(self.dscore, names)}"]
        for load, cotangent in self.loads:
            lines.append(f"d {ir.formula(load, names)} = {ir.formula(cotangent, names)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.describe()


def adjoint(root: Node) -> Adjoint:
    """Return the gradients of a score expression with respect to the score and each float load.

    Args:
        root: an f32 expression of score, b, h, q, kv and captured tensors; it must not read `grad`.

    Returns:
        The cotangents of `score` and of each float load, for the cotangent `grad` of the root.
    """
    if root.type != F32 or "grad" in ir.reads(root):
        raise AssertionError(f"adjoint takes an f32 root that does not read grad, got {root}")
    order = ir.topo(root)
    needed = _depends(order)
    cotangents: dict[Node, Node] = {root: ir.arg("grad")}
    for n in reversed(order):
        if n not in needed or n not in cotangents:
            continue
        for a, rule in zip(n.args, _RULES.get(n.op, ()), strict=False):
            if rule is not None and a in needed:
                _accumulate(cotangents, a, rule(n, cotangents[n]))
    score = ir.arg("score")
    loads = tuple((n, cotangents[n]) for n in order if n.op == "load" and n in cotangents)
    return Adjoint(
        dscore=cotangents.get(score, _ZERO) if score in needed else _ZERO,
        loads=tuple((n, c) for n, c in loads if n in needed),
    )


def _depends(order: Sequence[Node]) -> set[Node]:
    """Return the set of nodes that depend differentiably on the score or on a float load."""
    dependent: set[Node] = set()
    for n in order:
        leaf = (n.op == "arg" and n.attr == "score") or (n.op == "load" and n.type == F32)
        pairs = zip(n.args, _RULES.get(n.op, ()), strict=False) if n.type == F32 else ()
        if leaf or any(rule is not None and a in dependent for a, rule in pairs):
            dependent.add(n)
    return dependent


def _accumulate(cotangents: dict[Node, Node], n: Node, term: Node) -> None:
    if term is _ZERO:
        return
    before = cotangents.get(n)
    cotangents[n] = term if before is None else _plus(before, term)


def _plus(a: Node, b: Node) -> Node:
    if a.op == "where" and b.op == "where" and a.args[0] is b.args[0]:
        condition, yes, no = a.args
        if no is _ZERO and b.args[1] is _ZERO:
            return build("where", condition, yes, b.args[2])  # where(c,x,0) + where(c,0,y)
        if yes is _ZERO and b.args[2] is _ZERO:
            return build("where", condition, b.args[1], no)  # where(c,0,y) + where(c,x,0)
    return build("add", a, b)


def _times(g: Node, factor: Node) -> Node:
    if _is(factor, -1.0):
        return build("neg", g)  # g * -1 = -g
    if g.op == "where" and factor.op == "const" and math.isfinite(_value(factor)):
        condition, yes, no = g.args
        if no is _ZERO:
            return build("where", condition, _times(yes, factor), no)  # 0 * k = 0 for finite k
        if yes is _ZERO:
            return build("where", condition, yes, _times(no, factor))
    return build("mul", g, factor)


def _value(n: Node) -> float:
    return float(n.attr)  # type: ignore[arg-type]


def _is(n: Node, value: float) -> bool:
    return n.op == "const" and n.attr == value


def _pass(n: Node, g: Node) -> Node:
    return g


def _negated(n: Node, g: Node) -> Node:
    return build("neg", g)


def _by(factor: Callable[[Node], Node]) -> Rule:
    """Return the rule that multiplies the cotangent by `factor(node)`."""
    return lambda n, g: _times(g, factor(n))


def _other(i: int) -> Rule:
    return _by(lambda n: n.args[i])


def _extreme(i: int) -> Rule:
    """Return the rule for argument `i` of max or min.

    The selected argument gets the whole cotangent. At a tie each argument gets half. If either
    argument is NaN, each gets the whole cotangent.

    The selected argument gets the whole cotangent. At a tie each argument gets half. If one is NaN,
    each gets the whole.
    """

    def rule(n: Node, g: Node) -> Node:
        this, other = n.args[i], n.args[1 - i]
        loses = build("lt", this, other) if n.op == "max" else build("lt", other, this)
        shared = build("where", build("eq", this, other), _times(g, const(0.5)), g)
        return build("where", loses, _ZERO, shared)

    return rule


def _abs(n: Node, g: Node) -> Node:
    a = n.args[0]
    falls = build("where", build("lt", a, _ZERO), build("neg", g), _ZERO)  # 0 at 0 and at NaN
    return build("where", build("lt", _ZERO, a), g, falls)


def _divisor(n: Node, g: Node) -> Node:
    return build("mul", build("neg", g), build("div", n, n.args[1]))  # d(a/b)/db = -(a/b)/b


def _modulus(n: Node, g: Node) -> Node:
    return build("mul", build("neg", g), build("fdiv", *n.args))  # a % b = a - b * (a // b)


def _base(n: Node, g: Node) -> Node:
    a, b = n.args
    lower = const(_value(b) - 1.0) if b.op == "const" else build("sub", b, const(1.0))
    slope = _times(g, build("mul", b, build("pow", a, lower)))
    return build("where", build("eq", b, _ZERO), _ZERO, slope)  # a ** 0 is flat, at a = 0 too


def _exponent(n: Node, g: Node) -> Node:
    a, b = n.args
    if a.op == "const" and _value(a) > 0.0:
        return _times(g, build("mul", n, const(math.log(_value(a)))))
    flat = build("and", build("eq", a, _ZERO), build("ge", b, _ZERO))  # 0 ** b is 0 for b > 0
    return build("where", negate(flat), build("mul", g, build("mul", n, build("log", a))), _ZERO)


def _where(i: int) -> Rule:
    def rule(n: Node, g: Node) -> Node:
        return build("where", n.args[0], *((g, _ZERO) if i == 1 else (_ZERO, g)))

    return rule


def _logarithm(inner: Callable[[Node], Node]) -> Rule:
    return lambda n, g: build("div", g, inner(n.args[0]))


def _sqrt(n: Node, g: Node) -> Node:
    return build("div", g, build("mul", const(2.0), n))


def _rsqrt(n: Node, g: Node) -> Node:
    cube = build("mul", build("mul", n, n), n)
    return build("mul", _times(g, const(-0.5)), cube)


def _sigmoid(n: Node, g: Node) -> Node:
    return build("mul", build("mul", g, build("sub", const(1.0), n)), n)  # g * (1 - y) * y


def _square(n: Node) -> Node:
    return const(_value(n) * _value(n)) if n.op == "const" else build("mul", n, n)


def _angle(i: int) -> Rule:
    """Return the rule of atan2(y, x) that multiplies by argument `i`: x for y, -y for x.

    The derivative at the origin is 0.
    """

    def rule(n: Node, g: Node) -> Node:
        squares = [_square(a) for a in n.args]
        sum_ = build("add", *squares)
        slope = build("div", _times(g if i == 1 else build("neg", g), n.args[i]), sum_)
        if any(s.op == "const" and _value(s) > 0.0 for s in squares):
            return slope
        return build("where", build("eq", sum_, _ZERO), _ZERO, slope)

    return rule


def _share(i: int) -> Rule:
    return _by(lambda n: build("div", n.args[i], n))  # NaN at the origin, as torch's


def _gaussian(n: Node) -> Node:
    square = build("mul", n.args[0], n.args[0])
    return build("mul", const(2.0 / math.sqrt(math.pi)), build("exp", build("neg", square)))


def _inverse_gaussian(n: Node) -> Node:
    return build("mul", const(0.5 * math.sqrt(math.pi)), build("exp", build("mul", n, n)))


def _second_derivative(n: Node, g: Node) -> Node:
    raise AssertionError(f"{n.op} is a derivative, and attention has no second one")


# op -> the rule of each argument, None for no gradient. Operations that are missing here (floor,
# fdiv, comparisons, casts, integer operations) have no gradient.
_RULES: dict[str, tuple[Rule | None, ...]] = {
    "add": (_pass, _pass),
    "sub": (_pass, _negated),
    "mul": (_other(1), _other(0)),
    "neg": (_negated,),
    "abs": (_abs,),
    "min": (_extreme(0), _extreme(1)),
    "max": (_extreme(0), _extreme(1)),
    "mod": (_pass, _modulus),
    "div": (lambda n, g: build("div", g, n.args[1]), _divisor),
    "pow": (_base, _exponent),
    "exp": (_by(lambda n: n),),
    "exp2": (_by(lambda n: build("mul", n, const(math.log(2.0)))),),
    "expm1": (_by(lambda n: build("add", n, const(1.0))),),
    "log": (_logarithm(lambda a: a),),
    "log2": (_logarithm(lambda a: build("mul", a, const(math.log(2.0)))),),
    "log1p": (_logarithm(lambda a: build("add", a, const(1.0))),),
    "sqrt": (_sqrt,),
    "rsqrt": (_rsqrt,),
    "tanh": (_by(lambda n: build("sub", const(1.0), build("mul", n, n))),),
    "sigmoid": (_sigmoid,),
    "sin": (_by(lambda n: build("cos", n.args[0])),),
    "cos": (_by(lambda n: build("neg", build("sin", n.args[0]))),),
    "erf": (_by(_gaussian),),
    "erfinv": (_by(_inverse_gaussian),),
    "lgamma": (_by(lambda n: build("digamma", n.args[0])),),
    "digamma": (_second_derivative,),
    "hypot": (_share(0), _share(1)),
    "atan2": (_angle(1), _angle(0)),
    "round": (_pass,),
    "with_slope": (None, lambda n, g: _times(g, n.args[2]), None),
    "where": (None, _where(1), _where(2)),
}
