"""Values by distance on a CPU are those of each score, and so are their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attnkit
from attnkit.graph.eval_torch import evaluate, positions
from attnkit.graph.ir import F32
from attnkit.splice import cpu_distances
from attnkit.splice.cpu import CpuHooks
from attnkit.splice.cpu_distances import by_distance, diagonal_sums, distances, reads_diagonals
from attnkit.splice.program import Program
from attnkit.templates.cpu import Tile
from attnkit.tracing.tracer import trace

HEADS, LENGTH = 3, 96


def tables() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "line": torch.randn(HEADS, 2 * LENGTH),
        "few": torch.randn(HEADS, 9),
        "batch": torch.randn(2, 2 * LENGTH),
        "row": torch.randn(HEADS, LENGTH),
        "scalar": torch.rand(HEADS),
    }


Mod = Callable[..., Any]
# from tables to the score_mod; names of the tables that it learns
MODS: dict[str, tuple[Callable[[dict[str, Tensor]], Mod], tuple[str, ...]]] = {
    "relative bias": (lambda T: lambda s, b, h, q, kv: s + T["line"][h, q - kv + LENGTH], ("line",)),
    "clamped": (lambda T: lambda s, b, h, q, kv: s + T["few"][h, (q - kv).clamp(-4, 4) + 4], ("few",)),
    "buckets": (
        lambda T: lambda s, b, h, q, kv: s + T["few"][h, torch.log1p((q - kv).abs().float()).int()],
        ("few",),
    ),
    "a factor": (lambda T: lambda s, b, h, q, kv: s * T["line"][h, kv - q], ("line",)),
    "by batch": (lambda T: lambda s, b, h, q, kv: s - T["batch"][b, q - kv] * T["scalar"][h], ("batch", "scalar")),
    "kerple": (
        lambda T: lambda s, b, h, q, kv: s - T["scalar"][h] * torch.log1p(T["scalar"][h] * (q - kv).abs()),
        ("scalar",),
    ),
    "with a row": (
        lambda T: lambda s, b, h, q, kv: torch.tanh(s + T["line"][h, q - kv]) + T["row"][h, q],
        ("line", "row"),
    ),
    "twice": (
        lambda T: lambda s, b, h, q, kv: s + T["few"][h, (q - kv) % 5] * T["few"][h, (q - kv) % 7],
        ("few",),
    ),
}  # fmt: skip


def tile_of(q: slice, kv: slice) -> Tile:
    b, h, rows, columns = positions((2, HEADS, LENGTH, LENGTH), torch.device("cpu")).values()
    return Tile(b, h, rows[:, :, q], columns[..., kv])


@given(
    st.sampled_from(sorted(MODS)),
    st.tuples(st.integers(0, 40), st.integers(1, 56)),
    st.tuples(st.integers(0, 40), st.integers(1, 56)),
)
def test_scores_are_those_of_each_score(name: str, q: tuple[int, int], kv: tuple[int, int]) -> None:
    traced = trace(MODS[name][0](tables()), "score")
    tile = tile_of(slice(q[0], sum(q)), slice(kv[0], sum(kv)))
    env = {"b": tile.b, "h": tile.h, "q": tile.q, "kv": tile.kv}
    score = torch.randn(2, HEADS, q[1], kv[1])
    with torch.no_grad():
        exact = evaluate([traced.root], {**env, "score": score}, traced.tensors)[0]
        hooks = CpuHooks(
            Program(traced.root), traced.tensors, (), torch.float32, torch.device("cpu"), HEADS
        )
        for _ in range(2):  # the second one finds memory of the first
            found = hooks.score(score.clone(), tile)
            torch.testing.assert_close(found.expand(score.shape), exact, rtol=3e-7, atol=1e-6)


@pytest.mark.parametrize("name", sorted(MODS))
def test_expressions_of_q_minus_kv_are_found(name: str) -> None:
    traced = trace(MODS[name][0](tables()), "score")
    rest, found = by_distance(traced.root, len(traced.tensors))
    assert len(found) >= 1
    assert all(n.type == F32 for n in found)
    from attnkit.graph import ir

    assert not any(reads_diagonals(n) for n in ir.topo(rest))


def test_cheap_expressions_stay() -> None:
    slopes = torch.rand(HEADS)
    traced = trace(lambda s, b, h, q, kv: s - slopes[h] * (q - kv), "score")
    assert by_distance(traced.root, 1) == (traced.root, ())


@settings(max_examples=20)
@given(st.integers(8, 40), st.integers(8, 40))
def test_sums_along_diagonals(rows: int, columns: int) -> None:
    t = torch.randn(2, 3, rows, columns, dtype=torch.float64)
    found = diagonal_sums(t)
    for e in range(rows + columns - 1):
        offset = e - rows + 1  # column - row
        exact = t.diagonal(offset, dim1=2, dim2=3).sum(-1)
        torch.testing.assert_close(found[:, :, 0, e], exact)
    tile = tile_of(slice(7, 7 + rows), slice(3, 3 + columns))
    line = distances(tile)
    assert line is not None
    differences = (line.q - line.kv).flatten().tolist()
    assert differences == [(7 - 3) - (e - rows + 1) for e in range(rows + columns - 1)]


@pytest.mark.parametrize("name", sorted(MODS))
def test_gradients_of_tables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, learned = MODS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(2, HEADS, LENGTH, 16) for _ in range(4)]
    calls: list[int] = []
    real = cpu_distances.diagonal_sums
    monkeypatch.setattr("attnkit.splice.cpu.diagonal_sums", lambda t: calls.append(1) or real(t))

    def gradients(backend: str, dtype: torch.dtype) -> list[Tensor]:
        # tables in the same dtype: torch sums the gradient of a float32 table in float32
        own = {n: t.to(dtype).requires_grad_() for n, t in tables().items()}
        query, key, value, grad = (t.to(dtype).requires_grad_() for t in inputs)
        wanted = [query, key, value, *(own[n] for n in learned)]
        mask = attnkit.masks.causal()
        out = attnkit.flex_attention(query, key, value, make(own), mask, backend=backend)
        return list(torch.autograd.grad(out, wanted, grad))

    found = gradients("cpu", torch.float32)
    assert bool(calls) == (name != "kerple")  # whose tables are read at the head alone
    dense, exact = gradients("eager", torch.float32), gradients("eager", torch.float64)
    for a, b, c in zip(found, dense, exact, strict=True):
        error, allowed = ((t.double() - c).norm().item() for t in (a, b))
        assert error <= 2 * allowed + torch.finfo(torch.float32).eps * c.norm().item()
