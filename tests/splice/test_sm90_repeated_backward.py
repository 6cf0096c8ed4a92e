"""Compare repeated Hopper backwards, relaunched in the emulator, with the float64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")  # without it no call is planned for the kernel

import attnkit
from attnkit import flex_attention
from attnkit.jit import emulation
from attnkit.runtime.reuse.backward import BackwardReuse
from attnkit.schedule import whole_heads
from tests.sampling import sampled
from tests.templates.backward_kit import BF16, CAUSAL, check, draw

LENGTHS = 100, 140


@pytest.fixture
def relaunched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list to which each backward appends whether it took the fast path."""
    taken: list[bool] = []
    whole = BackwardReuse.try_fast_path

    def noted(*arguments: Any) -> Any:
        found = whole(*arguments)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(BackwardReuse, "try_fast_path", noted)
    attnkit.clear_caches()
    return taken


@pytest.mark.parametrize(
    ("dim", "kv_heads"), sampled([(64, 1), (128, 2), (192, 1)], 2), ids=lambda value: str(value)
)
def test_repeated_backwards_agree_with_float64(
    relaunched: list[bool], dim: int, kv_heads: int
) -> None:
    """Repeated backwards with new tensors are exact, and relaunched from the third call on.

    The first call compiles, and the second is analysed.
    """
    for _ in range(4):
        inputs, weights = draw(*LENGTHS, dims=(dim, dim), heads=(2, kv_heads))
        inputs[2] = inputs[2].transpose(1, 2).contiguous().transpose(1, 2)
        check((inputs, weights), mask=CAUSAL, whole=True)
    assert relaunched == [False, False, True, True]


def test_repeated_backwards_of_a_captured_tensor(relaunched: list[bool]) -> None:
    """A relaunch accumulates the gradient of a captured tensor from zero."""
    slope = torch.rand(2).to(BF16).requires_grad_()
    mod = lambda s, b, h, q, kv: s * slope[h]

    def gradients(qkv: list[Tensor], weight: Tensor, **options: Any) -> list[Tensor]:
        learned = [t.detach().requires_grad_() for t in qkv]
        out = flex_attention(*learned, mod, CAUSAL, **options)
        return list(torch.autograd.grad((out * weight).sum(), [*learned, slope]))

    for _ in range(5):
        inputs, (weight, _) = draw(*LENGTHS)
        found = gradients(inputs, weight, backend="emulate")
        exact = gradients([t.double() for t in inputs], weight.double(), backend="eager")
        dense = gradients(inputs, weight, backend="eager")
        for ours, theirs, true in zip(found, dense, exact, strict=True):
            allowed = 2 * (theirs.double() - true).abs().max() + true.abs().max() * 2**-8
            assert (ours.double() - true).abs().max() <= allowed
    assert relaunched[:2] == [False, False]
    assert relaunched[3:] == [True, True]


def test_a_fixed_order_of_a_captured_tensor_is_not_relaunched(relaunched: list[bool]) -> None:
    """The sums of a captured tensor's gradient in a fixed order are rounded after the kernels."""
    slope = torch.rand(2, requires_grad=True)
    mod = lambda s, b, h, q, kv: s * slope[h]
    inputs, (weight, _) = draw(*LENGTHS)

    def gradients() -> tuple[Tensor, ...]:
        learned = [t.detach().requires_grad_() for t in inputs]
        out = flex_attention(*learned, mod, CAUSAL, deterministic=True, backend="emulate")
        return torch.autograd.grad((out * weight).sum(), [*learned, slope])

    first = gradients()
    for _ in range(4):
        assert all(map(torch.equal, gradients(), first))
    assert relaunched == [False] * 5


@pytest.mark.parametrize("whole", [False, True], ids=["semaphores", "whole heads"])
def test_a_fixed_order_repeats_its_bits(
    relaunched: list[bool], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deterministic backward is relaunched, with semaphores that hold the first turns again."""
    if whole:  # by expensive rounding of dQ
        monkeypatch.setattr(whole_heads, "BYTES_A_CLOCK", 1)
        inputs, (weight, _) = draw(300, dims=(128, 128))
    else:
        inputs, (weight, _) = draw(*LENGTHS, heads=(2, 1))

    def gradients() -> list[Tensor]:
        learned = [t.detach().requires_grad_() for t in inputs]
        out = flex_attention(
            *learned, None, CAUSAL, enable_gqa=True, deterministic=True, backend="emulate"
        )
        return list(torch.autograd.grad((out * weight).sum(), learned))

    first = gradients()
    for _ in range(4):
        with emulation.session(mode="adversarial"):
            assert all(map(torch.equal, gradients(), first))
    assert relaunched[:2] == [False, False]
    assert relaunched[3:] == [True, True]
