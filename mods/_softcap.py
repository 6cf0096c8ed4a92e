"""Build the softcap: a smooth limit on scores."""

from __future__ import annotations

import torch
from torch import Tensor

from attnkit import ScoreMod, picklable
from attnkit.mods._check import number, number_text


@picklable
def softcap(cap: float) -> ScoreMod:
    """Build a score_mod `cap * tanh(score / cap)`, which keeps scores within (-cap, cap).

    It is applied after `scale`, as in FlashAttention's `softcap` and Gemma 2's
    `attn_logit_softcapping`.

    Args:
        cap: greater than 0.

    Returns:
        The score_mod.

    Raises:
        ArgumentError, OptionError: `cap` is not a finite number greater than 0.

    Source: Bello et al. 2017, arXiv:1611.09940; Gemma 2, arXiv:2408.00118.

    >>> import torch
    >>> softcap(2.0)(torch.tensor([-10.0, 0.0, 1.0, 10.0]), 0, 0, 0, 0)
    tensor([-1.9998,  0.0000,  0.9242,  1.9998])
    """
    bound = number("cap", cap, positive=True)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return bound * torch.tanh(score / bound)

    return ScoreMod(score_mod, f"softcap({number_text(cap)})")
