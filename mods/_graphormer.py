"""Build Graphormer's score_mod: a learned bias by the distance of two nodes in a graph."""

from __future__ import annotations

from torch import Tensor

from attnkit import Axes, OptionError, ScoreMod, picklable
from attnkit.mods._check import extent, int_tensor, shape_text, table


@picklable
def graphormer(bias: Tensor, distance: Tensor) -> ScoreMod:
    """Build Graphormer's score_mod, which adds `bias[h, distance[q, kv]]` to the score.

    Args:
        bias: float [H, P], learned; `spatial_pos_encoder.weight.T` of a Hugging Face Graphormer.
        distance: int [N, N] or [B, N, N], the spatial position of each pair, from 0 to P - 1, for
            example the length of the shortest path, or a reserved number if there is no path.

    Returns:
        The score_mod.

    Raises:
        ArgumentError, ShapeError, DTypeError: an argument is not as described.
        OptionError: a distance is not in 0 .. P - 1.

    Source: Ying et al. 2021, arXiv:2106.05234, section 3.1.2.

    >>> import torch
    >>> distance = torch.tensor([[0, 1, 2], [1, 0, 1], [2, 1, 0]])  # a path of three nodes
    >>> mod = graphormer(torch.tensor([[0.0, -1.0, -3.0]]), distance)
    >>> mod(torch.zeros(3), 0, torch.tensor(0), 0, torch.arange(3))
    tensor([ 0., -1., -3.])
    """
    count = table("bias", bias, "[H, P]", (2,)).shape[1]
    int_tensor("distance", distance, "[N, N] or [B, N, N]", (2, 3))
    ends = extent(distance)
    if ends is not None and (ends[0] < 0 or ends[1] >= count):
        raise OptionError(f"distance must be from 0 to {count - 1}, got {ends[0]} to {ends[1]}")
    batched = distance.ndim == 3

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + bias[h, distance[b, q, kv] if batched else distance[q, kv]]

    leading = ("b",) if batched else ()
    axes = [Axes("bias", bias, "h", None), Axes("distance", distance, *leading, "q", "kv")]
    label = f"graphormer({shape_text(bias)}, {shape_text(distance)})"
    return ScoreMod(score_mod, label, axes=axes)
