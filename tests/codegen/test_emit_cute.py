"""Compare the DSL emitter with torch, compiled for the CPU by the DSL (no GPU needed)."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.eval_torch import evaluate
from attnkit.graph.ir import BOOL, F32, I32, Node, Type, arg, const, load
from attnkit.graph.simplify import build, cast

cutlass = pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from cutlass import cute  # noqa: E402
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor  # noqa: E402

from attnkit.codegen.cute_host import run_on_cpu  # noqa: E402
from attnkit.codegen.emit_cute import emit  # noqa: E402
from attnkit.codegen.load_indices import LoadIndices  # noqa: E402

q, kv, score = arg("q"), arg("kv"), arg("score")
Pair = tuple[Node, Node]

FLOATS = [
    *map(float, "-inf -100.25 -7.5 -3 -1 -0.75 -1e-8 -0.0 0.0 1e-12 1e-8 0.3 0.5 1 1.5".split()),
    *map(float, "2 3.5 7.25 80 1e6 1e10 inf nan".split()),
]
INTS = [-(2**31) + 1, -(2**20), -65, -64, -7, -3, -1, 0, 1, 2, 3, 5, 8, 63, 64, 1000, 2**31 - 1]
DIVISORS = [-64, -7, -3, -2, -1, 1, 2, 3, 7, 8, 64, 2**30]
SHIFTS = [0, 1, 5, 31, 32, 40, -1]
WHOLE = [-2e9, -3.99, -1.0, -0.5, -0.0, 0.0, 0.99, 1.0, 2.5, 1e6, 2e9]
SIZE = max(len(FLOATS), len(INTS))


def _table(values: Sequence[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor(list(itertools.islice(itertools.cycle(values), SIZE)), dtype=dtype)


TABLES = [
    _table(FLOATS, torch.float32),
    _table(INTS, torch.int32),
    _table([True, False], torch.bool),
    _table(DIVISORS, torch.int32),
    _table(SHIFTS, torch.int32),
    _table(WHOLE, torch.float32),
]
GRID = {
    "q": torch.arange(SIZE, dtype=torch.int32).view(-1, 1),
    "kv": torch.arange(SIZE, dtype=torch.int32).view(1, -1),
}
OPERANDS: dict[Type, Pair] = {
    F32: (load(0, F32, [q]), load(0, F32, [kv])),
    I32: (load(1, I32, [q]), load(1, I32, [kv])),
    BOOL: (load(2, BOOL, [q]), load(2, BOOL, [kv])),
}
TAKES: dict[str, tuple[Type, ...]] = {
    **{"n": (F32, I32), "w": (I32, BOOL), "T": (F32, I32, BOOL)},
    **{"f": (F32,), "i": (I32,), "b": (BOOL,)},
}
DIVIDING, SHIFTING = ("fdiv", "mod", "tdiv"), ("shl", "shr")
CURVED = "pow exp exp2 expm1 log log2 log1p sqrt rsqrt tanh sigmoid sin cos erf erfinv atan2 hypot".split()  # the operations that no two libraries round alike


GAMMAS = ("lgamma", "digamma")  # likewise, but they are differences of larger numbers


def samples() -> list[Node]:
    """Return one node for each operation and argument type, with arguments from tables."""
    found = [ir.node("round", OPERANDS[F32][0], attr=a) for a in ("bfloat16", "float16")]
    for op, (letters, _) in ir.SIGNATURES.items():
        for kind in TAKES[letters[-1]]:
            args = list((*OPERANDS[kind], load(5, F32, [q]))[: letters.count(letters[-1])])
            if kind == I32 and op in DIVIDING + SHIFTING:
                args[1] = load(3 if op in DIVIDING else 4, I32, [kv])
            if op == "where":
                args = [build("lt", q, kv), *args]
            if op == "cast":
                source = load(5, F32, [q]) if kind == F32 else args[0]
                found += [ir.node("cast", source, to=to) for to in OPERANDS]
                found += [ir.node("cast", args[0], to=BOOL)]
            elif op != "round":
                found.append(ir.node(op, *args))
    return found


def with_constants(n: Node) -> list[Node]:
    """Return copies of a node with the last, the first, or all arguments constant."""
    if n.op == "cast":
        return []
    pools: dict[Type, list[Any]] = {F32: [-2.0, 0.5, 3.0], I32: [-7, 8], BOOL: [True]}
    if n.op in DIVIDING and n.type == I32:
        pools[I32] = [*DIVISORS, 12, -12, 2**30 + 1, 2**31 - 1]
    if n.op == "pow":
        pools[F32] = [-2.5, -2.0, 0.3125, 3.0]  # at 0.5 torch itself has two answers, for -inf
    if n.op in SHIFTING:
        pools[I32] = SHIFTS
    made = []
    for value in pools[n.args[-1].type]:
        last = const(value)
        first = [const(pools[a.type][0]) for a in n.args[:-1]]
        choices = [(*n.args[:-1], last), (*first, last), (*first, n.args[-1])]
        made += [ir.node(n.op, *args, attr=n.attr) for args in choices]
    return made


def equal(ours: Tensor, theirs: Tensor, label: object) -> None:
    torch.testing.assert_close(
        ours.broadcast_to(theirs.shape), theirs, rtol=0, atol=0, equal_nan=True,
        msg=lambda text: f"{label}: {text}",
    )  # fmt: skip


def ulps(ours: Tensor, exact: Tensor, terms: Tensor | None = None) -> Tensor:
    """Return the error in units in the last place of float32; inf where only one is finite.

    A result below the smallest normal float32 may be flushed to zero. `terms` are sizes of numbers
    whose difference the result is; its unit is then that of the largest.
    """
    rounded = exact.float()
    largest = exact.abs() if terms is None else exact.abs().maximum(terms)
    unit = torch.exp2(largest.clamp_min(2.0**-126).log2().floor() - 23)
    error = (ours.double() - exact).abs() / unit
    same = (ours == rounded) | (ours.isnan() & rounded.isnan())
    error = torch.where(exact.abs() < 2.0**-126, (ours.abs() > 2.0**-126).double(), error)
    return torch.where(
        rounded.isfinite() & ours.isfinite(), error, torch.where(same, 0.0, math.inf)
    )


def test_every_operation_is_sampled() -> None:
    assert {n.op for n in samples()} == set(ir.SIGNATURES)
    assert {*CURVED, *GAMMAS} < set(ir.SIGNATURES)


def test_every_exact_operation_gives_torchs_bits() -> None:
    roots = [n for n in samples() if n.op not in (*CURVED, *GAMMAS)]
    roots += [m for n in roots for m in with_constants(n)]
    roots += [build("div", const(1.0), n) for n in roots if n.type == F32]  # tells 0.0 from -0.0
    expected = evaluate(roots, GRID, TABLES)
    for n, ours, theirs in zip(roots, run_on_cpu(roots, GRID, TABLES), expected, strict=True):
        equal(ours, theirs.broadcast_to(ours.shape), n)


def test_every_curved_operation_is_within_three_units_of_the_last_place() -> None:
    roots = [n for n in samples() if n.op in CURVED]
    roots += [m for n in roots for m in with_constants(n)]
    exact = evaluate(roots, GRID, TABLES, torch.float64)
    for n, ours, reference in zip(roots, run_on_cpu(roots, GRID, TABLES), exact, strict=True):
        error = ulps(ours, reference.broadcast_to(ours.shape))
        assert error.max() <= 3, f"{n}: {error.max()} at {error.argmax()}"


@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1e-4, 1.0, 30.0]))
@settings(max_examples=5, deadline=None)
def test_curved_operations_stay_within_three_units_on_random_values(
    seed: int, scale: float
) -> None:
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(seed)) * scale
    roots = [ir.node(op, score) for op in CURVED if op not in ("pow", "atan2", "hypot")]
    roots += [
        build("atan2", score, other)
        for other in (const(1.0), const(-0.25), build("mul", score, score))
    ]
    roots += [build("hypot", score, other) for other in (const(0.25), build("exp", score))]
    exact = evaluate(roots, {"score": values.double()}, [], torch.float64)
    for n, ours, reference in zip(
        roots, run_on_cpu(roots, {"score": values}, []), exact, strict=True
    ):
        error = ulps(ours, reference)
        assert error.max() <= 3, f"{n}: {error.max()} at {values[error.argmax()]}"


def gamma_values() -> Tensor:
    """Return numbers of all sizes and signs, many near the zeros and poles of lgamma."""
    random = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(4000, generator=random)
    near = [draw() * 2.0**-k + at for at in (1, 2, -1, -2, -7) for k in (3, 9)]
    sizes = [draw() * s for s in (0.3, 2.0, 10.0, 100.0, 1e4)]
    wide = torch.exp(draw() * 20).clamp(2.0**-120, 2.0**120)
    return torch.cat([*near, *sizes, wide, -wide, torch.tensor(FLOATS)])


def test_lgamma_and_its_derivative_are_as_exact_as_their_terms() -> None:
    """lgamma of a positive number is within three units; the others are so of their terms."""
    values = gamma_values()
    wide = values.double()
    ours = run_on_cpu([ir.node(op, score) for op in GAMMAS], {"score": values}, [])
    exact = torch.lgamma(wide)
    assert ulps(ours[0], exact)[values > 0].max() <= 3
    terms = torch.lgamma(wide.abs()).abs().clamp(min=1).nan_to_num(posinf=1.0)
    error = ulps(ours[0], exact, terms)
    assert error.max() <= 3, f"{error.max()} at {values[error.argmax()]}"

    exact = torch.digamma(wide)
    # the terms of the reflection
    terms = torch.digamma(1 + wide.abs()).abs() + math.pi / torch.tan(math.pi * wide).abs()
    terms = torch.where(wide > 0, 1.0, terms.nan_to_num(nan=1.0, posinf=1.0)).clamp(min=1)
    error = ulps(ours[1], exact, terms)
    # torch's float32 is off by up to 10 units here
    assert error.max() <= 6, f"{error.max()} at {values[error.argmax()]}"


@st.composite
def exact_graphs(draw: st.DrawFn) -> Node:
    """Draw graphs of operations that are exact or correctly rounded, with all three types."""
    pools: dict[Type, list[Node]] = {
        F32: [score, load(0, F32, [build("sub", q, kv)]), const(0.75)],
        I32: [q, kv, load(1, I32, [kv, build("mod", q, const(3))]), const(-3)],
        BOOL: [build("le", kv, q)],
    }
    ops = sorted(set(ir.SIGNATURES) - {*CURVED, *GAMMAS, "round"})
    for _ in range(draw(st.integers(1, 14))):
        op = draw(st.sampled_from(ops))
        kind = draw(st.sampled_from(TAKES[ir.SIGNATURES[op][0][-1]]))
        args = [draw(st.sampled_from(pools[kind])) for _ in ir.SIGNATURES[op][0]]
        if op in DIVIDING and kind == I32:
            args[1] = const(draw(st.sampled_from([-7, -2, 2, 3, 8, 64])))
        elif op in SHIFTING:
            args[1] = const(draw(st.integers(0, 4)))
        elif op == "where":
            args[0] = draw(st.sampled_from(pools[BOOL]))
        if op == "cast":
            to = draw(st.sampled_from([F32, BOOL] if kind == F32 else [I32, F32, BOOL]))
            made = cast(args[0], to)
        else:
            made = build(op, *args)
        pools[made.type].append(made)
    return draw(st.sampled_from([pools[made.type][-1], pools[F32][-1], pools[BOOL][-1]]))


@given(root=exact_graphs())
@settings(max_examples=40, deadline=None)
def test_random_graphs_of_exact_operations_give_torchs_bits(root: Node) -> None:
    env = {
        "q": torch.arange(9, dtype=torch.int32).view(-1, 1),
        "kv": torch.arange(7, dtype=torch.int32).view(1, -1),
        "score": torch.linspace(-4, 4, 63).view(9, 7),
    }
    env["score"][0, :3] = torch.tensor([-math.inf, math.inf, math.nan])
    tensors = [torch.linspace(-2, 2, 11), torch.arange(-10, 11, dtype=torch.int32).view(7, 3)]
    (ours,) = run_on_cpu([root], env, tensors)
    (theirs,) = evaluate([root], env, tensors)
    equal(ours, theirs.broadcast_to(ours.shape), root)


ELEMENTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
ELEMENTS += [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def test_loads_take_every_element_type_any_strides_and_negative_indices() -> None:
    values = torch.tensor([[3.5, -2.0, 0.0], [7.25, 1.0, -0.5]])
    row, column = build("sub", q, const(1)), build("sub", kv, const(2))
    tensors: list[Tensor] = []
    roots: list[Node] = []
    for dtype in ELEMENTS:
        table = (values.abs() if dtype == torch.uint8 else values).to(dtype)
        type_ = BOOL if dtype == torch.bool else F32 if dtype.is_floating_point else I32
        for view, index in (
            (table, [row, column]),
            (table.repeat(1, 4).t()[::2], [column, row]),
            (table[0], [column]),
            (table[1, 0], []),
        ):
            roots.append(load(len(tensors), type_, index))
            tensors.append(view)
    roots += [cast(n, to) for n in roots for to in (I32, F32, BOOL)]
    env = {"q": torch.arange(2).int().view(-1, 1), "kv": torch.arange(3).int().view(1, -1)}
    expected = evaluate(roots, env, tensors)
    for n, ours, theirs in zip(roots, run_on_cpu(roots, env, tensors), expected, strict=True):
        equal(ours, theirs.broadcast_to(ours.shape), n)


def test_wrap_names_the_loads_whose_index_may_be_negative() -> None:
    table = torch.arange(8, dtype=torch.float32)
    inside, below = load(0, F32, [build("sub", q, kv)]), load(0, F32, [build("sub", kv, q)])
    env = {"q": torch.tensor([2, 3], dtype=torch.int32), "kv": torch.tensor(1, dtype=torch.int32)}
    ours = run_on_cpu([inside, below], env, [table], indices=LoadIndices(frozenset([below])))
    assert [t.tolist() for t in ours] == [[1.0, 2.0], [7.0, 6.0]]


def test_a_clamped_index_stays_inside_whatever_the_data_says() -> None:
    ids = torch.tensor([0, 3, -1, -4, 4, -5, 2**31 - 1, -(2**31)], dtype=torch.int32)
    table = torch.arange(4, dtype=torch.float32)
    index = load(0, I32, [q])
    root = load(1, F32, [index])
    expected = [0.0, 3.0, 3.0, 0.0, 3.0, 0.0, 3.0, 0.0]
    (ours,) = run_on_cpu(
        [root],
        {"q": torch.arange(8, dtype=torch.int32)},
        [ids, table],
        indices=LoadIndices(clamp=frozenset([root])),
    )
    assert ours.tolist() == expected


def test_a_shared_subexpression_is_emitted_once() -> None:
    root = score
    for _ in range(60):  # 2^60 operations without sharing
        root = build("mul", build("add", root, root), const(0.5))
    values = torch.randn(7)
    assert torch.equal(run_on_cpu([root], {"score": values}, [])[0], values)


class _Staged:
    """Emit the value of a row first, then the remaining expression from that value."""

    def __init__(self, row: Node, root: Node) -> None:
        self.row = row
        self.root = root

    def __call__(self, i: Any, scores: Any, out: Any) -> None:
        known: dict[Node, Any] = {}
        emit([self.row], {"q": 3}, [], memo=known)  # a Python number is taken too
        (out[i],) = emit([self.root], {"score": scores[i]}, [], memo=known)


@cute.jit
def _staged(scores: cute.Tensor, out: cute.Tensor, body: cutlass.Constexpr) -> None:
    for i in cutlass.range(scores.shape[0]):
        body(i, scores, out)


def test_values_known_already_are_not_emitted_again() -> None:
    row = build("exp", build("mul", q, const(0.25)))
    scores, out = torch.randn(5), torch.empty(5)
    arguments = from_dlpack(scores), from_dlpack(out)
    body = _Staged(row, build("sub", build("mul", score, row), row))
    cute.compile(_staged, *arguments, body)(*arguments)
    torch.testing.assert_close(out, scores * math.exp(0.75) - math.exp(0.75))


class _Site:
    """Stub of the place in a GPU kernel where expressions are emitted."""

    def __init__(self, roots: Sequence[Node], fast: bool, wrap: frozenset[Node] | None) -> None:
        self.roots, self.fast, self.indices = roots, fast, LoadIndices(wrap)

    def __call__(self, q: Any, kv: Any, values: Sequence[Any]) -> None:
        outputs, captured = values[: len(self.roots)], values[len(self.roots) :]
        env = {"q": q, "kv": kv}
        found = emit(self.roots, env, captured, fast=self.fast, indices=self.indices)
        for out, value in zip(outputs, found, strict=True):
            out[q, kv] = value


@cute.kernel
def _kernel(values: list, site: cutlass.Constexpr) -> None:
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    site(block, thread, values)


@cute.jit
def _launch(values: list, site: cutlass.Constexpr) -> None:
    _kernel(values, site).launch(grid=(SIZE, 1, 1), block=(SIZE, 1, 1))


def ptx(
    roots: Sequence[Node],
    folder: Path,
    *,
    fast: bool = False,
    wrap: frozenset[Node] | None = None,
) -> str:
    """Return the PTX of a Hopper kernel that evaluates the roots over TABLES."""
    kinds = {F32: cutlass.Float32, I32: cutlass.Int32, BOOL: cutlass.Boolean}
    types = [torch.float32, torch.int32, torch.bool]
    values = [make_fake_compact_tensor(kinds[r.type], (SIZE, SIZE)) for r in roots]
    values += [
        make_fake_compact_tensor(list(kinds.values())[types.index(t.dtype)], (SIZE,))
        for t in TABLES
    ]
    options = f"--gpu-arch sm_90a --keep-ptx --dump-dir={folder}"
    compiled = cute.compile(_launch, values, _Site(roots, fast, wrap), options=options)
    return str(compiled.artifacts.PTX)


@pytest.mark.parametrize("fast", [False, True])
def test_every_operation_compiles_for_the_gpu(fast: bool, tmp_path: Path) -> None:
    text = ptx(samples(), tmp_path, fast=fast)
    for instruction in ("tanh.approx.f32", "lg2.approx", "max.NaN.f32"):
        assert (instruction in text.replace(".ftz", "")) == fast, instruction
    assert ".func" not in text  # no call to a library that is not there


def test_fast_forms_are_single_instructions(tmp_path: Path) -> None:
    a, b = OPERANDS[F32]
    for root, wanted in {
        build("tanh", a): "tanh.approx.f32",
        build("exp2", a): "ex2.approx.f32",
        build("log2", a): "lg2.approx.f32",
        build("sqrt", a): "sqrt.approx.f32",
        build("rsqrt", a): "rsqrt.approx.f32",
        build("max", a, b): "max.NaN.f32",
        build("min", a, b): "min.NaN.f32",
        build("div", a, b): "div.approx.f32",
        build("div", a, const(3.0)): "mul.f32",
    }.items():
        floats = re.findall(r"\t(\w[\w.]*\.f32)\s", ptx([root], tmp_path, fast=True))
        assert floats == [wanted], f"{root}: {floats}"


def test_powers_of_two_divide_by_shifts(tmp_path: Path) -> None:
    difference = build("sub", q, kv)
    text = ptx(
        [build("fdiv", difference, const(64)), build("mod", difference, const(64))], tmp_path
    )
    assert "shr.s32" in text
    assert not re.search(r"\b(div|rem|mul\.hi|setp)\b", text)


def test_other_constants_divide_by_multiplication(tmp_path: Path) -> None:
    """Division by other constants compiles to multiplications, without div, rem or setp."""
    difference = build("sub", q, kv)
    text = ptx(
        [build("fdiv", difference, const(74)), build("mod", difference, const(74))], tmp_path
    )
    assert re.search(r"mul\.(hi|wide)\.u32", text)
    assert not re.search(r"\b(div|rem|setp)\b", text)
