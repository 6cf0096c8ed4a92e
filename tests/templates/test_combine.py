"""Check the kernel that combines partial results of split rows, for finite and infinite LSEs."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit import kernel
from attnkit.jit.emulator_runs import run_emulated
from attnkit.splice.forward_sources import combine_source

DIM, ROWS, PARTS = 64, 64, 3
NAN, INF = math.nan, math.inf

# LSEs of the partial results of the tile's first rows; those of the other rows are random
KINDS = [
    (0.0, 0.0, 0.0),
    (1.5, -2.0, 0.25),
    (0.0, 100.0, 50.0),
    (-100.0, -300.0, -100.5),
    (300.0, 0.0, -300.0),
    (0.0, 0.0, 300.0),
    (-INF, 2.0, -INF),
    (-INF, -INF, -200.0),
    (-INF, -INF, -INF),
    (NAN, 0.0, 1.0),
    (0.0, NAN, -INF),
    (1.0, 0.0, NAN),
    (NAN, -INF, -INF),
    (NAN, NAN, NAN),
]


@functools.cache
def combine(dtype: str) -> Any:
    return kernel.kernel(combine_source(dtype, DIM, (ROWS, DIM), "sm_90a"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_are_weighted_by_their_lse(dtype: torch.dtype) -> None:
    lse = torch.randn(PARTS, ROWS) * 4
    lse[:, : len(KINDS)] = torch.tensor(KINDS).T
    parts = torch.randn(PARTS, ROWS, DIM)
    out = torch.full((1, 1, ROWS, DIM), NAN, dtype=dtype)
    found = torch.full((1, 1, ROWS), NAN)
    split = torch.tensor([[0, 0, 0]], dtype=torch.int32)
    split_ptr = torch.tensor([0, PARTS], dtype=torch.int32)
    run_emulated(
        combine(str(dtype).removeprefix("torch.")), (parts, lse, split, split_ptr, out, found)
    )

    wide = lse.double()
    total = torch.logsumexp(wide, 0)
    weights = torch.where(total == -INF, 0.0, torch.exp(wide - total))
    expected = (weights[:, :, None] * parts.double()).sum(0)
    spoiled = wide.isnan().any(0)
    assert torch.equal(found[0, 0].isnan(), spoiled)
    assert torch.equal(out[0, 0].isnan().all(1), spoiled)
    assert torch.equal(out[0, 0].isnan().any(1), spoiled)
    torch.testing.assert_close(
        found[0, 0, ~spoiled].double(), total[~spoiled], rtol=1e-6, atol=1e-6
    )
    unit = torch.finfo(dtype).eps
    bound = unit / 2 * expected.abs() + 1e-5 * (weights[:, :, None] * parts.double().abs()).sum(0)
    error = (out[0, 0].double() - expected).abs()
    assert bool((error <= bound + 1e-7)[~spoiled].all())
    masked = (lse == -INF).all(0)
    assert bool((out[0, 0, masked] == 0).all())
    assert bool((found[0, 0, masked] == -INF).all())


@pytest.mark.parametrize("sink", [0.5, -INF, 400.0, INF, NAN])
def test_a_sink_counts_once(sink: float) -> None:
    """The sink is one more part of each row, without an output; a row without keys stays 0."""
    lse, parts = torch.randn(PARTS, ROWS) * 4, torch.randn(PARTS, ROWS, DIM)
    lse[:, : len(KINDS)] = torch.tensor(KINDS).T
    out, found = torch.zeros(1, 1, ROWS, DIM, dtype=torch.bfloat16), torch.zeros(1, 1, ROWS)
    split = torch.tensor([[0, 0, 0]], dtype=torch.int32)
    split_ptr = torch.tensor([0, PARTS], dtype=torch.int32)
    source = combine_source("bfloat16", DIM, (ROWS, DIM), "sm_90a", ("float32", 1, True))
    given = parts, lse, split, split_ptr, out, found, torch.tensor([sink])
    run_emulated(kernel.kernel(source), given)

    wide = torch.cat([lse.double(), torch.full((1, ROWS), sink, dtype=torch.float64)])
    weights = torch.softmax(wide, 0)[:-1, :, None]
    empty = (lse == -INF).all(0)
    expected = (weights * parts.double()).sum(0).masked_fill(empty[:, None], 0.0)
    torch.testing.assert_close(out[0, 0].double(), expected, rtol=2**-8, atol=1e-5, equal_nan=True)
    total = torch.logsumexp(wide, 0)
    if sink == INF:  # inf - inf: the LSE of a row with keys is NaN, as its output
        total = total.masked_fill(~empty, NAN)
    torch.testing.assert_close(found[0, 0].double(), total, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_rows_beyond_the_end_are_not_written() -> None:
    """The combine kernel writes no rows beyond the end of a ragged last tile."""
    rows = 5
    lse, parts = torch.zeros(PARTS, ROWS), torch.ones(PARTS, ROWS, DIM)
    out = torch.full((1, 1, rows, DIM), NAN, dtype=torch.bfloat16)
    found = torch.full((1, 1, rows), NAN)
    split = torch.tensor([[0, 0, 0]], dtype=torch.int32)
    split_ptr = torch.tensor([0, PARTS], dtype=torch.int32)
    run_emulated(combine("bfloat16"), (parts, lse, split, split_ptr, out, found))
    assert bool((out == 1).all())
    torch.testing.assert_close(found, torch.full_like(found, math.log(PARTS)))


def test_each_architecture_has_a_key_of_its_own() -> None:
    hopper, blackwell = (
        combine_source("bfloat16", DIM, (ROWS, DIM), arch).key for arch in ("sm_90a", "sm_100a")
    )
    assert hopper != blackwell
    assert "90" not in blackwell
