"""Compute softmax(score(q k^T)) v by strips of query rows, with online softmax along kv.

Without a softmax the modified scores are the weights of the values, which are summed alone.

All arithmetic between input and output is float32 (float64 for float64 inputs). On CPUs with matrix
units 16-bit products would be faster, but torch rounds their results to 16 bits on a CPU, which
would be less exact.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnkit.sparsity.block_runs import BlockRuns
from attnkit.templates.cpu.call import Call, Workspace, exponential, finite, with_sink
from attnkit.templates.cpu.hooks import Hooks
from attnkit.templates.cpu.masks import Keep
from attnkit.templates.cpu.strips import Chunk
from attnkit.templates.cpu.units import Unit
from attnkit.templates.cpu.weights import WeightedSum
from attnkit.util.outputs import output_like

SCORES = 1 << 21  # scores in memory at a time


@torch.no_grad()
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: BlockRuns | None,
    hooks: Hooks,
    scale: float,
    *,
    need_max: bool = False,
    need_entropy: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute attention over the tiles that the mask touches.

    Args:
        query: [B, Hq, Sq, D], any strides; float32, float64, bfloat16 or float16.
        key: [B or 1, Hkv, Skv, D], Hkv a divisor of Hq.
        value: [B or 1, Hkv, Skv, Dv].
        runs: block runs of the mask, with batch 1 or B and heads 1 or Hq; None for no mask.
        hooks: score and mask of the variant.
        scale: factor on q k^T, before the score function.
        need_max: whether to return the largest score of each row.
        need_entropy: whether to return the entropy of each row.

    Returns:
        out [B, Hq, Sq, Dv] in the query's dtype and stride order; LSE [B, Hq, Sq], natural
        logarithm, float32 (float64 for float64); the largest score and the entropy of each row in
        the shape and dtype of the LSE, or None. A fully masked row gives 0, -inf (the sink, if
        there is one), -inf and 0. Without a softmax the LSE is zeros that mean nothing.
    """
    call = Call.of(query, key, value, runs, hooks, scale)
    out = output_like(query, value.shape[-1])
    lse = query.new_zeros(query.shape[:3], dtype=call.dtype)
    top = torch.empty_like(lse) if need_max else None
    entropy = torch.empty_like(lse) if need_entropy else None
    space = Workspace(query, call.dtype)
    for unit, chunk, keeps in call.walk(SCORES):
        if chunk.first:
            q = unit.rows(query, chunk, call.dtype)
            softmax: Softmax | WeightedSum = (
                Softmax(call.factor, need_entropy, hooks.survivor_scale)
                if hooks.has_softmax
                else WeightedSum(hooks.survivor_scale)
            )
        if chunk.spans:
            s = modified_scores(call, unit, chunk, keeps, q, space)
            survivors = call.survivors(unit, chunk, s)
            softmax.add(s, unit.columns(call.value, chunk, call.dtype), survivors)
        if chunk.last:
            here = (unit.batch, unit.head, chunk.rows)
            sink = None if hooks.sink is None else hooks.sink[unit.head].view(1, -1, 1)
            if isinstance(softmax, WeightedSum):
                softmax.finish(out[here])
                continue
            if entropy is not None:  # first, because `finish` overwrites its sums
                softmax.write_entropy(entropy[here], sink)
            softmax.finish(out[here], lse[here], None if top is None else top[here], sink)
    return out, lse, top, entropy


def modified_scores(
    call: Call, unit: Unit, chunk: Chunk, keeps: list[Keep], q: Tensor, space: Workspace
) -> Tensor:
    """Return the modified, masked scores of a chunk, [lanes, stacked rows, width].

    Masked scores are -inf, or 0 without a softmax. The scores still lack `Call.factor`.
    """
    stacked = call.scores(q, unit.columns(call.key, chunk, call.dtype), space)
    s = unit.spread(stacked, chunk)
    if call.hooks.has_score:
        for span, columns in chunk.places():
            part = s[..., columns]
            part.copy_(call.hooks.score(part, call.tile(unit, chunk, span)))
    for keep in keeps:
        if call.hooks.has_softmax:
            keep.fill(s)
        else:
            keep.zero(s)
    return stacked


