"""Build the score_mod that adds a full bias table."""

from __future__ import annotations

from torch import Tensor

from attnkit import Axes, ScoreMod, picklable
from attnkit.mods._check import shape_text, table


@picklable
def full_bias(bias: Tensor) -> ScoreMod:
    """Build a score_mod that adds `bias[b, h, q, kv]` to the score.

    The bias is added after `scale` is applied, like a float `attn_mask` of PyTorch's SDPA. The
    table may be larger than the call. Entry (0, 0) is for the first query and key, so use
    `.shift(q=...)` for queries that follow a cache.

    Args:
        bias: float [Sq, Skv], [H, Sq, Skv] or [B, H, Sq, Skv], may be learned; axes of size 1 are
            broadcast.

    Returns:
        The score_mod.

    Raises:
        ArgumentError, ShapeError, DTypeError: `bias` is not a float tensor of that shape.

    >>> import torch
    >>> bias = torch.tensor([[0.5, -0.5]])
    >>> full_bias(bias)(torch.zeros(2), 0, 0, 1, torch.arange(2))
    tensor([ 0.5000, -0.5000])
    """
    shapes = "[Sq, Skv], [H, Sq, Skv] or [B, H, Sq, Skv]"
    rank = table("bias", bias, shapes, (2, 3, 4)).ndim
    shared = tuple(size == 1 for size in bias.shape)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        indices = (b, h, q, kv)[4 - rank :]
        return score + bias[tuple(0 if s else i for s, i in zip(shared, indices, strict=True))]

    names = ("b", "h", "q", "kv")[4 - rank :]
    axes = Axes("bias", bias, *(None if s else n for s, n in zip(shared, names, strict=True)))
    return ScoreMod(score_mod, f"full_bias({shape_text(bias)})", axes=[axes])
