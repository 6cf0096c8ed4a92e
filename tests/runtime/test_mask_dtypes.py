"""Check that a mask keeps the same scores as FlexAttention for every dtype of the query."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask as flex_create_mask

from attnkit import create_block_mask, create_mask, flex_attention
from attnkit.errors import UnsupportedError

S = 96
HALF = torch.linspace(-3, 3, S).to(torch.bfloat16)
SINGLE = torch.linspace(-3, 3, S)
DOUBLE = torch.linspace(-3, 3, S, dtype=torch.float64)

MASKS: dict[str, Callable[..., Any]] = {
    "division": lambda b, h, q, kv: (q / 49) * 49 == q,
    "reciprocal": lambda b, h, q, kv: (kv + 1) * (1 / (kv + 1)) == 1,
    "a product of positions": lambda b, h, q, kv: (q * 0.1 + kv * 0.2) * 10 <= q + 2 * kv,
    "a float32 table": lambda b, h, q, kv: SINGLE[q] * SINGLE[kv] * 3 >= SINGLE[kv] * 3 * SINGLE[q],
    "a bfloat16 table": lambda b, h, q, kv: HALF[q] * 1.7 + HALF[kv] > HALF[kv] * 0.3,
    "thirds": lambda b, h, q, kv: q / 3 + kv / 3 == (q + kv) / 3,
}
WIDE: dict[str, Callable[..., Any]] = {
    "double": lambda b, h, q, kv: (q.double() / 49) * 49 == q,
    "a float64 table": lambda b, h, q, kv: DOUBLE[q] * DOUBLE[kv] * 3 >= DOUBLE[kv] * 3 * DOUBLE[q],
    "float32 beside float64": lambda b, h, q, kv: (q / 3).double() * 3 >= q.double(),
}


def dense(keep: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = (query @ key.mT).double() / query.shape[-1] ** 0.5
    weights = torch.where(keep, scores, -torch.inf).softmax(-1).nan_to_num(0.0)
    return weights @ value.double()


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    make = lambda: torch.randn(1, 2, S, 16, generator=generator, dtype=torch.float64).to(dtype)
    return make(), make(), make()


def check(mask: Callable[..., Any], dtype: torch.dtype, backend: str) -> None:
    expected = flex_create_mask(mask, 1, 1, S, S, device="cpu")
    assert torch.equal(create_mask(mask, 1, 1, S, S), expected)
    block_mask = create_block_mask(mask, 1, 1, S, S, BLOCK_SIZE=16)
    query, key, value = inputs(dtype)
    for masked in (mask, block_mask):
        out = flex_attention(query, key, value, block_mask=masked, backend=backend)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(
            out.double(), dense(expected, query, key, value), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_floats_of_a_mask_have_torchs_dtype(name: str, backend: str, dtype: torch.dtype) -> None:
    check(MASKS[name], dtype, backend)


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_masks_may_compute_in_float64(name: str, backend: str) -> None:
    check(WIDE[name], torch.float64, backend)
    if name != "a float64 table":  # which float32 does not hold: refused for other queries
        check(WIDE[name], torch.float32, backend)


@pytest.fixture
def default_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_default_dtype_counts(default_float64: None) -> None:
    mask = MASKS["division"]
    for dtype in (torch.float64, torch.float32):
        check(mask, dtype, "cpu")
    torch.set_default_dtype(torch.float32)
    for dtype in (torch.float64, torch.float32):
        check(mask, dtype, "cpu")


def test_a_change_of_the_default_dtype_is_seen_by_repeated_calls(default_float64: None) -> None:
    query, key, value = inputs(torch.float32)
    mask = MASKS["division"]
    found = []
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        outs = [flex_attention(query, key, value, block_mask=mask) for _ in range(3)]
        assert torch.equal(outs[0], outs[2])
        found.append(outs[0])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def test_kernels_refuse_masks_that_compute_in_float64() -> None:
    query, key, value = inputs(torch.float16)
    with pytest.raises(UnsupportedError, match=r"computes in float64.*\.float\(\)"):
        flex_attention(query, key, value, block_mask=WIDE["double"], backend="emulate")
