"""Compute the gradients of attention strip by strip, with recomputed scores.

The gradient of a modified score is dS = P (dP - delta), where P is the softmax, dP = dO v^T and
delta = rowsum(P dP) - dlse. Without a softmax it is dP. The gradient g of a row's entropy E adds
-g P (log(P) + E). If a strip fits in one chunk, P and the row sum are computed from the
chunk, as exactly as in a dense softmax. Longer rows use P = exp(S - lse) and rowsum(dO O) instead
(FlashAttention-2, Dao 2023).

With dropout, the output is the sum of P D v, where D is 0 or the survivors' scale. Then dV has P D,
dP = D (dO v^T), and rowsum(P dP) = dO . sum(P D v) is rowsum(dO O) as before.

All sums have a fixed order: equal inputs give bitwise equal results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attnkit.sparsity.block_runs import BlockRuns
from attnkit.templates.cpu.call import PAIRS, Call, Workspace, exponential, finite, with_sink
from attnkit.templates.cpu.hooks import Hooks
from attnkit.templates.cpu.masks import Keep
from attnkit.templates.cpu.strips import Chunk
from attnkit.templates.cpu.units import Unit

SCORES = 1 << 21  # scores per chunk; two or three buffers have this size
SUMS = 1 << 25  # elements of the float32 accumulators of 16-bit dK and dV


@torch.no_grad()
def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    runs: BlockRuns | None,
    hooks: Hooks,
    scale: float,
    *,
    entropy: Tensor | None = None,
    grad_entropy: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of `forward`; the hooks accumulate those of captured tensors and sink.

    Args:
        grad_out: [B, Hq, Sq, Dv], gradient of out.
        grad_lse: [B, Hq, Sq], gradient of the LSE; None for zero.
        query, key, value, runs, hooks, scale: as for `forward`.
        out, lse: results of `forward`.
        entropy: the entropies that `forward` returned, [B, Hq, Sq]; None if `grad_entropy` is.
        grad_entropy: [B, Hq, Sq], gradient of the entropies; None for zero.

    Returns:
        dq, dk, dv with dtype, shape and stride order of query, key and value. Fully masked rows
        contribute 0.
    """
    call = Call.of(query, key, value, runs, hooks, scale)
    dq, dk, dv = (torch.zeros_like(t) for t in (query, key, value))
    shared = Shared([dk, dv], [scale, 1.0], call.dtype)
    work = [Workspace(query, call.dtype) for _ in range(3 if hooks.has_score else 2)]
    for unit, chunk, keeps in call.walk(SCORES, few_pairs(call, dk)):
        if not chunk.spans:
            continue
        if chunk.first:
            rows = Rows(call, unit, chunk, grad_out, grad_lse, lse)
            if entropy is not None and grad_entropy is not None:
                rows.look_up_entropy(unit, chunk, entropy, grad_entropy)
            if not chunk.last:
                rows.look_up(unit.rows(out, chunk, call.dtype))
        shared.enter(unit)
        _chunk(call, unit, chunk, keeps, rows, shared, work)
        if chunk.last:
            rows.finish(dq[unit.batch, unit.head, chunk.rows], scale)
    shared.leave()
    if hooks.sink is not None and hooks.sink_grad is not None:
        for head in range(query.shape[1]):
            here = slice(None), head
            dlse = None if grad_lse is None else grad_lse[here]
            part = _sink_gradient(hooks.sink[head], out[here], grad_out[here], lse[here], dlse)
            hooks.sink_grad[head] += part
            if entropy is not None and grad_entropy is not None:
                sink, rows_of_head = hooks.sink[head], (lse[here], entropy[here])
                hooks.sink_grad[head] += _sink_entropy(sink, *rows_of_head, grad_entropy[here])
    return dq, dk, dv


def _sink_gradient(
    sink: Tensor, out: Tensor, grad_out: Tensor, lse: Tensor, grad_lse: Tensor | None
) -> Tensor:
    """Compute the gradient of the sink of one head: the sum of its p (dLSE - delta) over all rows.

    Args:
        sink: 0-d.
        out, grad_out: [B, Sq, Dv].
        lse, grad_lse: [B, Sq]; None for a gradient of zero.
    """
    minus_delta = -torch.linalg.vecdot(grad_out.to(lse.dtype), out.to(lse.dtype))
    if grad_lse is not None:
        minus_delta += grad_lse
    p = torch.exp(sink - lse).masked_fill_(lse == -math.inf, 0)
    return p.mul_(minus_delta).sum()


