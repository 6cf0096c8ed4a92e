"""Sums in a fixed order for wide heads, whose consumers add dQ from registers.

One warp waits for the turn of the next q tile while the consumers compute, another gives it to the
next kv tile once both have added; a consumer does neither, and waits only where its turn is late.

    told    a consumer says which q tile comes next, as soon as it knows
    go      its turn has come, and what was added before is known: the consumers add
    done    both have added; the turn is given on behind a fence
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute

from attnkit.templates.common import device
from attnkit.templates.common.semaphore import OrderRow, OrderTable, following_turn, wait_turn
from attnkit.templates.sm90.backward_sums import NOTE

OWN = 1  # named barriers of a consumer each


class WideTurns:
    """The part of a backward kernel for wide heads that keeps an order."""

    config: Any
    record: Any  # of `Loads`
    add: Any  # of `BackwardWide`

    def init_turns(self, bars: Any) -> None:
        """Initialise the barriers."""
        told, go, done = bars
        cute.arch.mbarrier_init(told, 1)
        cute.arch.mbarrier_init(go, 2)
        cute.arch.mbarrier_init(done, 8)

    @cute.jit
    def tell(
        self, bars: tuple, info: cute.Tensor, chunk: Int32, count: Int32, wg: Int32, ct: Int32
    ):
        """Say which semaphore the count-th q tile waits for; -1: there are no more."""
        if wg == 0 and ct == 0:
            info[NOTE + 2 * (count & 1)] = chunk
            info[NOTE + 2 * (count & 1) + 1] = info[self.record(0)]
            cute.arch.mbarrier_arrive(bars[0])

    def tell_next(self, place: Any, mark: Any, count: Any, wg: Any, ct: Any) -> None:
        """In a fixed order, say to which tile the count-th block adds its dQ."""
        if self.config.turns:
            _, first, info, order = place
            self.tell(order, info, 2 * (first + (mark >> 2)), count, wg, ct)

    def may_add(self, bars: Any, count: Any) -> None:
        """Wait for the turn of the count-th q tile."""
        cute.arch.mbarrier_wait(bars[1], count & 1)

    def has_added(self, bars: Any) -> None:
        """A consumer has added to a q tile."""
        cute.arch.sync_warp()
        device.arrive(bars[2])

    @cute.jit
    def await_turns(self, bars: tuple, info: cute.Tensor, turns: list):
        """A warp that waits for turns."""
        count, chunk = Int32(0), Int32(0)
        while chunk >= 0:
            cute.arch.mbarrier_wait(bars[0], count & 1)
            chunk, turn = info[NOTE + 2 * (count & 1)], info[NOTE + 2 * (count & 1) + 1]
            if chunk >= 0:
                wait_turn(turns[OrderTable.SEMAPHORE].iterator + chunk, turn)
                cute.arch.sync_warp()
                device.arrive(bars[1])
            count += 1

    @cute.jit
    def give_turns(self, bars: tuple, info: cute.Tensor, turns: list):
        """A warp that gives turns to the next."""
        device.arrive(bars[1])
        count, chunk = Int32(0), Int32(0)
        while chunk >= 0:
            cute.arch.mbarrier_wait(bars[2], count & 1)
            chunk, turn = info[NOTE + 2 * (count & 1)], info[NOTE + 2 * (count & 1) + 1]
            cute.arch.sync_warp()
            device.arrive(bars[1])  # what was told has been read
            if chunk >= 0:
                bounds, row = turns[OrderTable.ROW], chunk >> 1
                entry = tuple(bounds[row, i] for i in OrderRow)
                cute.arch.fence_acq_rel_gpu()  # of both consumers' sums
                following = following_turn(self.config.turns == "ascending", turn, entry, turns)
                with cute.arch.elect_one():
                    cute.arch.store(
                        turns[OrderTable.SEMAPHORE].iterator + chunk,
                        following,
                        sem="relaxed",
                        scope="gpu",
                    )
            count += 1

    def add_shared(self, sums: Any, acc: Any, to: Any, note: Any, wg: Any, ct: Any) -> None:
        """Add dK or dV to sums that several pieces share.

        Args:
            note: its semaphore, whose turn it is, who follows, tables.
        """
        semaphore, turn, following, turns = note
        if self.config.turns:
            self.enter_turn(semaphore, turn, turns, wg, ct)
        self.add(sums, acc, to, ct)
        if self.config.turns:
            self.leave_turn(semaphore, following, turns, wg, ct)

    @cute.jit
    def enter_turn(self, semaphore: Int32, turn: Int32, turns: list, wg: Int32, ct: Int32):
        """Wait until it is this consumer's turn at a sum."""
        if ct == 0:
            wait_turn(turns[OrderTable.SEMAPHORE].iterator + semaphore, turn)
        cute.arch.barrier(barrier_id=OWN + wg, number_of_threads=128)

    @cute.jit
    def leave_turn(self, semaphore: Int32, following: Int32, turns: list, wg: Int32, ct: Int32):
        """Give the turn to the next piece, once all threads of the consumer have added."""
        cute.arch.barrier(barrier_id=OWN + wg, number_of_threads=128)
        if ct == 0:
            cute.arch.fence_acq_rel_gpu()
            cute.arch.store(
                turns[OrderTable.SEMAPHORE].iterator + semaphore,
                following,
                sem="relaxed",
                scope="gpu",
            )
