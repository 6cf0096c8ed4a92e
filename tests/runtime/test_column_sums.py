"""Compare the column sums of `AuxRequest` with dense float64 attention."""

from __future__ import annotations

import contextlib
import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import attnkit
from attnkit import AuxRequest, Variant, flex, flex_attention

F64 = torch.float64
BACKENDS = ("cpu", "eager")
REQUEST = AuxRequest(column_sums=True)


def late(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Keep no key in the first rows, and none at all in head 2."""
    return (kv <= q - 5) & (h != 2)


def halved(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score / 2 - 0.125 * h


def draw(seed: int = 0, dtype: torch.dtype = F64, kv_batch: int = 2) -> list[Tensor]:
    """Return query [2, 4, 40, 16], key and value [2 or 1, 2, 50, 16]."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(2, 4, 40, 16), (kv_batch, 2, 50, 16), (kv_batch, 2, 50, 16)]
    tensors = [torch.randn(s, generator=random, dtype=F64) for s in shapes]
    return [t.to(dtype).requires_grad_() for t in tensors]


def kept() -> Tensor:
    """Return what `late` keeps, [4, 40, 50]."""
    rows, columns = torch.arange(40)[:, None], torch.arange(50)
    return (columns <= rows - 5) & (torch.arange(4) != 2)[:, None, None]


def dense(scores: Tensor, sink: Tensor | None = None) -> Tensor:
    """Return the column sums of the softmax of masked scores [B, Hq, Sq, Skv]."""
    keys = scores.shape[-1]
    empty = (scores == -math.inf).all(-1, keepdim=True)
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(*scores.shape[:3], 1)], -1)
    p = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return p[..., :keys].sum(2)


def masked_scores(tensors: list[Tensor]) -> Tensor:
    query, key = tensors[:2]
    scores = query @ key.repeat_interleave(2, 1).mT / 4
    scores = scores / 2 - 0.125 * torch.arange(4)[:, None, None]
    return scores.masked_fill(~kept(), -math.inf)


def attend(tensors: list[Tensor], **options: Any) -> Any:
    asked = {"enable_gqa": True, "return_aux": REQUEST, "block_mask": late}
    return flex_attention(*tensors, halved, **(asked | options))


