"""Check that values emitted level by level equal the whole expression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnkit import mods
from attnkit.codegen.score_form import score_form
from attnkit.graph import ir
from attnkit.graph.eval_torch import evaluate
from attnkit.graph.ir import BOOL, F32, I32, Node, arg, const, load
from attnkit.graph.simplify import build, cast
from attnkit.graph.staging import Level, level_of
from attnkit.tracing.tracer import trace

cutlass = pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from cutlass import cute  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

from attnkit.codegen.staged_emitter import Element, Stages  # noqa: E402

q, kv, h, b, score, scale = (arg(name) for name in ("q", "kv", "h", "b", "score", "scale"))
N = 40
TABLES = (
    torch.linspace(-2.0, 2.0, N),
    torch.linspace(-1.0, 3.0, 2 * N).view(2, N),
    torch.arange(N, dtype=torch.int32) * 7 % 11,
    torch.linspace(-3.0, 3.0, 2 * N),
)
BY_Q, BY_KV = load(0, F32, [q]), load(1, F32, [h, kv])
IDS_Q, IDS_KV = load(2, I32, [q]), load(2, I32, [kv])
DISTANCE = build("sub", q, kv)
RELATIVE = load(3, F32, [build("add", DISTANCE, const(N))])

# ------------------------------------------------------------------------------------------ levels


@pytest.mark.parametrize(
    ("node", "level"),
    [
        (const(1.0), Level.CONSTANT),
        (build("mul", scale, cast(h, F32)), Level.HEAD),
        (BY_Q, Level.ROW),
        (BY_KV, Level.COLUMN),
        (cast(DISTANCE, F32), Level.RELATIVE),
        (RELATIVE, Level.RELATIVE),
        (build("mul", RELATIVE, cast(h, F32)), Level.RELATIVE),
        (build("le", kv, q), Level.RELATIVE),
        (build("eq", IDS_Q, IDS_KV), Level.ELEMENT),
        (build("add", BY_Q, BY_KV), Level.ELEMENT),
        (build("mul", score, RELATIVE), Level.ELEMENT),
        (build("mul", score, scale), Level.ELEMENT),
        (cast(build("add", q, kv), F32), Level.ELEMENT),
    ],
)
def test_level(node: Node, level: Level) -> None:
    assert level_of(node) is level


def test_each_part_is_known_at_its_level_once() -> None:
    root = build(
        "add",
        build("mul", build("add", score, RELATIVE), build("add", BY_Q, const(1.0))),
        build("mul", BY_KV, build("mul", scale, const(2.0))),
    )
    stages = Stages([root])
    assert stages.nodes_at(Level.HEAD) == (build("mul", scale, const(2.0)),)
    assert stages.nodes_at(Level.ROW) == (build("add", BY_Q, const(1.0)),)
    assert stages.nodes_at(Level.COLUMN) == (root.args[1],)
    assert stages.nodes_at(Level.RELATIVE) == (RELATIVE,)


# ------------------------------------------------------------------------------------------ values

ROWS, COLUMNS = (0, 8), (0, 1, 8, 9)  # offsets of a thread's rows and columns
PLACES = [(r, j) for j in range(len(COLUMNS)) for r in range(len(ROWS))]


@dataclass(frozen=True)
class Site:
    """Hold the fields of a kernel's site that `Stages` reads."""

    b: Any
    h: Any
    scale: Any


class Thread:
    """Run the code of one thread; a callable object, so that the DSL does not parse its source."""

    def __init__(self, stages: Stages, shared: bool) -> None:
        self.stages = stages
        self.shared = shared

    def __call__(self, i: Any, values: Sequence[Any]) -> None:
        inputs, scores, rest = values[:5], values[5 : 5 + len(PLACES)], values[5 + len(PLACES) :]
        count = len(PLACES) * len(self.stages.roots)
        outputs, tables = rest[:count], rest[count:]
        b_, h_, q_, kv_, scale_ = (t[i] for t in inputs)
        site, stages = Site(b_, h_, scale_), self.stages
        head = stages.head(site, tables)
        rows = [(q_ + o, stages.row(site, tables, head, q_ + o)) for o in ROWS]
        columns = [(kv_ + o, stages.column(site, tables, head, kv_ + o)) for o in COLUMNS]
        elements = [
            Element(
                rows[r][0],
                columns[j][0],
                rows[r][1],
                columns[j][1],
                ROWS[r] - COLUMNS[j] if self.shared else None,
                scores[e][i],
            )
            for e, (r, j) in enumerate(PLACES)
        ]
        relatives = stages.relatives(site, tables, head, elements)
        assert len(relatives) in (0, len({e.step for e in elements} - {None}))
        found = stages.elements(site, tables, head, elements, relatives)
        for tensor, value in zip(outputs, (v for each in found for v in each), strict=True):
            tensor[i] = value


@cute.jit
def loop(count: cutlass.Int32, values: list, body: cutlass.Constexpr) -> None:
    for i in cutlass.range(count):
        body(i, values)


