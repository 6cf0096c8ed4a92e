"""Define work tiles of the backward: rows of the work list, records, and the walk of runs.

A work tile is a kv block with all q blocks that the mask does not leave empty. The host writes one
row per work tile to the work list (`attnkit.schedule.scheduler.Schedule.table`). The producer warp
reads it, walks the PARTIAL and the FULL runs merged in ascending order, and tells the other warps
through shared memory: a record per work tile, a word per q block.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import cutlass
from cutlass import Int32, cute


class WorkItem(IntEnum):
    """Numbers the int32 words of a row of the work list in global memory, 48 bytes."""

    BATCH = 0
    HEAD = 1
    KV_BLOCK = 2
    STORE_END = 3  # with first writers: this work tile is the first to add to q blocks below this
    PARTIAL = 4  # first PARTIAL run, blocks of it to skip, PARTIAL blocks
    NUM_PARTIAL = 6
    FULL = 7  # the same for the FULL runs
    NUM_FULL = 9
    SPLIT = 10  # number of the split kv block that this is a part of, -1 for a whole one
    NUM_PARTS = 11


ITEM_WORDS = 12


class WorkTile(IntEnum):
    """Numbers the int32 words of a work tile's record in shared memory; the producer writes it."""

    KV_BLOCK = 0
    HEAD = 1
    BATCH = 2
    NUM_BLOCKS = 3  # q blocks to visit
    VALID = 4  # 0: the work list is at its end
    # where work tiles of several query heads add to the dK and dV of one kv head in a fixed order
    TURN = 5
    NUM_TURNS = 6
    # where the parts of a split kv block add up dK and dV in the kernel
    SPLIT = 5
    NUM_PARTS = 6


RECORD = 8  # word at which the records begin, after those of the Q stages

# Bits of a q block's word, below its number.
APPLY_MASK = 1  # run the mask's instructions: the block is PARTIAL or at the end of a tensor
FULL_BLOCK = 2  # the block is FULL: where block lists overrule the mask, do not ask the mask

NOWHERE = 1 << 30  # beyond every block: a cursor at its end


def block_word(block: Any, partial: Any, ragged: Any) -> Any:
    """Encode a q block as one word: 4 * its number + its bits.

    Args:
        block: Int32.
        partial: Boolean, whether the mask leaves out some of its scores.
        ragged: Boolean, whether it reaches beyond the end of a tensor.
    """
    word = 4 * block + cutlass.select_(partial, Int32(0), Int32(FULL_BLOCK))
    return word + cutlass.select_(partial | ragged, Int32(APPLY_MASK), Int32(0))


@cute.jit
def begin_runs(runs: cute.Tensor, run: Int32, skip: Int32, left: Int32):
    """Return a cursor at a block of a run: (next block, end of its run, run, blocks left).

    Args:
        runs: int32 [2, runs], starts and lengths.
        run: the first run.
        skip: blocks of that run that another part of a split kv block visits.
        left: blocks to visit; 0 gives a cursor at its end.
    """
    block, end = Int32(NOWHERE), Int32(NOWHERE)
    if left > 0:
        end = runs[0, run] + runs[1, run]
        block = runs[0, run] + skip
    return block, end, run, left


@cute.jit
def next_block(partial: cute.Tensor, full: cute.Tensor, in_partial: tuple, in_full: tuple):
    """Take the next block of two cursors, in ascending order.

    Returns:
        Its number, whether it is PARTIAL, and both cursors advanced past it.
    """
    is_partial = in_partial[0] < in_full[0]
    block = cutlass.min(in_partial[0], in_full[0])
    if is_partial:
        in_partial = _advance(partial, *in_partial)
    else:
        in_full = _advance(full, *in_full)
    return block, is_partial, in_partial, in_full


@cute.jit
def _advance(runs: cute.Tensor, block: Int32, end: Int32, run: Int32, left: Int32):
    block, left = block + 1, left - 1
    if left == 0:
        block = Int32(NOWHERE)
    else:
        if block == end:
            run = run + 1
            block = runs[0, run]
            end = block + runs[1, run]
    return block, end, run, left
