"""Compare the random bits of dropout with their published definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnkit.errors import ArgumentError, OptionError
from attnkit.util.dropout import draw_state, kept, philox, survivor_scale, threshold_of
from tests.docs_code import functions_of

CPU = torch.device("cpu")
PAGE = functions_of("tutorials/dropout.md", "draw", "is_kept")


def test_philox_has_the_known_answers_of_random123() -> None:
    """Two of the known answers for philox4x32 with 7 rounds that Random123 is tested with."""
    ones = 0xFFFFFFFF
    for word, expected in (
        (0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (ones, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    ):
        t = torch.tensor(word)
        assert tuple(int(x) for x in philox((t,) * 4, (t, t))) == expected


@given(
    st.integers(0, 10**6),
    st.integers(1, 255),
    st.tuples(st.integers(0, 70), st.integers(1, 40)),
    st.tuples(st.integers(0, 70), st.integers(1, 40)),
)
def test_bits_are_those_of_the_page(
    seed: int, threshold: int, rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    torch.manual_seed(seed)
    state = PAGE["draw"](threshold / 256)
    torch.manual_seed(seed)
    assert torch.equal(state, draw_state(threshold / 256, CPU))
    (q, height), (kv, width) = rows, columns
    ends = (q, q + height), (kv, kv + width)
    found = kept(state, torch.tensor([[1], [3]]), torch.tensor([0, 4]), 5, *ends)
    assert found.shape == (2, 2, height, width)
    numbers = state.tolist()
    for i, b in enumerate((1, 3)):
        for j, h in enumerate((0, 4)):
            for r in (0, height // 2, height - 1):
                expected = [PAGE["is_kept"](*numbers, b, h, 5, q + r, kv + c) for c in range(width)]
                assert found[i, j, r].tolist() == expected


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_the_rate_is_that_of_the_rounded_probability(p: float) -> None:
    """Rate, rows, columns, words and bytes are within 6 standard deviations."""
    torch.manual_seed(0)
    state = draw_state(p, CPU)
    assert state is not None
    b, h = torch.arange(2)[:, None], torch.arange(4)
    keep = kept(state, b, h, 4, (0, 512), (0, 512)).double()
    rate = 1 - threshold_of(p) / 256
    assert survivor_scale(state, torch.float64).item() == pytest.approx(1 / rate)
    parts = keep.view(2, 4, 32, 2, 4, 2, 32, 2, 4, 2)
    for mean in (
        keep.mean(), keep.mean((2, 3)), keep.mean((0, 1, 2)), keep.mean((0, 1, 3)),
        parts.mean((0, 1, 2, 4, 6, 8)),
        # pairs of neighbours along q, kv, heads, and those that share a word or a byte's place
        1 + (keep[..., 1:] - rate).mul(keep[..., :-1] - rate).mean() - (1 - rate),
        1 + (keep[..., 8:] - rate).mul(keep[..., :-8] - rate).mean() - (1 - rate),
        1 + (keep[..., 8:, :] - rate).mul(keep[..., :-8, :] - rate).mean() - (1 - rate),
        1 + (keep[:, 1:] - rate).mul(keep[:, :-1] - rate).mean() - (1 - rate),
    ):  # fmt: skip
        count = keep.numel() / mean.numel()
        deviation = (rate * (1 - rate) / count) ** 0.5
        assert (mean - rate).abs().max() <= 6 * deviation


def test_two_calls_draw_other_bits() -> None:
    torch.manual_seed(0)
    first, second = (draw_state(0.5, CPU) for _ in range(2))
    assert first is not None
    assert second is not None
    zero = torch.zeros(1, dtype=torch.int64)
    a, b = (kept(s, zero[:, None], zero, 1, (0, 64), (0, 64)) for s in (first, second))
    assert 0.4 < (a == b).double().mean() < 0.6


@pytest.mark.parametrize("p", [0, 0.0, -0.0])
def test_no_dropout_draws_nothing(p: float) -> None:
    before = torch.get_rng_state()
    assert draw_state(p, CPU) is None
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("p", "error", "text"),
    [
        (1.0, OptionError, r"dropout_p must be in \[0, 1\), got 1.0"),
        (-0.1, OptionError, "got -0.1"),
        (float("nan"), OptionError, "got nan"),
        (0.001, OptionError, "dropout_p=0.001 would be rounded to 0, .* from 1 / 512"),
        (0.999, OptionError, "dropout_p=0.999 would be rounded to 1"),
        ("0.1", ArgumentError, "dropout_p must be a number in .*, got '0.1'"),
        (None, ArgumentError, "got None"),
        (True, ArgumentError, "got True"),
        (torch.tensor(0.1), ArgumentError, "got Tensor"),
    ],
)
def test_errors(p: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        threshold_of(p)


def test_bits_are_on_the_device_of_the_state() -> None:
    state, zero = torch.tensor([5, 200]), torch.tensor([[0]])
    expected = kept(state, zero, zero, 1, (3, 40), (1, 20))
    with torch.device("meta"):  # on which nothing can be computed by mistake
        found = kept(state, zero, zero, 1, (3, 40), (1, 20))
    assert torch.equal(found, expected)


def test_the_least_and_the_greatest_probability_are_named() -> None:
    for p in (0.001, 0.999):
        with pytest.raises(
            OptionError, match=r"expected 0, or a number from 1 / 512 to 1 - 1 / 512$"
        ):
            threshold_of(p)
