"""Check exact sums of floats as integers: independent of order, with NaN and infinities."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnkit.splice.exact_sums import BINS, STEP, empty_sums, fit, round_sums

CPU = torch.device("cpu")
floats = st.floats(width=32)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def binned(values: list[float]) -> Tensor:
    """Add values in the given order as the kernels do; return the bins, int64 [1, BINS]."""
    sums = empty_sums((), CPU)
    for bits in torch.tensor(values, dtype=torch.float32).view(torch.int32).tolist():
        exponent, digits = (bits >> 23) & 255, bits & ((1 << 23) - 1)
        if exponent == 255:
            sums[0, -1] |= 4 if digits else (2 if bits < 0 else 1)
            continue
        digits |= (1 << 23) * (exponent > 0)
        number = digits << (max(exponent, 1) % STEP)
        sums[0, max(exponent, 1) // STEP] += -number if bits < 0 else number
    return sums


@given(values=st.lists(finite, max_size=40))
def test_sums_are_exact_but_for_one_rounding(values: list[float]) -> None:
    found = float(round_sums(binned(values), ()))
    exact = sum(map(Fraction, values), Fraction(0))
    size = sum((abs(Fraction(v)) for v in values), Fraction(0))
    try:
        expected = float(torch.tensor(float(exact), dtype=torch.float64).float())
    except OverflowError:
        expected = math.inf
    if math.isinf(found):
        assert math.isinf(expected)
        return
    # float64 between the bins: far below a float32's rounding, unless they cancel
    allowed = abs(exact) / 2**23 + size / 2**45 + Fraction(2) ** -149
    assert abs(Fraction(found) - exact) <= allowed


@given(values=st.lists(floats, max_size=20), data=st.data())
def test_the_order_does_not_matter(values: list[float], data: st.DataObject) -> None:
    other = data.draw(st.permutations(values))
    assert torch.equal(binned(values), binned(other))


@given(values=st.lists(floats, max_size=12))
def test_nan_and_infinities_are_kept(values: list[float]) -> None:
    found = float(round_sums(binned(values), ()))
    special = [v for v in values if not math.isfinite(v)]
    if not special:
        assert not math.isnan(found)
    elif len(set(map(str, special))) > 1 or any(map(math.isnan, special)):
        assert math.isnan(found)
    else:
        assert found == special[0]


def test_shapes_are_those_of_the_tensors() -> None:
    assert empty_sums((2, 3), CPU).shape == (2, 3, BINS)
    assert round_sums(empty_sums((2, 3), CPU), (2, 3)).shape == (2, 3)
    assert empty_sums((), CPU).shape == (1, BINS)
    assert round_sums(empty_sums((), CPU), ()).shape == ()
    assert round_sums(empty_sums((0,), CPU), (0,)).shape == (0,)


def test_kernels_mean_the_same() -> None:
    pytest.importorskip("cutlass", reason="the DSL exists for Linux only")
    from attnkit.templates.common import exact_sums

    assert (exact_sums.STEP, exact_sums.BINS) == (STEP, BINS)


def test_a_bin_holds_as_many_of_the_largest_as_are_allowed() -> None:
    largest = ((1 << 24) - 1) << (STEP - 1)
    assert largest * (1 << 32) < 1 << 63


@pytest.mark.parametrize(
    ("batch", "length", "numel", "fits"),
    [
        (2, 8192, 16 * 16383, True),  # a relative bias per head
        (2, 8192, 1 << 21, False),  # much more memory than dQ
        (1, 1 << 16, 16, False),  # more scores than a bin can take
    ],
)
def test_which_sums_fit_the_bins(batch: int, length: int, numel: int, fits: bool) -> None:
    query = torch.empty(batch, 16, length, 128, device="meta")
    assert fit(query, query, [torch.empty(numel, device="meta")]) is fits


def test_calls_without_learned_tensors_fit_at_any_length() -> None:
    query = torch.empty(1, 16, 1 << 20, 128, device="meta")
    assert fit(query, query, [])