def _sink_entropy(sink: Tensor, lse: Tensor, entropy: Tensor, grad_entropy: Tensor) -> Tensor:
    """Compute the part of a sink's gradient that comes from the entropies [B, Sq] of its head."""
    p = torch.exp(sink - lse).masked_fill_(lse == -math.inf, 0)
    return -(grad_entropy * (torch.xlogy(p, p) + p * entropy)).sum()


def few_pairs(call: Call, dk: Tensor) -> int:
    """Return how many (b, h) a unit may have, so that the float32 sums of 16-bit dK and dV fit."""
    if dk.dtype == call.dtype:
        return PAIRS
    widths = call.key.shape[3] + call.value.shape[3]
    return min(PAIRS, SUMS // max(1, call.key.shape[2] * widths))


class Rows:
    """Holds Q, dO, dQ and the statistics of a strip's rows, stacked by lane: [lanes, rows, ...]."""

    def __init__(
        self,
        call: Call,
        unit: Unit,
        chunk: Chunk,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        lse: Tensor,
    ) -> None:
        dtype = call.dtype
        self._has_softmax = call.hooks.has_softmax
        self.q = unit.rows(call.query, chunk, dtype)
        self.do = unit.rows(grad_out, chunk, dtype)
        self._factor = call.factor
        self._dq = self.q.new_zeros(self.q.shape)
        self._lse = unit.rows(lse[..., None], chunk, dtype)
        self._dead = self._lse == -math.inf
        self._sink: Tensor | None = None
        if call.hooks.sink is not None:
            sink = call.hooks.sink[unit.head].view(1, -1, 1, 1)
            self._sink = sink.expand(*unit.shape, chunk.height, 1).reshape(self._lse.shape)
        self._dlse: Tensor | None = None
        if grad_lse is not None:
            self._dlse = unit.rows(grad_lse[..., None], chunk, dtype).masked_fill(self._dead, 0)
        self._dot: Tensor | None = None
        self._entropy: tuple[Tensor, Tensor] | None = None  # of the rows, and its gradient

    def look_up(self, out: Tensor) -> None:
        """Use the statistics of the forward, out and LSE, for rows that exceed one chunk."""
        self._dot = torch.linalg.vecdot(self.do, out)[..., None]
        self._lse = self._lse.masked_fill(self._dead, math.inf).div_(self._factor)

    def look_up_entropy(
        self, unit: Unit, chunk: Chunk, entropy: Tensor, grad_entropy: Tensor
    ) -> None:
        """Let `score_gradient` add the gradient of the entropies [B, Hq, Sq] of the forward."""
        own, grad = (
            unit.rows(t[..., None], chunk, self.q.dtype).masked_fill(self._dead, 0)
            for t in (entropy, grad_entropy)
        )
        self._entropy = own, grad

    def weights(self, s: Tensor, spread: Tensor, keeps: list[Keep]) -> None:
        """Replace modified scores `s` by the weights P in place; `spread` is a view of `s`."""
        if not self._has_softmax:
            for keep in keeps:
                keep.zero(spread)
            return
        if self._dot is not None:
            exponential(s, self._lse, self._factor)
            for keep in keeps:
                keep.zero(spread)
            return
        for keep in keeps:
            keep.fill(spread)
        peak = s.amax(dim=-1, keepdim=True)
        exponential(s, finite(peak), self._factor)
        total = s.sum(dim=-1, keepdim=True)
        if self._sink is None:
            s.div_(total.masked_fill_(self._dead, 1))
        else:
            decay, total, _ = with_sink(total, peak.mul_(self._factor), self._sink)
            s.mul_(decay / total)

    def score_gradient(self, p: Tensor, dp: Tensor, spread: Tensor, keeps: list[Keep]) -> None:
        """Replace `dp` by the gradient of the modified scores in place, given the weights `p`.

        `spread` is a view of `dp`.
        """
        if not self._has_softmax:
            for keep in keeps:
                keep.zero(spread)
            return
        dp.sub_(torch.linalg.vecdot(p, dp)[..., None] if self._dot is None else self._dot)
        if self._dlse is not None:  # added separately, because the dot product may be far larger
            dp.add_(self._dlse)
        dp.mul_(p)
        if self._entropy is not None:
            own, grad = self._entropy
            dp.addcmul_(torch.xlogy(p, p).addcmul_(p, own), grad, value=-1)

    def add(self, ds: Tensor, k: Tensor) -> None:
        """Accumulate dS k into dq, without the softmax scale."""
        self._dq.baddbmm_(ds, k)

    def finish(self, dq: Tensor, scale: float) -> None:
        """Multiply dQ by the softmax scale and write it to `dq` [nb, nh, rows, D]."""
        dq.copy_(self._dq.mul_(scale).view(dq.shape))


class Shared:
    """Accumulates dK and dV over the units that share keys, in the compute dtype.

    The accumulators are the results themselves if these have the compute dtype. Otherwise they are
    rounded to the results once.

    Args:
        results: dK and dV, or one of them, written.
        factors: the factor of each.
        dtype: the compute dtype.
    """

    def __init__(
        self, results: Sequence[Tensor], factors: Sequence[float], dtype: torch.dtype
    ) -> None:
        self._results, self._factors = results, factors
        self._dtype = dtype
        self._place: tuple[slice, slice] | None = None
        self._sums: list[Tensor] = []

    def enter(self, unit: Unit) -> None:
        """Switch to the accumulators of a unit's keys."""
        place = unit.kv_batch, unit.kv_head
        if place == self._place:
            return
        self.leave()
        self._place = place
        self._sums = [
            t[place] if t.dtype == self._dtype else torch.zeros_like(t[place], dtype=self._dtype)
            for t in self._results
        ]

    def leave(self) -> None:
        """Round the accumulators to the results, unless they are the results themselves."""
        if self._place is not None:
            for t, total in zip(self._results, self._sums, strict=True):
                if t.dtype != self._dtype:
                    t[self._place] = total
        self._place = None

    def add(self, chunk: Chunk, *shares: Tensor) -> None:
        """Add a chunk's shares [lanes, width, n], without their factors, to the accumulators."""
        for total, share, factor in zip(self._sums, shares, self._factors, strict=True):
            spread = share.view(*total.shape[:2], -1, total.shape[3])
            for span, columns in chunk.places():
                total[:, :, span.start : span.stop].add_(spread[:, :, columns], alpha=factor)


def _chunk(
    call: Call,
    unit: Unit,
    chunk: Chunk,
    keeps: list[Keep],
    rows: Rows,
    shared: Shared,
    work: list[Workspace],
) -> None:
    """Add the contributions of a chunk to all gradients."""
    k = unit.columns(call.key, chunk, call.dtype)
    v = unit.columns(call.value, chunk, call.dtype)
    s = call.scores(rows.q, k, work[0])
    p = s
    if call.hooks.has_score:
        p = work[2].take(*s.shape).copy_(s)  # `score` may overwrite it, and `dscore` reads `s`
        for span, columns in chunk.places():
            part = unit.spread(p, chunk)[..., columns]
            part.copy_(call.hooks.score(part, call.tile(unit, chunk, span)))
    rows.weights(p, unit.spread(p, chunk), keeps)
    ds = torch.bmm(rows.do, v.mT, out=work[1].take(*s.shape))
    survivors, factor = call.survivors(unit, chunk, s), call.hooks.survivor_scale
    if survivors is None or factor is None:
        dv = torch.bmm(p.mT, rows.do)
    else:
        dv = torch.bmm((p * survivors).mT, rows.do).mul_(factor)
        ds.mul_(survivors).mul_(factor)
    rows.score_gradient(p, ds, unit.spread(ds, chunk), keeps)
    if call.hooks.has_score:
        through_score(call, unit, chunk, keeps, s, ds, p)
        ds = p
    shared.add(chunk, torch.bmm(ds.mT, rows.q), dv)
    rows.add(ds, k)


def through_score(
    call: Call,
    unit: Unit,
    chunk: Chunk,
    keeps: list[Keep],
    s: Tensor,
    ds: Tensor,
    result: Tensor,
) -> None:
    """Write the gradient of the raw scores `s` to `result`; `ds` is that of the modified scores."""
    s, ds, result = (unit.spread(t, chunk) for t in (s, ds, result))
    for span, columns in chunk.places():
        tile = call.tile(unit, chunk, span)
        if call.hooks.needs_captured_grad:
            call.hooks.captured_grad(s[..., columns], ds[..., columns], tile)
        grad = call.hooks.dscore(s[..., columns], ds[..., columns], tile)
        result[..., columns].copy_(grad)
    for keep in keeps:  # the score's derivative may be infinite under the mask, and 0 * inf is NaN
        keep.zero(result)
