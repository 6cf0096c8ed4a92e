"""Compare the statistics of `AuxRequest` with dense float64 attention."""

from __future__ import annotations

import contextlib
import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import attnkit
from attnkit import AuxRequest, Variant, flex, flex_attention
from attnkit.testing import Case, Limits, cases, plain, variants

F64 = torch.float64
BACKENDS = ("cpu", "eager")


def late(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Keep no key in the first rows, and none at all in head 2."""
    return (kv <= q - 5) & (h != 2)


def halved(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score / 2 - 0.125 * h


def draw(seed: int = 0, dtype: torch.dtype = F64) -> list[Tensor]:
    """Return query [2, 4, 40, 16], key and value [2, 2, 50, 16]."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(2, 4, 40, 16), (2, 2, 50, 16), (2, 2, 50, 16)]
    tensors = [torch.randn(s, generator=random, dtype=F64) for s in shapes]
    return [t.to(dtype).requires_grad_() for t in tensors]


def dense_scores(tensors: list[Tensor]) -> Tensor:
    """Return the modified scores, -inf where the mask keeps none."""
    query, key, _ = tensors
    scores = query @ key.repeat_interleave(2, 1).mT / 4
    rows, columns, head = (
        torch.arange(40)[:, None],
        torch.arange(50),
        torch.arange(4)[:, None, None],
    )
    scores = scores / 2 - 0.125 * head
    return scores.masked_fill((columns > rows - 5) | (head == 2), -math.inf)


def attend(tensors: list[Tensor], request: Any, **options: Any) -> Any:
    asked = {"enable_gqa": True, "return_aux": request, "block_mask": late}
    return flex_attention(*tensors, halved, **(asked | options))


@pytest.mark.parametrize("backend", BACKENDS)
def test_max_logits_are_the_largest_scores_of_heads(backend: str) -> None:
    tensors = draw()
    expected = dense_scores(tensors).amax((2, 3))
    assert bool((expected[:, 2] == -math.inf).all())
    for _ in range(3):
        _, aux = attend(tensors, AuxRequest(max_logits=True), backend=backend)
        assert (aux.lse, aux.max_scores) == (None, None)
        assert aux.max_logits.shape == (2, 4)
        assert not aux.max_logits.requires_grad
        torch.testing.assert_close(aux.max_logits, expected.detach(), rtol=1e-13, atol=1e-13)
    _, both = attend(tensors, AuxRequest(True, True, True), backend=backend)
    assert torch.equal(both.max_logits, both.max_scores.amax(-1))
    _, narrow = attend(draw(dtype=torch.bfloat16), AuxRequest(max_logits=True), backend=backend)
    assert narrow.max_logits.dtype == torch.float32


def test_max_logits_do_not_count_a_sink() -> None:
    tensors = draw()
    _, aux = attend(tensors, AuxRequest(max_logits=True), sink=torch.full((4,), 99.0))
    _, plain = attend(tensors, AuxRequest(max_logits=True))
    assert torch.equal(aux.max_logits, plain.max_logits)


def test_max_logits_compile_and_have_a_shape_without_data() -> None:
    torch._dynamo.reset()
    tensors = draw(dtype=torch.float32)
    call = lambda *t: attend(list(t), AuxRequest(max_logits=True))[1].max_logits
    assert torch.equal(
        torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors), call(*tensors)
    )
    assert call(*(t.detach().to("meta") for t in tensors)).shape == (2, 4)


def test_other_requests_are_accepted_as_they_were() -> None:
    tensors = draw(dtype=torch.float32)
    _, aux = attend(tensors, flex.AuxRequest(max_scores=True))
    assert isinstance(aux, attnkit.AuxOutput)
    assert aux.max_logits is None
    query, key, value = (t.detach() for t in tensors)
    options = {"enable_gqa": True, "return_aux": AuxRequest(max_logits=True)}
    _, aux = flex.flex_attention(query, key, value, **options)
    assert isinstance(aux, attnkit.AuxOutput)
    assert aux.max_logits.shape == (2, 4)
    _, none = flex.flex_attention(query[:, :, :0], key, value, **options)
    assert bool((none.max_logits == -math.inf).all())
    assert none.max_logits.shape == (2, 4)


