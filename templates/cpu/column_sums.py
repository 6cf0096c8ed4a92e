"""Sum the attention weights of each key over the queries, in a second pass over the scores.

The sum of key j is C[j] = sum over i of P[i, j]. The weights P = exp(S - LSE) are computed again,
strip by strip, from the LSE of the forward; without a softmax they are the modified scores. No
matrix [Sq, Skv] exists.

With the gradient g of C, the gradient of a score is dS = P (g - m), where m = P g is the mean of g
over the row. It is that of a softmax whose dP is g in every row. One pass computes m, another one
dS. Without a softmax dS is g.

All sums have a fixed order: equal inputs give bitwise equal results.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnkit.sparsity.block_runs import BlockRuns
from attnkit.templates.cpu.backward import Shared, few_pairs, through_score
from attnkit.templates.cpu.call import Call, Workspace, exponential
from attnkit.templates.cpu.forward import modified_scores
from attnkit.templates.cpu.hooks import Hooks
from attnkit.templates.cpu.masks import Keep
from attnkit.templates.cpu.strips import Chunk
from attnkit.templates.cpu.units import Unit

SCORES = 1 << 21  # scores per chunk; one to three buffers have this size


@torch.no_grad()
def column_sums(
    query: Tensor, key: Tensor, lse: Tensor, runs: BlockRuns | None, hooks: Hooks, scale: float
) -> Tensor:
    """Compute the sums of the weights of each key.

    Args:
        query, key, runs, hooks, scale: as for `forward`.
        lse: the LSE that `forward` returned, [B, Hq, Sq]; any tensor without a softmax.

    Returns:
        [B, Hq, Skv], float32 (float64 for float64). Fully masked rows add 0, and dropout, which
        follows the softmax, changes nothing.
    """
    call = Call.of(query, key, key, runs, hooks, scale)
    sums = query.new_zeros((*query.shape[:2], key.shape[2]), dtype=call.dtype)
    space = Workspace(query, call.dtype)
    for unit, chunk, keeps in call.walk(SCORES):
        if not chunk.spans:
            continue
        if chunk.first:
            rows = Rows(call, unit, chunk, lse)
        weights = rows.weights(call, unit, chunk, keeps, space)
        part = unit.spread(weights, chunk).sum(2)
        mine = sums[unit.batch, unit.head]
        for span, columns in chunk.places():
            mine[..., span.start : span.stop].add_(part[..., columns])
    return sums


@torch.no_grad()
def column_sums_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    runs: BlockRuns | None,
    hooks: Hooks,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `column_sums`; the hooks add up those of captured tensors and sink.

    The LSE is no input: what the scores change of it is part of their gradient.

    Args:
        grad: gradient of the sums, [B, Hq, Skv].
        query, key, lse, runs, hooks, scale: as for `column_sums`.

    Returns:
        dq, dk with dtype, shape and stride order of query and key.
    """
    call = Call.of(query, key, key, runs, hooks, scale)
    grad = grad.to(call.dtype)
    means = _row_means(call, lse, grad) if hooks.has_softmax else None
    dq, dk = torch.zeros_like(query), torch.zeros_like(key)
    shared = Shared([dk], [scale], call.dtype)
    work = [Workspace(query, call.dtype) for _ in range(3)]
    for unit, chunk, keeps in call.walk(SCORES, few_pairs(call, dk)):
        if not chunk.spans:
            continue
        if chunk.first:
            rows = Rows(call, unit, chunk, lse)
        shared.enter(unit)
        k = unit.columns(call.key, chunk, call.dtype)
        ds = rows.weights(call, unit, chunk, keeps, work[0])
        spread = unit.spread(ds, chunk)
        wanted = _columns(grad, unit, chunk)
        if means is None:  # a weight is the modified score itself
            spread.copy_(wanted.expand(spread.shape))
            for keep in keeps:
                keep.zero(spread)
        else:
            spread.mul_(wanted - means[unit.batch, unit.head, chunk.rows, None])
        if hooks.has_score:
            s = call.scores(rows.q, k, work[1])
            result = work[2].take(*s.shape)
            through_score(call, unit, chunk, keeps, s, ds, result)
            ds = result
        shared.add(chunk, torch.bmm(ds.mT, rows.q))
        rows.add(ds, k)
        if chunk.last:
            rows.finish(dq[unit.batch, unit.head, chunk.rows], scale)
    shared.leave()
    if hooks.sink is not None and hooks.sink_grad is not None and means is not None:
        for head in range(query.shape[1]):
            p = torch.exp(hooks.sink[head] - lse[:, head])
            p.masked_fill_(lse[:, head] == -math.inf, 0)
            hooks.sink_grad[head] -= (p * means[:, head]).sum()
    return dq, dk


class Rows:
    """Holds Q, dQ and the LSE of a strip's rows, stacked by lane: [lanes, rows, ...]."""

    def __init__(self, call: Call, unit: Unit, chunk: Chunk, lse: Tensor) -> None:
        self.q = unit.rows(call.query, chunk, call.dtype)
        self._dq: Tensor | None = None
        self._shift: Tensor | None = None
        if call.hooks.has_softmax:
            own = unit.rows(lse[..., None], chunk, call.dtype)
            # rows without a finite score have weights of 0
            self._shift = own.masked_fill(own == -math.inf, math.inf).div_(call.factor)

    def weights(
        self, call: Call, unit: Unit, chunk: Chunk, keeps: list[Keep], space: Workspace
    ) -> Tensor:
        """Return the weights of a chunk, [lanes, stacked rows, width], 0 where masked."""
        s = modified_scores(call, unit, chunk, keeps, self.q, space)
        return s if self._shift is None else exponential(s, self._shift, call.factor)

    def add(self, ds: Tensor, k: Tensor) -> None:
        """Accumulate dS k into dq, without the softmax scale."""
        self._dq = torch.bmm(ds, k) if self._dq is None else self._dq.baddbmm_(ds, k)

    def finish(self, dq: Tensor, scale: float) -> None:
        """Multiply dQ by the softmax scale and write it to `dq` [nb, nh, rows, D]."""
        assert self._dq is not None
        dq.copy_(self._dq.mul_(scale).view(dq.shape))


def _row_means(call: Call, lse: Tensor, grad: Tensor) -> Tensor:
    """Return the mean of `grad` [B, Hq, Skv] over each row with the weights P: [B, Hq, Sq]."""
    means = torch.zeros_like(lse, dtype=call.dtype)
    space = Workspace(call.query, call.dtype)
    for unit, chunk, keeps in call.walk(SCORES):
        if not chunk.spans:
            continue
        if chunk.first:
            rows = Rows(call, unit, chunk, lse)
        weights = unit.spread(rows.weights(call, unit, chunk, keeps, space), chunk)
        part = torch.linalg.vecdot(weights, _columns(grad, unit, chunk))
        means[unit.batch, unit.head, chunk.rows].add_(part)
    return means


def _columns(t: Tensor, unit: Unit, chunk: Chunk) -> Tensor:
    """Return the chunk's columns of `t` [B, Hq, Skv] as [nb, nh, 1, width]."""
    mine = t[unit.batch, unit.head]
    return torch.cat([mine[..., span.start : span.stop] for span in chunk.spans], -1)[:, :, None]
