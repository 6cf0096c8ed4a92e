"""Attention sinks plus a causal window."""

from __future__ import annotations

from torch import Tensor

from attnkit import Mask
from attnkit.masks._check import whole


def streaming_llm(window: int, sinks: int = 4) -> Mask:
    """Keeps, of the keys up to the query, the first `sinks` and those of a window.

    Args:
        window: keys before the query (a row keeps up to `window + 1` local keys).
        sinks: keys at the start that every later query sees.

    Raises:
        ArgumentError, OptionError: not ints, or negative.

    Source: Xiao et al. 2023 (StreamingLLM), arXiv:2309.17453.

    >>> from attnkit import create_mask
    >>> create_mask(streaming_llm(1, sinks=2), None, None, 6, 6).int()[0, 0]
    tensor([[1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0],
            [1, 1, 1, 1, 0, 0],
            [1, 1, 0, 1, 1, 0],
            [1, 1, 0, 0, 1, 1]], dtype=torch.int32)
    """
    whole("window", window)
    whole("sinks", sinks)

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) & ((q - kv <= window) | (kv < sinks))

    return Mask(keep, f"streaming_llm({window}, {sinks})")
