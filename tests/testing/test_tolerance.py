"""Check that the tolerance is as tight as the reference allows, never zero, and finds errors."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnkit import create_mask, masks, testing
from attnkit.runtime.variant import Variant
from attnkit.testing import Case, Limits
from attnkit.testing.examine import bind
from attnkit.testing.quantities import OUTPUTS, DenseCall, captured_leaves, oracle
from attnkit.testing.rounding import perturbed
from attnkit.testing.shuffled import shuffled
from attnkit.testing.tolerance import FACTOR, ULPS, compare, exact

CPU = torch.device("cpu")
SMALL = Limits(q_len=(1, 30), kv_len=(1, 30))


def dense_call(variant: Variant, case: Case) -> DenseCall:
    bound = bind(variant, case, CPU)
    kept = None if variant.mask is None else create_mask(variant.mask, *case.dense_shape)
    return DenseCall(variant.score_mod, kept, case, captured_leaves(bound.score), CPU)


@given(
    testing.variants(SMALL),
    testing.cases(SMALL, dtype=torch.float64, normalization=None),
    st.integers(0, 9),
)
def test_samples_are_the_oracle_up_to_rounding(variant: Variant, case: Case, sample: int) -> None:
    call = dense_call(variant, case)
    gold = oracle(call)
    for sampler in (shuffled, perturbed):
        found = sampler(call, sample)
        assert found.keys() == gold.keys()
        for name, expected in gold.items():
            torch.testing.assert_close(
                found[name].to(expected.dtype), expected, rtol=1e-6, atol=1e-6, equal_nan=True
            )


def test_noise_scales_with_the_dtype() -> None:
    variant = Variant(lambda s, b, h, q, kv: torch.tanh(s), masks.causal())
    errors = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        call = dense_call(variant, Case(20, 20, dtype=dtype))
        gold, noisy = oracle(call), perturbed(call, 0)
        errors[dtype] = float((noisy["dquery"] - gold["dquery"]).abs().max())
    assert 1e-17 < errors[torch.float64] < 1e-14
    assert 1e-8 < errors[torch.float32] < 1e-5
    assert 1e-4 < errors[torch.bfloat16] < 1e-1


def test_one_key_leaves_room_for_a_difference_of_equal_numbers() -> None:
    # dO V^T and rowsum(dO O) cancel: the oracle's gradient is 0, a backend's is a rounding error
    call = dense_call(Variant(), Case(1, 1))
    assert not oracle(call)["dquery"].any()
    assert perturbed(call, 0)["dquery"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_allowed_is_twice_the_largest_sample_and_a_few_roundings(dtype: torch.dtype) -> None:
    case = Case(3, 3, dtype=dtype)
    gold = {name: torch.full((3,), 2.0) for name in ("out", "dquery", "dtable through lse")}
    eps = torch.finfo(dtype).eps
    for off in (0.0, 0.25):
        rough = {name: t + off for name, t in gold.items()}
        found = {name: t.to(dtype) for name, t in gold.items()}
        rows = compare(found, gold, [rough], case, "cpu")
        by_row = FACTOR * off + ULPS * 2.0 * (eps + torch.finfo(torch.float32).eps)
        whole = max((FACTOR if dtype == torch.float32 else 3.0) * off, ULPS * eps * 2.0)
        assert [r.allowed for r in rows] == pytest.approx([by_row, by_row, whole], rel=1e-12)
        assert all(r.ok and r.error == 0 for r in rows)


NAMES = ["out", "lse", "max_scores", "dquery", "dkey", "dvalue", "dkey through lse"]
SPREAD = torch.tensor([100.0, 0.01, 1.0, 0.01])  # sizes of the rows


def rows_of(name: str) -> torch.Tensor:
    """Return a quantity [B, H, rows, dim], or [B, H, rows] without features, of unequal rows."""
    t = 1 + torch.rand(1, 2, 4, 5, dtype=torch.float64)
    t = t[..., 0] * SPREAD if name in OUTPUTS[1:] else t * SPREAD[:, None]
    return t


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "units"), [(torch.float32, 1600), (torch.bfloat16, 16)])
def test_a_wrong_small_row_beside_large_ones_is_found(
    name: str, dtype: torch.dtype, units: int
) -> None:
    """The row is wrong by no more than the rounding errors of the large row."""
    case, expected = Case(4, 4, heads=2, dtype=dtype), rows_of(name)
    gold = {"out": torch.zeros(1), name: expected}
    rough = {"out": torch.zeros(1), name: expected * (1 + 16 * torch.finfo(dtype).eps)}
    assert compare(rough, gold, [rough], case, "cpu")[-1].ok
    found = {k: t.clone() for k, t in rough.items()}
    place = (0, 1, 3, 2)[: expected.ndim]
    found[name][place] += units * torch.finfo(dtype).eps
    (*_, row) = compare(found, gold, [rough], case, "cpu")
    assert not row.ok
    assert row.where == str(list(place))
    assert row.allowed < float(found[name][place] - expected[place])


def test_gradients_of_captured_tensors_are_compared_as_a_whole() -> None:
    expected = torch.tensor([[100.0, 100.0], [0.01, 0.01]])
    gold = {"out": torch.zeros(1), "dtable": expected}
    rough = {"out": torch.zeros(1), "dtable": expected + torch.tensor([[1e-3], [0.0]])}
    found = {"out": torch.zeros(1), "dtable": expected + torch.tensor([[0.0], [1e-3]])}
    assert all(row.ok for row in compare(found, gold, [rough], Case(2, 2), "cpu"))


@given(st.sampled_from(NAMES), st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
       st.integers(-60, 30))  # fmt: skip
def test_a_row_may_be_off_by_a_rounding_where_the_reference_is_exact(
    name: str, dtype: torch.dtype, exponent: int
) -> None:
    """Subnormal numbers have few digits, and may be flushed to 0."""
    expected = (rows_of(name) * 2.0**exponent).clamp(max=60000)
    gold = {"out": torch.zeros(1), name: expected}
    for found in (expected.to(dtype), expected * (1 + torch.finfo(dtype).eps)):
        results = {"out": torch.zeros(1), name: found}
        assert all(row.ok for row in compare(results, gold, [gold], Case(4, 4, dtype=dtype), "cpu"))


def test_flushed_subnormal_numbers_are_no_errors() -> None:
    gold = {"out": torch.full((1, 1, 1, 4), 1e-39, dtype=torch.float64)}
    (row,) = compare({"out": torch.zeros(1, 1, 1, 4)}, gold, [gold], Case(1, 1), "cpu")
    assert row.ok


def test_names_the_place_of_the_largest_error() -> None:
    gold = {"out": torch.zeros(2, 3, dtype=torch.float64)}
    found = {"out": gold["out"].clone()}
    found["out"][1, 2] = 0.5
    (row,) = compare(found, gold, [gold], Case(1, 1), "cpu")
    assert (row.error, row.ok, row.where) == (0.5, False, "[1, 2]")
    assert row.allowed < 1e-30


def test_not_finite_is_never_allowed_where_the_oracle_is_finite() -> None:
    gold = {"out": torch.ones(3), "lse": torch.tensor([0.0, -math.inf, 1.0])}
    rough = {name: t + 100 for name, t in gold.items()}
    for bad in (math.nan, math.inf):
        found = {"out": torch.tensor([1.0, bad, 1.0]), "lse": gold["lse"]}
        out, lse = compare(found, gold, [rough], Case(1, 1), "cpu")
        assert not out.ok
        assert out.where == "[1]"
        assert lse.ok


def test_nan_of_the_oracle_must_pass_through() -> None:
    gold = dict.fromkeys(OUTPUTS, torch.tensor([math.nan, 1.0])) | {"dquery": torch.tensor([7.0])}
    found = {name: t.nan_to_num(0.0) for name, t in gold.items()} | {"dquery": torch.zeros(1)}
    rows = compare(found, gold, [gold], Case(1, 1), "cpu")
    # and no gradient means anything
    assert [(r.quantity, r.ok) for r in rows] == [(name, False) for name in OUTPUTS]
    assert all(row.ok for row in compare(gold, gold, [gold], Case(1, 1), "cpu"))


def test_exact_counts_differences() -> None:
    row = exact("mask", "trace", torch.tensor([1, 2, 3]), torch.tensor([1, 0, 0]), Case(1, 1))
    assert (row.error, row.allowed, row.where) == (2.0, 0.0, "[1]")
    assert dataclasses.replace(row, error=0.0).ok


def test_a_wider_captured_tensor_leaves_room_for_the_arithmetic_of_the_inputs() -> None:
    """The dense reference must compute in float32 what depends on a float64 tensor, as attnkit does."""
    random = torch.Generator().manual_seed(0)
    t0 = torch.randn(200, generator=random, requires_grad=True)
    t1 = torch.randn(200, generator=random, requires_grad=True)
    wide = torch.randn(200, generator=random).double().requires_grad_()

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        both = t0[kv] + t1[kv]
        return s * torch.sigmoid(torch.where(both > 0.5, both, wide[kv] + s))

    case = Case(q_len=1, kv_len=1, spread=0.1, seed=1)
    assert testing.check_case(Variant(mod, None), case).ok
