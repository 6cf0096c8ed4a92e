"""Compute dense attention, the reference that tests compare every other backend with.

All scores are materialized, so memory is O(Sq * Skv). Autograd computes the backward. The reference
shares the graph evaluator with the other backends, but no code for tiles, plans or sparsity.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.eval_torch import evaluate, mask_dtype, positions
from attnkit.tracing.tracer import Traced
from attnkit.util.dropout import kept, survivor_scale

# Out, LSE, row maxima, entropies of the rows or None.
DenseResult: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor | None]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Traced | None = None,
    mask: Traced | None = None,
    *,
    scale: float | None = None,
    allowed: Tensor | None = None,
    sink: Tensor | None = None,
    dropout: Tensor | None = None,
    need_entropy: bool = False,
    normalization: str = "softmax",
) -> DenseResult:
    """Compute dense attention with a traced score_mod and a traced mask_mod.

    Args:
        query: [B, Hq, Sq, D], any float dtype. The compute dtype is float64 for float64, float32
            for other dtypes.
        key: [B or 1, Hkv, Skv, D]; Hkv divides Hq.
        value: [B or 1, Hkv, Skv, Dv].
        score: traced score_mod, or None.
        mask: traced mask_mod, or None.
        scale: factor on query @ key^T; None for 1 / sqrt(D).
        allowed: bool tensor, broadcastable to [B, Hq, Sq, Skv]; scores where it is False are masked
            too.
        sink: [Hq], one more logit in the denominator of each row; None for none.
        dropout: the state of `draw_state`; None to drop no element of the softmax.
        need_entropy: whether to also return the entropies of the rows.
        normalization: "softmax"; or "sigmoid" or "none", with which LSE and row maxima are zeros
            that mean nothing.

    Returns:
        out [B, Hq, Sq, Dv] in the query's dtype; LSE, row maxima and entropies [B, Hq, Sq] in the
        compute dtype, natural logarithm; None for entropies that are not needed. A fully masked row
        has output 0, LSE -inf (the sink, if there is one), row maximum -inf, entropy 0 and zero
        gradients.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    heads = query.shape[1]
    key, value = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query @ key.transpose(-2, -1)).to(dtype) * scale
    env = positions((*query.shape[:3], key.shape[2]), query.device)
    if score is not None:
        env["score"] = scores
        (scores,) = evaluate(
            [score.root], env, score.tensors, dtype, checked=_all_loads(score), names=score.names
        )
    if normalization == "sigmoid":
        scores = torch.sigmoid(scores)
    masked = -math.inf if normalization == "softmax" else 0.0
    if mask is not None:
        keep = _keep(mask, env)
        scores = torch.where(keep, scores, masked)
    if allowed is not None:
        scores = torch.where(allowed, scores, masked)
    shape = (*query.shape[:3], key.shape[-2])
    if normalization != "softmax":
        rows = scores.new_zeros(shape[:3])
        return scores.expand(shape).to(query.dtype) @ value, rows, rows.clone(), None
    logit = None if sink is None else sink.to(dtype)[:, None, None]
    factors = None if dropout is None else _survivors(dropout, shape, dtype)
    return _softmax_times(scores.expand(shape), value, query.dtype, logit, factors, need_entropy)


def dense_mask(mask: Traced, query: Tensor, key: Tensor) -> Tensor:
    """Evaluate a traced mask at all positions; return bool, broadcastable to [B, Hq, Sq, Skv]."""
    return _keep(mask, positions((*query.shape[:3], key.shape[2]), query.device))


def _keep(mask: Traced, env: dict[str, Tensor]) -> Tensor:
    dtype = mask_dtype(mask.root, mask.tensors)
    checked = _all_loads(mask)
    return evaluate([mask.root], env, mask.tensors, dtype, checked=checked, names=mask.names)[0]


def _survivors(state: Tensor, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """Return the factors of dropout: 0 for elements that are dropped, else the survivors' scale."""
    batch, heads, q_len, kv_len = shape
    b, h = (torch.arange(n, device=state.device) for n in (batch, heads))
    keep = kept(state, b[:, None], h, heads, (0, q_len), (0, kv_len))
    return keep.to(dtype) * survivor_scale(state, dtype)


def _softmax_times(
    scores: Tensor,
    value: Tensor,
    dtype: torch.dtype,
    sink: Tensor | None,
    factors: Tensor | None,
    need_entropy: bool,
) -> DenseResult:
    """Compute softmax(scores) @ value, LSE, row maxima and, if needed, entropies of the rows.

    `sink` is [Hq, 1, 1] or None. `factors` of the softmax are [B, Hq, Sq, Skv] or None. The output
    and the entropy of masked rows are 0.
    """
    row_max = scores.detach().amax(dim=-1, keepdim=True)
    top = row_max if sink is None else torch.maximum(row_max, sink.detach())
    base = torch.where(top == -math.inf, 0.0, top)
    weights = torch.exp(scores - base)
    row_sum = weights.sum(dim=-1, keepdim=True)
    masked = row_sum == 0 if sink is None else row_max == -math.inf
    total = row_sum if sink is None else row_sum + torch.exp(sink - base)
    safe = torch.where(masked, 1.0, total)
    # a sum over no keys is 0, whatever the sink
    weights = weights if sink is None else weights.masked_fill(masked, 0.0)
    softmax = weights / safe
    out = (softmax if factors is None else softmax * factors).to(dtype) @ value
    # a row without keys has zero gradients if its LSE is -inf
    empty = -math.inf if sink is None else torch.where(sink == -math.inf, -math.inf, sink)
    lse = torch.where(masked, empty, base + torch.log(safe))
    entropy = None
    if need_entropy:
        parts = [(weights / safe, scores - base)]
        if sink is not None:
            parts.append((torch.exp(sink - base) / safe, sink - base))
        entropy = torch.where(masked, 0.0, _entropy(torch.log(safe), parts)).squeeze(-1)
    return out, lse.squeeze(-1), row_max.squeeze(-1), entropy


def _entropy(log_sum: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Compute the entropies of rows [..., 1]: log_sum - sum(p * x), where p = exp(x - log_sum).

    Args:
        log_sum: [..., 1], logarithm of the sum of exp(x) over all parts.
        parts: pairs (p, x), [..., n]. Where p is 0, the product is 0, also for x = -inf.
    """
    entropy = log_sum
    for p, x in parts:
        entropy = entropy - (p * torch.where(p == 0, 0.0, x)).sum(dim=-1, keepdim=True)
    # a rounded difference may be below 0; the gradient is that of the difference
    return entropy + (-entropy.detach()).clamp(min=0)


def _all_loads(traced: Traced) -> frozenset[ir.Node]:
    """Return all loads of a graph, because the reference checks every index at run time."""
    return frozenset(n for n in ir.topo(traced.root) if n.op == "load")
