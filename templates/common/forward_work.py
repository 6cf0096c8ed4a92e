"""The work list of a forward kernel, as the host writes it and the producers walk it."""

from __future__ import annotations

from enum import IntEnum


class WorkItem(IntEnum):
    """int32 words of a row of the work list, a work tile, written by `attnkit.schedule.work_list`.

    A cursor is (run, take, blocks): the first `take` blocks of a run, the last one first, then the
    whole runs before it, `blocks` kv blocks in all. Work tiles that are fully masked stand at the end
    of the list.
    """

    BATCH = 0
    HEAD = 1
    Q_BLOCK = 2
    SPLIT_SLOT = 3  # >= 0: a part of a row that is split along kv; Combine puts the parts together
    PARTIAL_RUN = 4  # cursor into the runs of PARTIAL blocks
    PARTIAL_TAKE = 5
    PARTIAL_BLOCKS = 6
    FULL_RUN = 7  # cursor into the runs of FULL blocks
    FULL_TAKE = 8
    FULL_BLOCKS = 9
    NUM_MASKED = 10  # kv blocks that need the mask; they come first
    NUM_LIVE = 11  # work tiles of the whole list that are not fully masked; the same in every row


ITEM_WORDS = len(WorkItem)
CURSORS = (WorkItem.PARTIAL_RUN, WorkItem.FULL_RUN)  # PARTIAL blocks are visited first
