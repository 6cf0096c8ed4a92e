"""Build the block-diagonal mask."""

from __future__ import annotations

from torch import Tensor

from attnkit import Mask, picklable
from attnkit.masks._check import number_text, whole


@picklable
def block_diagonal(size: int, kv_size: int | None = None) -> Mask:
    """Build a block-diagonal mask, which keeps keys with `kv // kv_size == q // size`.

    Args:
        size: queries per block.
        kv_size: keys per block; None means `size`.

    Returns:
        The mask, for any lengths.

    Raises:
        ArgumentError, OptionError: a size is not a positive int.

    >>> from attnkit import create_mask
    >>> create_mask(block_diagonal(2), None, None, 5, 5).int()[0, 0]
    tensor([[1, 1, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [0, 0, 1, 1, 0],
            [0, 0, 1, 1, 0],
            [0, 0, 0, 0, 1]], dtype=torch.int32)
    """
    whole("size", size, least=1)
    columns = size if kv_size is None else whole("kv_size", kv_size, least=1)

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q // size == kv // columns

    arguments = ", ".join(number_text(n) for n in (size, kv_size) if n is not None)
    return Mask(keep, f"block_diagonal({arguments})", frame="common")
