"""Provide hypothesis strategies for random mask_mods and score_mods.

A random function is generated as Python source and then executed. It therefore traces,
differentiates and prints like a user's function, and a failure can print its source. The grammar
keeps integers small, indices inside their tables and scores moderate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from attnkit.testing.drawn_source import run_drawn
from attnkit.testing.limits import ANY_SIZE, Limits, check_limits

_HEADERS = {"mask": "mask_mod(b, h, q, kv)", "score": "score_mod(score, b, h, q, kv)"}


class _Writer:
    """Draws Python source of random expressions and of the captured tensors that they read.

    Methods that draw an expression return its source.
    """

    def __init__(self, draw: st.DrawFn, limits: Limits) -> None:
        check_limits(limits)
        self.draw = draw
        self.batch = limits.batch[1]
        self.heads = limits.heads[1]
        self.length = max(limits.q_len[1], limits.kv_len[1])
        self.tables: list[str] = []

    def pick(self, *choices: str) -> str:
        """Draw one of `choices`; hypothesis shrinks to the first."""
        return self.draw(st.sampled_from(choices))

    def number(self, low: int, high: int) -> int:
        """Draw an int from `low` to `high`, both included."""
        return self.draw(st.integers(low, high))

    def divisor(self) -> int:
        """Draw a nonzero int; most choices are positive."""
        return self.draw(st.sampled_from([2, 3, 5, 16, 33, -3]))

    # --- captured tensors

    def load(self, values: str) -> str:
        """Draw a load from a new captured tensor, whose data the source `values` creates."""
        n, span = self.length, 2 * self.length - 1
        shape, index = self.draw(
            st.sampled_from(
                [
                    (f"{n}", "kv"),
                    (f"{n}", "q"),
                    (f"{self.heads}", "h"),
                    (f"{self.batch}", "b"),
                    (f"{self.heads}, {n}", "h, kv"),
                    (f"{self.batch}, {n}", "b, q"),
                    (f"{span}", f"q - kv + {n - 1}"),
                    (f"{span}", "q - kv"),  # negative indices count from the end
                    (f"{self.heads}, {span}", f"h, kv - q + {n - 1}"),
                    (f"{n}, {n}", "q, kv"),
                    ("7", "(q * 3 + kv) % 7"),
                    ("1", ""),  # one number
                ]
            )
        )
        if not index:
            return self.table(f"({values})[0]", shape)
        name = self.table(values, shape)
        return f"{name}[{index}]"

    def table(self, values: str, shape: str) -> str:
        """Append source that defines a new captured tensor and return the tensor's name."""
        name = f"t{len(self.tables)}"
        self.tables.append(f"{name} = {values.format(shape=shape)}")
        return name

    # --- expressions; `depth` is the largest nesting depth

    def integer(self, depth: int) -> str:
        """Draw an expression of type i32."""
        if depth == 0 or self.number(0, 3) == 0:
            kind = self.number(0, 5)
            return self.load(_INTS) if kind == 5 else self.pick("kv", "q", "q - kv", "h", "b")
        form = self.pick(
            "({a} + {b})", "({a} - {b})", "({a} + {c})", "({a} * {d})", "({a} // {d})",
            "({a} % {d})", "({a}).abs()", "torch.minimum({a}, {b})", "torch.maximum({a}, {b})",
            "({a}).clamp(-5, {c})", "({a} & {c})", "({a} >> 2)", "({a} ^ {b})", "(-({a}))",
            "torch.where({t}, {a}, {b})", 'torch.div({a}, {d}, rounding_mode="trunc")',
            "torch.fmod({a}, {d})",
        )  # fmt: skip
        return self.fill(form, self.integer, depth)

    def truth(self, depth: int) -> str:
        """Draw an expression of type bool."""
        if depth == 0 or self.number(0, 2) == 0:
            return self.compared(depth)
        form = self.pick(
            "({a} & {b})", "({a} | {b})", "(~{a})", "({a} ^ {b})", "torch.where({a}, {b}, {t})",
            "torch.logical_and({a}, {b})", "torch.logical_or({a}, {b})",
        )  # fmt: skip
        return self.fill(form, self.truth, depth)

    def compared(self, depth: int) -> str:
        """Draw a bool expression: a comparison, or a load from a bool table."""
        kind = self.number(0, 6)
        if kind == 0:
            return self.pick("(q >= kv)", "(kv < q)", "(q == kv)", "(kv <= 2 * q)")
        if kind == 1:
            return self.load(_BOOLS)
        if kind == 2:
            return f"({self.load(_FLOATS)} > 0.2)"
        if kind == 3:
            name = self.table(_DOCUMENTS, str(self.length))
            return f"({name}[q] == {name}[kv])"
        sign = self.pick("<", "<=", ">", ">=", "==", "!=")
        right = str(self.number(-20, 100)) if kind == 4 else self.integer(max(depth - 1, 0))
        return f"({self.integer(max(depth - 1, 0))} {sign} {right})"

    def real(self, depth: int) -> str:
        """Draw a float expression whose values are not large."""
        if depth == 0 or self.number(0, 4) == 0:
            kind = self.number(0, 3)
            if kind == 3:
                return self.pick("(q - kv) * 0.05", "(h + 1) * -0.3", "(q % 7) / 3", "b * 0.5")
            return "score" if kind == 0 else self.load(self.pick(*_LEARNED))
        form = self.pick(
            "({a} + {b})", "({a} - {b})", "(torch.tanh({a}) * {b})", "({a} * {x})", "({a} / {x})",
            "torch.tanh({a})", "torch.sigmoid({a})", "torch.exp(-({a}).abs())", "torch.sin({a})",
            "torch.cos({a})", "torch.sqrt(({a}).abs() + 1)", "torch.log1p(({a}).abs())",
            "torch.relu({a})", "torch.nn.functional.gelu({a})", "torch.nn.functional.silu({a})",
            "torch.nn.functional.softplus({a})", "torch.where({t}, {a}, {b})",
            "torch.where({a} > {x}, {a}, {b})", "torch.maximum({a}, {b})", "({a}).clamp(-{x}, {x})",
            "({a}).abs()", "({a} / (1 + ({b}).abs()))", "torch.erf({a})",
            "torch.atan2({a}, {b})", "(({a}) * torch.tanh({b}).detach())",
            # 0.9, because both derivatives are infinite at 1 and tanh may or may not round to 1
            "torch.erfinv(torch.tanh({a}) * 0.9)", "torch.asin(torch.tanh({a}) * 0.9)",
            "torch.lgamma(({a}).abs() + 0.5)", "torch.hypot({a}, ({b}).abs() + {x})",
            "torch.exp2(-({a}).abs())",
            "torch.rsqrt(({a}).abs() + {x})",
        )  # fmt: skip
        return self.fill(form, self.real, depth)

    def fill(self, form: str, same: Callable[[int], str], depth: int) -> str:
        """Replace the fields of the template `form` by drawn expressions and numbers.

        Fields a and b become expressions that `same` draws, t a bool expression, c an int, d a
        nonzero int and x a positive float.
        """
        holes: dict[str, Any] = {}
        for hole, make in (
            ("a", lambda: same(depth - 1)),
            ("b", lambda: same(depth - 1)),
            ("t", lambda: self.truth(depth - 1)),
            ("c", lambda: self.number(0, 100)),
            ("d", self.divisor),
            ("x", lambda: self.pick("0.5", "1.5", "3.0")),
        ):
            if f"{{{hole}}}" in form:
                holes[hole] = make()
        return form.format(**holes)


