"""Build score_mods that replace the exponential of softmax by another activation.

The new score is the logarithm of the activation, whose exponential softmax normalises.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnkit import ScoreMod, picklable
from attnkit.mods._check import number, number_text


@picklable
def log_sigmoid(bias: float = 0.0) -> ScoreMod:
    """Build a score_mod `log(sigmoid(score + bias))`, so that weights are normalised sigmoids.

    The weights of a row sum to 1, unlike those of FlashSigmoid, which does not normalise sigmoids.

    Args:
        bias: added to the score. With `-log(n)` for n keys the result is close to softmax.

    Returns:
        The score_mod.

    Raises:
        ArgumentError, OptionError: `bias` is not a finite number.

    Source: Ramapuram et al. 2024 (sigmoid attention), arXiv:2409.04431, normalised.

    >>> import torch
    >>> log_sigmoid()(torch.tensor([-9.0, 0.0, 3.0]), 0, 0, 0, 0)
    tensor([-9.0001, -0.6931, -0.0486])
    """
    shift = number("bias", bias)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(score + shift)

    return ScoreMod(score_mod, f"log_sigmoid({number_text(bias)})")


@picklable
def log_relu(power: float = 2.0) -> ScoreMod:
    """Build a score_mod `log(relu(score) ** power)`: weights are normalised powers of ReLU.

    A score that is not positive gets weight 0 and gradient 0. A row without a positive score has
    output 0, like a fully masked row.

    Args:
        power: 2 for squared ReLU, 1 for ReLU.

    Returns:
        The score_mod.

    Raises:
        ArgumentError, OptionError: `power` is not a finite number greater than 0.

    Source: Shen et al. 2023 (ReLU attention), arXiv:2302.06461; So et al. 2021 (squared ReLU),
    arXiv:2109.08668.

    >>> import torch
    >>> torch.softmax(log_relu()(torch.tensor([-1.0, 0.0, 1.0, 2.0]), 0, 0, 0, 0), 0)
    tensor([0.0000, 0.0000, 0.2000, 0.8000])
    """
    exponent = number("power", power, positive=True)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        positive = score > 0
        safe = torch.where(positive, score, 1.0)
        return torch.where(positive, exponent * torch.log(safe), -math.inf)

    return ScoreMod(score_mod, f"log_relu({number_text(power)})")
