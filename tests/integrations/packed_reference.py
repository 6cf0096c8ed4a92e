"""Compute attention of packed sequences one by one, from its formula, with autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

INF = float("inf")


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Sequence[int],
    cu_k: Sequence[int],
    *,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask: Callable[..., Any] | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out [total_q, Hq, Dv] and LSE [Hq, total_q], in the dtype of the tensors."""
    group = query.shape[1] // key.shape[1]
    scale = query.shape[2] ** -0.5 if scale is None else scale
    nothing = sum(t[..., :0].sum() for t in (query, key, value))  # 0, with a gradient of zeros
    out = query.new_zeros(*query.shape[:2], value.shape[2]) + nothing
    lse = query.new_full((query.shape[1], query.shape[0]), -INF)
    outs, lses = [], []
    for n in range(len(cu_q) - 1):
        q = query[cu_q[n] : cu_q[n + 1]].transpose(0, 1)
        k, v = (t[cu_k[n] : cu_k[n + 1]].transpose(0, 1) for t in (key, value))
        k, v = (t.repeat_interleave(group, 0) for t in (k, v))
        rows, columns = q.shape[1], k.shape[1]
        if not columns:
            outs.append(out[cu_q[n] : cu_q[n + 1]])
            lses.append(lse[:, cu_q[n] : cu_q[n + 1]])
            continue
        b, h = torch.tensor(n), torch.arange(q.shape[0])[:, None, None]
        i = torch.arange(columns - rows, columns)[:, None]
        j = torch.arange(columns)
        scores = q @ k.mT * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if slopes is not None:
            slope = slopes if slopes.ndim == 1 else slopes[n]
            scores = scores - slope.to(scores.dtype)[:, None, None] * (i - j).abs()
        if score_mod is not None:
            scores = score_mod(scores, b, h, i, j)
        keep = torch.ones(q.shape[0], rows, columns, dtype=torch.bool)
        if window[0] >= 0:
            keep = keep & (i - j <= window[0])
        if window[1] >= 0:
            keep = keep & (j - i <= window[1])
        if mask is not None:
            keep = keep & mask(b, h, i, j)
        scores = scores.masked_fill(~keep, -INF)
        some = keep.any(-1)
        total = torch.where(some, scores.logsumexp(-1), -INF)
        shifted = scores - torch.where(some, total, 0)[..., None]
        outs.append((torch.where(keep, shifted.exp(), 0) @ v).transpose(0, 1))
        lses.append(total)
    rest = cu_q[-1]
    return torch.cat([*outs, out[rest:]]), torch.cat([*lses, lse[:, rest:]], 1)


def check_close(found: Sequence[Tensor], exact: Sequence[Tensor], dense: Sequence[Tensor]) -> None:
    """Check that the error of each tensor is at most twice that of dense attention.

    Sums of few terms may be exact by chance in the dense result, so that a few roundings of the
    largest value are allowed besides.
    """
    for ours, true, theirs in zip(found, exact, dense, strict=True):
        assert ours.shape == true.shape
        finite = true.isfinite()
        assert torch.equal(ours.isfinite(), finite)
        if finite.any():
            eps = torch.finfo(ours.dtype).eps
            ours, true, theirs = (t[finite].double() for t in (ours, true, theirs))
            allowed = 2 * (theirs - true).abs().amax() + 8 * eps * (1 + true.abs().amax())
            assert (ours - true).abs().amax() <= allowed
