"""Draw random expressions over b, h, q, kv and captured tensors, and compute their dense values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.eval_torch import evaluate
from attnkit.graph.ir import BOOL, F32, I32, Node, Type, arg, const, load
from attnkit.graph.simplify import build, cast

Q, KV, B, H = arg("q"), arg("kv"), arg("b"), arg("h")


@dataclass(frozen=True)
class Case:
    """Hold a random expression with its captured tensors and sizes."""

    root: Node
    tensors: tuple[Tensor, ...]
    q_len: int
    kv_len: int
    batch: int
    heads: int

    def sizes(self) -> dict[str, int]:
        return {"q_len": self.q_len, "kv_len": self.kv_len,
                "batch": self.batch, "heads": self.heads}  # fmt: skip


def positions(case: Case) -> dict[str, Tensor]:
    """Return the indices b, h, q, kv, int32, broadcastable to [batch, heads, q_len, kv_len]."""
    return {
        "b": torch.arange(case.batch, dtype=torch.int32).view(-1, 1, 1, 1),
        "h": torch.arange(case.heads, dtype=torch.int32).view(-1, 1, 1),
        "q": torch.arange(case.q_len, dtype=torch.int32).view(-1, 1),
        "kv": torch.arange(case.kv_len, dtype=torch.int32),
    }


def dense(
    root: Node, tensors: tuple[Tensor, ...], case: Case, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Evaluate an expression at every position; return [batch, heads, q_len, kv_len]."""
    return dense_nodes([root], tensors, case, dtype)[root]


def dense_nodes(
    roots: list[Node],
    tensors: tuple[Tensor, ...],
    case: Case,
    dtype: torch.dtype = torch.float32,
) -> dict[Node, Tensor]:
    """Evaluate every subexpression at every position; return {node: values}."""
    env = positions(case)
    memo: dict[Node, Tensor] = {}
    evaluate(roots, env, tensors, dtype, memo=memo)
    shape = (case.batch, case.heads, case.q_len, case.kv_len)
    return {n: v.expand(shape) for n, v in memo.items()}


