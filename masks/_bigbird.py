"""Build BigBird's mask: a window of blocks, global blocks and random blocks."""

from __future__ import annotations

from torch import Tensor

from attnkit import Mask, picklable
from attnkit.masks._check import int_tensor, number_text, shape_text, whole
from attnkit.masks._topk_blocks import blocks_mask


@picklable
def bigbird(
    random_blocks: Tensor, block: int, *, window_blocks: int = 1, global_blocks: int = 1
) -> Mask:
    """Build BigBird's mask, which keeps neighbouring blocks, global blocks and random blocks.

    Hugging Face's BigBird makes the first and the last block global and always has a window of
    three blocks. In this mask the first `global_blocks` blocks are global. Use `|` to add the last
    block.

    Args:
        random_blocks: int [query blocks, R] or [H, query blocks, R], the random kv blocks of each
            query block, -1 for an unused entry; R up to 128.
        block: positions per block.
        window_blocks: neighbouring blocks on each side (1 gives a window of three blocks).
        global_blocks: number of blocks at the start whose queries see all keys and whose keys all
            queries see.

    Returns:
        The mask, for query lengths up to `block` times the number of query blocks.

    Raises:
        ArgumentError, OptionError, ShapeError, DTypeError: an argument is not as described.

    Source: Zaheer et al. 2020 (BigBird, internal transformer construction), arXiv:2007.14062.

    >>> import torch
    >>> from attnkit import create_mask
    >>> mask = bigbird(torch.tensor([[0], [4], [2], [1], [2]]), 1)
    >>> create_mask(mask, None, None, 5, 5).int()[0, 0]
    tensor([[1, 1, 1, 1, 1],
            [1, 1, 1, 0, 1],
            [1, 1, 1, 1, 0],
            [1, 1, 1, 1, 1],
            [1, 0, 1, 1, 1]], dtype=torch.int32)
    """
    whole("block", block, least=1)
    whole("window_blocks", window_blocks)
    whole("global_blocks", global_blocks)
    shapes = "[query blocks, R] or [H, query blocks, R]"
    int_tensor("random_blocks", random_blocks, shapes, (2, 3))
    random = blocks_mask("random_blocks", random_blocks, block, block)

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        row, column = q // block, kv // block
        near = (row - column <= window_blocks) & (column - row <= window_blocks)
        return near | (row < global_blocks) | (column < global_blocks)

    label = f"bigbird({shape_text(random_blocks)}, {number_text(block)})"
    return Mask(random | Mask(keep, frame="common"), label)