_INTS = "torch.randint(-3, 9, ({shape},), generator=random)"
_BOOLS = "torch.rand({shape}, generator=random) < 0.6"
_DOCUMENTS = "torch.randint(0, 4, ({shape},), generator=random).sort().values"
_FLOATS = "torch.randn({shape}, generator=random)"
_LEARNED = (
    "torch.randn({shape}, generator=random, requires_grad=True)",
    "torch.randn({shape}, generator=random)",
    # float64 values must be exact in float32: others are refused unless the query is float64
    "torch.randn({shape}, generator=random).double().requires_grad_()",
    "torch.randn({shape}, generator=random, dtype=torch.bfloat16, requires_grad=True)",
    "torch.randn(2, {shape}, generator=random, requires_grad=True)[1]",
)


def _function(kind: str, body: str, tables: list[str], seed: int) -> Callable[..., Any]:
    """Return the mask_mod or score_mod that computes the expression `body`."""
    lines = [f"def {_HEADERS[kind]}:", f"    return {body}", f"return {kind}_mod"]
    function: Callable[..., Any] = run_drawn(f"{kind}_mod", tables, seed, lines)
    return function


@st.composite
def mask_mods(draw: st.DrawFn, limits: Limits = ANY_SIZE, *, depth: int = 3) -> Callable[..., Any]:
    """Draw random functions `mask_mod(b, h, q, kv)` that read captured int, bool and float tables.

    Args:
        limits: sizes of the calls that the function must support.
        depth: largest nesting depth of expressions.
    """
    writer = _Writer(draw, limits)
    body = writer.truth(depth)
    return _function("mask", body, writer.tables, draw(st.integers(0, 99)))


@st.composite
def score_mods(draw: st.DrawFn, limits: Limits = ANY_SIZE, *, depth: int = 3) -> Callable[..., Any]:
    """Draw random differentiable functions `score_mod(score, b, h, q, kv)`.

    Some captured tensors require grad.

    Args:
        limits: sizes of the calls that the function must support.
        depth: largest nesting depth of expressions.
    """
    writer = _Writer(draw, limits)
    body = writer.real(depth)
    body = draw(st.sampled_from([f"score + {body}", body, f"score * torch.sigmoid({body})"]))
    return _function("score", body, writer.tables, draw(st.integers(0, 99)))
