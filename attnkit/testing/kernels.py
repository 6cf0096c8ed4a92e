"""Compare the kernels of a variant, on a GPU or in the emulator, with dense float64 attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnkit.runtime.variant import Variant


@dataclass(frozen=True)
class Error:
    """Describes the error of one result of a kernel.

    Attributes:
        name: name of the result.
        size: largest difference from the float64 result; NaN if either has a NaN.
        limit: largest allowed error.
        why: explanation of the limit.
    """

    name: str
    size: float
    limit: float
    why: str

    @property
    def ok(self) -> bool:
        """Return whether the error is at most the limit."""
        return self.size <= self.limit

    def __str__(self) -> str:
        return f"{self.name}: error {self.size:.2e}, limit {self.limit:.2e} ({self.why})"


def compare(
    variant: Variant,
    qkv: Sequence[Tensor],
    *,
    backend: str = "emulate",
    backward: bool = False,
    learned: Sequence[Tensor] = (),
    seed: int = 1,
) -> list[Error]:
    """Run a variant with its kernels and as dense float64 attention; return the kernels' errors.

    Args:
        variant: the variant to run.
        qkv: query, key and value, float16 or bfloat16.
        backend: "cute", "emulate", or "emulate:" followed by an architecture.
        backward: whether to compare gradients too.
        learned: captured tensors whose gradients are compared.
        seed: seed of the random gradient of the output.

    Returns:
        The error of the LSE, of the output and, with `backward`, of each gradient.
    """
    grouped = qkv[0].shape[1] != qkv[1].shape[1]
    inputs = [x.detach().requires_grad_(backward) for x in qkv]
    wide = [x.detach().double().requires_grad_(backward) for x in inputs]
    out, lse = variant(*inputs, backend=backend, return_lse=True, enable_gqa=grouped)
    exact, exact_lse = variant(*wide, backend="eager", return_lse=True, enable_gqa=grouped)
    rounded, rounded_lse, *unrounded = _rounded(variant, *inputs)
    unit = torch.finfo(qkv[0].dtype).eps
    errors = [
        Error("LSE", _distance(lse, exact_lse), unit, "a unit of the inputs' dtype at 1"),
        _error("output", out, exact, rounded),
    ]
    if not backward:
        return errors
    names = ["dquery", "dkey", "dvalue", *(f"dcaptured {i}" for i in range(len(learned)))]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out)
    # Kernels compute rowsum(dO O) from the rounded output, which has the same effect as the LSE
    # gradient below. For query, key and value the unrounded output is computed from rounded
    # probabilities, as in 16-bit dense attention. For captured tensors, whose gradients are sums
    # over whole heads, it is computed from unrounded probabilities.
    grads_lse = [(grad.float() * (o - rounded.float())).sum(-1).detach() for o in unrounded]
    got = torch.autograd.grad([out], [*inputs, *learned], [grad])
    expected = torch.autograd.grad([exact], [*wide, *learned], [grad.double()])
    dense = [
        dx
        for xs, grad_lse in zip((inputs, learned), grads_lse, strict=True)
        if xs
        for dx in torch.autograd.grad(
            [rounded, rounded_lse], xs, [grad, grad_lse], retain_graph=True
        )
    ]
    return errors + [_error(*row) for row in zip(names, got, expected, dense, strict=True)]


def _error(name: str, got: Tensor, exact: Tensor, rounded: Tensor) -> Error:
    limit = 2 * _distance(rounded, exact)
    return Error(name, _distance(got, exact), limit, "twice that of dense in the same dtype")


def _distance(x: Tensor, exact: Tensor) -> float:
    """Return the largest absolute difference; equal infinities count as no difference."""
    difference = (x.detach().double() - exact.detach()).abs()
    return float(difference.masked_fill(x.detach() == exact.detach(), 0).max())


def _rounded(
    variant: Variant, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute dense attention with the rounding steps of kernels whose MMAs take 16-bit operands.

    Scores are float32. The probabilities, their gradients and the gradients of the scores are
    rounded to the inputs' dtype.

    Returns:
        (output, LSE, output before its rounding, output from unrounded probabilities). The last two
        are float32.
    """
    dtype, kv_len, group = query.dtype, key.shape[2], query.shape[1] // key.shape[1]
    identity = torch.eye(kv_len, device=key.device).expand(*key.shape[:2], kv_len, kv_len)
    keys = key.float().repeat_interleave(group, 1)
    scores = (query.float() @ keys.mT) * query.shape[-1] ** -0.5
    if scores.requires_grad:
        scores.register_hook(lambda grad: grad.to(dtype).float())
    # With identity matrices as key and value the variant returns the probabilities of the scores.
    weights, lse = variant(
        scores,
        identity,
        identity,
        backend="eager",
        scale=1.0,
        enable_gqa=group > 1,
        return_lse=True,
    )
    values, narrow = value.repeat_interleave(group, 1), weights.to(dtype)
    wide = values.detach().float()
    return narrow @ values, lse, narrow.detach().float() @ wide, weights.detach() @ wide
