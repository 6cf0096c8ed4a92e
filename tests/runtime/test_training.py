"""Check attention in training: autocast, checkpointing, gradient accumulation, shared tensors."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attnkit
from attnkit import flex_attention, masks

BF16 = torch.bfloat16
KERNELS = sys.platform == "linux" and importlib.util.find_spec("cutlass") is not None
TEMPLATES = [
    "cpu",
    pytest.param(
        "emulate", marks=pytest.mark.skipif(not KERNELS, reason="the DSL exists for Linux only")
    ),
]


@pytest.fixture(params=TEMPLATES)
def backend(request: pytest.FixtureRequest) -> str:
    """Return the name of each backend under test: torch operators, then emulated Hopper kernels."""
    return str(request.param)


def inputs(dtype: torch.dtype = BF16) -> list[Tensor]:
    return [torch.randn(1, 2, 70, 64).to(dtype).requires_grad_() for _ in range(3)]


def attention(backend: str) -> Callable[..., Tensor]:
    """Return a function for deterministic causal attention with a gain per head."""
    gains = torch.tensor([0.5, 2.0])
    mod = lambda s, b, h, q, kv: s * gains[h]
    return lambda q, k, v: flex_attention(
        q, k, v, mod, masks.causal(), backend=backend, deterministic=True
    )


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_autocast_casts_query_key_and_value(backend: str) -> None:
    call, wide = attention(backend), inputs(torch.float32)
    by_hand = [t.to(BF16) for t in wide]
    expected = call(*by_hand)
    grad = torch.randn_like(expected)
    with torch.autocast("cpu", BF16):
        found = call(*wide)
        mixed = call(by_hand[0], *wide[1:])  # of dtypes that would not fit together
    assert found.dtype == BF16
    assert torch.equal(found, expected)
    assert torch.equal(mixed, expected)
    gradients = torch.autograd.grad(found, wide, grad)
    assert all(g.dtype == torch.float32 for g in gradients)
    assert same(gradients, torch.autograd.grad(expected, wide, grad))


def test_autocast_around_the_backward_changes_nothing(backend: str) -> None:
    call, made = attention(backend), inputs()
    out = call(*made)
    grad = torch.randn_like(out)
    plain = torch.autograd.grad(out, made, grad, retain_graph=True)
    with torch.autocast("cpu", BF16):
        assert same(torch.autograd.grad(out, made, grad), plain)


def test_autocast_leaves_other_dtypes_and_the_inside_alone() -> None:
    wide = [t.double() for t in inputs(torch.float32)]
    for backend in ("cpu", "eager"):
        expected = flex_attention(*wide, backend=backend)
        with torch.autocast("cpu", BF16):
            assert torch.equal(flex_attention(*wide, backend=backend), expected)
        narrow = [t.to(BF16) for t in wide]
        expected = flex_attention(*narrow, backend=backend)
        with torch.autocast("cpu", BF16):  # would round the scores
            assert torch.equal(flex_attention(*narrow, backend=backend), expected)
        with torch.autocast("cpu", BF16, enabled=False):
            assert flex_attention(*wide, backend=backend).dtype == torch.float64


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(backend: str, reentrant: bool) -> None:
    call, made = attention(backend), inputs()
    grad = torch.randn(1, 2, 70, 64).to(BF16)
    found = []
    for function in (call, lambda *qkv: checkpoint(call, *qkv, use_reentrant=reentrant)):
        fresh = [t.detach().requires_grad_() for t in made]
        out = function(*fresh)
        out.backward(grad)
        found.append((out, *(t.grad for t in fresh)))
    assert same(*found)


@pytest.mark.parametrize("changed", [False, True])
def test_checkpointing_of_a_mask_that_the_function_makes(changed: bool) -> None:
    """The recomputation makes the table again; it is compared with the one that was freed."""
    made, divisor = inputs(torch.float32), [15]

    def call(*qkv: Tensor) -> Tensor:
        mask = masks.causal() & masks.document(torch.arange(70) // divisor[0])
        out: Tensor = flex_attention(*qkv, block_mask=mask, backend="cpu")
        return out

    expected = torch.autograd.grad(call(*made).sum(), made)
    out = checkpoint(call, *made, use_reentrant=False)
    divisor[0] += changed
    if changed:
        with pytest.raises(attnkit.StaleDataError, match="between a forward and its backward"):
            torch.autograd.grad(out.sum(), made)
    else:
        assert same(torch.autograd.grad(out.sum(), made), expected)


def test_gradients_accumulate(backend: str) -> None:
    call, made = attention(backend), inputs()
    grad = torch.randn(1, 2, 70, 64).to(BF16)
    for _ in range(2):
        call(*made).backward(grad)
    once = torch.autograd.grad(call(*made), made, grad)
    assert same([t.grad for t in made], [g + g for g in once])


def test_one_tensor_in_several_places(backend: str) -> None:
    call, (shared, other, _) = attention(backend), inputs()
    grad = torch.randn(1, 2, 70, 64).to(BF16)
    for places in ((0, 0, 1), (0, 1, 0), (0, 0, 0)):
        tensors = [shared if p == 0 else other for p in places]
        together = torch.autograd.grad(call(*tensors), shared, grad)[0]
        apart = [t.detach().clone().requires_grad_() for t in tensors]
        parts = torch.autograd.grad(call(*apart), apart, grad)
        expected = sum(g.double() for g, p in zip(parts, places, strict=True) if p == 0)
        allowed = 2 * torch.finfo(BF16).eps * sum(g.double().abs() for g in parts)
        assert ((together - expected).abs() <= allowed).all()


def test_a_view_of_one_tensor_in_all_places(backend: str) -> None:
    """Query, key and value may be views of one packed projection [B, S, 3, H, D]."""
    packed = torch.randn(1, 70, 3, 2, 64).to(BF16).requires_grad_()
    call, grad = attention(backend), torch.randn(1, 2, 70, 64).to(BF16)
    out = call(*packed.permute(2, 0, 3, 1, 4))
    assert out.transpose(1, 2).is_contiguous()
    (found,) = torch.autograd.grad(out, packed, grad)
    apart = [t.detach().contiguous().requires_grad_() for t in packed.permute(2, 0, 3, 1, 4)]
    expected = torch.autograd.grad(call(*apart), apart, grad)
    assert same(found.permute(2, 0, 3, 1, 4), expected)


def test_second_derivatives_are_refused(backend: str) -> None:
    call, made = attention(backend), inputs()
    (first,) = torch.autograd.grad(call(*made).float().sum(), made[0], create_graph=True)
    with pytest.raises(attnkit.UnsupportedError, match="no second derivative"):
        first.float().sum().backward()


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_transforms_are_refused_or_dense(transform: str) -> None:
    made = [t.detach().float() for t in inputs()]

    def loss(backend: str) -> Callable[..., Any]:
        return lambda q: flex_attention(q, *made[1:], block_mask=masks.causal(), backend=backend)

    if transform == "vmap":
        several = torch.stack(made[:1] * 2)
        with pytest.raises(
            attnkit.UnsupportedError, match=r"no rule for torch\.func\.vmap; give it"
        ):
            torch.func.vmap(loss("cpu"))(several)
        found = torch.func.vmap(loss("eager"))(several)[1]
        torch.testing.assert_close(found, loss("cpu")(made[0]))
        return
    with pytest.raises(attnkit.UnsupportedError, match=r"torch\.func\.grad; take torch"):
        torch.func.grad(lambda q: loss("cpu")(q).sum())(made[0])
    found = torch.func.grad(lambda q: loss("eager")(q).sum())(made[0])
    query = made[0].requires_grad_()
    (expected,) = torch.autograd.grad(loss("cpu")(query).sum(), query)
    torch.testing.assert_close(found, expected)
