"""Compare attention without a softmax in emulated kernels with dense float64 attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")  # without it no call is planned for the kernel

import attnkit
from attnkit import flex_attention
from attnkit.jit import emulation
from attnkit.masks import causal
from attnkit.runtime.reuse.backward import BackwardReuse
from attnkit.splice import dispatch, forward
from tests.sampling import diagonal, sampled

NAMES = ("sigmoid", "none")
LENGTH = 260


def late(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Keep no key in the first work tile, and few in the last."""
    return (q >= 200) & (kv <= q - 210)


def scattered(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Keep keys in no form of intervals."""
    return (kv * 7 + q * 3) % 5 != 0


def draw(
    seed: int, rows: int = LENGTH, keys: int = LENGTH, widths: tuple[int, int] = (64, 64)
) -> list[Tensor]:
    """Return query [1, 2, rows, D], key [1, 1, keys, D] and value [1, 1, keys, Dv], bfloat16."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(1, 2, rows, widths[0]), (1, 1, keys, widths[0]), (1, 1, keys, widths[1])]
    return [torch.randn(s, generator=random).bfloat16() for s in shapes]


def weight(like: Tensor, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(100 + seed)
    return torch.randn(like.shape, generator=random, dtype=torch.float64)


def check_close(found: Any, exact: Any, dense: Any) -> None:
    """Check for at most twice the error of dense attention and a rounding."""
    for ours, true, theirs in zip(found, exact, dense, strict=True):
        ours, true, theirs = (t.detach().double() for t in (ours, true, theirs))
        allowed = 2 * (theirs - true).abs().amax() + true.abs().amax() * 2**-8
        assert (ours - true).abs().amax() <= allowed


def check_call(
    name: str, tensors: list[Tensor], mask: Any, mod: Any = None, learned: tuple[Tensor, ...] = (),
    backend: str = "emulate", mode: Any = "eager", backward: bool = True, **options: Any,
) -> list[Tensor]:  # fmt: skip
    """Compare a call and its gradients with dense float64 attention; return them."""
    results = []
    for where, dtype in (
        (backend, tensors[0].dtype), ("eager", torch.float64), ("eager", tensors[0].dtype),
    ):  # fmt: skip
        inputs = [t.to(dtype).requires_grad_(backward) for t in tensors]
        with emulation.session(mode=mode, seeds=1) as session:
            out = flex_attention(
                *inputs, mod, mask, enable_gqa=True, backend=where, normalization=name, **options
            )
            found = [out]
            if backward:
                loss = (out.double() * weight(out, 0)).sum()
                found += torch.autograd.grad(loss, [*inputs, *learned])
        assert session.ok, [str(report) for _, report in session.reports]
        results.append(found)
    check_close(*results)
    return results[0]


@pytest.mark.parametrize(("mask", "name"), diagonal([late, scattered], NAMES))
def test_hopper(mask: Any, name: str) -> None:
    """Rows without keys give 0, and a term of the row counts."""
    mod = lambda s, b, h, q, kv: s - 0.01 * q
    out, dq, *_ = check_call(name, draw(0), mask, mod, mode="check")
    if mask is late:
        assert not out[:, :, :210].any()
        assert not dq[:, :, :210].any()


WEIGHTS = {
    "weights of 2**-100": lambda s, b, h, q, kv: s - 70,
    "weights from 0 to 1": lambda s, b, h, q, kv: 40 * s - torch.where(kv % 3 == 0, math.inf, 0.0),
    "small weights but for one": lambda s, b, h, q, kv: torch.where((q == 37) & (kv == 250), 9, s - 9),
    "weights about the limit of small ones": lambda s, b, h, q, kv: s / 64 - 3.4 - 0.001 * kv,
    "a NaN": lambda s, b, h, q, kv: torch.where((q == 3) & (kv == 250), math.nan, s),
    "a NaN among small weights": lambda s, b, h, q, kv: torch.where((q == 3) & (kv == 7), math.nan, s - 9),
}  # fmt: skip


@pytest.mark.parametrize("kind", sampled([(k,) for k in WEIGHTS], 3))
def test_sigmoids_of_modified_scores(kind: str) -> None:
    """Small weights have a formula of their own where a warp has no others."""
    compare_sigmoids(draw(6, 140, 300), WEIGHTS[kind], 3 if "NaN" in kind else None)


@pytest.mark.parametrize("extreme", [0.0, math.nan, 1e20])
def test_sigmoids_of_raw_scores(extreme: float) -> None:
    """Two weights that share a reciprocal are exact, however small one of them is."""
    query, key, value = draw(7, 140, 300)
    query[:, :, 3] = extreme
    compare_sigmoids([query, key, value], None, 3 if math.isnan(extreme) else None)


def compare_sigmoids(tensors: list[Tensor], mod: Any, lost_row: int | None) -> None:
    """Compare the output with dense attention: it is NaN in `lost_row` alone."""
    run = lambda backend, dtype: flex_attention(
        *(t.to(dtype) for t in tensors), mod, enable_gqa=True, backend=backend,
        normalization="sigmoid",
    )  # fmt: skip
    dtype = tensors[0].dtype
    results = [run("emulate", dtype), run("eager", torch.float64), run("eager", dtype)]
    lost = results[1].isnan()
    assert torch.equal(results[0].isnan(), lost)
    assert lost.any(3).nonzero()[:, 2].unique().tolist() == ([] if lost_row is None else [lost_row])
    check_close(*([t.masked_fill(lost, 0.0)] for t in results))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sampled([(n,) for n in NAMES], 2))
def test_learned_tensors_on_hopper(name: str) -> None:
    """Loads at the levels of head, row, column and distance have gradients."""
    tables = [torch.randn(n, requires_grad=True) for n in (2, LENGTH, LENGTH, 2 * LENGTH)]
    slopes, rows, columns, distances = tables

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * slopes[h] + rows[q] + columns[kv] + distances[q - kv + LENGTH]

    check_call(name, draw(1), causal(), mod, tuple(tables))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("widths", [(192, 128), (256, 256)])
def test_wide_heads_on_hopper(widths: tuple[int, int], name: str) -> None:
    check_call(name, draw(2, 130, 130, widths), scattered)


def test_learned_tensors_of_wide_heads_use_torch_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = torch.randn(130, requires_grad=True)
    mod = lambda s, b, h, q, kv: s + table[kv]
    seen: list[str] = []
    whole = dispatch.run_backward

    def noted(call: Any, inputs: Any) -> Any:
        from attnkit.splice import backward

        seen.append(str(backward.supports(dispatch._with_weights(call), inputs)))
        return whole(call, inputs)

    monkeypatch.setattr(attnkit.runtime.torch_ops, "run_backward", noted)
    check_call("sigmoid", draw(3, 70, 130, (192, 64)), causal(), mod, (table,))
    assert seen == ["False"]


@pytest.mark.parametrize(("backend", "name"), diagonal(["emulate", "emulate:sm_100a"], NAMES))
def test_split_rows_are_summed(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows with many keys are split along kv; the parts add up."""
    merged: list[bool] = []
    whole = forward.combine_source

    def noted(*arguments: Any) -> Any:
        merged.append(arguments[-1])
        return whole(*arguments)

    monkeypatch.setattr(forward, "combine_source", noted)
    kept = lambda b, h, q, kv: (kv >= 70) | (kv < 4 * q)
    rows, keys = (16, 1100) if backend == "emulate" else (200, 2048)
    query, *others = draw(4, rows, keys)
    check_call(name, [query[:, :1], *others], kept, backend=backend, backward=False)
    assert merged == [False]  # no softmax


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_float16_and_a_negative_scale(name: str) -> None:
    tensors = [t.half() for t in draw(5, 130, 200)]
    check_call(name, tensors, causal(), scale=-0.1)
    check_call(name, tensors, None, lambda s, b, h, q, kv: s - 5.0, backward=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_deterministic(name: str) -> None:
    table = torch.randn(2, 300, requires_grad=True)
    mod = lambda s, b, h, q, kv: s + table[h, q - kv]
    first, again = (
        check_call(name, draw(6), causal(), mod, (table,), deterministic=True) for _ in range(2)
    )
    assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("name", sampled([(n,) for n in NAMES], 2))
def test_calls_are_relaunched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated calls with new tensors take the fast paths of forward and backward."""
    taken: list[bool] = []
    whole = BackwardReuse.try_fast_path

    def noted(*arguments: Any) -> Any:
        found = whole(*arguments)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(BackwardReuse, "try_fast_path", noted)
    attnkit.clear_caches()
    for seed in range(4):
        check_call(name, draw(seed, 130, 130), up_to_itself)
    assert taken[0] is False
    assert taken[-1] is True


def up_to_itself(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv <= q


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_blackwell(name: str) -> None:
    tables = [torch.randn(n, requires_grad=True) for n in (2, 130)]
    slopes, rows = tables
    mod = lambda s, b, h, q, kv: s * slopes[h] + rows[q]
    check_call(name, draw(7, 130, 130), scattered, mod, tuple(tables), "emulate:sm_100a")
    check_call(name, draw(8, 130, 256, (128, 128)), causal(), backend="emulate:sm_100a")
    if name == "sigmoid":
        wide = draw(7, 130, 130, (256, 256))
        check_call(name, wide, causal(), mod, tuple(tables), "emulate:sm_100a")
        check_call(name, draw(9, 140, 130, (64, 128)), late, backend="emulate:sm_100a")
