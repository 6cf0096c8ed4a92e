"""Convert a score_mod to the form in which a kernel computes it, in log2 units.

    2**(x - maximum)   with   x = score * factor + slope * (kv - origin) + bias

The softmax scale and log2(e) are folded into the factors, so that a score_mod that is linear in the
score costs one multiply-add per score before the exponential. A term that depends on the row alone
does not change the probabilities: the kernel leaves it out of x and adds it to the LSE. A term that
is linear in kv, with a factor that depends on the head alone, such as that of ALiBi, is split at an
origin into three parts: one per row, one per block, and one per column that is the same in all
blocks. A kernel that can add slope * (kv - q) faster by itself requests that term separately
(`separate_distance`).

Without a softmax the weight of a value is the modified score itself (`weight_form`): x is the
weight, in natural units, and all terms belong to it. If the weight is a sigmoid, x is the argument
of the sigmoid in log2 units, and the weight is 1 / (1 + 2**-x).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from attnkit.graph import ir
from attnkit.graph.ir import F32, I32, Node, arg, const
from attnkit.graph.simplify import build, cast
from attnkit.graph.staging import Level, index_level, index_repeats, level_of, linear

LOG2E = math.log2(math.e)

SCORE, SCALE, Q, KV = arg("score"), arg("scale"), arg("q"), arg("kv")

_HEAD = frozenset({"b", "h", "scale"})
_ROW = _HEAD | {"q"}
_COLUMN = _HEAD | {"kv"}


class NumberFacts(NamedTuple):
    """Holds what is known of a score_mod that reads numbers from tables, see `number_tables`.

    The facts are those of a score_mod in which the same numbers are constants.

    Attributes:
        ceiling, positive: see `ScoreForm`.
        tables: slots of the tables. Their floats are finite, and products of a few are too.
    """

    ceiling: float | None
    positive: bool
    tables: frozenset[int]


class ScoreForm(NamedTuple):
    """Holds the parts of a score_mod as expressions of `score` (q . k) and `scale` (softmax scale).

    Attributes:
        factor: factor of the score, log2 units, independent of the score; None if x is not linear
            in the score.
        bias: term added to score * factor, log2 units; x itself if `factor` is None; None for 0.
        slope: factor of (kv - origin), log2 units, which depends on the head alone; None for 0.
        row: term that is left out of x and added to the LSE, natural units, as an expression of q
            and of kv = origin; None for 0.
        ceiling: bound on |x| for all scores, log2 units; None if no bound is known.
        distance: factor of (kv - q), log2 units, which depends on the head alone; None for 0, or
            without `separate_distance`: `slope` and `row` then include the term.
        weight: what x is without a softmax: "linear" for the weight itself, "sigmoid" for the
            argument of a sigmoid in log2 units; "" for the exponent of a softmax.
        positive: whether `factor` is known to be the scale times a positive number.
    """

    factor: Node | None
    bias: Node | None
    slope: Node | None
    row: Node | None
    ceiling: float | None
    distance: Node | None = None
    weight: str = ""
    positive: bool = False

    @property
    def plain(self) -> bool:
        """Return whether x is the score times the scale times a positive number."""
        return self.bias is None and self.slope is None and self.positive

    @property
    def only_slope(self) -> bool:
        """Return whether x is the score times the scale times a positive number, plus the slope."""
        return self.bias is None and self.slope is not None and self.positive

    @property
    def only_column(self) -> bool:
        """Return whether x is a positive multiple of the score, plus a term of the column.

        An example is score - c[h, kv].
        """
        known = self.bias is not None and level_of(self.bias) is Level.COLUMN
        return known and self.slope is None and self.positive and not self.weight

    @property
    def full_bias(self) -> bool:
        """Return whether the score_mod adds a full bias: a table with one element for each score.

        An example is score + table[h, q, kv]. It may also add terms that depend on the row alone, but
        nothing else.
        """
        loads = [] if self.bias is None else [n for n in ir.topo(self.bias) if n.op == "load"]
        levels = [index_level(n) for n in loads]
        own = [n for n, level in zip(loads, levels, strict=True) if level is Level.ELEMENT]
        known = {Level.CONSTANT, Level.HEAD, Level.ELEMENT}.issuperset(levels)
        return (
            self.additive
            and self.slope is None
            and bool(own)
            and known
            and not any(map(index_repeats, own))
        )

    @property
    def additive(self) -> bool:
        """Return whether the score_mod only adds a term that does not depend on the score."""
        return not self.weight and self.factor is build("mul", SCALE, const(LOG2E))


def weight_form(
    root: Node | None, *, split_sigmoid: bool = True, facts: NumberFacts | None = None
) -> ScoreForm:
    """Convert the graph of a weight to the `ScoreForm` that a kernel without a softmax computes.

    Args:
        root: the weight, a score_mod, or a sigmoid of one; None for the unmodified score.
        split_sigmoid: whether to leave a sigmoid at the root to the kernel. A backward needs its
            derivative too, which shares the sigmoid of the graph.
        facts: what is known of numbers in tables; None if the graph reads none.
    """
    root, tables = SCORE if root is None else root, _tables(facts)
    sigmoid = split_sigmoid and root.op == "sigmoid"
    unit = const(LOG2E if sigmoid else 1.0)
    inner = root.args[0] if sigmoid else root
    with_score = [n for n in terms(inner) if "score" in ir.reads(n)]
    biases = [n for n in terms(inner) if n not in with_score]
    core = sum_of(with_score) or const(0.0)
    split = linear(core)
    factor: Node | None = None
    if split is not None:
        factor = build("mul", SCALE, _scaled(split.factor, unit, tables))
        biases += [] if split.bias is const(0.0) else [split.bias]
        total = sum_of(biases)
    else:
        total = sum_of([unscaled(core, tables), *biases])
    bias = None if total is None else _scaled(total, unit, tables)
    positive = _positive(factor) if facts is None else facts.positive
    weight = "sigmoid" if sigmoid else "linear"
    return ScoreForm(factor, bias, None, None, None, weight=weight, positive=positive)


def score_form(
    root: Node | None, *, separate_distance: bool = False, facts: NumberFacts | None = None
) -> ScoreForm:
    """Convert a score_mod to the `ScoreForm` that a kernel computes.

    Args:
        root: the score_mod; None for the unmodified score.
        separate_distance: whether to return terms slope * (kv - q) as `distance`, not as `slope`
            and `row`.
        facts: what is known of numbers in tables; None if the graph reads none.
    """
    root, tables = SCORE if root is None else root, _tables(facts)
    cores: list[Node] = []
    rows: list[Node] = []
    slopes: list[Node] = []
    distances: list[Node] = []
    biases: list[Node] = []
    for term in terms(root):
        names = ir.reads(term)
        slope = None if "score" in names else kv_slope(term)
        if "score" in names:
            cores.append(term)
        elif names <= _ROW:
            rows.append(term)
        elif slope is not None and separate_distance and _vanishes(term):
            distances.append(slope)
        elif slope is not None:
            slopes.append(slope)
            rows.append(term)
        else:
            biases.append(term)
    core = sum_of(cores) or const(0.0)
    split = linear(core)
    log2e = const(LOG2E)
    if split is not None:
        factor: Node | None = build("mul", SCALE, _scaled(split.factor, log2e, tables))
        if split.bias is not const(0.0):
            biases.append(split.bias)
        total = sum_of(biases)
        ceiling = None
    else:
        factor = None
        total = sum_of([unscaled(core, tables), *biases])
        reach = None if biases or slopes or distances else _reach(core)
        ceiling = None if reach is None else max(map(abs, reach)) * LOG2E
    return ScoreForm(
        factor,
        None if total is None else _scaled(total, log2e, tables),
        _mapped(sum_of(slopes), log2e, tables),
        sum_of(rows),
        ceiling if facts is None else facts.ceiling,
        _mapped(sum_of(distances), log2e, tables),
        positive=_positive(factor) if facts is None else facts.positive,
    )


def number_facts(form: ScoreForm, tables: frozenset[int]) -> NumberFacts:
    """Return what the kernel may assume of numbers that it reads from `tables`."""
    return NumberFacts(form.ceiling, form.positive, tables)


def _tables(facts: NumberFacts | None) -> frozenset[int]:
    return frozenset() if facts is None else facts.tables


def split_row(form: ScoreForm) -> tuple[Node | None, ScoreForm]:
    """Split the terms of `form.row` into those that depend on the row alone, and the others.

    Returns:
        The sum of the terms that depend on q and the head alone, None for 0; and the form without
        them.
    """
    parts = () if form.row is None else tuple(terms(form.row))
    known = [n for n in parts if ir.reads(n) <= _ROW]
    rest = [n for n in parts if n not in known]
    return sum_of(known), form._replace(row=sum_of(rest))


def _positive(factor: Node | None) -> bool:
    """Return whether `factor` is the scale times a positive constant."""
    if factor is None or factor.op != "mul" or factor.args[0] is not SCALE:
        return False
    other = factor.args[1]
    return other.op == "const" and 0.0 < float(str(other.attr)) < math.inf


def _mapped(n: Node | None, by: Node, tables: frozenset[int]) -> Node | None:
    return None if n is None else _scaled(n, by, tables)


def terms(n: Node, sign: int = 1) -> Iterable[Node]:
    """Yield the nonzero terms of a float sum, each multiplied by `sign` (1 or -1)."""
    if n.type == F32 and n.op in ("add", "sub"):
        yield from terms(n.args[0], sign)
        yield from terms(n.args[1], sign if n.op == "add" else -sign)
    elif n.op == "neg" and n.type == F32:
        yield from terms(n.args[0], -sign)
    elif n.op != "const" or float(str(n.attr)) != 0.0:
        yield n if sign > 0 else build("neg", n)


def sum_of(parts: list[Node]) -> Node | None:
    """Return the sum of expressions; None if there are none."""
    total: Node | None = None
    for n in parts:
        total = n if total is None else build("add", total, n)
    return total


def _scaled(n: Node, by: Node, tables: frozenset[int]) -> Node:
    """Return `n` times the constant `by`, merged with a factor of `n` that is a number, if any."""
    if n.op == "const":
        return const(float(str(n.attr)) * float(str(by.attr)))
    if n.op == "mul":
        for one, other in (n.args, n.args[::-1]):
            if _is_number(one, tables):
                return build("mul", other, _scaled(one, by, tables))
    return build("mul", n, by)


def _is_number(n: Node, tables: frozenset[int]) -> bool:
    """Return whether `n` is a constant or a number in one of `tables`."""
    return n.op == "const" or (n.op == "load" and n.attr in tables)


def unscaled(core: Node, tables: frozenset[int] = frozenset()) -> Node:
    """Replace the score by q . k * scale in `core`; fold numbers that multiply it into the scale.

    `tables` are the slots of tables of numbers, see `NumberFacts`.
    """
    mapping = {SCORE: build("mul", SCORE, SCALE)}
    for n in ir.topo(core):
        product = _times_scale(n, tables)
        if product is not None:
            mapping[n] = product
    return ir.substitute(core, mapping)


def _times_scale(n: Node, tables: frozenset[int]) -> Node | None:
    """Rewrite score * c or score / c, c a number, as q . k * (scale * c); else return None."""
    if n.op == "mul" and SCORE in n.args:
        other = n.args[1] if n.args[0] is SCORE else n.args[0]
        if _is_number(other, tables):
            return build("mul", SCORE, build("mul", SCALE, other))
    if n.op == "div" and n.args[0] is SCORE and n.args[1].op == "const":
        by = float(str(n.args[1].attr))
        if by != 0.0 and math.isfinite(1.0 / by):
            return build("mul", SCORE, build("mul", SCALE, const(1.0 / by)))
    return None


def adds_only_slope(root: Node | None) -> bool:
    """Return whether a score_mod adds a slope times kv and terms of the row, and nothing else."""
    return root is not None and score_form(root).only_slope


def adds_full_bias(root: Node | None) -> bool:
    """Return whether a score_mod adds a full bias, and possibly ALiBi's slope * (kv - q).

    See `ScoreForm.full_bias`.
    """
    return score_form(root, separate_distance=True).full_bias


def kv_slope(n: Node) -> Node | None:
    """Return the factor of kv in an expression that is linear in kv.

    The result is None if the expression may not be linear, or if the factor is zero or depends on
    more than the head.
    """
    slope = _slope(n)
    if slope is None or slope is const(0.0) or not ir.reads(slope) <= _HEAD:
        return None
    return slope


def _slope(n: Node) -> Node | None:
    """Return the derivative of `n` with respect to kv; None if `n` may not be linear in kv."""
    zero, one = const(0.0), const(1.0)
    if n is KV:
        return one
    if "kv" not in ir.reads(n):
        return zero
    if n.op == "cast" and n.type == F32 and n.args[0].type == I32:
        return _slope(n.args[0])
    if n.op == "neg":
        inner = _slope(n.args[0])
        return inner and build("neg", inner)
    if n.op in ("add", "sub"):
        a, b = _slope(n.args[0]), _slope(n.args[1])
        return build(n.op, a, b) if a and b else None
    if n.op == "mul":
        for inner, other in (n.args, n.args[::-1]):
            if "kv" not in ir.reads(other):
                slope = _slope(inner)
                return slope and build("mul", slope, cast(other, F32))
    if n.op == "div" and "kv" not in ir.reads(n.args[1]):
        slope = _slope(n.args[0])
        return slope and build("div", slope, n.args[1])
    return None


def _vanishes(n: Node) -> bool:
    """Return whether a term that is linear in kv is 0 at q == kv, and so is slope * (kv - q)."""
    if n.op in ("add", "sub"):
        operands = tuple(a.args[0] if a.op == "cast" else a for a in n.args)
        if n.op == "sub" and operands in ((KV, Q), (Q, KV)):
            return True
        return all(map(_vanishes, n.args))
    if n.op in ("neg", "cast", "div"):
        return _vanishes(n.args[0])
    return n.op == "mul" and any(map(_vanishes, n.args))


def _reach(n: Node) -> tuple[float, float] | None:
    """Return (lower, upper) bounds of a float expression for all scores; None if unknown."""
    if n.op == "const":
        value = float(str(n.attr))
        return (value, value) if math.isfinite(value) else None
    if n.op == "tanh":
        return -1.0, 1.0
    if n.op == "sigmoid":
        return 0.0, 1.0
    if n.op == "atan2":
        return -3.1416, 3.1416
    if n.op == "with_slope":
        return _reach(n.args[0])
    parts = [_reach(a) if a.type == F32 else None for a in n.args]
    if n.op == "neg" and parts[0]:
        return -parts[0][1], -parts[0][0]
    if len(parts) == 2 and parts[0] and parts[1]:
        (a, b), (c, d) = parts[0], parts[1]
        if n.op == "add":
            return a + c, b + d
        if n.op == "sub":
            return a - d, b - c
        if n.op == "mul":
            ends = (a * c, a * d, b * c, b * d)
            return min(ends), max(ends)
    return None
