"""Build T5's relative position bias: one learned number per head and distance bucket."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnkit import Axes, OptionError, ScoreMod, picklable
from attnkit.mods._check import MOST_DISTANCES, flag, shape_text, table, whole


@picklable
def t5_bias(bias: Tensor, *, bidirectional: bool = True, max_distance: int = 128) -> ScoreMod:
    """Build T5's relative position score_mod, which adds `bias[h, bucket(kv - q)]` to the score.

    The first axis is the heads. Hugging Face's `relative_attention_bias.weight` is [buckets, H], so
    pass `weight.T`. T5 does not scale its scores, so pass `scale=1.0` to `flex_attention`. Queries
    that follow a cache need `.shift(q=...)`.

    Half of the buckets hold one distance each. The other half hold ranges of distances that grow up
    to `max_distance`; all larger distances share the last bucket. If `bidirectional` is True, keys
    before and after the query use half of the buckets each. If it is False, keys after the query
    count as distance 0.

    Args:
        bias: float [H, buckets], learned.
        bidirectional: True in an encoder, False in a decoder.
        max_distance: all distances of at least this number share the last bucket.

    Returns:
        The score_mod.

    Raises:
        ArgumentError, ShapeError, DTypeError: an argument is not as described.
        OptionError: there are fewer than 2 buckets on a side, their number is odd with
            `bidirectional`, or `max_distance` is not larger than the number of buckets with one
            distance.

    Source: Raffel et al. 2020 (T5), arXiv:1910.10683; buckets as in Mesh TensorFlow.

    >>> import torch
    >>> q, kv = torch.arange(3)[:, None], torch.arange(3)
    >>> bias = torch.arange(32.0)[None]
    >>> t5_bias(bias)(torch.zeros(3, 3), 0, torch.tensor(0), q, kv)
    tensor([[ 0., 17., 18.],
            [ 1.,  0., 17.],
            [ 2.,  1.,  0.]])
    """
    buckets = table("bias", bias, "[H, buckets]", (2,)).shape[1]
    flag("bidirectional", bidirectional)
    whole("max_distance", max_distance, 1, MOST_DISTANCES)
    side = buckets // 2 if bidirectional else buckets
    if side < 2 or (bidirectional and buckets % 2):
        needed = "an even number of buckets, at least 4" if bidirectional else "at least 2 buckets"
        raise OptionError(f"bias must have {needed}, got {buckets}")
    if max_distance <= side // 2:
        raise OptionError(
            f"max_distance must be greater than the {side // 2} single distances, got "
            f"{max_distance}"
        )
    bucket_of = _buckets(side, max_distance).to(bias.device)

    if bidirectional:

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            bucket = bucket_of[(kv - q).abs().clamp(max=max_distance)]
            return score + bias[h, torch.where(kv > q, bucket + side, bucket)]

    else:

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return score + bias[h, bucket_of[(q - kv).clamp(0, max_distance)]]

    label = f"t5_bias({shape_text(bias)})"
    return ScoreMod(score_mod, label, axes=[Axes("bias", bias, "h", None)])


def _buckets(count: int, max_distance: int) -> Tensor:
    """Return the bucket of each distance, int32 [max_distance + 1], with T5's float32 rounding."""
    distance = torch.arange(max_distance + 1, device="cpu")
    exact = count // 2
    scaled = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    rough = (exact + (scaled * (count - exact)).long()).clamp(max=count - 1)
    return torch.where(distance < exact, distance, rough).int()
