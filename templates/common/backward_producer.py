"""Partition the TMA copies of a backward's producer warp and iterate over its q blocks."""

from __future__ import annotations

from typing import Any

from attnkit.templates.common.backward_work import Lists
from attnkit.templates.common.tma import partition
from attnkit.templates.common.work_tile import block_word, next_block


def partition_operands(config: Any, atoms: Any, tiles: Any, smem: Any, kv_rows: int) -> list[Any]:
    """Partition the TMA copies of Q, K, V and dO into shared memory and global memory views.

    Args:
        config: the `BackwardConfig` of an architecture.
        atoms, tiles: TMA copies of Q, K, V and dO, and their coordinate tensors.
        smem: shared memory; its fields q, k, v and do are [rows, columns, stages].
        kv_rows: rows of one copy of K or V.

    Returns:
        The pair that `partition` returns, for each of Q, K, V and dO.
    """
    rows = config.block_q, kv_rows, kv_rows, config.block_q
    columns = config.head_dim, config.head_dim, config.head_dim_v, config.head_dim_v
    targets = smem.q, smem.k, smem.v, smem.do
    return [
        partition(
            atom, target, tile, tuple(shape), (None, 0, None, None)
        )  # of a tensor [S, D, H, B]
        for atom, target, tile, *shape in zip(atoms, targets, tiles, rows, columns, strict=True)
    ]


def next_q_block(lists: Lists, cursors: Any, kv_block: Any, ragged: Any) -> Any:
    """Return the next q block of a work tile, its word, and the advanced cursors.

    Args:
        cursors: cursors of the PARTIAL and of the FULL blocks, from `begin_runs`.
        kv_block: kv block of the work tile, Int32.
        ragged: the q block and the kv block that reach beyond the end of a tensor, Int32.

    Returns:
        The number of the q block, its word for the consumers (`block_word`), and both cursors
        advanced past it.
    """
    block, is_partial, *behind = next_block(lists.partial, lists.full, *cursors)
    ragged_q, ragged_kv = ragged
    word = block_word(block, is_partial, (block == ragged_q) | (kv_block == ragged_kv))
    return block, word, *behind
