"""Check that captured float64 tensors in float32 scores are exact or refused, never rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import DTypeError, create_block_mask, create_mask, flex_attention
from attnkit.inspection.summary import summarize
from attnkit.tracing.float64_checks import float64_slots, rounding_sensitive_slots
from attnkit.tracing.tracer import trace

S = 150
TIMES = 1.7e9 + torch.arange(S, dtype=torch.float64) * 0.25  # seconds since 1970
SLOPES = torch.tensor([0.1, 0.3], dtype=torch.float64)
BIAS = torch.rand(S, dtype=torch.float64)
PLACES = torch.arange(S, dtype=torch.float64)


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, S, 8, generator=random).to(dtype) for _ in range(3)]


def recent(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (TIMES[q] >= TIMES[kv]) & (TIMES[q] - TIMES[kv] <= 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_a_mask_that_decides_by_rounded_numbers_is_refused(
    backend: str, dtype: torch.dtype
) -> None:
    q, k, v = inputs(dtype)
    with pytest.raises(DTypeError, match=r"'TIMES' holds float64 numbers.*mask_mod decides by"):
        flex_attention(q, k, v, None, recent, backend=backend)
    with pytest.raises(DTypeError, match="'TIMES'"):
        flex_attention(q, k, v, None, create_block_mask(recent, 1, 1, S, S), backend=backend)


def test_it_is_exact_where_the_query_is_float64() -> None:
    q, k, v = inputs(torch.float64)
    distance = torch.arange(S)[:, None] - torch.arange(S)
    dense = (distance >= 0) & (distance <= 20)
    scores = (q @ k.mT / 8**0.5).masked_fill(~dense, -torch.inf)
    torch.testing.assert_close(flex_attention(q, k, v, None, recent), scores.softmax(-1) @ v)


def test_masks_are_computed_in_float64() -> None:
    distance = torch.arange(S)[:, None] - torch.arange(S)
    dense = (distance >= 0) & (distance <= 20)
    assert torch.equal(create_mask(recent, 1, 1, S, S)[0, 0], dense)
    blocks = create_block_mask(recent, 1, 1, S, S, BLOCK_SIZE=10)
    assert torch.equal(blocks.to_dense()[0, 0] > 0, dense.view(15, 10, 15, 10).any(3).any(1))
    assert summarize(blocks).kept_positions == int(dense.sum())


def test_numbers_that_float32_holds_are_welcome_until_they_change() -> None:
    q, k, v = inputs()
    places = PLACES.clone()
    mask = lambda b, h, i, j: places[i] >= places[j]
    mod = lambda s, b, h, i, j: s - 0.1 * (places[i] - places[j])
    dense = torch.ones(S, S, dtype=torch.bool).tril()
    bias = 0.1 * (torch.arange(S)[:, None] - torch.arange(S))
    scores = (q @ k.mT / 8**0.5 - bias).masked_fill(~dense, -torch.inf)
    for _ in range(3):
        torch.testing.assert_close(flex_attention(q, k, v, mod, mask), scores.softmax(-1) @ v)
    places.add_(1e9)
    places.add_(0.3)
    for arguments in ((None, mask), (mod, None)):
        for _ in range(2):
            with pytest.raises(DTypeError, match="'places'"):
                flex_attention(q, k, v, *arguments)


def test_compiled_calls_refuse_too() -> None:
    q, k, v = inputs()
    places = PLACES.clone()

    @torch.compile(backend="eager", fullgraph=True)
    def call(q: Tensor, k: Tensor, v: Tensor, places: Tensor) -> Any:
        return flex_attention(q, k, v, lambda s, b, h, i, j: s - (places[i] - places[j]))

    call(q, k, v, places)
    places.add_(1e9 + 0.3)
    with pytest.raises(DTypeError, match="places"):
        call(q, k, v, places)


SHOWS: dict[str, Callable[..., Any]] = {
    "difference": lambda s, b, h, q, kv: s - (TIMES[q] - TIMES[kv]),
    "one after the other": lambda s, b, h, q, kv: s - TIMES[q] + TIMES[kv],
    "offset": lambda s, b, h, q, kv: s * (TIMES[q] - 1.7e9),
    "from a position": lambda s, b, h, q, kv: s + (TIMES[q] - q),
    "comparison": lambda s, b, h, q, kv: torch.where(TIMES[q] > TIMES[kv], s, s + 1),
    "rounding": lambda s, b, h, q, kv: s + torch.floor(TIMES[q] / 60),
    "phase": lambda s, b, h, q, kv: s * torch.sin(TIMES[q]),
    "integer": lambda s, b, h, q, kv: s + TIMES[q].long() % 60,
    "integer alone": lambda s, b, h, q, kv: s + TIMES[q].long(),
    "truth": lambda s, b, h, q, kv: s + (TIMES[q] * 0.5).bool(),
}
HARMLESS: dict[str, Callable[..., Any]] = {
    "slope": lambda s, b, h, q, kv: s - SLOPES[h] * (q - kv),
    "bias": lambda s, b, h, q, kv: s + BIAS[kv],
    "factor and bias": lambda s, b, h, q, kv: torch.tanh(s / SLOPES[h]) * SLOPES[h] + BIAS[kv],
    "function of one": lambda s, b, h, q, kv: s * torch.exp(-SLOPES[h]) + torch.sigmoid(BIAS[q]),
    "one more": lambda s, b, h, q, kv: s * (1 + SLOPES[h]) * (1 - BIAS[q]),
    "threshold of the score": lambda s, b, h, q, kv: torch.where(s > SLOPES[h], s, -BIAS[q]),
}


@pytest.mark.parametrize("name", SHOWS)
def test_scores_whose_rounding_shows(name: str) -> None:
    traced = trace(SHOWS[name], "score")
    assert [
        traced.tensors[i] is TIMES
        for i in rounding_sensitive_slots(traced.root, float64_slots(traced.tensors))
    ] == [True]
    q, k, v = inputs()
    with pytest.raises(DTypeError, match=r"'TIMES' holds .*float\(\)"):
        flex_attention(q, k, v, SHOWS[name])


@pytest.mark.parametrize("name", HARMLESS)
def test_factors_and_terms_of_the_score_are_rounded_as_it_is(name: str) -> None:
    traced = trace(HARMLESS[name], "score")
    assert rounding_sensitive_slots(traced.root, float64_slots(traced.tensors)) == ()
    q, k, v = inputs()
    exact = flex_attention(q.double(), k.double(), v.double(), HARMLESS[name])
    found = flex_attention(q, k, v, HARMLESS[name])
    reference = flex_attention(q, k, v, HARMLESS[name], backend="eager")
    assert (found - exact).abs().mean() <= 2 * (reference - exact).abs().mean()


def test_a_length_takes_float64_tables() -> None:
    """hypot adds squares, which cancel nothing, so that rounding an argument is harmless."""
    wide = inputs(torch.float64)
    mods = (
        lambda s, b, h, q, kv: torch.hypot(s, BIAS[kv]),
        lambda s, b, h, q, kv: s + torch.hypot(BIAS[q], BIAS[kv]),
        lambda s, b, h, q, kv: s * torch.hypot(SLOPES[h], (q - kv) * 0.1),
    )
    for mod in mods:
        exact = flex_attention(*wide, mod, backend="eager")
        narrow = flex_attention(*(t.float() for t in wide), mod)
        torch.testing.assert_close(narrow.double(), exact, rtol=1e-5, atol=1e-5)
    # a mask decides by the length, and stays refused
    with pytest.raises(DTypeError, match="mask_mod decides by"):
        flex_attention(*inputs(), None, lambda b, h, q, kv: torch.hypot(BIAS[q], BIAS[kv]) < 1)
