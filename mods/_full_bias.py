"""Define the mod that adds a bias to each score."""

from __future__ import annotations

from torch import Tensor

from attnkit.mods._check import ScoreMod, table


def full_bias(bias: Tensor) -> ScoreMod:
    """Adds `bias[b, h, q, kv]`.

    Args:
        bias: float [Sq, Skv], [H, Sq, Skv] or [B, H, Sq, Skv], may be learned; axes of size 1 are
            broadcast.

    Returns:
        The score_mod.

    Raises:
        ArgumentError, ShapeError, DTypeError: not a float tensor of that shape.

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

    return score_mod
