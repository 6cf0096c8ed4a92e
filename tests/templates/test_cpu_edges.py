"""Check the CPU template on large numbers, infinities and NaN, and check its memory and cost."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import attnkit
from attnkit.sparsity.block_runs import EMPTY, FULL, PARTIAL, BlockRuns
from attnkit.templates import cpu
from attnkit.templates.cpu import Tile
from tests.templates.cpu_kit import (
    DTYPES,
    Case,
    LambdaHooks,
    Mask,
    Score,
    causal,
    check,
    dead_rows,
    dilated,
    documents,
    minus_infinity,
    positions,
    random_inputs,
    softcap,
    states_of,
    template_attention,
    two_sided,
    window,
)


def test_runs_decide_over_the_mask() -> None:
    """Block lists override the mask: FULL tiles are kept whole, and EMPTY ones are skipped."""
    torch.manual_seed(5)
    states = torch.randint(0, 3, (1, 1, 14, 9), dtype=torch.int8)
    q_len, kv_len, block = 14 * 16 - 3, 9 * 24 - 10, (16, 24)
    tiles = states.repeat_interleave(16, 2).repeat_interleave(24, 3)[:, :, :q_len, :kv_len]
    allowed = (tiles == FULL) | ((tiles == PARTIAL) & causal(*positions(1, 1, q_len, kv_len)))
    case = Case(**random_inputs(q_len=q_len, kv_len=kv_len), mask=causal, allowed=allowed)
    case.runs = BlockRuns.from_states(states, q_len, kv_len, block)
    check(case)


def test_scores_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows longer than a chunk are merged correctly, wherever the chunk boundaries are."""
    import sys

    for name in ("forward", "backward"):
        monkeypatch.setattr(sys.modules[f"attnkit.templates.cpu.{name}"], "SCORES", 128 * 2 * 50)
    for mask in (None, window, two_sided, dead_rows, dilated):
        for score in (None, softcap, minus_infinity):
            check(Case(**random_inputs(q_len=260), mask=mask, score=score, block=(64, 32)))


def test_large_scores_do_not_overflow() -> None:
    inputs = random_inputs(q_len=100)
    inputs["query"] *= 300
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        check(Case(**inputs, mask=causal, block=(32, 32), dtype=dtype))


def test_equal_inputs_give_equal_bits() -> None:
    for dtype in DTYPES:
        case = Case(**random_inputs(heads=4, kv_heads=2, q_len=200), mask=documents, dtype=dtype)
        case.score, case.block = softcap, (32, 32)
        first, second = template_attention(case), template_attention(case)
        for name, result in first.items():
            assert torch.equal(result, second[name]), name


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("score", [None, softcap])
def test_what_the_mask_hides_does_not_leak(bad: float, score: Score | None) -> None:
    """NaN or infinity in fully masked keys changes neither results nor gradients."""
    inputs = random_inputs(q_len=64)
    query, key, value = (t.float() for t in inputs.values())
    mask = lambda b, h, q, kv: (q >= kv) & (kv != 13) & (kv < 60)
    shape = (1, 1, 64, 64)
    states = states_of(mask(*positions(*shape)).expand(shape), (32, 32))
    runs = BlockRuns.from_states(states, 64, 64, (32, 32))
    hooks = LambdaHooks(mask, score)
    needed = {"need_max": True, "need_entropy": True}
    clean = cpu.forward(query, key, value, runs, hooks, 0.25, **needed)
    grads = cpu.backward(value, None, query, key, value, *clean[:2], runs, hooks, 0.25)
    key[:, :, 13], key[:, :, 60:] = bad, bad
    dirty = cpu.forward(query, key, value, runs, hooks, 0.25, **needed)
    for found, want in zip(dirty, clean, strict=True):
        assert found is not None
        assert want is not None
        assert torch.equal(found, want)
    if score is None:  # dq multiplies a weight of 0 with the key itself
        _, dk, dv = cpu.backward(value, None, query, key, value, *dirty[:2], runs, hooks, 0.25)
        assert torch.equal(dk, grads[1])
        assert torch.equal(dv, grads[2])


