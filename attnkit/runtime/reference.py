"""Compute dense attention, the reference that tests compare every other backend with.

All scores are materialized, so memory is O(Sq * Skv). Autograd computes the backward. The reference
shares the graph evaluator with the other backends, but no code for tiles, plans or sparsity.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

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
        dropout: the state of `draw_state`; None to drop no weight.
        need_entropy: whether to also return the entropies of the rows.
        normalization: "softmax"; or "sigmoid" or "none", with which LSE and row maxima are zeros
            that mean nothing.

    Returns:
        out [B, Hq, Sq, Dv] in the query's dtype; LSE, row maxima and entropies [B, Hq, Sq] in the
        compute dtype, natural logarithm; None for entropies that are not needed. A fully masked row
        has output 0, LSE -inf (the sink, if there is one), row maximum -inf, entropy 0 and zero
        gradients.
    """
    scores = _masked_scores(query, key, score, mask, scale, allowed, normalization)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    dtype, shape = scores.dtype, (*query.shape[:3], key.shape[2])
    factors = None if dropout is None else _survivors(dropout, shape, dtype)
    if normalization != "softmax":
        rows = scores.new_zeros(shape[:3])
        weights = scores if factors is None else scores * factors
        return weights.to(query.dtype) @ value, rows, rows.clone(), None
    logit = None if sink is None else sink.to(dtype)[:, None, None]
    return _softmax_times(scores, value, query.dtype, logit, factors, need_entropy)


def column_sums(
    query: Tensor,
    key: Tensor,
    score: Traced | None = None,
    mask: Traced | None = None,
    *,
    scale: float | None = None,
    allowed: Tensor | None = None,
    sink: Tensor | None = None,
    normalization: str = "softmax",
) -> Tensor:
    """Sum the weights of each key over the queries; see `attention` for the arguments.

    Returns:
        [B, Hq, Skv] in the compute dtype. Fully masked rows add 0.
    """
    scores = _masked_scores(query, key, score, mask, scale, allowed, normalization)
    if normalization != "softmax":
        return scores.sum(dim=2)
    return _softmax(scores, None if sink is None else sink.to(scores.dtype)[:, None, None]).p.sum(2)


def _masked_scores(
    query: Tensor,
    key: Tensor,
    score: Traced | None,
    mask: Traced | None,
    scale: float | None,
    allowed: Tensor | None,
    normalization: str,
) -> Tensor:
    """Return the modified scores [B, Hq, Sq, Skv] in the compute dtype.

    Masked scores are -inf. Without a softmax they are 0, and sigmoids take the place of the others
    if that is the normalization.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
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
    return scores.expand(*query.shape[:3], key.shape[-2])


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
    found = _softmax(scores, sink)
    p, base, safe, masked = found.p, found.base, found.safe, found.masked
    out = (p if factors is None else p * factors).to(dtype) @ value
    # a row without keys has zero gradients if its LSE is -inf
    empty = -math.inf if sink is None else torch.where(sink == -math.inf, -math.inf, sink)
    lse = torch.where(masked, empty, base + torch.log(safe))
    entropy = None
    if need_entropy:
        parts = [(p, scores - base)]
        if sink is not None:
            parts.append((torch.exp(sink - base) / safe, sink - base))
        entropy = torch.where(masked, 0.0, _entropy(torch.log(safe), parts)).squeeze(-1)
    return out, lse.squeeze(-1), found.row_max.squeeze(-1), entropy


class _Softmax(NamedTuple):
    """Holds a dense softmax.

    Attributes:
        p: [B, Hq, Sq, Skv], the softmax, 0 in masked rows.
        row_max: [B, Hq, Sq, 1], the largest score of each row; also of this shape are
        base: what is subtracted from the scores of a row.
        safe: the sum of exp(score - base) over the keys and the sink, 1 in masked rows.
        masked: whether a row has no keys.
    """

    p: Tensor
    row_max: Tensor
    base: Tensor
    safe: Tensor
    masked: Tensor


def _softmax(scores: Tensor, sink: Tensor | None) -> _Softmax:
    """Compute the softmax of scores [B, Hq, Sq, Skv]; `sink` is [Hq, 1, 1] or None."""
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
    return _Softmax(weights / safe, row_max, base, safe, masked)


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