def dense_entropy(scores: Tensor, sink: Tensor | None = None) -> Tensor:
    """Compute -sum(p log p) of each row, over the keys and the sink; 0 for a row without keys."""
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(*scores.shape[:3], 1)], -1)
    masked = (scores == -math.inf).all(-1, keepdim=True)
    p = scores.masked_fill(masked, 0.0).softmax(-1)
    return (
        -torch.where(p > 0, p * torch.where(p > 0, p, 1.0).log(), 0.0)
        .sum(-1)
        .masked_fill(masked[..., 0], 0.0)
    )


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_entropies_and_their_gradients(backend: str, with_sink: bool) -> None:
    tensors = draw()
    sink = torch.randn(4, dtype=F64).requires_grad_() if with_sink else None
    learned = [*tensors[:2], *([] if sink is None else [sink])]
    expected = dense_entropy(dense_scores(tensors), sink)
    weight = torch.randn_like(expected)
    exact = torch.autograd.grad(expected, learned, weight)
    for _ in range(3):  # the slow path, the call cache, a repeated backward
        _, aux = attend(tensors, AuxRequest(entropy=True), backend=backend, sink=sink)
        assert (aux.lse, aux.max_scores, aux.max_logits) == (None,) * 3
        gradients = torch.autograd.grad(aux.entropy, learned, weight)
        for ours, true in zip((aux.entropy, *gradients), (expected, *exact), strict=True):
            torch.testing.assert_close(ours, true, rtol=1e-11, atol=1e-12)
    assert bool((aux.entropy[:, 2] == 0).all())
    assert bool((aux.entropy[:, :, :5] == 0).all())
    assert bool((gradients[0][:, 2] == 0).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_add_up_with_those_of_the_other_results(backend: str) -> None:
    """Output, LSE and entropy may all have gradients; a tensor of the score_mod gets its own."""
    tensors, table = draw(), torch.randn(4, 50, dtype=F64, requires_grad=True)
    mod = lambda s, b, h, q, kv: torch.tanh(s) * 3 + table[h, kv]
    learned = [*tensors, table]

    def run(backend: str) -> tuple[Tensor, ...]:
        request = AuxRequest(lse=True, entropy=True)
        out, aux = flex_attention(
            *tensors, mod, late, enable_gqa=True, return_aux=request, backend=backend
        )
        live = aux.lse.masked_fill(aux.lse == -math.inf, 0)
        loss = out.square().sum() + (live * aux.entropy).sum() + aux.entropy.square().sum()
        return (out, aux.lse, aux.entropy, *torch.autograd.grad(loss, learned))

    query, key, value = tensors
    scores = query @ key.repeat_interleave(2, 1).mT / 4
    kept = dense_scores(tensors) > -math.inf
    scores = (scores.tanh() * 3 + table[:, None]).masked_fill(~kept, -math.inf)
    masked = ~kept.any(-1, keepdim=True)
    out = scores.masked_fill(masked, 0.0).softmax(-1).masked_fill(masked, 0.0)
    out = out @ value.repeat_interleave(2, 1)
    entropy, lse = dense_entropy(scores), scores.masked_fill(masked, 0.0).logsumexp(-1)
    lse = lse.masked_fill(masked[..., 0], 0)
    loss = out.square().sum() + (lse * entropy).sum() + entropy.square().sum()
    exact = torch.autograd.grad(loss, learned)
    for ours, true in zip(run(backend)[3:], exact, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_those_of_finite_differences(backend: str) -> None:
    random = torch.Generator().manual_seed(0)
    shapes = [(2, 2, 4, 3), (1, 1, 5, 3), (1, 1, 5, 2), (2,), (2, 5)]
    tensors = [torch.randn(s, generator=random, dtype=F64).requires_grad_() for s in shapes]

    def call(query: Tensor, key: Tensor, value: Tensor, sink: Tensor, table: Tensor) -> Any:
        out, aux = flex_attention(
            *(query, key, value),
            lambda s, b, h, q, kv: s * 2 + table[h, kv],
            lambda b, h, q, kv: kv < q,
            enable_gqa=True,
            sink=sink,
            return_aux=AuxRequest(entropy=True),
            backend=backend,
        )
        return out, aux.entropy

    torch.autograd.gradcheck(call, tensors)
    torch.autograd.gradcheck(lambda q, k, v, t: call(q, k, v, None, t), [*tensors[:3], tensors[4]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_entropies_are_exact_to_the_rounding_of_float32(backend: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensors = draw(dtype=dtype)
        wide = [t.detach().double().requires_grad_() for t in tensors]
        exact = dense_entropy(dense_scores(wide))
        weight = torch.randn_like(exact)
        true = torch.autograd.grad(exact, wide[:2], weight)
        _, aux = attend(tensors, AuxRequest(entropy=True), backend=backend)
        assert aux.entropy.dtype == torch.float32
        limit = 1e-5 if dtype == torch.float32 else 2e-2
        found = torch.autograd.grad(aux.entropy, tensors[:2], weight.float())
        for ours, theirs in zip((aux.entropy, *found), (exact, *true), strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=limit, atol=limit)


@pytest.mark.parametrize("backend", BACKENDS)
def test_entropies_of_extreme_rows(backend: str) -> None:
    """One key, equal keys, one far above all, weights that underflow, scores of minus infinity."""
    query, value = torch.ones(1, 1, 6, 8), torch.zeros(1, 1, 64, 8)
    key = torch.zeros(1, 1, 64, 8)
    bias = torch.zeros(6, 64)
    bias[1, 3] = 1e4
    bias[2] = -1e4
    bias[3, 1:] = -100.0  # below the smallest float32 after exp
    bias[4, 2:] = -math.inf
    bias[5] = -math.inf
    bias.requires_grad_()
    _, aux = flex_attention(
        *(query, key, value),
        lambda s, b, h, q, kv: s + bias[q, kv],
        lambda b, h, q, kv: (q > 0) | (kv == 7),
        return_aux=AuxRequest(entropy=True),
        backend=backend,
    )
    expected = torch.tensor([0, 0, math.log(64), 0, math.log(2), 0])
    torch.testing.assert_close(aux.entropy[0, 0], expected, rtol=1e-6, atol=1e-6)
    assert bool((aux.entropy >= 0).all())
    (gradient,) = torch.autograd.grad(aux.entropy.sum(), bias)
    torch.testing.assert_close(gradient, torch.zeros(6, 64), rtol=0, atol=1e-6)


def test_rows_longer_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cpu template computes long rows in parts."""
    for module in ("forward", "backward"):
        name = f"attnkit.templates.cpu.{module}"
        monkeypatch.setattr(sys.modules[name], "SCORES", 4 * 40 * 16)
    tensors, sink = draw(), torch.randn(4, dtype=F64).requires_grad_()
    for own in (None, sink):
        learned = [*tensors[:2], *([] if own is None else [own])]
        expected = dense_entropy(dense_scores(tensors), own)
        weight = torch.randn_like(expected)
        _, aux = attend(tensors, AuxRequest(entropy=True), backend="cpu", sink=own)
        found = torch.autograd.grad(aux.entropy, learned, weight)
        exact = torch.autograd.grad(expected, learned, weight)
        for ours, true in zip((aux.entropy, *found), (expected, *exact), strict=True):
            torch.testing.assert_close(ours, true, rtol=1e-11, atol=1e-12)


def test_entropy_compiles_to_one_graph() -> None:
    torch._dynamo.reset()
    tensors, sink = draw(dtype=torch.float32), torch.randn(4, requires_grad=True)

    def call(*t: Tensor) -> Any:
        request = AuxRequest(lse=True, max_logits=True, entropy=True)
        out, aux = attend(list(t[:3]), request, sink=t[3])
        return out, aux.lse, aux.entropy, aux.max_logits

    learned = [*tensors, sink]
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(*learned)
    expected = call(*learned)
    weights = [torch.randn_like(t) for t in found[:3]]
    for ours, theirs in zip(
        (*found, *torch.autograd.grad(found[:3], learned, weights)),
        (*expected, *torch.autograd.grad(expected[:3], learned, weights)),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    meta = call(*(t.detach().to("meta") for t in learned))
    assert meta[2].shape == (2, 4, 40)


def test_calls_that_a_mode_intercepts_give_the_same() -> None:
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    tensors = draw()
    results = []
    for mode in (Watch(), contextlib.nullcontext()):
        with mode:
            out, aux = attend(tensors, AuxRequest(entropy=True, max_scores=True))
            loss = out.square().sum() + aux.entropy.square().sum()
            results.append((aux.entropy, aux.max_scores, *torch.autograd.grad(loss, tensors)))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("used", ["out", "lse", "entropy", "nothing but out"])
def test_unused_results_have_no_gradient(used: str) -> None:
    tensors = draw()
    request = AuxRequest(lse=True, entropy=used != "nothing but out")
    found = []
    for backend in BACKENDS:
        out, aux = attend(tensors, request, backend=backend)
        lse = aux.lse.masked_fill(aux.lse == -math.inf, 0)
        loss = {"lse": lse, "entropy": aux.entropy}.get(used, out).square().sum()
        found.append(torch.autograd.grad(loss, tensors, allow_unused=True))
    for ours, theirs in zip(*found, strict=True):
        expected = torch.zeros_like(ours) if theirs is None else theirs
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)


def test_the_first_derivative_is_the_last() -> None:
    tensors = draw()
    _, aux = attend(tensors, AuxRequest(entropy=True), backend="cpu")
    (gradient,) = torch.autograd.grad(aux.entropy.sum(), tensors[:1], create_graph=True)
    with pytest.raises(attnkit.UnsupportedError, match="no second derivative"):
        gradient.sum().backward()


@given(
    seed=st.integers(0, 99),
    shift=st.floats(-50, 50),
    factor=st.floats(0.0, 8.0),
    backend=st.sampled_from(BACKENDS),
)
def test_entropy_is_that_of_the_softmax_alone(
    seed: int, shift: float, factor: float, backend: str
) -> None:
    """It lies in [0, log n], a shift of the scores does not change it, equal scores give log n."""
    tensors = [t.detach() for t in draw(seed)]
    kept = lambda b, h, q, kv: kv <= q + 3

    def entropy(mod: Any) -> Tensor:
        request = AuxRequest(entropy=True)
        _, aux = flex_attention(
            *tensors, mod, kept, enable_gqa=True, return_aux=request, backend=backend
        )
        return aux.entropy

    plain = entropy(lambda s, b, h, q, kv: s * factor)
    shifted = entropy(lambda s, b, h, q, kv: s * factor + shift)
    torch.testing.assert_close(plain, shifted, rtol=1e-9, atol=1e-9)
    largest = (torch.arange(40) + 4).clamp(max=50).double().log().expand(2, 4, 40)
    assert bool((plain >= 0).all())
    assert bool((plain <= largest + 1e-12).all())
    uniform = entropy(lambda s, b, h, q, kv: s * 0 + shift)
    torch.testing.assert_close(uniform, largest)


SIZES = Limits(q_len=(1, 40), kv_len=(1, 40), batch=(1, 2), heads=(1, 4))


@settings(max_examples=40)
@given(variant=variants(SIZES), case=cases(SIZES, dtype=F64), backend=st.sampled_from(BACKENDS))
def test_statistics_of_any_variant(variant: Variant, case: Case, backend: str) -> None:
    """Entropies, their gradients and the largest logits are those of the user's own functions."""
    query, key, value = case.inputs()
    sink = case.sinks() if case.normalization == "softmax" else None
    scores = plain.raw_scores(query, key, case.scale)
    if variant.score_mod is not None:
        scores = plain.modified(variant.score_mod, scores)
    if variant.mask is not None:
        kept = plain.dense_mask(variant.mask, case.dense_shape, torch.device("cpu"))
        scores = torch.where(kept, scores, -math.inf)
    assume(not scores.isnan().any() and bool((scores < 1e100).all()))
    logits = sink if case.normalization == "softmax" else torch.zeros(case.heads, dtype=F64)
    expected = dense_entropy(scores, logits)
    _, aux = variant(
        *(query, key, value),
        scale=case.scale,
        enable_gqa=case.heads != case.kv_heads,
        return_aux=AuxRequest(max_logits=True, entropy=True),
        backend=backend,
        sink=sink,
        normalization=case.normalization,
    )
    torch.testing.assert_close(aux.entropy, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(aux.max_logits, scores.detach().amax((2, 3)), rtol=1e-9, atol=1e-9)
    learned = [query, key, *([] if sink is None else [sink])]
    if not expected.requires_grad:
        return
    weight = torch.randn_like(expected)
    exact = torch.autograd.grad(expected, learned, weight, allow_unused=True)
    assume(all(g is None or bool(g.isfinite().all()) for g in exact))
    found: Any = [None] * len(learned)
    if aux.entropy.requires_grad:
        found = torch.autograd.grad(aux.entropy, learned, weight, allow_unused=True)
    for ours, true, like in zip(found, exact, learned, strict=True):
        ours, true = (torch.zeros_like(like) if g is None else g for g in (ours, true))
        torch.testing.assert_close(ours, true, rtol=1e-7, atol=1e-7)