class Softmax:
    """Accumulates online softmax of some rows times the values (Milakov and Gimelshein, 2018)."""

    def __init__(
        self, factor: float, need_entropy: bool = False, survivor_scale: Tensor | None = None
    ) -> None:
        self._factor = factor  # on every score, applied in the exponential
        self._survivor_scale = survivor_scale  # of the elements that dropout keeps
        self._need_entropy = need_entropy
        # sum of w log(w) over the weights w of a row before the division, [lanes, rows, 1]
        self._moment: Tensor
        self._acc: Tensor | None = None  # [lanes, rows, Dv]
        self._total: Tensor  # [lanes, rows, 1], as are _peak and _shift
        self._peak: Tensor
        self._shift: Tensor

    def add(self, s: Tensor, v: Tensor, survivors: Tensor | None = None) -> None:
        """Add scores and their values.

        Args:
            s: [lanes, rows, width], overwritten.
            v: the values.
            survivors: bool, in the shape of `s`: the elements that dropout keeps; None for all.
        """
        peak = s.amax(dim=-1, keepdim=True)
        if self._acc is not None:
            peak = torch.maximum(peak, self._peak)
        shift = finite(peak)
        exponential(s, shift, self._factor)
        if self._acc is None:
            self._total = s.sum(dim=-1, keepdim=True)
            if self._need_entropy:
                self._moment = torch.xlogy(s, s).sum(dim=-1, keepdim=True)
            self._acc = torch.bmm(s if survivors is None else s.mul_(survivors), v)
        else:
            decay = exponential(self._shift, shift, self._factor)
            if self._need_entropy:  # w becomes decay w, whose logarithm is log(decay) + log(w)
                self._moment.mul_(decay).addcmul_(torch.xlogy(decay, decay), self._total)
                self._moment.add_(torch.xlogy(s, s).sum(dim=-1, keepdim=True))
            self._total.mul_(decay).add_(s.sum(dim=-1, keepdim=True))
            self._acc.mul_(decay).baddbmm_(s if survivors is None else s.mul_(survivors), v)
        self._peak, self._shift = peak, shift

    def write_entropy(self, entropy: Tensor, sink: Tensor | None) -> None:
        """Write the entropies of the rows: log(total) - moment / total; 0 for a row without keys.

        Args:
            entropy: [nb, nh, rows], written.
            sink: [1, nh, 1], one more logit of each row; None for none.
        """
        if self._acc is None:
            entropy.zero_()
            return
        total, moment = self._total.view(entropy.shape), self._moment.view(entropy.shape)
        if sink is not None:
            peak = self._peak.view(entropy.shape) * self._factor
            base = torch.maximum(peak, sink)
            base = base.masked_fill(base == -math.inf, 0)
            decay, own = torch.exp(peak - base), torch.exp(sink - base)
            moment = decay * moment + torch.xlogy(decay, decay) * total + torch.xlogy(own, own)
            total = decay * total + own
        # a rounded difference may be below 0
        found = torch.log(total).sub_(moment / total).clamp_(min=0)
        entropy.copy_(found.masked_fill_(total == 0, 0))

    def finish(self, out: Tensor, lse: Tensor, top: Tensor | None, sink: Tensor | None) -> None:
        """Write the results of the rows.

        Args:
            out: [nb, nh, rows, Dv], written.
            lse: [nb, nh, rows], written.
            top: [nb, nh, rows], written with the maxima; None if they are not needed.
            sink: [1, nh, 1], one more logit of each row; None for none.
        """
        if self._acc is None:
            out.zero_()
            lse.copy_(torch.full_like(lse, -math.inf) if sink is None else sink.expand(lse.shape))
            if top is not None:
                top.fill_(-math.inf)
            return
        if self._survivor_scale is not None:
            self._acc.mul_(self._survivor_scale)
        if top is not None:
            torch.mul(self._peak.view(top.shape), self._factor, out=top)
        if sink is not None:
            peak = self._peak.view(lse.shape) * self._factor
            decay, total, with_sink_lse = with_sink(self._total.view(lse.shape), peak, sink)
            lse.copy_(with_sink_lse)
            torch.div(self._acc.view(out.shape) * decay[..., None], total[..., None], out=out)
            return
        log = torch.log(self._total)
        lse.copy_(log.add_(self._shift, alpha=self._factor).view(lse.shape))
        tiny = torch.finfo(self._total.dtype).tiny  # a fully masked row becomes 0 / tiny
        total = self._total.clamp_(min=tiny)
        torch.div(self._acc.view(out.shape), total.view(*lse.shape, 1), out=out)
