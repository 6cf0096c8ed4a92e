"""Compare softmax1 with its formula in dense float64 attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import attnkit
from attnkit import Variant, flex_attention
from attnkit.errors import ConflictError, OptionError
from attnkit.masks import causal
from attnkit.runtime import normalization, torch_ops
from attnkit.testing import Case, Limits, cases, check_case

F64 = torch.float64
BACKENDS = ("cpu", "eager")


def late(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Keep no key in the first rows."""
    return kv <= q - 5


def draw(seed: int = 0, dtype: torch.dtype = F64) -> list[Tensor]:
    """Return query [2, 4, 40, 16], key and value [2, 2, 50, 16]."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(2, 4, 40, 16), (2, 2, 50, 16), (2, 2, 50, 16)]
    tensors = [torch.randn(s, generator=random, dtype=F64) for s in shapes]
    return [t.to(dtype).requires_grad_() for t in tensors]


def attend(tensors: list[Tensor], score_mod: Any = None, **options: Any) -> Any:
    asked = {"enable_gqa": True, "return_lse": True, "normalization": "softmax1"}
    return flex_attention(*tensors, score_mod, late, **(asked | options))


def dense(tensors: list[Tensor], slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Compute out and LSE of softmax1: exp(x) / (1 + sum(exp(x)))."""
    query, key, value = tensors
    key, value = (t.repeat_interleave(2, 1) for t in (key, value))
    rows, columns = torch.arange(40)[:, None], torch.arange(50)
    scores = query @ key.mT / 4 - slopes[:, None, None] * (rows - columns)
    scores = scores.masked_fill(columns > rows - 5, -math.inf)
    total = 1 + scores.exp().sum(-1)
    return scores.exp() / total[..., None] @ value, total.log()


@pytest.mark.parametrize("backend", BACKENDS)
def test_softmax1_has_one_more_in_the_denominator(backend: str) -> None:
    tensors = draw()
    slopes = torch.rand(4, dtype=F64).requires_grad_()
    learned = [*tensors, slopes]
    expected = dense(tensors, slopes)
    weights = [torch.randn_like(t) for t in expected]
    exact = torch.autograd.grad(expected, learned, weights)
    mod = lambda s, b, h, q, kv: s - slopes[h] * (q - kv)
    for _ in range(3):  # the slow path, the call cache, the fast path
        found = attend(tensors, mod, backend=backend)
        gradients = torch.autograd.grad(found, learned, weights)
        for ours, true in zip((*found, *gradients), (*expected, *exact), strict=True):
            torch.testing.assert_close(ours, true, rtol=1e-11, atol=1e-11)


def test_variants_take_it_too() -> None:
    tensors = draw(dtype=torch.float32)
    query, key, value = tensors
    variant = Variant(None, causal())
    found = variant(query, key, value, enable_gqa=True, normalization="softmax1")
    sink = torch.zeros(4)
    assert torch.equal(found, variant(query, key, value, enable_gqa=True, sink=sink))
    assert not torch.equal(found, variant(query, key, value, enable_gqa=True))


@pytest.mark.parametrize("backend", [None, "cpu"])
def test_softmax_is_the_default(backend: str | None) -> None:
    tensors = draw(dtype=torch.float32)
    options = {} if backend is None else {"backend": backend}
    plain = attend(tensors, normalization="softmax", **options)
    query, key, value = tensors
    default = flex_attention(query, key, value, None, late, enable_gqa=True, return_lse=True)
    assert all(map(torch.equal, plain, default))
    sink = torch.randn(4)
    assert all(
        map(
            torch.equal,
            attend(tensors, normalization="softmax", sink=sink),
            flex_attention(*tensors, None, late, enable_gqa=True, return_lse=True, sink=sink),
        )
    )


@pytest.mark.parametrize("wrong", ["Softmax", "softmax2", "", None, 1, True, torch.zeros(2)])
def test_unknown_names(wrong: Any) -> None:
    for _ in range(2):
        with pytest.raises(OptionError, match="normalization must be one of 'softmax', 'softmax1'"):
            attend(draw(), normalization=wrong)


