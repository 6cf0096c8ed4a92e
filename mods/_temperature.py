"""Build score_mods that scale scores by the logarithm of the number of keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnkit import Axes, OptionError, ScoreMod, picklable
from attnkit.mods._check import extent, int_tensor, number_text, shape_text, table, whole


@picklable
def log_length(trained: int, length: int | Tensor | None = None) -> ScoreMod:
    """Build a score_mod that scales scores in a row of n keys by `max(1, log(n) / log(trained))`.

    Qwen's `use_logn_attn` is `log_length(seq_length)`. Queries that follow a cache of c keys need
    `.shift(q=c)`, so that row q has `q + c + 1` keys. With p places of padding on the left,
    `.shift(q=-p)` counts from the first token; rows before it count as rows of one key.

    Args:
        trained: sequence length in training, at least 2.
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
            return score * (torch.log((q + 1).clamp(min=1).float()) * unit).clamp(min=1.0)

        return ScoreMod(score_mod, f"log_length({number_text(trained)})")
    if isinstance(length, Tensor):
        lengths = _lengths(length)

        def of_batch(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return score * (torch.log(lengths[b].float()) * unit).clamp(min=1.0)

        axes = [Axes("length", lengths, "b")]
        return ScoreMod(of_batch, f"log_length({number_text(trained)}, [B])", axes=axes)
    factor = max(1.0, math.log(whole("length", length, 1)) * unit)

    def constant(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score * factor

    return ScoreMod(constant, f"log_length({number_text(trained)}, {number_text(length)})")


@picklable
def scalable_softmax(scale: Tensor, length: int | Tensor | None = None) -> ScoreMod:
    """Build a score_mod that scales scores in a row of n keys by `scale[h] * log(n)`.

    The factor keeps attention focused on few keys if n is large. Queries that follow a cache of c
    keys need `.shift(q=c)`, so that row q has `q + c + 1` keys. With p places of padding on the
    left, `.shift(q=-p)` counts from the first token; rows before it count as rows of one key.

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
    by_head = Axes("scale", table("scale", scale, "[H]", (1,)), "h")
    label = f"scalable_softmax({shape_text(scale)}"
    if length is None:

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return score * (scale[h] * torch.log((q + 1).clamp(min=1).float()))

        return ScoreMod(score_mod, f"{label})", axes=[by_head])
    if isinstance(length, Tensor):
        lengths = _lengths(length)

        def of_batch(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return score * (scale[h] * torch.log(lengths[b].float()))

        axes = [by_head, Axes("length", lengths, "b")]
        return ScoreMod(of_batch, f"{label}, [B])", axes=axes)
    factor = math.log(whole("length", length, 1))

    def constant(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score * (scale[h] * factor)

    return ScoreMod(constant, f"{label}, {number_text(length)})", axes=[by_head])


def _lengths(length: Tensor) -> Tensor:
    lengths = int_tensor("length", length, "[B]", (1,))
    ends = extent(lengths)
    if ends is not None and ends[0] < 1:
        raise OptionError(f"length must be at least 1 everywhere, got {ends[0]}")
    return lengths
