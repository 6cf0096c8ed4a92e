"""Write P of a forward without a softmax: the weights are the modified scores themselves."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, cute

from attnkit.templates.common import device


def write_weights(
    acc_s: cute.Tensor, p: cute.Tensor | None, factor: Float32 | None, dtype: Any
) -> None:
    """Write P = score * factor of a block.

    Args:
        acc_s: f32, the modified scores, 0 where masked; overwritten if `p` is None.
        p: registers for pairs of P in the dtype; None writes P unpacked over the scores.
        factor: factor of the scores; None for 1.
        dtype: dtype of P.
    """
    pairs = None if p is None else cute.recast_tensor(p, Int32)  # i32, two of P each
    for i in range(0, cute.size(acc_s), 2):
        low, high = (device.shifted(acc_s[i + k], factor, None) for k in range(2))
        if pairs is None:
            acc_s[i], acc_s[i + 1] = low, high
        else:
            pairs[i // 2] = device.pack(low, high, dtype)
