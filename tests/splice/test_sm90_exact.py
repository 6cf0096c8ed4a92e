"""Check that the emulated Hopper kernels are exact, at sizes that the emulator runs in seconds.

The tests cover drawn variants, sums in a fixed order, and captured numbers, as `tests/gpu` does on
a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnkit import flex_attention, masks
from attnkit.runtime.variant import Variant
from attnkit.testing import Case, Limits
from tests.gpu import backward_kit, cute_kit, test_compositions
from tests.sampling import diagonal, sampled

pytest.importorskip("cutlass")
FP16 = torch.float16


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute_kit, "DEVICE", "cpu")
    monkeypatch.setattr(cute_kit, "BACKEND", "emulate")


@pytest.mark.parametrize("dims", sampled([((64, 64),), ((128, 128),)], 2), ids=str)
def test_drawn_variants(dims: tuple[int, int]) -> None:
    limits = Limits(q_len=(1, 140), kv_len=(1, 140), batch=(1, 2), heads=(1, 2))
    test_compositions.draw(sum(dims), limits, dims, examples=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dims", sampled([((64, 128),), ((128, 64),)], 2), ids=str)
def test_shared_heads_in_a_fixed_order(dims: tuple[int, int]) -> None:
    case = Case(
        70, 150, batch=2, heads=2, head_dim=dims[0], value_dim=dims[1], dtype=FP16
    )  # kv heads and batch elements are shared
    backward_kit.check(Variant(None, masks.causal()), case, deterministic=True)


@pytest.mark.parametrize(("lengths", "ordered"), diagonal([(13, 49), (70, 145)], [False, True]))
def test_learned_tables_at_ragged_ends(lengths: tuple[int, int], ordered: bool) -> None:
    """Gradients of learned tables are exact where tiles reach beyond the lengths."""
    random = torch.Generator().manual_seed(1)
    along, rows, columns = (torch.randn(n, generator=random, requires_grad=True) for n in [300] * 3)

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score * (1 + rows[q] / 4) + along[q - kv] + columns[kv]

    case = Case(*lengths, head_dim=64, value_dim=64, dtype=FP16)
    backward_kit.check(Variant(mod), case, deterministic=ordered)


@pytest.mark.exhaustive
@pytest.mark.parametrize("bad", sampled([(float("inf"),), (float("nan"),)], 2))
def test_nan_and_infinities_reach_learned_tables(bad: float) -> None:
    """NaN and infinities appear only in the sums that contain them, in a fixed order or any."""
    bias = torch.zeros(70, requires_grad=True)
    mod = lambda s, b, h, q, kv: s + bias[q]
    qkv = [torch.randn(1, 1, 70, 64, dtype=FP16) for _ in range(3)]
    grad = torch.randn(1, 1, 70, 64, dtype=FP16)
    grad[0, 0, 33, 5] = bad
    found = []
    for fixed in (False, True):
        out = flex_attention(*qkv, mod, masks.causal(), backend="emulate", deterministic=fixed)
        found += torch.autograd.grad(out, bias, grad)
    finite = [torch.isfinite(g) for g in found]
    assert torch.equal(*finite)
    assert not finite[0][33]
    assert finite[0].sum() == 69
    assert torch.equal(found[0].isnan(), found[1].isnan())


@pytest.mark.exhaustive
def test_captured_numbers() -> None:
    """Zero-dimensional captured tensors may be mask bounds, parts of an index, or learned."""
    table, shift = torch.randn(400), torch.tensor(3)
    window, gain = torch.tensor(40), torch.tensor(0.7, requires_grad=True)

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score * gain + table[q - kv + shift]

    variant = Variant(mod, lambda b, h, q, kv: (q - kv).abs() < window)
    backward_kit.check(variant, Case(100, 140, head_dim=64, value_dim=64, dtype=FP16))
