"""A window of keys around each query."""

from __future__ import annotations

from torch import Tensor

from attnkit import ArgumentError, Mask
from attnkit.masks._check import limit


def sliding_window(left: int | None, right: int | None = 0) -> Mask:
    """Keeps the keys from `left` positions before the query to `right` positions after it.

    The query's own position is kept too, so a row keeps up to `left + 1 + right` keys
    (FlashAttention's counting). With the default `right=0` the mask is causal by itself.

    Args:
        left: keys before the query, or None for all of them.
        right: keys after the query, or None for all of them.

    Raises:
        ArgumentError, OptionError: not ints, negative, or both None.

    Source: Beltagy et al. 2020 (Longformer), arXiv:2004.05150; Jiang et al. 2023 (Mistral),
    arXiv:2310.06825.

    >>> from attnkit import create_mask
    >>> create_mask(sliding_window(2, 1), None, None, 6, 6).int()[0, 0]
    tensor([[1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0],
            [1, 1, 1, 1, 0, 0],
            [0, 1, 1, 1, 1, 0],
            [0, 0, 1, 1, 1, 1],
            [0, 0, 0, 1, 1, 1]], dtype=torch.int32)
    """
    before, after = limit("left", left), limit("right", right)
    label = f"sliding_window({left})" if right == 0 else f"sliding_window({left}, {right})"
    if before is not None and after is not None:

        def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (q - kv <= before) & (kv - q <= after)

        return Mask(keep, label)
    if before is not None:

        def keep_from(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return q - kv <= before

        return Mask(keep_from, label)
    if after is not None:

        def keep_to(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return kv - q <= after

        return Mask(keep_to, label)
    raise ArgumentError("left and right are both None, which keeps everything; use noop_mask")
