"""Build ALiBi: a bias that is linear in the distance, with one slope per head."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from attnkit import Axes, ScoreMod, picklable
from attnkit.mods._check import flag, shape_text, table, whole

Slope: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@picklable
def alibi(heads: int | Tensor, *, symmetric: bool = False) -> ScoreMod:
    """Build ALiBi's score_mod, which adds `slope[h] * (kv - q)` to the score.

    FlashAttention's `alibi_slopes` subtract `slope[h] * |q + Skv - Sq - kv|`. With a causal mask
    the weights are the same; otherwise use `alibi(slopes, symmetric=True).shift(q=Skv - Sq)`.
    Hugging Face's BLOOM adds `slope[h] * kv`, which gives the same weights but another LSE.

    The default slopes are those of the paper: `2 ** (-8 * (h + 1) / H)` if H is a power of two.
    Otherwise they are the slopes of the next lower power of two, followed by every other slope of
    the next higher one.

    Args:
        heads: H, the number of query heads of the model, for the default slopes; or the slopes,
            float [H] or [B, H] (learned slopes get gradients). If a call has only some of the
            model's heads, pass their slopes.
        symmetric: whether to subtract `slope[h] * |q - kv|` instead, for bidirectional attention.

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
    flag("symmetric", symmetric)
    if isinstance(heads, Tensor):
        slope, axes = _from_table(heads), Axes("heads", heads, *("b", "h")[2 - heads.ndim :])
        shown = shape_text(heads)
    else:
        slope, axes = _default(whole("heads", heads, 1)), Axes("heads", heads, "h")
        shown = str(heads)

    if symmetric:

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return score - slope(b, h) * (q - kv).abs()

    else:

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return score + slope(b, h) * (kv - q)

    label = f"alibi({shown}, symmetric=True)" if symmetric else f"alibi({shown})"
    return ScoreMod(score_mod, label, axes=[axes])


def _from_table(slopes: Tensor) -> Slope:
    if table("heads", slopes, "[H] or [B, H]", (1, 2)).ndim == 2:
        return lambda b, h: slopes[b, h]
    return lambda b, h: slopes[h]


def _default(heads: int) -> Slope:
    power = 1 << (heads.bit_length() - 1)  # the largest power of two that is at most H

    def slope(b: Tensor, h: Tensor) -> Tensor:
        exponent = (h + 1) * (-8 / power)
        if heads > power:
            exponent = torch.where(h < power, exponent, (2 * (h - power) + 1) * (-4 / power))
        return torch.exp2(exponent)

    return slope
