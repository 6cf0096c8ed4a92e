"""Compose several score_mods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from attnkit import ArgumentError, ScoreMod, picklable


@picklable
def compose(*mods: Callable[..., Any]) -> ScoreMod:
    """Build a score_mod that applies `mods` in order, each to the result of the previous one.

    Args:
        mods: any number of functions `score_mod(score, b, h, q, kv)`. Without any, scores do not
            change.

    Returns:
        The score_mod.

    Raises:
        ArgumentError: a mod is not callable.
        ShapeError: two mods have tables for different heads or different batch sizes.

    >>> import torch
    >>> from attnkit.mods import alibi, softcap
    >>> mod = compose(softcap(1.0), alibi(8))
    >>> mod(torch.full((3,), 50.0), 0, torch.tensor(0), 2, torch.arange(3))
    tensor([0.0000, 0.5000, 1.0000])
    """
    for at, mod in enumerate(mods):
        if not callable(mod):
            raise ArgumentError(
                f"mods[{at}] must be a function score_mod(score, b, h, q, kv), got "
                f"{type(mod).__name__}"
            )

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        for mod in mods:
            score = mod(score, b, h, q, kv)
        return score

    axes = [table for mod in mods if isinstance(mod, ScoreMod) for table in mod.axes]
    label = ", ".join(mod.label if isinstance(mod, ScoreMod) else _name(mod) for mod in mods)
    return ScoreMod(score_mod, f"compose({label})", axes=axes)


def _name(mod: Callable[..., Any]) -> str:
    return str(getattr(mod, "__name__", type(mod).__name__))
