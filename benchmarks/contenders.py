"""Build the functions to time for one problem: calls of attnkit and of its peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from variants import Mod

import attnkit

Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Problem:
    """Hold the inputs of one measurement.

    Attributes:
        query, key, value, grad: [B, H, S, D]; `grad` is the gradient of the output.
        mask_mod: the mask, as in FlexAttention.
        score_mod: the score_mod, or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    mask_mod: Mod
    score_mod: Mod | None

    @property
    def length(self) -> int:
        return self.query.shape[2]

    def without_grad(self) -> Problem:
        """Return the same problem with query, key and value detached from autograd."""
        query, key, value = (t.detach() for t in (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value)

    def grid(self) -> tuple[Tensor, ...]:
        """Return the indices b, h, q, kv, int32, broadcastable to the scores [1, H, S, S]."""
        sizes = (1, self.query.shape[1], self.length, self.length)
        return tuple(
            torch.arange(n, dtype=torch.int32).view([n if i == axis else 1 for i in range(4)])
            for axis, n in enumerate(sizes)
        )

    def kept(self) -> Tensor:
        """Return the dense mask, bool [1, 1, S, S], True where a score is kept."""
        return self.mask_mod(*self.grid())


def attnkit_run(p: Problem) -> Run:
    """Build a call of attnkit; the block mask is built once, outside the call."""
    mask = attnkit.create_block_mask(p.mask_mod, None, None, p.length, p.length)
    return lambda: attnkit.flex_attention(p.query, p.key, p.value, p.score_mod, mask)


def flex_run(p: Problem) -> Run:
    """Build a call of compiled FlexAttention; the block mask is built once, outside the call."""
    torch.compiler.reset()
    mask = flex.create_block_mask(p.mask_mod, None, None, p.length, p.length, device="cpu")
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    return lambda: compiled(p.query, p.key, p.value, score_mod=p.score_mod, block_mask=mask)


def dense_run(p: Problem) -> Run:
    """Build a call of SDPA with a dense bias that holds the mask and the (additive) score_mod."""
    bias = kept = p.kept()
    if p.score_mod is not None:
        bias = p.score_mod(torch.zeros(()), *p.grid()).masked_fill(~kept, -torch.inf)
        bias = bias.to(p.query.dtype)
    return lambda: F.scaled_dot_product_attention(p.query, p.key, p.value, attn_mask=bias)


def causal_run(p: Problem) -> Run:
    """Build a call of SDPA with `is_causal`."""
    return lambda: F.scaled_dot_product_attention(p.query, p.key, p.value, is_causal=True)


OURS = "attnkit"
CONTENDERS: dict[str, Callable[[Problem], Run]] = {
    OURS: attnkit_run,
    "flex compiled": flex_run,
    "sdpa dense": dense_run,
    "sdpa is_causal": causal_run,
}


def dense(p: Problem, dtype: torch.dtype) -> list[Tensor]:
    """Compute dense attention in `dtype` with plain torch operators; return output, dQ, dK and dV.

    In float64 this is the reference result. The error of the same computation in a smaller dtype
    determines the error that is allowed in that dtype.
    """
    kept, heads = p.kept()[0, 0], []
    b, _, q, kv = (x[0, 0] for x in p.grid())
    for h in range(p.query.shape[1]):
        own = [t[:, h].detach().to(dtype).requires_grad_() for t in (p.query, p.key, p.value)]
        scores = own[0] @ own[1].mT * p.query.shape[-1] ** -0.5
        if p.score_mod is not None:
            scores = p.score_mod(scores, b, torch.tensor(h), q, kv)
        out = scores.masked_fill(~kept, -torch.inf).softmax(-1).to(dtype) @ own[2]
        heads.append([out.detach(), *torch.autograd.grad(out, own, p.grad[:, h].to(dtype))])
    return [torch.stack(parts, 1) for parts in zip(*heads, strict=True)]


def error(results: list[Tensor], truth: list[Tensor]) -> float:
    """Return the largest difference from `truth` over the largest entry, of all tensors."""
    pairs = zip(results, truth, strict=True)
    return max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs)
