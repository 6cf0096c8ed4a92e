"""A variant's GPU kernels, on a GPU or executed on the CPU, against dense attention in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnkit.runtime.variant import Variant


@dataclass(frozen=True)
class Error:
    """How far a result is off.

    Attributes:
        name: of the result.
        size: the largest difference from float64; NaN where only one is finite.
        limit: what is allowed.
        why: what the limit is.
    """

    name: str
    size: float
    limit: float
    why: str

    @property
    def ok(self) -> bool:
        """Whether it is allowed."""
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
    """Run a variant with a kernel and dense.

    Args:
        variant: what to run.
        qkv: query, key, value, float16 or bfloat16.
        backend: "cute", "emulate", or "emulate:" and an architecture.
        backward: gradients too.
        learned: captured tensors whose gradients are compared as well.
        seed: of the gradient of the output.
    """
    shared = qkv[0].shape[1] != qkv[1].shape[1]
    inputs = [x.detach().requires_grad_(backward) for x in qkv]
    wide = [x.detach().double().requires_grad_(backward) for x in inputs]
    out, lse = variant(*inputs, backend=backend, return_lse=True, enable_gqa=shared)
    exact, exact_lse = variant(*wide, backend="eager", return_lse=True, enable_gqa=shared)
    rounded, rounded_lse, *unrounded = _rounded(variant, *inputs)
    unit = torch.finfo(qkv[0].dtype).eps
    found = [
        Error("LSE", _distance(lse, exact_lse), unit, "a unit of the inputs' dtype at 1"),
        _error("output", out, exact, rounded),
    ]
    if not backward:
        return found
    names = ["dquery", "dkey", "dvalue", *(f"dcaptured {i}" for i in range(len(learned)))]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out)
    # Kernels take rowsum(dO O) from the rounded output: as if the LSE had this gradient. That output
    # is one of rounded probabilities, as in dense attention of 16 bits, which gradients of captured
    # tensors, sums over whole heads, add up.
    rests = [(grad.float() * (o - rounded.float())).sum(-1).detach() for o in unrounded]
    got = torch.autograd.grad([out], [*inputs, *learned], [grad])
    expected = torch.autograd.grad([exact], [*wide, *learned], [grad.double()])
    dense = [
        dx
        for xs, rest in zip((inputs, learned), rests, strict=True)
        if xs
        for dx in torch.autograd.grad([rounded, rounded_lse], xs, [grad, rest], retain_graph=True)
    ]
    return found + [_error(*row) for row in zip(names, got, expected, dense, strict=True)]


def _error(name: str, got: Tensor, exact: Tensor, rounded: Tensor) -> Error:
    limit = 2 * _distance(rounded, exact)
    return Error(name, _distance(got, exact), limit, "twice that of dense in the same dtype")


def _distance(x: Tensor, exact: Tensor) -> float:
    """The largest difference; NaN where only one is finite."""
    difference = (x.detach().double() - exact.detach()).abs()
    return float(difference.masked_fill(x.detach() == exact.detach(), 0).max())


def _rounded(
    variant: Variant, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Dense attention with scores in float32 and, as every kernel for 16-bit products must, the
    probabilities and the gradients of both rounded to the inputs' dtype.

    Returns:
        Output, LSE, the output before it was rounded, and that with probabilities not rounded.
    """
    dtype, kv_len, group = query.dtype, key.shape[2], query.shape[1] // key.shape[1]
    identity = torch.eye(kv_len, device=key.device).expand(*key.shape[:2], kv_len, kv_len)
    keys = key.float().repeat_interleave(group, 1)
    scores = (query.float() @ keys.mT) * query.shape[-1] ** -0.5
    if scores.requires_grad:
        scores.register_hook(lambda grad: grad.to(dtype).float())
    # With identities for key and value the variant gives the probabilities of these scores.
    weights, lse = variant(
        *(scores, identity, identity),
        backend="eager", scale=1.0, enable_gqa=group > 1, return_lse=True,
    )  # fmt: skip
    values, narrow = value.repeat_interleave(group, 1), weights.to(dtype)
    wide = values.detach().float()
    return narrow @ values, lse, narrow.detach().float() @ wide, weights.detach() @ wide
