"""Compare results on a GPU with dense attention in float64, on a sample of rows or heads.

A forward is compared on sampled rows of two heads, a backward on the gradients of the last kv head
and of the query heads that share it. The limit is twice the error of dense attention in the inputs'
own dtype, with products rounded to that dtype and the softmax in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from gpu_variants import Problem, kept_rows
from torch import Tensor

from attnkit.util import dropout

FACTOR = 2.0
ROWS = 64  # sampled for the first batch element and head, and for the last
SEED = 4  # of torch's generator, before the call with dropout whose result is compared
SCORES_HELD = 1 << 26  # scores that the reference for gradients computes at a time


@dataclass(frozen=True)
class Verdict:
    """Hold the error of the worst tensor and its limit.

    Attributes:
        error: largest difference, relative to the largest exact value.
        allowed: largest allowed error, twice that of dense attention in the same dtype.
    """

    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Return whether the error is within the limit; False if the result contains a NaN."""
        return self.error <= self.allowed


class Check:
    """Compute the reference of one problem and direction, and compare results with it.

    Args:
        p: the problem. Its inputs require grad for a backward.
        backward: check gradients instead of the output.
    """

    def __init__(self, p: Problem, backward: bool) -> None:
        self.p, self.backward = p, backward
        random = torch.Generator().manual_seed(0)
        length = p.shape.length
        inner = torch.randperm(length, generator=random)[: max(0, ROWS - 2)]
        ends = torch.tensor([0, length - 1])
        self.state = None
        if p.dropout_p:
            torch.manual_seed(SEED)
            self.state = dropout.draw_state(p.dropout_p, p.query.device)
        self.rows = torch.cat((inner, ends)).unique().to(p.query.device)
        dense = self._gradients if backward else self._outputs
        self.truth = dense(torch.float64)
        own = [t.to(torch.float64) for t in dense(p.query.dtype)]
        # a reference may be exact by chance, but no result is more precise than its dtype
        least = torch.finfo(p.query.dtype).eps / 2
        self.allowed = [
            FACTOR * max(_off(a, b), least) for a, b in zip(own, self.truth, strict=True)
        ]

    def __call__(self, results: Sequence[Tensor]) -> Verdict:
        """Compare the results of a contender with the reference; return the worst verdict.

        Args:
            results: the output [B, H, S, Dv], or the gradients of query, key, value and learned
                tables.
        """
        picked = self._picked(results)
        pairs = zip(picked, self.truth, self.allowed, strict=True)
        verdicts = [Verdict(_off(a.double(), b), allowed) for a, b, allowed in pairs]
        # comparisons with NaN are false, and a NaN is the worst error
        return max(verdicts, key=lambda v: math.inf if math.isnan(v.error) else v.error / v.allowed)

    def _picked(self, results: Sequence[Tensor]) -> list[Tensor]:
        if not self.backward:
            return [results[0][i, i, self.rows] for i in (0, -1)]
        group = self.p.shape.heads // self.p.shape.kv_heads
        query, key, value, *tables = results
        return [query[:, -group:], key[:, -1:], value[:, -1:], *(t[-group:] for t in tables)]

    def _outputs(self, dtype: torch.dtype) -> list[Tensor]:
        p, tables = self.p, self.p.extras
        if dtype == torch.float64:
            tables = tuple(t.double() if t.is_floating_point() else t for t in tables)
        outputs = []
        for i in (0, -1):
            query, key, value = (t[i, i].to(dtype) for t in (p.query, p.key, p.value))
            place = i % p.shape.batch, i % p.shape.heads
            with torch.no_grad():
                rows, state = self.rows, self.state
                out = _attention(p, query[rows], key, value, rows, place, tables, state)
            outputs.append(out)
        return outputs

    def _gradients(self, dtype: torch.dtype) -> list[Tensor]:
        """Compute reference gradients in `dtype`, summed over query rows; return them in float64.

        The gradients are those of the last kv head and of the query heads that share it, for all
        batch elements, and those of the learned tables.
        """
        p, shape = self.p, self.p.shape
        group = shape.heads // shape.kv_heads
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        tables = tuple(
            t.detach()
            .to(wide if t.is_floating_point() else t.dtype)
            .requires_grad_(t.requires_grad)
            for t in p.extras
        )
        learned = [t for t in tables if t.requires_grad]
        totals = [
            torch.zeros_like(t[:, -n:], dtype=wide)
            for t, n in ((p.query, group), (p.key, 1), (p.value, 1))
        ]
        sums = [torch.zeros_like(t) for t in learned]
        step = max(1, SCORES_HELD // shape.length)
        everything = torch.arange(shape.length, device=p.query.device)
        for b in range(shape.batch):
            for head in range(group):
                for rows in everything.split(step):
                    place = b, shape.heads - group + head
                    parts = self._part(dtype, rows, place, tables, learned)
                    totals[0][b, head, rows] += parts[0]
                    for total, part in zip(totals[1:], parts[1:3], strict=True):
                        total[b, 0] += part
                    for total, part in zip(sums, parts[3:], strict=True):
                        total += part
        return [*(t.to(torch.float64) for t in totals), *(t[-group:].double() for t in sums)]

    def _part(
        self,
        dtype: torch.dtype,
        rows: Tensor,
        place: tuple[int, int],
        tables: tuple[Tensor, ...],
        learned: list[Tensor],
    ) -> tuple[Tensor, ...]:
        p, (b, h) = self.p, place
        query = p.query[b, h, rows].detach().to(dtype).requires_grad_()
        key, value = (t[b, -1].detach().to(dtype).requires_grad_() for t in (p.key, p.value))
        out = _attention(p, query, key, value, rows, place, tables, self.state)
        return torch.autograd.grad(out, (query, key, value, *learned), p.grad[b, h, rows].to(dtype))


def _attention(
    p: Problem,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    place: tuple[int, int],
    tables: tuple[Tensor, ...],
    state: Tensor | None,
) -> Tensor:
    """Compute dense attention for the query rows `rows` of one head; fully masked rows give 0.

    `tables` are the captured tensors, followed by the sink if there is one. `state` is that of
    dropout, or None.
    """
    sink = None
    if p.sink is not None:
        tables, sink = tables[:-1], tables[-1]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = (query @ key.mT).to(wide) * query.shape[-1] ** -0.5
    score_mod: Callable[..., Tensor] | None = p.modified_by(tables)
    if score_mod is not None:
        b, h = (torch.tensor(i, device=rows.device) for i in place)
        columns = torch.arange(len(key), dtype=torch.int32, device=rows.device)
        scores = score_mod(scores, b, h, rows.int()[:, None], columns[None])
    kept = None if p.mask_mod is None else kept_rows(p.mask_mod, rows.int(), len(key))
    if p.normalization != "softmax":
        weights = torch.sigmoid(scores) if p.normalization == "sigmoid" else scores
        weights = weights if kept is None else weights.masked_fill(~kept, 0)
        return weights.to(query.dtype) @ value
    if kept is not None:
        scores = scores.masked_fill(~kept, -math.inf)
    dead = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(dead, 0)
    if sink is not None:  # one more logit of each row, and no value
        logit = sink[place[1]].to(wide).expand(len(rows), 1)
        scores = torch.cat((scores, logit), 1)
    weights = scores.softmax(-1)[:, : len(key)].masked_fill(dead, 0)
    if state is not None:
        weights = weights * survivors(p, state, rows, len(key), place).to(wide)
    return weights.to(query.dtype) @ value


def survivors(
    p: Problem, state: Tensor, rows: Tensor, columns: int, place: tuple[int, int]
) -> Tensor:
    """Return the factors that dropout gives the softmax in some rows of a head."""
    b, h = (torch.tensor([[i]], device=rows.device) for i in place)
    first, last = int(rows[0]), int(rows[-1])
    parts = [(first, last + 1)]
    if last - first + 1 != len(rows):
        parts = [(int(row), int(row) + 1) for row in rows]
    kept = [dropout.kept(state, b, h, p.shape.heads, ends, (0, columns))[0, 0] for ends in parts]
    return torch.cat(kept).double() * dropout.survivor_scale(state, torch.float64)


def _off(result: Tensor, truth: Tensor) -> float:
    """Return the largest difference relative to the largest exact value, or to 1 if all are 0."""
    top = truth.abs().max()
    return float((result - truth).abs().max() / torch.where(top > 0, top, 1))
