"""Build the strided and the fixed mask of Sparse Transformers."""

from __future__ import annotations

from torch import Tensor

from attnkit import Mask, picklable
from attnkit.masks._check import number_text, whole


@picklable
def strided(stride: int) -> Mask:
    """Build the strided mask: the last `stride + 1` keys and every `stride`-th key before them.

    Keys are counted back from the query, and keys after the query are masked.

    Args:
        stride: at least 1; in the paper, about the square root of the length.

    Returns:
        The mask, for any lengths.

    Raises:
        ArgumentError, OptionError: `stride` is not a positive int.

    Source: Child et al. 2019 (Sparse Transformer, strided), arXiv:1904.10509, section 4.3.

    >>> from attnkit import create_mask
    >>> create_mask(strided(2), None, None, 7, 7).int()[0, 0]
    tensor([[1, 0, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0, 0],
            [0, 1, 1, 1, 0, 0, 0],
            [1, 0, 1, 1, 1, 0, 0],
            [0, 1, 0, 1, 1, 1, 0],
            [1, 0, 1, 0, 1, 1, 1]], dtype=torch.int32)
    """
    whole("stride", stride, least=1)

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        distance = q - kv
        return (distance >= 0) & ((distance <= stride) | (distance % stride == 0))

    return Mask(keep, f"strided({number_text(stride)})", frame="common")


@picklable
def fixed(block: int, summary: int = 1) -> Mask:
    """Build the fixed mask: the query's block and the last `summary` keys of each earlier block.

    Keys after the query are masked.

    Args:
        block: positions per block, at least 1.
        summary: positions at the end of each block that every later query sees, 1 to `block`.

    Returns:
        The mask, for any lengths.

    Raises:
        ArgumentError, OptionError: an argument is not a positive int, or `summary` is greater than
            `block`.

    Source: Child et al. 2019 (Sparse Transformer, fixed), arXiv:1904.10509, section 4.3.

    >>> from attnkit import create_mask
    >>> create_mask(fixed(3), None, None, 7, 7).int()[0, 0]
    tensor([[1, 0, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0, 0],
            [0, 0, 1, 1, 0, 0, 0],
            [0, 0, 1, 1, 1, 0, 0],
            [0, 0, 1, 1, 1, 1, 0],
            [0, 0, 1, 0, 0, 1, 1]], dtype=torch.int32)
    """
    whole("block", block, least=1)
    first = block - whole("summary", summary, least=1, most=block)

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) & ((q // block == kv // block) | (kv % block >= first))

    return Mask(keep, f"fixed({number_text(block)}, {number_text(summary)})", frame="common")
