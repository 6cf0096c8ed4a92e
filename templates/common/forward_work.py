"""Define the arguments that every forward kernel takes: rows of the work list, and scalars."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from cutlass import Float32, Int32


class WorkItem(IntEnum):
    """Indices of the int32 words in a row of the work list; a row describes one work tile.

    `attnkit.schedule.work_list` writes the rows. A cursor (run, take, blocks) stands for `blocks`
    kv blocks in descending order: the first `take` blocks of a run, then the whole runs before it.
    Fully masked work tiles are at the end of the list.
    """

    BATCH = 0
    HEAD = 1
    Q_BLOCK = 2
    SPLIT_SLOT = 3  # >= 0: slot of a part of a row that is split along kv, for `Combine`
    PARTIAL_RUN = 4  # cursor into the runs of PARTIAL blocks
    PARTIAL_TAKE = 5
    PARTIAL_BLOCKS = 6
    FULL_RUN = 7  # cursor into the runs of FULL blocks
    FULL_TAKE = 8
    FULL_BLOCKS = 9
    NUM_MASKED = 10  # kv blocks that need the mask; they come first
    NUM_LIVE = 11  # number of work tiles in the list that are not fully masked; same in every row


ITEM_WORDS = len(WorkItem)
CURSORS = (WorkItem.PARTIAL_RUN, WorkItem.FULL_RUN)  # PARTIAL blocks are visited first


@dataclass(frozen=True)
class Scalars:
    """Holds the scalar arguments of a call.

    Attributes:
        scale: softmax scale.
        group: query heads per kv head.
        q_len, kv_len: sequence lengths.
        kv_batch: batch size of key and value, 1 where all batch elements share them.
    """

    scale: Float32
    group: Int32
    q_len: Int32
    kv_len: Int32
    kv_batch: Int32
