"""Compare attention without a softmax, sigmoid or none, with its formula in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

import attnkit
from attnkit import AuxRequest, Variant, flex, flex_attention
from attnkit.errors import ConflictError, OptionError, UnsupportedError
from attnkit.masks import causal
from attnkit.runtime import torch_ops
from attnkit.testing import Case, Limits, cases, plain, variants

F64 = torch.float64
BACKENDS = ("cpu", "eager")
NAMES = ("sigmoid", "none")


def late(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Keep no key in the first rows."""
    return kv <= q - 5


def draw(seed: int = 0, dtype: torch.dtype = F64) -> list[Tensor]:
    """Return query [2, 4, 40, 16], key and value [2, 2, 50, 16]."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(2, 4, 40, 16), (2, 2, 50, 16), (2, 2, 50, 16)]
    tensors = [torch.randn(s, generator=random, dtype=F64) for s in shapes]
    return [t.to(dtype).requires_grad_() for t in tensors]


def attend(tensors: list[Tensor], name: str, score_mod: Any = None, **options: Any) -> Any:
    asked = {"enable_gqa": True, "normalization": name}
    return flex_attention(*tensors, score_mod, late, **(asked | options))


def weighted(
    scores: Tensor, kept: Tensor | None, value: Tensor, name: str, dtype: torch.dtype = F64
) -> Tensor:
    """Return sum(w v): w is a score, or its sigmoid, and 0 where it is not kept."""
    weights = torch.sigmoid(scores) if name == "sigmoid" else scores
    if kept is not None:
        weights = torch.where(kept, weights, 0.0)
    heads = scores.shape[1] // value.shape[1]
    return weights.to(dtype) @ value.repeat_interleave(heads, 1)


def positions() -> tuple[Tensor, Tensor]:
    return torch.arange(40)[:, None], torch.arange(50)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_and_gradients(backend: str, name: str) -> None:
    """Terms of a row count, unlike in a softmax; rows without keys give 0."""
    tensors = draw()
    slopes = torch.rand(4, dtype=F64).requires_grad_()
    table = torch.randn(40, dtype=F64).requires_grad_()
    learned = [*tensors, slopes, table]
    query, key, value = tensors
    rows, columns = positions()
    scores = query @ key.repeat_interleave(2, 1).mT / 4
    scores = scores * slopes[:, None, None] + table[:, None]
    exact = weighted(scores, columns <= rows - 5, value, name)
    weights = torch.randn_like(exact)
    gradients = torch.autograd.grad(exact, learned, weights)
    mod = lambda s, b, h, q, kv: s * slopes[h] + table[q]
    for _ in range(3):  # the slow path, the call cache, the fast path
        found = attend(tensors, name, mod, backend=backend)
        assert torch.equal(found[:, :, :5], torch.zeros(2, 4, 5, 16, dtype=F64))
        ours = torch.autograd.grad(found, learned, weights)
        for one, true in zip((found, *ours), (exact, *gradients), strict=True):
            torch.testing.assert_close(one, true, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name: str) -> None:
    random = torch.Generator().manual_seed(0)
    shapes = [(1, 2, 5, 4), (1, 1, 6, 4), (1, 1, 6, 3)]
    tensors = [torch.randn(s, generator=random, dtype=F64).requires_grad_() for s in shapes]
    bias = torch.randn(2, generator=random, dtype=F64).requires_grad_()

    def call(*given: Tensor) -> Tensor:
        *qkv, learned = given
        mod = lambda s, b, h, q, kv: torch.tanh(s) + learned[h] * (q - kv)
        kept = lambda b, h, q, kv: kv <= q - 1
        found: Tensor = flex_attention(
            *qkv, mod, kept, enable_gqa=True, backend="cpu", normalization=name
        )
        return found

    assert torch.autograd.gradcheck(call, (*tensors, bias))


SIZES = Limits(q_len=(1, 40), kv_len=(1, 40), batch=(1, 2), heads=(1, 4))


@settings(max_examples=60)
@given(
    variant=variants(SIZES),
    case=cases(SIZES, dtype=F64, sinks=False),
    backend=st.sampled_from(BACKENDS),
    name=st.sampled_from(NAMES),
)
def test_any_variant(variant: Variant, case: Case, backend: str, name: str) -> None:
    """Output and gradients are those of the user's own functions in plain torch."""
    inputs = case.inputs()
    query, key, value = inputs
    scores, kept = plain.raw_scores(query, key, case.scale), None
    if variant.score_mod is not None:
        scores = plain.modified(variant.score_mod, scores)
    if variant.mask is not None:
        kept = plain.dense_mask(variant.mask, case.dense_shape, torch.device("cpu"))
    assume(bool(scores.isfinite().all()) and bool((scores.abs() < 1e30).all()))
    exact = weighted(scores, kept, value, name)
    found = variant(
        *inputs,
        scale=case.scale,
        enable_gqa=case.heads != case.kv_heads,
        kernel_options={"BLOCK_M": case.block[0], "BLOCK_N": case.block[1]},
        backend=backend,
        normalization=name,
    )
    close(found, exact)
    weights = torch.randn_like(exact)
    expected = torch.autograd.grad(exact, inputs, weights, allow_unused=True)
    assume(all(g is None or bool(g.isfinite().all()) for g in expected))
    ours = torch.autograd.grad(found, inputs, weights, allow_unused=True)
    for one, true, like in zip(ours, expected, inputs, strict=True):
        close(*(torch.zeros_like(like) if g is None else g for g in (one, true)))


