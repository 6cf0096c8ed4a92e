"""Define work tiles of the backward: work list rows, records in shared memory, and cursors of runs.

A work tile is a kv block with all q blocks that the mask does not leave empty. The host writes one
row per work tile to the work list (`attnkit.schedule.scheduler.Schedule.table`). The producer warp
reads the row and merges the PARTIAL and the FULL runs in ascending order. It informs the other
warps through shared memory, with a record per work tile and a word per q block.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import cutlass
from cutlass import Int32, cute


class WorkItem(IntEnum):
    """Indices of the int32 words in a row of the work list in global memory (48 bytes)."""

    BATCH = 0
    HEAD = 1
    KV_BLOCK = 2
    STORE_END = 3  # with first writers: this work tile is the first to write q blocks below this
    FINISH_END = 3  # with whole heads: it is the last to write q blocks below this
    PARTIAL = 4  # two words: first PARTIAL run, blocks of it to skip
    NUM_PARTIAL = 6  # PARTIAL blocks to visit
    FULL = 7  # the same for the FULL runs
    NUM_FULL = 9
    SPLIT = 10  # number of the split kv block that this is a part of, -1 for a whole kv block
    NUM_PARTS = 11
    STORE_BEGIN = 10  # with whole heads: it is the first to write q blocks from this one on
    HEAD_GOES_ON = 11  # with whole heads: 1 if the next row of the list is of the same head, else 0


ITEM_WORDS = 12


class WorkTile(IntEnum):
    """Indices of the int32 words in a work tile's record in shared memory, from the producer."""

    KV_BLOCK = 0
    HEAD = 1
    BATCH = 2
    NUM_BLOCKS = 3  # q blocks to visit
    VALID = 4  # 0: the work list is at its end
    # if the work tiles of several query heads add to dK and dV of one kv head in a fixed order
    TURN = 5
    NUM_TURNS = 6
    # if the parts of a split kv block add up dK and dV in the kernel
    SPLIT = 5
    NUM_PARTS = 6
    # if several work tiles share a kv block, each with a part of the columns of dQ, dK and dV
    COLUMN_PART = 7


RECORD = 8  # index of the first record word, after the words of the Q stages

# The low bits of a q block's word, below its number.
APPLY_MASK = 1  # run the mask's instructions: the block is PARTIAL or at the end of a tensor
FULL_BLOCK = 2  # the block is FULL: skip the mask if block lists take precedence over it

NOWHERE = 1 << 30  # greater than every block: the next block of an exhausted cursor


def block_word(block: Any, partial: Any, ragged: Any) -> Any:
    """Encode a q block as one word: 4 * `block` plus the bits APPLY_MASK and FULL_BLOCK.

    Args:
        block: number of the q block, Int32.
        partial: Boolean, whether the mask leaves out some of the block's scores.
        ragged: Boolean, whether the block reaches beyond the end of a tensor.
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
        left: number of blocks to visit; 0 gives an exhausted cursor.
    """
    block, end = Int32(NOWHERE), Int32(NOWHERE)
    if left > 0:
        end = runs[0, run] + runs[1, run]
        block = runs[0, run] + skip
    return block, end, run, left


@cute.jit
def next_block(partial: cute.Tensor, full: cute.Tensor, in_partial: tuple, in_full: tuple):
    """Return the smaller next block of two cursors, and advance its cursor.

    Returns:
        The block's number, whether it is PARTIAL, and both cursors after the step.
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
