"""Build the mask of sliding tile attention: neighbourhood attention between whole tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from attnkit import Mask, OptionError, picklable
from attnkit.masks._check import grid, sizes, whole
from attnkit.masks._grid import check_tile, unravel


@picklable
def sliding_tile(
    shape: Sequence[int],
    tile: int | Sequence[int],
    kernel: int | Sequence[int],
    *,
    text: int = 0,
) -> Mask:
    """Build a sliding tile mask, which keeps the `kernel` nearest tiles along each axis of a grid.

    All queries of a tile see the same tiles, so no block is partial if a tile consists of whole
    blocks. The tokens of the grid must be in the tiled layout (see `tile_order`). Text tokens
    follow; they see all keys, and all queries see them. `kernel` counts tiles: the paper's window
    of (18, 24, 24) tokens in tiles of (6, 8, 8) is (3, 3, 3).

    Args:
        shape: shape of the grid in tokens, 1 to 3 axes.
        tile: tokens per tile along each axis; must divide the grid.
        kernel: number of tiles along each axis, odd and at most the number of tiles of the grid.
        text: number of text tokens after the grid.

    Returns:
        The mask, for query and kv length equal to the product of `shape` plus `text`.

    Raises:
        ArgumentError, OptionError: an argument is not as described.

    Source: Zhang et al. 2025 (STA), arXiv:2502.04507.

    >>> from attnkit import create_mask
    >>> create_mask(sliding_tile((8,), 2, 3, text=1), None, None, 9, 9).int()[0, 0]
    tensor([[1, 1, 1, 1, 1, 1, 0, 0, 1],
            [1, 1, 1, 1, 1, 1, 0, 0, 1],
            [1, 1, 1, 1, 1, 1, 0, 0, 1],
            [1, 1, 1, 1, 1, 1, 0, 0, 1],
            [0, 0, 1, 1, 1, 1, 1, 1, 1],
            [0, 0, 1, 1, 1, 1, 1, 1, 1],
            [0, 0, 1, 1, 1, 1, 1, 1, 1],
            [0, 0, 1, 1, 1, 1, 1, 1, 1],
            [1, 1, 1, 1, 1, 1, 1, 1, 1]], dtype=torch.int32)
    """
    lengths = grid("shape", shape)
    parts = check_tile(lengths, tile)
    kernels = sizes("kernel", kernel, len(lengths))
    tiles = tuple(length // part for length, part in zip(lengths, parts, strict=True))
    if any(width % 2 == 0 or width > count for width, count in zip(kernels, tiles, strict=True)):
        raise OptionError(
            f"kernel must be odd and at most the tiles of the grid, {tiles}, got {kernels}"
        )
    whole("text", text)
    tokens, tile_tokens = math.prod(lengths), math.prod(parts)

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        rows, columns = unravel(q // tile_tokens, tiles), unravel(kv // tile_tokens, tiles)
        near = [
            _near(row, column, count, width // 2)
            for row, column, count, width in zip(rows, columns, tiles, kernels, strict=True)
        ]
        kept = near[0]
        for other in near[1:]:
            kept = kept & other
        return kept | (q >= tokens) | (kv >= tokens) if text else kept

    arguments = f"{lengths}, {parts}, {kernels}" + (f", text={text}" if text else "")
    return Mask(keep, f"sliding_tile({arguments})", lengths=(tokens + text,) * 2)


def _near(row: Tensor, column: Tensor, tiles: int, reach: int) -> Tensor:
    """Return whether tile `column` is in the window of tile `row`, on an axis of `tiles` tiles."""
    distance = row.clamp(reach, tiles - 1 - reach) - column
    return (distance <= reach) & (distance >= -reach)
