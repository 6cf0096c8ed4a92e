"""Attend densely with a score_mod that torch.vmap calls, and compare flex_attention with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from attnkit import flex_attention

B, H, S, D = 2, 3, 10, 8

Made = tuple[Callable[..., Any], Sequence[Tensor]]  # a score_mod and its learned tensors


def dense(mod: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend with the score_mod called by torch.vmap, which runs the user's code itself."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    index = [torch.arange(n) for n in (B, H, S, S)]
    for axes in ((0, None, None, None, 0), (0, None, None, 0, None), (0, None, 0, None, None)):
        mod = torch.vmap(mod, in_dims=axes)
    mod = torch.vmap(mod, in_dims=(0, 0, None, None, None))
    return mod(scores, *index).softmax(-1) @ value


@contextmanager
def _default_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def assert_same_by_vmap(make: Callable[[], Made], backend: Any) -> None:
    """Compare the output and all gradients of flex_attention in float64 with those of `dense`.

    Args:
        make: function that makes a score_mod and its learned tensors.
        backend: backend of flex_attention.
    """
    torch.manual_seed(0)
    with _default_float64():
        mod, learned = make()
        inputs = [torch.randn(B, H, S, D).requires_grad_() for _ in range(3)]
        weight = torch.randn(B, H, S, D)
        expected = dense(mod, *inputs)
        found = flex_attention(*inputs, mod, backend=backend)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    wanted = [*inputs, *learned]
    theirs = torch.autograd.grad(expected, wanted, weight, allow_unused=True)
    ours = torch.autograd.grad(found, wanted, weight, allow_unused=True)
    for mine, reference in zip(ours, theirs, strict=True):
        if reference is None:
            assert mine is None or not mine.any()
        else:
            torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-9)
