"""Write P of a Hopper forward without a softmax."""

from __future__ import annotations

from cutlass import Float32, Int32, cute

from attnkit.templates.common import device
from attnkit.templates.common.sigmoid import MINUS, sigmoid, sigmoid_on_mufu
from attnkit.templates.sm90.config import ForwardConfig


def write_weights(
    config: ForwardConfig, acc_s: cute.Tensor, p: cute.Tensor | None, factor: Float32 | None
) -> None:
    """Write P of a block: score * factor, or the sigmoid of it.

    Args:
        config: compile-time configuration.
        acc_s: f32, the modified scores, after the mask; overwritten if `p` is None.
        p: registers for pairs of P in the dtype; None writes P unpacked over the scores.
        factor: factor of the scores; None for 1.
    """
    pairs = None if p is None else cute.recast_tensor(p, Int32)  # i32, two of P each
    count = cute.size(acc_s)
    low, high, minus = acc_s[0], acc_s[1], Int32(MINUS)
    for i in range(0, count, 2):
        if i == count // 2:
            # the second half waits for the first: all at once would not fit in the registers
            (minus,) = device.after([Int32(MINUS)], [high])
        low, high = (device.shifted(acc_s[i + k], factor, None) for k in range(2))
        if config.softmax == "sigmoid":
            # half of the scores each, because either unit alone would take longer than the MMAs
            low, high = sigmoid(low, config.dtype, minus), sigmoid_on_mufu(high, minus)
        if pairs is None:
            acc_s[i], acc_s[i + 1] = low, high
        else:
            pairs[i // 2] = device.pack(low, high, device.DTYPES[config.dtype])


def keep_weights_here(weights: cute.Tensor) -> None:
    """Keep weights that are never negative before the wait for P V, as `keep_exponentials_here`.

    The emitted `nanosleep` is predicated on the sign of all weights together.
    """
    bits = cute.recast_tensor(weights, Int32)  # the same elements
    signs = bits[0]
    for i in range(1, cute.size(bits)):
        signs = signs | bits[i]
    cute.arch.inline_ptx("nanosleep.u32 1;", predicate=signs < Int32(0))
