"""Build score_mods that make attention weights decay with the distance."""

from __future__ import annotations

import torch
from torch import Tensor

from attnkit import Axes, ScoreMod, ShapeError, picklable
from attnkit.mods._check import number, number_text, shape_text, table


@picklable
def distance_decay(rate: Tensor, power: float = 1.0) -> ScoreMod:
    """Build a score_mod that subtracts `rate[h] * |q - kv| ** power` from the score.

    The weights of a row sum to 1, unlike in RetNet's retention, which has no softmax.

    Args:
        rate: float [H], may be learned; `-log(gamma)` for RetNet's decay gamma.
        power: greater than 0. 1 gives RetNet's decay, other powers give KERPLE's power variant.

    Returns:
        The score_mod.

    Raises:
        ArgumentError, OptionError, ShapeError, DTypeError: an argument is not as described.

    Source: Sun et al. 2023 (RetNet), arXiv:2307.08621; Chi et al. 2022 (KERPLE),
    arXiv:2205.09921.

    >>> import torch
    >>> mod = distance_decay(torch.tensor([0.5]), 2)
    >>> mod(torch.zeros(4), 0, torch.tensor(0), 3, torch.arange(4))
    tensor([-4.5000, -2.0000, -0.5000,  0.0000])
    """
    table("rate", rate, "[H]", (1,))
    exponent = number("power", power, positive=True)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score - rate[h] * (q - kv).abs().float() ** exponent

    label = f"distance_decay({shape_text(rate)}, {number_text(power)})"
    return ScoreMod(score_mod, label, axes=[Axes("rate", rate, "h")])


@picklable
def kerple(rate: Tensor, scale: Tensor) -> ScoreMod:
    """Build KERPLE's score_mod, which subtracts `rate[h] * log(1 + scale[h] * |q - kv|)`.

    Args:
        rate: float [H], learned; must stay positive.
        scale: float [H], learned; must stay positive.

    Returns:
        The score_mod.

    Raises:
        ArgumentError, ShapeError, DTypeError: an argument is not a float tensor of that shape.

    Source: Chi et al. 2022 (KERPLE, logarithmic), arXiv:2205.09921.

    >>> import torch
    >>> mod = kerple(torch.tensor([1.0]), torch.tensor([1.0]))
    >>> mod(torch.zeros(3), 0, torch.tensor(0), 2, torch.arange(3))
    tensor([-1.0986, -0.6931,  0.0000])
    """
    table("rate", rate, "[H]", (1,))
    table("scale", scale, "[H]", (1,))
    if rate.shape != scale.shape:
        raise ShapeError(
            f"rate and scale must have the same shape [H], got {tuple(rate.shape)} and "
            f"{tuple(scale.shape)}"
        )

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score - rate[h] * torch.log1p(scale[h] * (q - kv).abs())

    label = f"kerple({shape_text(rate)}, {shape_text(scale)})"
    return ScoreMod(score_mod, label, axes=[Axes("rate", rate, "h"), Axes("scale", scale, "h")])
