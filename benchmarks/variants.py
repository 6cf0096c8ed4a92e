"""Define the masks and score_mods of the cases, the same for attnkit and FlexAttention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Mod = Callable[..., Tensor]


def causal(length: int) -> Mod:
    def mask_mod(b, h, q, kv):
        return q >= kv

    return mask_mod


def window_512(length: int) -> Mod:
    """Return a mask where each query attends to itself and the 511 keys before it."""

    def mask_mod(b, h, q, kv):
        return (q >= kv) & (q - kv < 512)

    return mask_mod


def documents_8(length: int) -> Mod:
    """Return a causal mask within 8 documents with random boundaries."""
    random = torch.Generator().manual_seed(8)
    cuts = 1 + torch.randperm(length - 1, generator=random)[:7]
    ids = torch.zeros(length, dtype=torch.int32)
    ids[cuts] = 1
    ids = ids.cumsum(0, dtype=torch.int32)

    def mask_mod(b, h, q, kv):
        return (q >= kv) & (ids[q] == ids[kv])

    return mask_mod


def alibi(heads: int) -> Mod:
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)

    def score_mod(score, b, h, q, kv):
        return score - slopes[h] * (q - kv)

    return score_mod


def softcap(heads: int) -> Mod:
    def score_mod(score, b, h, q, kv):
        return 20 * torch.tanh(score / 20)

    return score_mod


def relative_bias(heads: int) -> Mod:
    table = torch.randn(heads, 8192, generator=torch.Generator().manual_seed(1))

    def score_mod(score, b, h, q, kv):
        return score + table[h, q - kv]

    return score_mod


MASKS: dict[str, Callable[[int], Mod]] = {
    "causal": causal,
    "window_512": window_512,
    "documents_8": documents_8,
}
SCORES: dict[str, Callable[[int], Mod]] = {
    "alibi": alibi,
    "softcap": softcap,
    "relative_bias": relative_bias,
}
