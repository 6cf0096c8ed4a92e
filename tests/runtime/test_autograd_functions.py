"""Check score_mods that change gradients: autograd.Function, detach and torch.no_grad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from attnkit import flex_attention
from attnkit.errors import TraceError
from attnkit.tracing.tracer import trace
from tests.runtime.by_vmap import B, D, H, Made, S, assert_same_by_vmap, dense


class Rounded(torch.autograd.Function):
    """Rounds, and passes the gradient on (a straight-through estimator)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Any) -> Any:
        return torch.round(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


class Tanh(torch.autograd.Function):
    """Computes tanh with a backward that reads the saved input and the saved output."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Any) -> Any:
        return torch.tanh(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, y = ctx.saved_tensors
        return torch.where(x > 0, grad * (1 - y * y), -(grad - grad * y**2) / 2 + 0)


class Mixed(torch.autograd.Function):
    """Multiplies two numbers and adds a third, with gradients that are not the product's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Any, b: Any, shift: Any) -> Any:
        return a * b + shift

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        a, b, ctx.shift = inputs
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        a, b = ctx.saved_tensors
        return grad * b * 2, grad * a * ctx.shift if ctx.needs_input_grad[1] else None, None


class Steps(torch.autograd.Function):
    """Returns two numbers, of which the first is marked as not differentiable."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Any) -> Any:
        return x * x, torch.sin(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[0])
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * torch.cos(x) * 3


def table() -> nn.Parameter:
    return nn.Parameter(torch.randn(H, S))


def straight_through() -> Made:
    bias = table()
    return lambda s, b, h, q, kv: Rounded.apply(s * 3) / 3 + Rounded.apply(bias[h, kv]), [bias]


def of_saved_tensors() -> Made:
    return lambda s, b, h, q, kv: 2 * Tanh.apply(s / 2), []


def of_two_numbers() -> Made:
    bias = table()
    return lambda s, b, h, q, kv: Mixed.apply(s, bias[h, q], 2.5), [bias]


def of_one_number_twice() -> Made:
    return lambda s, b, h, q, kv: Mixed.apply(s, s, -0.5), []


def in_a_chain() -> Made:
    bias = table()
    return lambda s, b, h, q, kv: Rounded.apply(Tanh.apply(Mixed.apply(s, bias[h, q], 1))), [bias]


def not_differentiable() -> Made:
    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        square, sine = Steps.apply(s)
        return s + square / 4 + sine

    return mod, []


def on_a_captured_tensor() -> Made:
    bias = table()
    return lambda s, b, h, q, kv: s + Tanh.apply(bias)[h, q], [bias]


def detached() -> Made:
    bias = table()
    return (
        lambda s, b, h, q, kv: (
            s * s.detach() + bias[h].detach()[kv] * bias[h, q] - bias[h, q].detach()
        ),
        [bias],
    )


def without_grad() -> Made:
    bias = table()

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        with torch.no_grad():
            factor = torch.sigmoid(s * bias[h, q])
            row = bias[h]
        with torch.no_grad(), torch.enable_grad():
            shift = bias[h, kv] * 2
        return s * factor + row[q] + shift

    return mod, [bias]


MODS: dict[str, Callable[[], Made]] = {
    made.__name__: made
    for made in (
        straight_through,
        of_saved_tensors,
        of_two_numbers,
        of_one_number_twice,
        in_a_chain,
        not_differentiable,
        on_a_captured_tensor,
        detached,
        without_grad,
    )
}


@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("name", MODS)
def test_value_and_all_gradients_are_those_of_vmap(name: str, backend: Any) -> None:
    assert_same_by_vmap(MODS[name], backend)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", [name for name in MODS if name != "on_a_captured_tensor"])
def test_the_trace_does_not_depend_on_the_mode_around_it(name: str, around: Any) -> None:
    mod, _ = MODS[name]()
    expected = trace(mod, "score").root
    with around():
        assert trace(mod, "score").root is expected


# Dynamo refuses a function that takes one tensor twice
NOT_COMPILED = {"of_one_number_twice", "on_a_captured_tensor"}


@pytest.mark.parametrize("name", [name for name in MODS if name not in NOT_COMPILED])
def test_compiled_calls_have_the_same_gradients(name: str) -> None:
    torch._dynamo.reset()
    mod, learned = MODS[name]()
    inputs = [torch.randn(B, H, S, D).requires_grad_() for _ in range(3)]

    def call(*qkv: Any) -> Any:
        return flex_attention(*qkv, mod)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    weight, found = torch.randn(B, H, S, D), []
    for function in (call, compiled):
        out = function(*inputs)
        grads = torch.autograd.grad(out, [*inputs, *learned], weight, allow_unused=True)
        found.append((out, *(g for g in grads if g is not None)))
    torch.testing.assert_close(*found)


def test_a_compiled_call_refuses_a_function_of_captured_tensors() -> None:
    torch._dynamo.reset()
    mod, _ = on_a_captured_tensor()
    query = torch.randn(1, H, S, D)
    compiled = torch.compile(
        lambda x: flex_attention(x, x, x, mod), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(Exception, match="call it outside of the score_mod and capture its result"):
        compiled(query)


class MarkedInput(torch.autograd.Function):
    """Marks an input as not differentiable; Dynamo cannot trace the backward of that."""

    @staticmethod
    def forward(a: Any, kept: Any) -> Any:
        return torch.where(kept, a, -torch.inf)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, None


def test_a_compiled_call_without_gradients_traces_no_backward() -> None:
    torch._dynamo.reset()

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return MarkedInput.apply(score, q <= kv)

    query = torch.randn(1, H, S, D)
    compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(query, query, query, mod), flex_attention(query, query, query, mod)
    )


class Old(torch.autograd.Function):
    """Has the older form of forward, which takes ctx."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y = torch.sin(x)
        ctx.save_for_backward(y)
        ctx.y = y
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (y,) = ctx.saved_tensors
        return grad * y * ctx.y


def test_the_older_form_and_a_returned_input() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * 2

    query = torch.randn(B, H, S, D, dtype=torch.float64, requires_grad=True)
    for own, same in (
        (lambda s, b, h, q, kv: Doubled.apply(s) + s, lambda s: 2 * s + (s - s.detach())),
        (
            lambda s, b, h, q, kv: Old.apply(s),
            lambda s: s.detach().sin() + (s - s.detach()) * s.detach().sin() ** 2,
        ),
    ):
        found = flex_attention(query, query, query, own)
        expected = dense(lambda s, b, h, q, kv, f=same: f(s), query, query, query)
        torch.testing.assert_close(found, expected)
        ours, theirs = (torch.autograd.grad(x.sin().sum(), query)[0] for x in (found, expected))
        torch.testing.assert_close(ours, theirs)


def test_a_backward_that_changes_is_seen() -> None:
    factor = 2.0

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * factor

    query = torch.randn(1, 1, 8, 8, requires_grad=True)

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return Scaled.apply(s)

    def gradient() -> Any:
        key = torch.ones(1, 1, 8, 8).cumsum(2)
        return torch.autograd.grad(flex_attention(query, key, key, mod).sum(), query)[0]

    first = gradient()
    factor = 3.0
    torch.testing.assert_close(gradient(), first * 1.5)
    Scaled.backward = staticmethod(lambda ctx, grad: grad * 4)  # type: ignore[method-assign]
    torch.testing.assert_close(gradient(), first * 2)


class Clipped(Rounded):
    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.clamp(-1, 1)


class Moved(Rounded):
    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad + 1.0


class Replaced(Rounded):
    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return torch.where(grad > 0, grad, 1.0)


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.mark_non_differentiable(x)
        return x


ROW = nn.Parameter(torch.ones(3))
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "a gradient that is clipped": (
        lambda s, h: Clipped.apply(s),
        "must multiply grad by a number that does not depend on grad",
    ),
    "a gradient that is moved": (lambda s, h: Moved.apply(s), "must multiply grad by a number"),
    "a gradient that is replaced": (
        lambda s, h: Replaced.apply(s),
        "must multiply grad by a number",
    ),
    "a row": (lambda s, h: s + Rounded.apply(ROW * s)[h], "single elements, as table"),
    "a whole parameter": (
        lambda s, h: Mixed.apply(s, ROW, 1)[h],
        "pass an element of it, as table",
    ),
    "an input that is marked": (lambda s, h: Marked.apply(s), "return a copy, as x.clone()"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(TraceError, match=message):
        trace(lambda s, b, h, q, kv: function(s, h), "score")


def test_masks_have_no_gradient() -> None:
    traced = trace(lambda b, h, q, kv: Rounded.apply(q / 3).detach() > kv, "mask")
    assert traced.root is trace(lambda b, h, q, kv: torch.round(q / 3) > kv, "mask").root


def test_formulas_name_what_has_no_gradient() -> None:
    assert str(trace(lambda s, b, h, q, kv: s.detach() * s, "score")).endswith(
        "detach(score) * score"
    )
