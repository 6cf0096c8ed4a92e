"""A window with gaps."""

from __future__ import annotations

from torch import Tensor

from attnkit import Mask
from attnkit.masks._check import whole


def dilated(left: int, dilation: int, right: int = 0) -> Mask:
    """Keeps every `dilation`-th key of a window, counted from the query.

    Args:
        left: positions before the query that the window reaches over.
        dilation: distance between kept keys, from 1 on (1 is `sliding_window`).
        right: positions after the query that the window reaches over.

    Raises:
        ArgumentError, OptionError: not ints, negative, or dilation 0.

    Source: Beltagy et al. 2020 (Longformer), arXiv:2004.05150, section 3.1.

    >>> from attnkit import create_mask
    >>> create_mask(dilated(4, 2), None, None, 6, 6).int()[0, 0]
    tensor([[1, 0, 0, 0, 0, 0],
            [0, 1, 0, 0, 0, 0],
            [1, 0, 1, 0, 0, 0],
            [0, 1, 0, 1, 0, 0],
            [1, 0, 1, 0, 1, 0],
            [0, 1, 0, 1, 0, 1]], dtype=torch.int32)
    """
    whole("left", left)
    whole("right", right)
    whole("dilation", dilation, least=1)

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        distance = q - kv
        return (distance <= left) & (distance >= -right) & (distance % dilation == 0)

    return Mask(
        keep,
        f"dilated({left}, {dilation})" if right == 0 else f"dilated({left}, {dilation}, {right})",
    )
