"""Check the term slope * (kv - q) in the Hopper backward, in the products and per distance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit import create_block_mask, masks, mods
from attnkit.codegen.backward_hooks import GraphBackward
from attnkit.templates.sm90.backward import HELD_STEPS, Backward
from attnkit.templates.sm90.backward_config import BackwardConfig
from attnkit.tracing.tracer import trace
from tests.sampling import sampled
from tests.templates.backward_kit import BF16, CAUSAL, FP16, check, draw, poisoned  # noqa: F401

BACKEND = "emulate:sm_90a"

pytestmark = pytest.mark.usefixtures("poisoned")


def steep(*slopes: float) -> Callable[[], Any]:
    """Return a builder of ALiBi with the given slope for each head."""
    table = torch.tensor(slopes)
    return lambda: mods.alibi(table)


def hooks(mod: Any) -> GraphBackward:
    traced = trace(mod, "score")
    return GraphBackward(traced.root, None, None, scores=len(traced.tensors))


@pytest.mark.parametrize(
    ("dims", "dtype"),
    sampled([((192, 128), BF16), ((128, 128), FP16), ((64, 64), BF16)], 3),
    ids=str,
)
def test_both_directions(dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Gradients are exact without a mask for slopes of both signs."""
    check(draw(140, 200, dims=dims, dtype=dtype), steep(0.7, -0.2), backend=BACKEND)


@pytest.mark.parametrize("dim", sampled([(128,), (64,)], 2))
def test_in_all_orders(dim: int) -> None:
    mask = CAUSAL & masks.document(torch.arange(200) // 70)
    drawn = draw(200, dims=(dim, dim), heads=(2, 1))
    check(drawn, steep(0.5, 0.01), mask, mode="check", backend=BACKEND)


@pytest.mark.parametrize("dim", sampled([(64,), (128,)], 2))
def test_far_away(dim: int) -> None:
    """Gradients are exact for keys 1900 positions away, where LSE cancels terms of 190."""
    length = 2000
    keep = lambda b, h, q, kv: (q >= length - 70) & (kv < 130)
    mask = create_block_mask(keep, None, None, length, length, device="cpu")
    check(draw(length, dims=(dim, dim), heads=(1, 1)), steep(0.1), mask, backend=BACKEND)


@pytest.mark.parametrize("scale", sampled([(-0.088,), (0.0,), (8.0,)], 3))
def test_softmax_scales(scale: float) -> None:
    check(draw(140, 200, heads=(1, 1)), steep(0.3), backend=BACKEND, scale=scale)


TABLE = torch.linspace(-2.0, 2.0, 600)
OTHERS: dict[str, Any] = {
    "a number of the row": lambda s, b, h, q, kv: s + 0.2 * (kv - q) + 0.01 * q,
    "a table of q - kv": lambda s, b, h, q, kv: s - (q - kv) / 7 + TABLE[q - kv + 300],
    "two slopes": lambda s, b, h, q, kv: s + 0.3 * (kv - q) - 0.02 * kv,
}


@pytest.mark.parametrize("name", sampled([(name,) for name in OTHERS], 3))
def test_with_other_terms(name: str) -> None:
    assert hooks(OTHERS[name]).has_distance_term
    check(draw(140, 200, heads=(1, 1)), lambda: OTHERS[name], backend=BACKEND)


def test_learned_slopes() -> None:
    mod = lambda slopes: lambda s, b, h, q, kv: s + slopes[h] * (kv - q)
    check(draw(200, dims=(128, 128)), mod, CAUSAL, [torch.tensor([0.5, 0.05])], backend=BACKEND)


def test_the_slope_is_in_the_distance_term_alone() -> None:
    """ALiBi's term is in `distance_term` only, and is added in the k-step that subtracts LSE.

    A mod whose derivative depends on the score needs the registers, so it has no distance term.
    """
    own = hooks(mods.alibi(8))
    assert own.has_distance_term
    assert own.only_scales
    assert own.form.row is None
    config = BackwardConfig(less_lse=True)
    kernel = Backward(config, own)
    assert kernel.lse_in_mma.with_slope
    assert kernel.held_steps == HELD_STEPS - 1
    assert not Backward(BackwardConfig(), own).lse_in_mma.with_slope
    assert Backward(config, hooks(lambda s, b, h, q, kv: s + 1.0)).held_steps == HELD_STEPS
    capped = hooks(lambda s, b, h, q, kv: torch.tanh(s) + 0.3 * (kv - q))
    assert capped.has_derivative
    assert not capped.has_distance_term
