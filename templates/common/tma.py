"""Create tensor views for TMA copies."""

from __future__ import annotations

from typing import Any

from cutlass import cute
from cutlass.cute.nvgpu import cpasync


def ordered(tensor: Any, modes: tuple[int, ...]) -> Any:
    """Return a view of the tensor with its dimensions permuted to the order `modes`."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=list(modes)))


def partition(atom: Any, smem: Any, tiles: Any, shape: Any, coordinates: Any) -> Any:
    """Return the two sides of a TMA copy: the shared memory view by stage, the global view by tile.

    Args:
        atom: the TMA copy.
        smem: [rows, columns, stages] in shared memory.
        tiles: the TMA coordinate tensor.
        shape, coordinates: arguments of `cute.local_tile`.
    """
    return cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(smem, 0, 2),
        cute.group_modes(cute.local_tile(tiles, shape, coordinates), 0, 2),
    )