@pytest.mark.parametrize("chunked", [False, True])
def test_nan_reaches_its_row_and_no_other(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    if chunked:
        monkeypatch.setattr(sys.modules["attnkit.templates.cpu.forward"], "SCORES", 128 * 2 * 10)
    query, key, value = (t.float() for t in random_inputs(q_len=64).values())
    for wrong in ((10, 3), (63, 63), (20, 0)):

        def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return torch.where((q == wrong[0]) & (kv == wrong[1]), math.nan, s)  # noqa: B023

        own = LambdaHooks(score=score)
        out, lse, top, entropy = cpu.forward(
            query, key, value, None, own, 0.25, need_max=True, need_entropy=True
        )
        assert top is not None
        assert entropy is not None
        rows = torch.arange(64) == wrong[0]
        for result in (out.isnan().all(-1), lse.isnan(), top.isnan(), entropy.isnan()):
            assert torch.equal(result, rows.expand(1, 2, 64))
        assert not out[:, :, ~rows].isnan().any()


def test_infinite_score_has_infinite_lse() -> None:
    query, key, value = (t.float() for t in random_inputs(q_len=8).values())
    score = lambda s, b, h, q, kv: torch.where((q == 2) & (kv == 3), math.inf, s)
    out, lse, _, _ = cpu.forward(query, key, value, None, LambdaHooks(score=score), 0.25)
    assert (lse[:, :, 2] == math.inf).all()
    assert out[:, :, 2].isnan().all()
    assert lse[:, :, 3:].isfinite().all()


def test_derivative_that_is_infinite_under_the_mask() -> None:
    """Gradients are finite if the score_mod's derivative is not finite only at masked scores."""
    score = lambda s, b, h, q, kv: torch.sqrt((q - kv).to(s.dtype) * s.abs())
    case = Case(**random_inputs(q_len=50), mask=lambda b, h, q, kv: q > kv, score=score)
    for name, result in template_attention(case).items():
        assert not result.isnan().any(), name


def test_rows_without_keys_ignore_the_gradient_of_their_lse() -> None:
    query, key, value = (t.float() for t in random_inputs(q_len=40).values())
    runs = BlockRuns.from_states(torch.zeros(1, 1, 2, 1, dtype=torch.int8) + 1, 40, 40, (20, 40))
    hooks = LambdaHooks(lambda b, h, q, kv: (q >= kv) & (q % 2 == 0))
    out, lse, _, _ = cpu.forward(query, key, value, runs, hooks, 1.0)
    grad_lse = torch.full_like(lse, math.nan)
    grad_lse[:, :, ::2] = 1
    grads = cpu.backward(out, grad_lse, query, key, value, out, lse, runs, hooks, 1.0)
    for grad in grads:
        assert grad.isfinite().all()
    assert not grads[0][:, :, 1::2].any()


class Watch(LambdaHooks):
    """Hooks that count how often mask and score are evaluated at each position."""

    def __init__(self, mask: Mask, shape: tuple[int, int]) -> None:
        super().__init__(mask, lambda s, b, h, q, kv: s)
        self.kept, self.scored = (torch.zeros(shape, dtype=torch.int32) for _ in range(2))

    def keep(self, tile: Tile) -> Tensor:
        q, kv = torch.broadcast_tensors(tile.q.long(), tile.kv.long())
        self.kept[q, kv] += 1
        return super().keep(tile)

    def score(self, s: Tensor, tile: Tile) -> Tensor:
        q, kv = torch.broadcast_tensors(tile.q.long(), tile.kv.long())
        self.scored[q, kv] += 1
        return super().score(s, tile)


def test_cost_follows_the_tiles() -> None:
    """The mask is evaluated on PARTIAL tiles only, the score once on each PARTIAL or FULL tile."""
    size, block = 1000, (128, 128)
    mask = lambda b, h, q, kv: (q >= kv) & ((q - kv < 300) | (kv < 40))
    dense = mask(*positions(1, 1, size, size))
    states = states_of(dense, block)
    runs = BlockRuns.from_states(states, size, size, block)
    hooks = Watch(mask, (size, size))
    query = torch.randn(1, 1, size, 8)
    cpu.forward(query, query, query, runs, hooks, 1.0)
    tiles = states[0, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)[:size, :size]
    assert torch.equal(hooks.scored, (tiles != EMPTY).to(torch.int32))
    assert torch.equal(hooks.kept > 0, tiles == PARTIAL)


class Largest(TorchDispatchMode):
    """Dispatch mode that records the size of the largest tensor that any operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        for t in found if isinstance(found, tuple | list) else [found]:
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.numel())
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_bounded(dtype: torch.dtype) -> None:
    """Forward and backward allocate no tensor as large as the scores."""
    size = 1 << 14
    query = torch.randn(1, 1, 512, 4, dtype=dtype)
    key = torch.randn(1, 1, size, 4, dtype=dtype)
    hooks = LambdaHooks(lambda b, h, q, kv: (q + kv) % 2 == 0)
    states = torch.full((1, 1, 4, size // 128), PARTIAL, dtype=torch.int8)
    for runs in (None, BlockRuns.from_states(states, 512, size, (128, 128))):
        with Largest() as largest:
            out, lse, _, _ = cpu.forward(query, key, key, runs, hooks, 1.0)
            cpu.backward(out, None, query, key, key, out, lse, runs, hooks, 1.0)
        assert largest.elements <= 1 << 22 < 512 * size


def test_strips_are_planned_once_per_runs() -> None:
    import gc
    import sys

    plans = sys.modules["attnkit.templates.cpu.strips"]._plans
    runs = BlockRuns.from_states(torch.ones(1, 1, 2, 2, dtype=torch.int8), 200, 200, (128, 128))
    query = torch.randn(1, 1, 200, 8)
    hooks = LambdaHooks(causal)
    cpu.forward(query, query, query, runs, hooks, 1.0)
    (first,) = plans[runs].values()
    cpu.forward(query, query, query, runs, hooks, 1.0)
    assert next(iter(plans[runs].values())) is first
    count = len(plans)
    del runs
    gc.collect()
    assert len(plans) == count - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_weights_are_zero(dtype: torch.dtype) -> None:
    """No weight is a subnormal number, because matrix products with many of them are slow."""
    length = 800  # exp(-800) is 0 in float64 too
    distance = -torch.arange(length, dtype=dtype)
    query, key = torch.zeros(2, 1, 1, length, 8, dtype=dtype)
    value = torch.eye(length, dtype=dtype)[None, None]  # the output is the weights
    value.requires_grad_()
    weights = attnkit.flex_attention(query, key, value, lambda s, b, h, q, kv: s + distance[kv])
    assert ((weights == 0) | (weights >= torch.finfo(dtype).tiny)).all()
    torch.testing.assert_close(weights[0, 0], distance.softmax(-1).expand(length, length))
    (dvalue,) = torch.autograd.grad(weights[..., 0].sum(), value)
    assert ((dvalue == 0) | (dvalue >= torch.finfo(dtype).tiny)).all()
