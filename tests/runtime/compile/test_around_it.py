"""Check compiled calls under what torch can put around them: transforms, shapes, autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

import attnkit
from attnkit import flex_attention, masks


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)
        self.slopes = nn.Parameter(torch.randn(2))
        self.register_buffer("ids", torch.arange(128) // 23)

    def mod(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + self.slopes[h] * (q - kv)

    def mask(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (self.ids[q] == self.ids[kv]) & (q >= kv)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x)
        out: Tensor = flex_attention(y, y, y, self.mod, self.mask)
        return out


def inputs(batch: int = 2, length: int = 64) -> Tensor:
    return torch.randn(batch, 2, length, 16)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, **{"fullgraph": True, "backend": "aot_eager"} | options)


# --- shapes


def test_batches_and_lengths_that_change() -> None:
    layer, counter = Layer(), CompileCounterWithBackend("aot_eager")
    call = compiled(layer, backend=counter)
    for batch, length in ((2, 64), (3, 64), (5, 100), (7, 31), (4, 90)):
        x = inputs(batch, length)
        torch.testing.assert_close(call(x), layer(x))
    assert counter.frame_count == 3  # static, any batch, any batch and length


@pytest.mark.parametrize(
    "mark", [torch._dynamo.mark_dynamic, torch._dynamo.decorators.mark_unbacked]
)
def test_lengths_that_are_marked(mark: Any) -> None:
    layer, counter = Layer(), CompileCounterWithBackend("aot_eager")
    call = compiled(layer, backend=counter)
    for length in (64, 100, 31):
        x = inputs(length=length)
        mark(x, 2)
        torch.testing.assert_close(call(x), layer(x))
    assert counter.frame_count == 1


# --- parameters and gradients


def test_functional_call() -> None:
    layer, x = Layer(), inputs()
    parameters = {name: p.detach() * 2 for name, p in layer.named_parameters()}
    call = lambda own, x: torch.func.functional_call(layer, own, (x,))
    torch.testing.assert_close(compiled(call)(parameters, x), call(parameters, x))


def test_compiled_autograd() -> None:
    layer, x = Layer(), inputs().requires_grad_()
    tensors = x, *layer.parameters()
    expected = torch.autograd.grad(layer(x).sum(), tensors)
    call = compiled(layer)
    whole = torch.compile(backend="aot_eager", fullgraph=True)
    with compiled_autograd._enable(whole):
        call(x).sum().backward()
    for t, own in zip(tensors, expected, strict=True):
        torch.testing.assert_close(t.grad, own)


# --- transforms that the operator would drop


def attend(query: Tensor) -> Tensor:
    out: Tensor = flex_attention(query, query, query, None, masks.causal())
    return out


def scaled(one: Tensor, factors: Tensor) -> Tensor:
    mod = lambda s, b, h, q, kv: s * factors[h]
    out: Tensor = flex_attention(one[None], one[None], one[None], mod)
    return out


DROPPED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "jvp": (lambda x: torch.func.jvp(attend, (x,), (x,))[1], "no forward-mode derivative"),
    "grad": (lambda x: torch.func.grad(lambda t: attend(t).sum())(x), r"torch\.func\.grad"),
    "vjp": (lambda x: torch.func.vjp(attend, x)[1](x), r"torch\.func\.grad"),
    "vmap": (lambda x: torch.func.vmap(scaled)(x, torch.randn(2, 2)), r"torch\.func\.vmap"),
}


@pytest.mark.parametrize("name", DROPPED)
def test_transforms_are_refused(name: str) -> None:
    """jvp gave zeros; the others ended in errors of torch."""
    call, text = DROPPED[name]
    with pytest.raises(torch._dynamo.exc.UserError, match=text):
        compiled(call)(inputs())


def test_forward_mode_is_refused() -> None:
    def call(x: Tensor) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(attend(forward_ad.make_dual(x, x))).tangent

    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        with pytest.raises(attnkit.UnsupportedError, match="no forward-mode derivative"):
            torch.compile(call, backend=backend)(inputs())


def test_vmap_over_query_key_and_value_alone() -> None:
    x = inputs()
    each = lambda x: torch.func.vmap(lambda t: attend(t[None])[0])(x)
    torch.testing.assert_close(compiled(each)(x), attend(x))
