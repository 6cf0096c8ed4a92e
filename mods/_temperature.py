"""Scale scores by the logarithm of the number of keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnkit import OptionError
from attnkit.mods._check import ScoreMod, int_tensor, table, whole


def log_length(trained: int, length: int | Tensor | None = None) -> ScoreMod:
    """Multiplies the scores of a row with n keys by `max(1, log(n) / log(trained))`.

    Args:
        trained: sequence length in training, from 2 on.
        length: n for all rows, an int, or int [B] per batch entry; None for causal attention,
            where row q has `n = q + 1` keys.

    Returns:
        The score_mod.

    Raises:
        ArgumentError, OptionError, ShapeError, DTypeError: an argument is not as described.

    Source: Chiang and Cholak 2022, arXiv:2202.12172; Qwen, arXiv:2309.16609 (LogN scaling).

    >>> import torch
    >>> log_length(4)(torch.ones(4), 0, 0, torch.tensor([0, 3, 7, 15]), 0)
    tensor([1.0000, 1.0000, 1.5000, 2.0000])
    """
    unit = 1 / math.log(whole("trained", trained, 2))
    if length is None:

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return score * (torch.log((q + 1).float()) * unit).clamp(min=1.0)

        return score_mod
    if isinstance(length, Tensor):
        lengths = _lengths(length)

        def of_batch(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return score * (torch.log(lengths[b].float()) * unit).clamp(min=1.0)

        return of_batch
    factor = max(1.0, math.log(whole("length", length, 1)) * unit)

    def constant(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score * factor

    return constant


def scalable_softmax(scale: Tensor, length: int | Tensor | None = None) -> ScoreMod:
    """Multiplies the scores of a row with n keys by `scale[h] * log(n)`: attention stays focused.

    Args:
        scale: float [H], learned.
        length: n for all rows, an int, or int [B] per batch entry; None for causal attention,
            where row q has `n = q + 1` keys.

    Returns:
        The score_mod.

    Raises:
        ArgumentError, OptionError, ShapeError, DTypeError: an argument is not as described.

    Source: Nakanishi 2025 (SSMax), arXiv:2501.19399.

    >>> import torch
    >>> mod = scalable_softmax(torch.tensor([0.5]))
    >>> mod(torch.ones(3), 0, torch.tensor(0), torch.tensor([0, 3, 7]), 0)
    tensor([0.0000, 0.6931, 1.0397])
    """
    table("scale", scale, "[H]", (1,))
    if length is None:

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return score * (scale[h] * torch.log((q + 1).float()))

        return score_mod
    if isinstance(length, Tensor):
        lengths = _lengths(length)

        def of_batch(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return score * (scale[h] * torch.log(lengths[b].float()))

        return of_batch
    factor = math.log(whole("length", length, 1))

    def constant(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score * (scale[h] * factor)

    return constant


def _lengths(length: Tensor) -> Tensor:
    lengths = int_tensor("length", length, "[B]", (1,))
    least = int(lengths.min())
    if least < 1:
        raise OptionError(f"length must be at least 1 everywhere, got {least}")
    return lengths
