"""Define ALiBi: scores fall linearly with the distance, with a slope for each head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnkit.mods._check import ScoreMod, table, whole


def alibi(heads: int | Tensor, *, symmetric: bool = False) -> ScoreMod:
    """Adds `slope[h] * (kv - q)`.

    The default slopes are those of the paper: `2 ** (-8 * (h + 1) / H)` if H is a power of two;
    otherwise those of the next lower power of two, then every other slope of the next higher one.

    Args:
        heads: H for the default slopes, or float [H] with a slope per head (learned slopes get
            gradients).
        symmetric: subtract `slope[h] * |q - kv|` instead, for bidirectional attention.

    Returns:
        The score_mod.

    Raises:
        ArgumentError, OptionError, ShapeError, DTypeError: an argument is not as described.

    Source: Press et al. 2021, arXiv:2108.12409.

    >>> import torch
    >>> q, kv = torch.arange(3)[:, None], torch.arange(3)
    >>> alibi(8)(torch.zeros(3, 3), 0, torch.tensor(0), q, kv)
    tensor([[ 0.0000,  0.5000,  1.0000],
            [-0.5000,  0.0000,  0.5000],
            [-1.0000, -0.5000,  0.0000]])
    """
    slope = _from_table(heads) if isinstance(heads, Tensor) else _default(whole("heads", heads, 1))

    if symmetric:

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return score - slope(h) * (q - kv).abs()

    else:

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return score + slope(h) * (kv - q)

    return score_mod


def _from_table(slopes: Tensor) -> Callable[[Tensor], Tensor]:
    table("heads", slopes, "[H]", (1,))
    return lambda h: slopes[h]


def _default(heads: int) -> Callable[[Tensor], Tensor]:
    power = 1 << (heads.bit_length() - 1)  # the largest power of two that is at most H

    def slope(h: Tensor) -> Tensor:
        exponent = (h + 1) * (-8 / power)
        if heads > power:
            exponent = torch.where(h < power, exponent, (2 * (h - power) + 1) * (-4 / power))
        return torch.exp2(exponent)

    return slope