def test_a_sink_beside_it_is_an_error_with_a_way_out() -> None:
    tensors, sink = draw(dtype=torch.float32), torch.randn(4)
    with pytest.raises(ConflictError, match="softmax1 is itself a sink of 0"):
        attend(tensors, sink=sink)
    both, _ = attend(tensors, normalization="softmax", sink=torch.nn.functional.softplus(sink))
    query, key, value = tensors
    scores = (query @ key.repeat_interleave(2, 1).mT / 4).double()
    scores = scores.masked_fill(torch.arange(50) > torch.arange(40)[:, None] - 5, -math.inf)
    total = scores.exp().sum(-1) + sink.double().exp()[:, None] + 1
    exact = (scores.exp() / total[..., None]) @ value.repeat_interleave(2, 1).double()
    torch.testing.assert_close(both.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("query", [None, 3, torch.zeros(4, 16), torch.zeros(())])
def test_the_query_is_still_checked(query: Any) -> None:
    _, key, value = draw()
    with pytest.raises((attnkit.ArgumentError, attnkit.ShapeError), match="query"):
        flex_attention(query, key, value, normalization="softmax1")


def test_compiles_to_one_graph() -> None:
    torch._dynamo.reset()
    tensors, slopes = draw(dtype=torch.float32), torch.rand(4, requires_grad=True)
    call: Callable[..., Any] = lambda *t: attend(
        list(t), lambda s, b, h, q, kv: s - slopes[h] * (q - kv)
    )
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors)
    expected = call(*tensors)
    weights = [torch.randn_like(t) for t in found]
    for ours, theirs in zip(
        (*found, *torch.autograd.grad(found, [*tensors, slopes], weights)),
        (*expected, *torch.autograd.grad(expected, [*tensors, slopes], weights)),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_the_cached_zeros_outlive_every_mode() -> None:
    """A sink that a mode creates is not given to a later call outside of it."""
    tensors = draw(dtype=torch.float32)
    expected = attend(tensors)
    attnkit.clear_caches()
    plain = [t.detach() for t in tensors]
    with torch.inference_mode():
        attend(plain)
    with FakeTensorMode() as mode:
        out, _ = attend([mode.from_tensor(t) for t in plain])
        assert out.shape == (2, 4, 40, 16)
    out, lse = attend([t.detach().to("meta") for t in tensors])
    assert out.is_meta
    assert lse.is_meta
    with torch.device("meta"):
        found = attend(tensors)
    assert all(map(torch.equal, found, expected))
    torch.autograd.grad(attend(tensors)[0].sum(), tensors)


def test_repeated_calls_share_one_sink_and_relaunch(monkeypatch: pytest.MonkeyPatch) -> None:
    attnkit.clear_caches()
    tensors = draw(dtype=torch.float32)
    for _ in range(3):
        attend(tensors, backend="cpu")
    assert len(normalization._zeros) == 1

    def unprepared(*_: Any) -> None:
        raise AssertionError("a repeated call takes the fast path")

    monkeypatch.setattr(torch_ops, "run", unprepared)
    attend(tensors, backend="cpu")


@given(cases(Limits(q_len=(1, 20), kv_len=(1, 20))).filter(lambda c: c.normalization != "softmax"))
@settings(max_examples=5)
def test_what_check_variant_draws_is_exact(case: Case) -> None:
    report = check_case(Variant(lambda s, b, h, q, kv: s + 0.1 * q, late), case)
    assert report.ok, str(report)


def test_a_case_of_softmax1_is_checked() -> None:
    case = Case(q_len=20, kv_len=33, heads=4, kv_heads=2, normalization="softmax1")
    assert "softmax1" in str(case)
    slopes = torch.rand(4, requires_grad=True)
    report = check_case(Variant(lambda s, b, h, q, kv: s * slopes[h], late), case)
    assert report.ok, str(report)
    with pytest.raises(OptionError, match="takes no sink"):
        Case(q_len=20, kv_len=33, sink=True, normalization="softmax1")
    with pytest.raises(OptionError, match="normalization must be"):
        Case(q_len=20, kv_len=33, normalization="softmax3")