class Maker:
    """Draw random expressions, adding captured tensors as needed."""

    def __init__(self, draw: st.DrawFn, q_len: int, kv_len: int, batch: int, heads: int) -> None:
        self.draw = draw
        self.case = (q_len, kv_len, batch, heads)
        self.tensors: list[Tensor] = []
        self.random = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def of(self, type_: Type, depth: int) -> Node:
        return {I32: self.integer, F32: self.real, BOOL: self.logic}[type_](depth)

    def pick(self, *options: str) -> str:
        return self.draw(st.sampled_from(options))

    def number(self, low: int, high: int) -> Node:
        return const(self.draw(st.integers(low, high)))

    # --- captured tensors

    def slot(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def table(self, type_: Type, *sizes: int) -> int:
        if type_ == F32:
            values = torch.randn(*sizes, generator=self.random)
            special = self.pick("plain", "plain", "infinite", "nan")
            if special != "plain":
                hit = torch.rand(sizes, generator=self.random) < 0.1
                values[hit] = float("nan") if special == "nan" else -float("inf")
            return self.slot(values)
        if type_ == BOOL:
            return self.slot(torch.rand(*sizes, generator=self.random) < 0.7)
        kind = self.pick("sorted", "random", "steps")
        high = self.draw(st.integers(1, 40))
        values = torch.randint(-3, high, sizes, generator=self.random)
        if kind != "random" and len(sizes) == 1:
            values = values.sort().values
        wide = self.draw(st.sampled_from([torch.int32, torch.int64, torch.int16]))
        return self.slot(values.to(wide))

    def loaded(self, type_: Type, depth: int) -> Node:
        q_len, kv_len, batch, heads = self.case
        form = self.pick("q", "kv", "kv", "q kv", "d", "b q", "h", "any")
        if form == "q":
            return load(self.table(type_, q_len), type_, [Q])
        if form == "kv":
            return load(self.table(type_, kv_len), type_, [KV])
        if form == "q kv":
            return load(self.table(type_, q_len, kv_len), type_, [Q, KV])
        if form == "d":
            size = q_len + kv_len
            return load(self.table(type_, size), type_, [build("sub", Q, KV)])
        if form == "b q":
            return load(self.table(type_, batch, q_len), type_, [B, Q])
        if form == "h":
            return load(self.table(type_, heads), type_, [H])
        size = self.draw(st.integers(1, 20))
        index = build("mod", self.integer(depth - 1), const(size))
        if self.draw(st.booleans()):
            index = build("sub", index, const(size))
        return load(self.table(type_, size), type_, [index])

    # --- expressions

    def integer(self, depth: int) -> Node:
        if depth <= 0:
            leaf = self.pick("q", "kv", "b", "h", "d", "number")
            if leaf == "number":
                return self.number(-40, 40)
            return {"q": Q, "kv": KV, "b": B, "h": H, "d": build("sub", Q, KV)}[leaf]
        op = self.pick("add", "sub", "mul", "neg", "abs", "min", "max", "where", "fdiv", "mod",
                       "tdiv", "load", "load", "and", "or", "xor", "shl", "shr", "cast",
                       "bound", "divide")  # fmt: skip
        a = self.integer(depth - 1)
        if op == "load":
            return self.loaded(I32, depth)
        if op in ("neg", "abs"):
            return build(op, a)
        if op == "cast":
            return cast(self.of(self.draw(st.sampled_from([BOOL, F32])), depth - 1), I32)
        if op == "where":
            return build("where", self.logic(depth - 1), a, self.integer(depth - 1))
        if op == "mul":
            return build("mul", a, self.draw(st.sampled_from([self.number(-5, 5), Q, H, KV])))
        if op in ("fdiv", "mod", "tdiv"):
            size = self.draw(st.integers(1, 70)) * self.draw(st.sampled_from([1, 1, -1]))
            return build(op, a, const(size))
        if op in ("shl", "shr"):
            return build(op, a, self.number(0, 4 if op == "shl" else 8))
        if op == "bound":
            return build("max", build("min", a, self.number(0, 50)), self.number(-50, 0))
        b = self.integer(depth - 1)
        if op == "divide":  # by something that varies, kept away from zero
            return build(self.pick("fdiv", "mod", "tdiv"), a, build("max", b, const(1)))
        return build(op, a, b)

    def real(self, depth: int) -> Node:
        if depth <= 0:
            return cast(self.integer(0), F32)
        op = self.pick("add", "sub", "mul", "div", "min", "max", "neg", "abs", "where", "load",
                       "load", "cast", "sqrt", "floor", "exp", "log", "tanh", "round", "pow",
                       "cos")  # fmt: skip
        if op == "load":
            return self.loaded(F32, depth)
        if op == "cast":
            return cast(self.integer(depth - 1), F32)
        a = self.real(depth - 1)
        if op == "round":
            return ir.node("round", a, attr=self.pick("float16", "bfloat16"))
        if op in ("neg", "abs", "sqrt", "floor", "exp", "log", "tanh", "cos"):
            return build(op, a)
        if op == "where":
            return build("where", self.logic(depth - 1), a, self.real(depth - 1))
        return build(op, a, self.real(depth - 1))

    def logic(self, depth: int) -> Node:
        op = self.pick("lt", "le", "eq", "real", "load", "and", "and", "or", "or", "not", "xor",
                       "where", "same")  # fmt: skip
        if depth <= 0 or op in ("lt", "le", "eq"):
            op = op if op in ("lt", "le", "eq") else "le"
            return build(op, self.integer(depth - 1), self.integer(depth - 1))
        if op == "real":
            return build(self.pick("lt", "le", "eq"), self.real(depth - 1), self.real(depth - 1))
        if op == "load":
            return self.loaded(BOOL, depth)
        if op == "same":  # the shape that the equality rewrite looks for
            q_table, kv_table = (self.table(I32, n) for n in self.case[:2])
            return build("and", build("eq", load(q_table, I32, [Q]), load(kv_table, I32, [KV])),
                         self.logic(depth - 1))  # fmt: skip
        a = self.logic(depth - 1)
        if op == "not":
            return build("not", a)
        if op == "where":
            return build("where", a, self.logic(depth - 1), self.logic(depth - 1))
        return build(op, a, self.logic(depth - 1))


@st.composite
def cases(draw: st.DrawFn, type_: Type = BOOL, max_len: int = 300, max_depth: int = 4) -> Case:
    """Draw an expression of a type with its sizes; integer overflow is possible but rare."""
    q_len, kv_len = draw(st.integers(1, max_len)), draw(st.integers(1, max_len))
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    maker = Maker(draw, q_len, kv_len, batch, heads)
    root = maker.of(type_, draw(st.integers(0, max_depth)))
    return Case(root, tuple(maker.tensors), q_len, kv_len, batch, heads)


def states_of(keep: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the tile states of a dense mask [b, h, q, kv] by brute force, int8."""
    any_, all_ = keep, keep
    for axis, size in ((2, block[0]), (3, block[1])):
        any_ = torch.stack([p.any(axis) for p in any_.split(size, axis)], axis)
        all_ = torch.stack([p.all(axis) for p in all_.split(size, axis)], axis)
    return any_.to(torch.int8) + all_.to(torch.int8)
