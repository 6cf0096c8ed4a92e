"""Check that the plain oracle has torch's values and gradients and shares no tested code."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_mask
from torch.utils._python_dispatch import TorchDispatchMode

from attnkit import testing
from attnkit.errors import UnsupportedError
from attnkit.runtime.variant import Variant
from attnkit.testing import Case, Limits, plain

CPU = torch.device("cpu")
SHAPE = (2, 3, 5, 7)
TABLE = torch.randn(3, 5, 7)
ROWS = torch.arange(70).view(10, 7)
NARROW = torch.randn(3, 5).to(torch.bfloat16)
LEARNED = torch.randn(3, 7, requires_grad=True)
SMALL = Limits(q_len=(1, 20), kv_len=(1, 20), batch=(1, 2), heads=(1, 3))

MASKS: dict[str, Any] = {
    "compare": lambda b, h, q, kv: q >= kv,
    "two indices": lambda b, h, q, kv: TABLE[h, q, kv] > 0,
    "part, then the rest": lambda b, h, q, kv: TABLE[h][q][kv] > 0,
    "int and index": lambda b, h, q, kv: TABLE[1, q, kv] > 0,
    "slice and index": lambda b, h, q, kv: (TABLE[h, q, 2:5] > 0.5).any(-1),
    "index, then a column": lambda b, h, q, kv: ROWS[q + b][3] > 20,
    "negative index": lambda b, h, q, kv: ROWS[q - kv, 0] > 20,
    "constant": lambda b, h, q, kv: True,
}


def by_loops(function: Any) -> Tensor:
    values = torch.zeros(SHAPE, dtype=torch.bool)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in SHAPE)):
        values[tuple(place.tolist())] = bool(function(*place.to(torch.int32)))
    return values


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_the_same_as_called_with_numbers(name: str) -> None:
    found = plain.dense_mask(MASKS[name], SHAPE, CPU)
    assert torch.equal(found.expand(SHAPE), by_loops(MASKS[name]))


def test_scores() -> None:
    score = torch.randn(SHAPE)
    found = plain.torch_scores(lambda s, b, h, q, kv: s * TABLE[h, q, kv] + b, score)
    torch.testing.assert_close(found, score * TABLE + torch.arange(2)[:, None, None, None])


class Called(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scores", [plain.torch_scores, plain.modified])
def test_log_sigmoid_needs_no_batching_rule(scores: Any, dtype: torch.dtype) -> None:
    """torch 2.11 has one that raises for CUDA tensors."""
    values = [-200.0, -30.0, -1.5, 0.0, 1e-3, 2.0, 30.0, 200.0]
    score = torch.tensor(values, dtype=dtype).view(1, 1, 2, 4)
    with Called() as called:
        found = scores(lambda s, b, h, q, kv: F.logsigmoid(s), score)
    assert "aten::log1p" in called.names
    assert not any("log_sigmoid" in name for name in called.names)
    torch.testing.assert_close(found, F.logsigmoid(score))
    if scores is plain.modified:
        x = score.clone().requires_grad_()
        (ours,) = torch.autograd.grad(scores(lambda s, *_: F.logsigmoid(s), x).sum(), x)
        (theirs,) = torch.autograd.grad(F.logsigmoid(x).sum(), x)
        torch.testing.assert_close(ours, theirs)


class _Double(torch.autograd.Function):
    """Autograd function without a rule for vmap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def test_what_vmap_cannot_run_is_called_one_by_one() -> None:
    def doubled(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return _Double.apply(s) + kv * 0.1

    score = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    expected = 2 * score + torch.arange(7, dtype=torch.float64) * 0.1
    found = plain.modified(doubled, score)
    torch.testing.assert_close(found, expected, rtol=1e-15, atol=1e-15)
    assert torch.autograd.grad(found.sum(), score)[0].eq(2).all()
    positions = torch.meshgrid(*(torch.arange(n) for n in SHAPE), indexing="ij")
    torch.testing.assert_close(plain.modified_at(doubled, score, positions), expected)
    ones = plain.dense_mask(lambda b, h, q, kv: _Double.apply(q * 1.0) > kv, (1, 1, 3, 4), CPU)
    assert ones.tolist() == [[[[2 * q > kv for kv in range(4)] for q in range(3)]]]


def test_too_many_calls_one_by_one_are_refused() -> None:
    message = r"torch.vmap cannot call <lambda> .*160000 positions are too many.*at most 20000"
    with pytest.raises(UnsupportedError, match=message):
        plain.dense_mask(lambda b, h, q, kv: _Double.apply(q * 1.0) > kv, (1, 1, 400, 400), CPU)


# --- the dtype of a score_mod: values that depend on a position have the scores' dtype

WIDE: dict[str, tuple[Any, Any]] = {
    "position times number": (lambda s, b, h, q, kv: s + q * 0.1, lambda q: q * 0.1),
    "position to float": (lambda s, b, h, q, kv: s + q.float() / 3, lambda q: q / 3),
    "position to float32": (lambda s, b, h, q, kv: s + q.to(torch.float32) / 3, lambda q: q / 3),
    "function of a position": (lambda s, b, h, q, kv: s + torch.sin(q), torch.sin),
    "score to float": (lambda s, b, h, q, kv: (s + 0.1 * q).float(), lambda q: 0.1 * q),
    "16-bit table": (
        lambda s, b, h, q, kv: s + NARROW[0, q] * 0.1,
        lambda q: NARROW[0].double() * 0.1,
    ),
    "embedding": (
        lambda s, b, h, q, kv: s + (F.embedding(q, TABLE[0]) / 3).sum(),
        lambda q: (TABLE[0].double() / 3).sum(-1),
    ),
    "to 16 bits": (
        lambda s, b, h, q, kv: s + (q * 0.1).bfloat16(),
        lambda q: (q * 0.1).bfloat16().double(),
    ),
}


@pytest.mark.parametrize("name", WIDE)
def test_what_depends_on_a_position_is_float64_for_float64_scores(name: str) -> None:
    score_mod, expected = WIDE[name]
    score = torch.randn(1, 1, 5, 7, dtype=torch.float64)
    found = plain.modified(score_mod, score)
    rows = expected(torch.arange(5, dtype=torch.float64))
    torch.testing.assert_close(found, score + rows[:, None], rtol=1e-15, atol=1e-15)
    assert torch.get_default_dtype() == torch.float32


def test_captured_arithmetic_and_attributes_are_torchs() -> None:
    seen = []

    def score_mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        seen.append(LEARNED.dtype)
        return s + (LEARNED / 3).exp()[h, kv]

    found = plain.modified(score_mod, torch.zeros(1, 3, 2, 7, dtype=torch.float64))
    assert torch.equal(found[0, :, 0], (LEARNED / 3).exp().double())
    assert seen == [torch.float32]


def test_gradients_are_summed_in_float64_and_pass_a_rounding() -> None:
    score = torch.randn(1, 3, 50, 7, dtype=torch.float64, requires_grad=True)
    found = plain.modified(lambda s, b, h, q, kv: (s * LEARNED[h, kv]).half(), score)
    weight = torch.randn(found.shape, dtype=torch.float64)
    dscore, dtable = torch.autograd.grad(found, [score, LEARNED], weight)
    exact = (score.detach() * weight).sum(2)[0]
    assert torch.equal(dtable, exact.float())
    torch.testing.assert_close(dscore, weight * LEARNED.detach()[:, None])


# --- attention


@settings(max_examples=15)
@given(testing.variants(SMALL), testing.cases(SMALL, dtype=torch.float64))
def test_agrees_with_pytorch(drawn: Variant, case: Case) -> None:
    """The plain oracle agrees with PyTorch's FlexAttention.

    FlexAttention computes position-dependent terms in float32, which the tolerance allows for.
    """
    query, key, value = (
        t.detach().expand(case.batch, -1, -1, -1).contiguous() for t in case.inputs()
    )
    mask_mod = (lambda b, h, q, kv: q >= 0) if drawn.mask is None else drawn.mask
    score_mod = drawn.score_mod or (lambda s, b, h, q, kv: s)
    kept = plain.dense_mask(mask_mod, case.dense_shape, CPU)
    assert torch.equal(kept, create_mask(mask_mod, *case.dense_shape, device="cpu"))

    def both(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where(mask_mod(b, h, q, kv), score_mod(s, b, h, q, kv), -math.inf)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # else it compiles
        theirs = flex.flex_attention(
            query, key, value, both, scale=case.scale, enable_gqa=True, return_lse=True
        )
    out, _, lse, *_ = plain.attention(query, key, value, drawn.score_mod, kept, scale=case.scale)
    live = lse.isfinite()
    torch.testing.assert_close(out[live], theirs[0][live], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse[live], theirs[1][live].double(), rtol=1e-3, atol=1e-3)
    assert not out[~kept.any(-1)].any()


def test_fully_masked_rows_are_zero_and_have_no_gradient() -> None:
    inputs = Case(4, 5, dtype=torch.float64).inputs()
    kept = torch.ones(1, 1, 4, 5, dtype=torch.bool)
    kept[:, :, 2] = False
    out, _, lse, top, _ = plain.attention(*inputs, None, kept)
    assert not out[0, 0, 2].any()
    assert lse[0, 0, 2] == top[0, 0, 2] == -math.inf
    dquery, dkey, _ = torch.autograd.grad(out.sum() + lse[lse.isfinite()].sum(), inputs)
    assert not dquery[0, 0, 2].any()
    assert dquery[0, 0, [0, 1, 3]].any(-1).all()
    assert dkey.isfinite().all()


def test_nan_and_infinite_scores_reach_the_output() -> None:
    inputs = Case(3, 3, dtype=torch.float64).inputs()
    out, _, lse, *_ = plain.attention(*inputs, lambda s, b, h, q, kv: s + (q * 1.0 - 1).log())
    # log(-1) is NaN, log(0) is -inf at each key of the row, log(1) is 0
    assert out[0, 0, 0].isnan().all()
    assert not out[0, 0, 1].any()
    assert lse[0, 0, 1] == -math.inf
    assert out[0, 0, 2].isfinite().all()
