"""Order of the tokens of images and videos in a sequence: row-major or tile by tile."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attnkit import OptionError
from attnkit.masks._check import grid, sizes


def unravel(place: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return the coordinates of row-major index `place` in a grid (last axis varies fastest)."""
    reverse: list[Tensor] = []
    for size in reversed(shape[1:]):
        reverse.append(place % size)
        place = place // size
    return (place, *reversed(reverse))


def coordinates(
    place: Tensor, shape: tuple[int, ...], tile: tuple[int, ...] | None
) -> tuple[Tensor, ...]:
    """Return the grid coordinates of the token at index `place` of the sequence.

    Args:
        place: integer tensor, from 0 to the product of `shape` minus 1.
        shape: shape of the grid.
        tile: shape of a tile if tokens are ordered tile by tile, with row-major order of the tiles
            and inside each tile. None if the tokens of the grid are in row-major order.
    """
    if tile is None:
        return unravel(place, shape)
    tiles = tuple(size // part for size, part in zip(shape, tile, strict=True))
    count = math.prod(tile)
    outer, inner = unravel(place // count, tiles), unravel(place % count, tile)
    return tuple(o * part + i for o, part, i in zip(outer, tile, inner, strict=True))


def check_tile(shape: tuple[int, ...], tile: int | Sequence[int]) -> tuple[int, ...]:
    """Check that the tile divides the grid and return the tile's size along each axis."""
    parts = sizes("tile", tile, len(shape))
    if any(size % part for size, part in zip(shape, parts, strict=True)):
        raise OptionError(f"tile must divide shape {shape} along every axis, got {parts}")
    return parts


def tile_order(shape: Sequence[int], tile: int | Sequence[int]) -> Tensor:
    """Return the row-major index of each token of a tiled layout.

    `x[..., order, :]` reorders row-major tokens to the tiled layout that `natten(tile=...)` and
    `sliding_tile` expect. `y[..., order.argsort(), :]` restores the row-major order of the result.

    Args:
        shape: shape of the grid, 1 to 3 axes.
        tile: size of a tile, an int or one int per axis; must divide the grid.

    Returns:
        int64 [number of tokens] on the CPU.

    Raises:
        ArgumentError, OptionError: sizes are not positive ints, or the tile does not divide the
            grid.

    >>> tile_order((2, 4), (2, 2))
    tensor([0, 1, 4, 5, 2, 3, 6, 7])
    """
    whole_grid = grid("shape", shape)
    parts = check_tile(whole_grid, tile)
    order = torch.zeros((), dtype=torch.int64, device="cpu")
    places = torch.arange(math.prod(whole_grid), device="cpu")
    for size, at in zip(whole_grid, coordinates(places, whole_grid, parts), strict=True):
        order = order * size + at
    return order