def close(found: Tensor, exact: Tensor) -> None:
    size = float(exact.detach().abs().amax())
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9 * (1 + size))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_block_lists_of_torch(backend: str, name: str) -> None:
    """A FULL block of the lists is kept whole, whatever the mask_mod says."""
    mask = torch_block_mask(late, None, None, 40, 50, device="cpu", BLOCK_SIZE=(8, 16))
    tensors = draw()
    query, key, value = tensors
    found = flex_attention(
        *tensors, None, mask, enable_gqa=True, backend=backend, normalization=name
    )
    rows, columns = positions()
    scores = query @ key.repeat_interleave(2, 1).mT / 4
    close(found, weighted(scores, columns <= rows - 5, value, name))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_error_of_a_dtype(dtype: torch.dtype, name: str) -> None:
    """The error is at most twice that of dense attention in the same dtype."""
    tensors = draw(dtype=dtype)
    bias = -math.log(50)
    mod = lambda s, b, h, q, kv: s + bias
    results = []
    for given_dtype in (dtype, F64):
        inputs = [t.detach().to(given_dtype) for t in tensors]
        query, key, value = inputs
        rows, columns = positions()
        wide = F64 if given_dtype == F64 else torch.float32
        scores = (query @ key.repeat_interleave(2, 1).mT).to(wide) / 4 + bias
        results.append(weighted(scores, columns <= rows - 5, value, name, given_dtype).double())
    dense, exact = results
    found = attend(tensors, name, mod, backend="cpu").double()
    rounding = torch.finfo(dtype).eps * exact.abs().amax()
    assert (found - exact).abs().amax() <= 2 * (dense - exact).abs().amax() + rounding


@pytest.mark.parametrize("name", NAMES)
def test_large_scores(name: str) -> None:
    """Infinite scores have the weights 1 and 0; NaN under the mask has no effect."""
    tensors = draw(dtype=torch.float32)
    value = tensors[2].detach().repeat_interleave(2, 1)
    low = lambda s, b, h, q, kv: torch.where(kv == 1, s * 0, -math.inf)
    bad = lambda s, b, h, q, kv: torch.where(kv <= q - 5, s * 0 + 1, math.nan)
    for backend in BACKENDS:
        found = attend(tensors, "sigmoid", low, backend=backend)
        torch.testing.assert_close(found[:, :, 10:], value[:, :, 1:2].expand(2, 4, 30, 16) / 2)
        found = attend(tensors, name, bad, backend=backend)
        assert not found.isnan().any()
        gradients = torch.autograd.grad(found.sum(), tensors)
        if backend == "cpu":
            assert not any(g.isnan().any() for g in gradients)


