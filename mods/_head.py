"""Build score_mods that multiply scores by one learned factor per head."""

from __future__ import annotations

import torch
from torch import Tensor

from attnkit import Axes, ScoreMod, picklable
from attnkit.mods._check import shape_text, table


@picklable
def head_scale(scale: Tensor) -> ScoreMod:
    """Build a score_mod that multiplies the score by `scale[h]`.

    `flex_attention` multiplies the score by its own `scale` first. Pass `scale=1.0` to
    `flex_attention` if the learned scale replaces it, as in Swin v2.

    Args:
        scale: float [H], learned.

    Returns:
        The score_mod.

    Raises:
        ArgumentError, ShapeError, DTypeError: `scale` is not a float tensor of that shape.

    Source: Henry et al. 2020 (learned scale), arXiv:2010.04245; Liu et al. 2022 (Swin v2, per
    head), arXiv:2111.09883.

    >>> import torch
    >>> head_scale(torch.tensor([1.0, 2.0]))(torch.tensor(3.0), 0, torch.arange(2), 0, 0)
    tensor([3., 6.])
    """
    table("scale", scale, "[H]", (1,))

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score * scale[h]

    label = f"head_scale({shape_text(scale)})"
    return ScoreMod(score_mod, label, axes=[Axes("scale", scale, "h")])


@picklable
def head_gate(gate: Tensor) -> ScoreMod:
    """Build a score_mod that multiplies the score by `sigmoid(gate[h])`.

    A factor of 0 gives uniform attention, a factor of 1 does not change the score.

    Args:
        gate: float [H], learned.

    Returns:
        The score_mod.

    Raises:
        ArgumentError, ShapeError, DTypeError: `gate` is not a float tensor of that shape.

    Source: d'Ascoli et al. 2021 (ConViT, a gate per head), arXiv:2103.10697.

    >>> import torch
    >>> head_gate(torch.tensor([0.0, 9.0]))(torch.tensor(2.0), 0, torch.arange(2), 0, 0)
    tensor([1.0000, 1.9998])
    """
    table("gate", gate, "[H]", (1,))

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score * torch.sigmoid(gate[h])

    return ScoreMod(score_mod, f"head_gate({shape_text(gate)})", axes=[Axes("gate", gate, "h")])