DTYPES = {I32: torch.int32, F32: torch.float32, BOOL: torch.bool}


def positions() -> dict[str, Tensor]:
    """Return first positions b, h, q, kv of 64 threads, int32 [64], and a scale, by name."""
    random = torch.Generator().manual_seed(0)
    sizes = {"b": 2, "h": 2, "q": N - ROWS[-1], "kv": N - COLUMNS[-1]}
    env = {
        name: torch.randint(0, n, (64,), generator=random, dtype=torch.int32)
        for name, n in sizes.items()
    }
    return env | {"scale": torch.rand(64, generator=random) + 0.1}


def by_levels(
    roots: Sequence[Node], tables: Sequence[Tensor], scores: Sequence[Tensor], shared: bool
) -> list[Tensor]:
    """Evaluate the roots level by level, compiled for the CPU; results by element, then root."""
    env = positions()
    outputs = [torch.empty(64, dtype=DTYPES[r.type]) for _ in PLACES for r in roots]
    flat = [*(env[n] for n in ("b", "h", "q", "kv", "scale")), *scores, *outputs]
    values = [from_dlpack(t) for t in flat]
    values += [from_dlpack(t.detach().reshape(t.shape or (1,))) for t in tables]
    body = Thread(Stages(roots, fast=False), shared)
    count = cutlass.Int32(64)
    cute.compile(loop, count, values, body)(count, values)
    return outputs


def at_once(
    roots: Sequence[Node],
    tables: Sequence[Tensor],
    scores: Sequence[Tensor],
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Evaluate the roots with `graph.eval_torch`, in the order of `by_levels`."""
    env, found = positions(), []
    env["scale"] = env["scale"].to(dtype)
    for (r, j), s in zip(PLACES, scores, strict=True):
        own = {"q": env["q"] + ROWS[r], "kv": env["kv"] + COLUMNS[j], "score": s.to(dtype)}
        values = evaluate(roots, env | own, [t.detach() for t in tables], dtype)
        found += [v.expand(64) for v in values]
    return found


def drawn_scores() -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(64, generator=random) for _ in PLACES]


@st.composite
def expressions(draw: st.DrawFn, kind: str = F32, depth: int = 4) -> Node:
    """Draw expressions of operations that are exact or correctly rounded."""
    leaves = {
        F32: [score, scale, BY_Q, BY_KV, RELATIVE, const(-1.5), cast(DISTANCE, F32), cast(h, F32)],
        I32: [q, kv, h, b, DISTANCE, IDS_Q, IDS_KV, const(3)],
        BOOL: [build("le", kv, q), build("eq", IDS_Q, IDS_KV), build("lt", DISTANCE, const(5))],
    }
    if depth == 0:
        return draw(st.sampled_from(leaves[kind]))
    forms = {
        F32: ["add", "sub", "mul", "min", "max", "neg", "abs", "where", "cast", "leaf"],
        I32: ["add", "sub", "min", "max", "neg", "abs", "where", "leaf"],
        BOOL: ["and", "or", "not", "lt", "leaf"],
    }
    form = draw(st.sampled_from(forms[kind]))
    inner = lambda kind: draw(expressions(kind, depth - 1))
    if form == "leaf":
        return draw(st.sampled_from(leaves[kind]))
    if form == "where":
        return build("where", inner(BOOL), inner(kind), inner(kind))
    if form == "cast":
        return cast(inner(I32), F32)
    if form == "lt":
        other = draw(st.sampled_from([I32, F32]))
        return build("lt", inner(other), inner(other))
    if form in ("neg", "abs", "not"):
        return build(form, inner(kind))
    return build(form, inner(kind), inner(kind))


@settings(max_examples=20)
@given(st.lists(expressions(), min_size=1, max_size=2), st.booleans())
def test_values_are_those_of_the_expression(roots: list[Node], shared: bool) -> None:
    scores = drawn_scores()
    found, expected = by_levels(roots, TABLES, scores, shared), at_once(roots, TABLES, scores)
    for value, other in zip(found, expected, strict=True):
        assert torch.equal(value, other), [ir.formula(r) for r in roots]


@pytest.mark.parametrize(
    "name", ["alibi", "relative_bias", "t5_bias", "kerple", "softcap", "graphormer"]
)
def test_library(name: str) -> None:
    """The score form of each mod has at most twice torch's error."""
    traced = trace(mods.examples(N, heads=2, batch=2)[name].mod, "score")
    form = score_form(traced.root)
    roots = [n for n in (form.factor, form.bias, form.slope, form.row) if n is not None]
    scores = drawn_scores()
    found = by_levels(roots, traced.tensors, scores, True)
    plain = at_once(roots, traced.tensors, scores)
    exact = at_once(roots, traced.tensors, scores, torch.float64)
    for value, other, gold in zip(found, plain, exact, strict=True):
        own = float((other - gold).abs().max())
        ulps = 4 * torch.finfo(torch.float32).eps * float(gold.abs().max())
        assert float((value - gold).abs().max()) <= max(2 * own, ulps)
