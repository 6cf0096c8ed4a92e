"""Add sums in a fixed order for head dims above 128, where consumers add dQ from registers.

One warp waits for the turn of the next q block while the consumers compute. Another warp passes the
turn to the next kv block once both consumers have added. The consumers wait only if their turn is
late. These mbarriers synchronise them:

    announced    a consumer has written the next q block, as soon as it knows it
    may_add      its turn has come, and the previous note has been read: the consumers may add
    added        both consumers have added; the turn is passed on after a fence
"""

from __future__ import annotations

from cutlass import Int32, cute

from attnkit.templates.common import device
from attnkit.templates.common.semaphore import OrderTable, look_up_turn, wait_turn
from attnkit.templates.common.work_tile import RECORD, WorkTile
from attnkit.templates.sm90.backward_config import BackwardConfig
from attnkit.templates.sm90.backward_shared import (
    WARPGROUP,
    Hd256Barrier,
    TurnBarriers,
    Word,
)

# Notes alternate between two slots of two words, because the previous note may still be read.
_NOTES, _CHUNK_AND_TURN = 2, 2
_TURN = 1  # index of the turn in a note, after the chunk


def _note(count: Int32) -> Int32:
    """Return the index of the first word of the `count`-th q block's note."""
    return Word.NOTE + _CHUNK_AND_TURN * (count & (_NOTES - 1))


class Hd256Deterministic:
    """Orders the additions to the sums by their semaphores.

    Args:
        config: `sum_order` is the order, "" for none.
    """

    def __init__(self, config: BackwardConfig) -> None:
        self.config = config

    @cute.jit
    def announce(
        self, bars: TurnBarriers, info: cute.Tensor, chunk: Int32, count: Int32, wg: Int32,
        thread: Int32,
    ):  # fmt: skip
        """Write the note of the `count`-th q block, with the semaphore it waits for and its turn."""
        if wg == 0 and thread == 0:
            info[_note(count)] = chunk
            info[_note(count) + _TURN] = info[RECORD + WorkTile.KV_BLOCK]
            cute.arch.mbarrier_arrive(bars.announced)

    @cute.jit
    def end(self, bars: TurnBarriers, info: cute.Tensor, count: Int32, wg: Int32, thread: Int32):
        """Signal the two warps that wait for turns and pass them that the CTA has no more q blocks.

        `count` is the number of q blocks that the CTA has processed.

        The consumers wait as they do before they add. Otherwise `added` might complete a second time
        before the warp that passes turns has seen the first, and that warp would wait forever.
        """
        if wg == 0 and thread == 0:
            info[_note(count)] = Int32(-1)
            cute.arch.mbarrier_arrive(bars.announced)
        self.may_add(bars, count)
        self.has_added(bars)

    def may_add(self, bars: TurnBarriers, count: Int32) -> None:
        """Wait until the turn of the `count`-th q block has come."""
        cute.arch.mbarrier_wait(bars.may_add, count & 1)

    def has_added(self, bars: TurnBarriers) -> None:
        """Signal that this warp has added its dQ of a q block."""
        cute.arch.sync_warp()
        device.arrive(bars.added)

    @cute.jit
    def wait_turns(self, bars: TurnBarriers, info: cute.Tensor, order: list):
        """Run the warp that waits for the turns of announced q blocks."""
        count, chunk = Int32(0), Int32(0)
        while chunk >= 0:
            cute.arch.mbarrier_wait(bars.announced, count & 1)
            chunk = info[_note(count)]
            if chunk >= 0:
                turn = info[_note(count) + _TURN]
                wait_turn(order[OrderTable.SEMAPHORE].iterator + chunk, turn)
            cute.arch.sync_warp()
            device.arrive(bars.may_add)
            count += 1

    @cute.jit
    def pass_turns(self, bars: TurnBarriers, info: cute.Tensor, order: list):
        """Run the warp that passes turns to the next kv block."""
        device.arrive(bars.may_add)
        count, chunk = Int32(0), Int32(0)
        while chunk >= 0:
            cute.arch.mbarrier_wait(bars.added, count & 1)
            chunk, turn = info[_note(count)], Int32(0)
            if chunk >= 0:
                turn = info[_note(count) + _TURN]
            cute.arch.sync_warp()
            device.arrive(bars.may_add)  # the note has been read
            if chunk >= 0:
                ascending = self.config.sum_order == "ascending"
                following = look_up_turn(ascending, turn, chunk >> 1, order)
                cute.arch.fence_acq_rel_gpu()  # orders both consumers' additions before the store
                with cute.arch.elect_one():
                    cute.arch.store(
                        order[OrderTable.SEMAPHORE].iterator + chunk, following, sem="relaxed",
                        scope="gpu",
                    )  # fmt: skip
            count += 1

    @cute.jit
    def enter_turn(self, semaphore: Int32, turn: Int32, order: list, wg: Int32, thread: Int32):
        """Wait for this consumer's turn at a sum of dK or dV."""
        if thread == 0:
            wait_turn(order[OrderTable.SEMAPHORE].iterator + semaphore, turn)
        cute.arch.barrier(barrier_id=Hd256Barrier.CONSUMER + wg, number_of_threads=WARPGROUP)

    @cute.jit
    def leave_turn(self, semaphore: Int32, following: Int32, order: list, wg: Int32, thread: Int32):
        """Pass the turn to the next work tile, after all threads of the consumer have added."""
        cute.arch.barrier(barrier_id=Hd256Barrier.CONSUMER + wg, number_of_threads=WARPGROUP)
        if thread == 0:
            cute.arch.fence_acq_rel_gpu()
            cute.arch.store(
                order[OrderTable.SEMAPHORE].iterator + semaphore, following, sem="relaxed",
                scope="gpu",
            )  # fmt: skip