STATISTICS = {
    "return_lse": {"return_lse": True},
    "return_aux.lse": {"return_aux": AuxRequest(lse=True)},
    "return_aux.max_scores": {"return_aux": AuxRequest(max_scores=True)},
    "return_aux.max_logits": {"return_aux": AuxRequest(max_logits=True)},
    "return_aux.entropy": {"return_aux": AuxRequest(entropy=True)},
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("asked", STATISTICS)
def test_statistics_of_a_softmax_are_refused(asked: str, name: str) -> None:
    tensors = draw()
    attend(tensors, name)
    for backend in BACKENDS:  # also where the fast path knows the call
        match = f"{asked} asks for a statistic of a softmax, which normalization='{name}'"
        with pytest.raises(OptionError, match=match):
            attend(tensors, name, backend=backend, **STATISTICS[asked])
    attend(tensors, name, return_aux=AuxRequest())


@pytest.mark.parametrize("name", NAMES)
def test_a_case_of_check_variant_has_no_sink(name: str) -> None:
    assert Case(q_len=3, kv_len=4, normalization=name).results == ("out",)
    with pytest.raises(OptionError, match=f"normalization='{name}' takes no sink"):
        Case(q_len=3, kv_len=4, normalization=name, sink=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_sink_is_refused(name: str) -> None:
    with pytest.raises(ConflictError, match=f"sink and normalization='{name}'.*denominator"):
        attend(draw(), name, sink=torch.zeros(4, dtype=F64))


def test_normalizations_share_no_call() -> None:
    """Calls that differ in the normalization alone never share a prepared call."""
    tensors = draw(dtype=torch.float32)
    names = ("softmax", "sigmoid", "none", "softmax1")
    first = [attend(tensors, name) for name in names]
    for _ in range(3):
        for name, found in zip(names, first, strict=True):
            assert torch.equal(attend(tensors, name), found)
    assert not any(torch.equal(a, b) for i, a in enumerate(first) for b in first[:i])


@pytest.mark.parametrize("name", NAMES)
def test_repeated_calls_take_the_fast_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attnkit.clear_caches()
    tensors = draw(dtype=torch.float32)
    built = "".join(list(name))  # not the literal
    for _ in range(3):
        attend(tensors, built, backend="cpu")

    def unprepared(*_: Any) -> None:
        raise AssertionError("a repeated call takes the fast path")

    monkeypatch.setattr(torch_ops, "run", unprepared)
    attend(tensors, built, backend="cpu")


@pytest.mark.parametrize("name", NAMES)
def test_compiles_to_one_graph(name: str) -> None:
    torch._dynamo.reset()
    tensors, slopes = draw(dtype=torch.float32), torch.rand(4, requires_grad=True)
    call: Callable[..., Any] = lambda *t: attend(
        list(t), name, lambda s, b, h, q, kv: s - slopes[h] * (q - kv)
    )
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors)
    expected = call(*tensors)
    assert torch.equal(found, expected)
    weights = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, [*tensors, slopes], weights),
        torch.autograd.grad(expected, [*tensors, slopes], weights),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_other_ways_of_a_call(name: str) -> None:
    """Variants, flex without keys, tensors without data, a second derivative."""
    tensors = draw(dtype=torch.float32)
    plain_call = flex_attention(*tensors, None, causal(), enable_gqa=True, normalization=name)
    options = {"enable_gqa": True, "normalization": name}
    assert torch.equal(Variant(None, causal())(*tensors, **options), plain_call)
    assert torch.equal(flex.flex_attention(*tensors, None, causal(), **options), plain_call)
    query, key, value = tensors
    nothing = flex.flex_attention(query, key[:, :, :0], value[:, :, :0], **options)
    assert torch.equal(nothing, torch.zeros(2, 4, 40, 16))
    with pytest.raises(OptionError, match="return_lse asks for"):
        flex.flex_attention(query, key[:, :, :0], value[:, :, :0], return_lse=True, **options)
    out = attend([t.detach().to("meta") for t in tensors], name)
    assert out.is_meta
    (gradient,) = torch.autograd.grad(attend(tensors, name).sum(), query, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        torch.autograd.grad(gradient.sum(), key)