@pytest.mark.parametrize("kv_batch", [2, 1])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_and_gradients(backend: str, with_sink: bool, kv_batch: int) -> None:
    tensors = draw(kv_batch=kv_batch)
    sink = torch.randn(4, dtype=F64).requires_grad_() if with_sink else None
    learned = [*tensors[:2], *([] if sink is None else [sink])]
    expected = dense(masked_scores(tensors), sink)
    weight = torch.randn_like(expected)
    exact = torch.autograd.grad(expected, learned, weight)
    for _ in range(2):  # the slow path, the call cache
        _, aux = attend(tensors, backend=backend, sink=sink)
        assert aux[:4] == (None,) * 4
        assert aux.column_sums.shape == (2, 4, 50)
        gradients = torch.autograd.grad(aux.column_sums, learned, weight)
        for ours, true in zip((aux.column_sums, *gradients), (expected, *exact), strict=True):
            torch.testing.assert_close(ours, true, rtol=1e-11, atol=1e-12)
    assert bool((aux.column_sums[:, 2] == 0).all())  # fully masked rows add 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_captured_tensors_add_up_with_those_of_the_output(backend: str) -> None:
    tensors, table = draw(), torch.randn(4, 50, dtype=F64, requires_grad=True)
    learned = [*tensors, table]
    out, aux = flex_attention(
        *tensors,
        lambda s, b, h, q, kv: torch.tanh(s) * 3 + table[h, kv],
        late,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True, entropy=True, column_sums=True),
        backend=backend,
    )
    loss = out.square().sum() + aux.column_sums.square().sum() + aux.entropy.sum()
    found = torch.autograd.grad(loss, learned)

    query, key, value = tensors
    scores = (query @ key.repeat_interleave(2, 1).mT / 4).tanh() * 3 + table[:, None]
    empty = ~kept().any(-1, keepdim=True)
    scores = scores.masked_fill(~kept(), -math.inf)
    p = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    loss = (p @ value.repeat_interleave(2, 1)).square().sum() + p.sum(2).square().sum()
    loss = loss - torch.where(p > 0, p * torch.where(p > 0, p, 1.0).log(), 0.0).sum()
    for ours, true in zip(found, torch.autograd.grad(loss, learned), strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("normalization", ["sigmoid", "none"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_without_a_softmax(backend: str, normalization: str) -> None:
    tensors = draw()
    scores = masked_scores(tensors)
    if normalization == "sigmoid":
        expected = scores.sigmoid().sum(2)
    else:
        expected = torch.where(kept(), scores, 0.0).sum(2)
    weight = torch.randn_like(expected)
    _, aux = attend(tensors, backend=backend, normalization=normalization)
    found = torch.autograd.grad(aux.column_sums, tensors[:2], weight)
    exact = torch.autograd.grad(expected, tensors[:2], weight)
    for ours, true in zip((aux.column_sums, *found), (expected, *exact), strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-11, atol=1e-11)


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
            return_aux=REQUEST,
            backend=backend,
        )
        return out, aux.column_sums

    torch.autograd.gradcheck(call, tensors)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_at_most_twice_those_of_dense_attention(
    dtype: torch.dtype, backend: str
) -> None:
    tensors = draw(dtype=dtype)
    weight = torch.randn(2, 4, 50, dtype=F64)

    def run(tensors: list[Tensor]) -> list[Tensor]:
        query, key = tensors[:2]
        scores = (query @ key.repeat_interleave(2, 1).mT).to(weight_of(query)) / 4
        scores = scores / 2 - 0.125 * torch.arange(4)[:, None, None]
        sums = dense(scores.masked_fill(~kept(), -math.inf))
        return [sums, *torch.autograd.grad(sums, tensors[:2], weight.to(sums.dtype))]

    def weight_of(t: Tensor) -> torch.dtype:
        return F64 if t.dtype == F64 else torch.float32

    exact = run([t.detach().double().requires_grad_() for t in tensors])
    _, aux = attend(tensors, backend=backend)
    assert aux.column_sums.dtype == torch.float32
    found = torch.autograd.grad(aux.column_sums, tensors[:2], weight.float())
    ulp = torch.finfo(dtype).eps
    for ours, true, other in zip((aux.column_sums, *found), exact, run(tensors), strict=True):
        error, allowed = (ours.double() - true).abs().max(), (other.double() - true).abs().max()
        rounding = ulp if ours.dtype == dtype else torch.finfo(torch.float32).eps
        assert error <= 2 * allowed + 2 * rounding * true.abs().max()


def test_rows_longer_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cpu template computes long rows in parts."""
    for module in ("forward", "column_sums"):
        name = f"attnkit.templates.cpu.{module}"
        monkeypatch.setattr(sys.modules[name], "SCORES", 4 * 40 * 16)
    tensors, sink = draw(), torch.randn(4, dtype=F64).requires_grad_()
    for own in (None, sink):
        learned = [*tensors[:2], *([] if own is None else [own])]
        expected = dense(masked_scores(tensors), own)
        weight = torch.randn_like(expected)
        _, aux = attend(tensors, backend="cpu", sink=own)
        found = torch.autograd.grad(aux.column_sums, learned, weight)
        exact = torch.autograd.grad(expected, learned, weight)
        for ours, true in zip((aux.column_sums, *found), (expected, *exact), strict=True):
            torch.testing.assert_close(ours, true, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_does_not_change_them(backend: str) -> None:
    tensors = draw()
    _, plain = attend(tensors, backend=backend)
    torch.manual_seed(1)
    _, aux = attend(tensors, backend=backend, dropout_p=0.5)
    assert torch.equal(aux.column_sums, plain.column_sums)
    found, exact = (
        torch.autograd.grad(x.column_sums.square().sum(), tensors[:2]) for x in (aux, plain)
    )
    assert all(map(torch.equal, found, exact))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_call_is_one_graph(dynamic: bool) -> None:
    torch._dynamo.reset()
    tensors, sink = draw(dtype=torch.float32), torch.randn(4, requires_grad=True)

    def call(*t: Tensor) -> Any:
        request = AuxRequest(lse=True, column_sums=True)
        out, aux = attend(list(t[:3]), return_aux=request, sink=t[3])
        return out, aux.lse, aux.column_sums

    learned = [*tensors, sink]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    found, expected = compiled(*learned), call(*learned)
    weights = [torch.randn_like(t) for t in found]
    for ours, theirs in zip(
        (*found, *torch.autograd.grad(found, learned, weights)),
        (*expected, *torch.autograd.grad(expected, learned, weights)),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    meta = call(*(t.detach().to("meta") for t in learned))
    assert meta[2].shape == (2, 4, 50)


def test_the_operators_keep_the_rules_of_torch() -> None:
    """Schemas, fake results, autograd registration and gradients, by torch's own check."""
    seen: list[Any] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "column_sums" in str(func):
                seen.append((func, args))
            return func(*args, **(kwargs or {}))

    tensors, sink = draw(), torch.randn(4, dtype=F64, requires_grad=True)
    with Record():
        _, aux = attend(tensors, sink=sink)
        aux.column_sums.sum().backward()
    assert len(seen) == 2
    for operator, arguments in seen:
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


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
            out, aux = attend(tensors)
            loss = out.square().sum() + aux.column_sums.square().sum()
            results.append((aux.column_sums, *torch.autograd.grad(loss, tensors)))
    assert all(map(torch.equal, *results))


def test_every_door_returns_them() -> None:
    tensors = draw(dtype=torch.float32)
    query, key, value = (t.detach() for t in tensors)
    options: dict[str, Any] = {"enable_gqa": True, "return_aux": REQUEST}
    _, aux = flex_attention(query, key, value, halved, late, **options)
    _, other = flex.flex_attention(query, key, value, halved, late, **options)
    assert isinstance(other, attnkit.AuxOutput)
    assert torch.equal(aux.column_sums, other.column_sums)
    _, third = Variant(halved, late)(query, key, value, **options)
    assert torch.equal(aux.column_sums, third.column_sums)
    assert not aux.column_sums.requires_grad
    _, none = flex.flex_attention(query[:, :, :0], key, value, **options)
    assert none.column_sums.shape == (2, 4, 50)
    assert bool((none.column_sums == 0).all())
    mask = attnkit.create_block_mask(late, 1, 4, 40, 50, BLOCK_SIZE=(16, 32))
    _, listed = flex_attention(query, key, value, halved, mask.to_flex(), **options)
    torch.testing.assert_close(listed.column_sums, aux.column_sums, rtol=1e-6, atol=1e-6)


def test_the_first_derivative_is_the_last() -> None:
    tensors = draw()
    _, aux = attend(tensors, backend="cpu")
    (gradient,) = torch.autograd.grad(aux.column_sums.sum(), tensors[:1], create_graph=True)
    with pytest.raises(attnkit.UnsupportedError, match="no second derivative"):
        gradient.sum().backward()


def test_captured_data_must_not_change_before_the_backward() -> None:
    tensors, ids = draw(), torch.arange(50) // 8
    same = lambda b, h, q, kv: ids[q] == ids[kv]
    _, aux = attend(tensors, block_mask=same)
    ids.numpy()[:] = 0  # which no version counter sees
    with pytest.raises(attnkit.StaleDataError):
        aux.column_sums.sum().backward()


def test_tiles_of_inference_mode_serve_a_training_step() -> None:
    tensors = draw()
    mask = lambda b, h, q, kv: kv <= q + 7
    with torch.inference_mode():
        attend([t.detach() for t in tensors], block_mask=mask, backend="cpu")
    _, aux = attend(tensors, block_mask=mask, backend="cpu")
    aux.column_sums.square().sum().backward()
    assert tensors[0].grad is not None
    with torch.inference_mode():
        captured = torch.arange(50)
    same = lambda b, h, q, kv: captured[kv] <= q
    with pytest.raises(attnkit.UnsupportedError, match="inference_mode"):
        attend(tensors, block_mask=same, backend="cpu")


@given(
    seed=st.integers(0, 99),
    shift=st.floats(-50, 50),
    width=st.integers(0, 60),
    backend=st.sampled_from(BACKENDS),
)
def test_they_sum_to_the_number_of_rows_with_keys(
    seed: int, shift: float, width: int, backend: str
) -> None:
    """Each row with a key gives away a weight of 1, and keys that no row keeps get none."""
    tensors = [t.detach() for t in draw(seed)]
    near = lambda b, h, q, kv: (kv <= q - 3) & (q - kv <= width)
    _, aux = flex_attention(
        *tensors,
        lambda s, b, h, q, kv: s * 3 + shift,
        near,
        enable_gqa=True,
        return_aux=REQUEST,
        backend=backend,
    )
    rows, columns = torch.arange(40)[:, None], torch.arange(50)
    keep = (columns <= rows - 3) & (rows - columns <= width)
    total = keep.any(1).sum().double().expand(2, 4)
    torch.testing.assert_close(aux.column_sums.sum(-1), total, rtol=1e-11, atol=1e-11)
    assert bool((aux.column_sums >= 0).all())
    assert bool((aux.column_sums[..., ~keep.any(0)] == 0).all())
