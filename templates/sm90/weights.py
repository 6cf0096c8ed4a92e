"""Compute P of a Hopper forward without a softmax."""

from __future__ import annotations

from cutlass import Float32, cute

from attnkit.templates.common import device
from attnkit.templates.common.sigmoid import sigmoid


def write_scores(acc_s: cute.Tensor, factor: Float32 | None) -> None:
    """Multiply the scores, which are P, by `factor` in place; None for 1."""
    for i in range(cute.size(acc_s)):
        acc_s[i] = device.shifted(acc_s[i], factor, None)


def write_sigmoids(acc_s: cute.Tensor, factor: Float32) -> None:
    """Replace the scores, f32, by sigmoids 1 / (1 + 2**-x) with x = score * factor."""
    for i in range(cute.size(acc_s)):
        acc_s[i] = sigmoid(acc_s[i] * factor)
