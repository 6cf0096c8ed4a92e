"""Build Sandwich: a bias computed from sinusoidal position embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from attnkit import Axes, OptionError, ScoreMod, picklable
from attnkit.mods._check import MOST_DISTANCES, own_device, whole

MOST_DIMS = 1 << 14


@picklable
def sandwich(
    heads: int, length: int, *, dims: int = 128, device: torch.device | str = "cpu"
) -> ScoreMod:
    """Build Sandwich's score_mod, which adds a bias from sinusoidal position embeddings.

    The bias is `(sum_i cos(|q - kv| / 10000 ** (2 * i / dims)) - dims / 2) * H / (8 * (h + 1))`
    with `i = 1 .. dims / 2`. The sum is the dot product of two sinusoidal embeddings and is
    computed once, into a table by distance. The bias is 0 at distance 0 and falls approximately
    logarithmically.

    Args:
        heads: H, the number of query heads.
        length: the larger of query and kv length; longer sequences are refused.
        dims: size of the embeddings, even; independent of the head dim.
        device: device of the query.

    Returns:
        The score_mod.

    Raises:
        ArgumentError, OptionError: an argument is not as described.

    Source: Chi et al. 2022, arXiv:2212.10356, section 5.

    >>> import torch
    >>> sandwich(8, 4)(torch.zeros(4), 0, torch.tensor(0), 3, torch.arange(4))
    tensor([-9.8238, -5.2020, -1.4466,  0.0000])
    """
    whole("heads", heads, 1)
    whole("length", length, 1, MOST_DISTANCES)
    if whole("dims", dims, 2, MOST_DIMS) % 2:
        raise OptionError(f"dims must be even, got {dims}")
    decay = _decay(length, dims).to(own_device("device", device))
    unit = heads / 8

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + decay[(q - kv).abs()] * (unit / (h + 1))

    axes = [Axes("heads", heads, "h"), Axes("length", length, "len")]
    return ScoreMod(score_mod, f"sandwich({heads}, {length}, dims={dims})", axes=axes)


def _decay(length: int, dims: int) -> Tensor:
    """Return the bias of each distance without the per-head factor, float32 [length]."""
    distance = torch.arange(length, dtype=torch.float64, device="cpu")
    total = torch.zeros_like(distance)
    for i in range(1, dims // 2 + 1):
        total += torch.cos(distance * 10000.0 ** (-2 * i / dims))
    return (total - dims // 2).float()
