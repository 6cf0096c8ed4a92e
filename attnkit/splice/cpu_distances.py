"""Evaluate what a score_mod computes of q - kv alone once per distance, not once per score.

A load such as table[h, q - kv] gathers element by element. A tile of R rows and C columns has only
R + C - 1 distances, one for each diagonal. Their values are repeated R times in memory, as a matrix
with rows of length R + C - 1; a view of it whose rows are one element shorter is the tile.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.ir import F32, Node, load
from attnkit.graph.staging import Level, hoisted, index_level
from attnkit.templates.cpu import Tile
from attnkit.util import caches

LEAST_ROWS = 8  # with fewer, the diagonals of a tile are about as many as its scores
LEAST_OPERATIONS = 6


@functools.lru_cache(maxsize=1024)
def by_distance(root: Node, slots: int) -> tuple[Node, tuple[Node, ...]]:
    """Replace expressions of q - kv by loads of whole tiles.

    Args:
        root: a float expression over the positions and the score.
        slots: number of tensors that it captures.

    Returns:
        The expression, which loads the tile of the i-th replaced expression, without an index, from
        slot `slots` + i; and these expressions.
    """
    found = [n for n in hoisted([root])[Level.RELATIVE] if n.type == F32 and _pays(n)]
    tiles = {n: load(slots + i, F32, ()) for i, n in enumerate(found)}
    return ir.substitute(root, tiles), tuple(found)


caches.register(by_distance.cache_clear)


def _pays(n: Node) -> bool:
    nodes = ir.topo(n)
    operations = sum(part.op not in ("arg", "const") for part in nodes)
    return operations >= LEAST_OPERATIONS or any(map(reads_diagonals, nodes))


def reads_diagonals(n: Node) -> bool:
    """Return whether a node is a load whose index depends on q - kv alone."""
    return n.op == "load" and index_level(n) is Level.RELATIVE


def distances(tile: Tile) -> Tile | None:
    """Return positions whose distances q - kv are those of a tile's diagonals, from last to first.

    Returns:
        A tile with q and kv of shape [1, 1, 1, rows + columns - 1]; None if it would not pay.
    """
    rows, columns = tile.q.shape[-2], tile.kv.shape[-1]
    if rows < LEAST_ROWS or columns < LEAST_ROWS:
        return None
    q, kv = tile.q.flatten(), tile.kv.flatten()
    up_the_first_column = torch.cat((q.flip(0), q[:1].expand(columns - 1)))
    along_the_first_row = torch.cat((kv[:1].expand(rows - 1), kv))
    shape = 1, 1, 1, rows + columns - 1
    return Tile(tile.b, tile.h, up_the_first_column.view(shape), along_the_first_row.view(shape))


def _diagonals(matrix: Tensor, columns: int) -> Tensor:
    """Return the view [.., rows, columns] of `matrix` [.., rows, rows + columns - 1].

    Its element (i, j) is element rows - 1 - i + j of row i.
    """
    b, h, rows, length = matrix.shape
    strides = (h * rows * length, rows * length, length - 1, 1)
    return matrix.as_strided((b, h, rows, columns), strides, matrix.storage_offset() + rows - 1)


class Diagonals:
    """Holds the memory of the tiles that one evaluation reads."""

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}

    def spread(self, at: int, values: Tensor, rows: int) -> Tensor:
        """Return the tile whose diagonals have the values [b, h, 1, rows + columns - 1].

        Args:
            at: number of the tile; the earlier tile of this number is overwritten.
            values: one for each diagonal, from that of the last row and first column.
            rows: number of rows of the tile.
        """
        shape = (*values.shape[:2], rows, values.shape[3])
        count = math.prod(shape)
        buffer = self._buffers.get(at)
        if buffer is None or buffer.numel() < count or buffer.dtype != values.dtype:
            buffer = values.new_empty(1 << (count - 1).bit_length())
            self._buffers[at] = buffer
        matrix = buffer[:count].view(shape)
        matrix.copy_(values.expand(shape))
        return _diagonals(matrix, values.shape[3] - rows + 1)


def diagonal_sums(t: Tensor) -> Tensor:
    """Sum [b, h, rows, columns] along its diagonals, in float64 and in the order of `distances`.

    Few numbers remain of many scores, so that float64 costs little and their rounding does not add.
    """
    b, h, rows, columns = t.shape
    matrix = t.new_zeros(b, h, rows, rows + columns - 1)
    _diagonals(matrix, columns).copy_(t)
    wide = t.dtype if t.device.type == "mps" else torch.float64  # which MPS does not have
    return matrix.sum(dim=2, keepdim=True, dtype=wide)
