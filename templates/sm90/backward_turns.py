"""Sums in a fixed order: the warps that add chunks of dQ, and of shared dK and dV, in turn.

The order is that of `attnkit.schedule.deterministic_order`: a semaphore a chunk says whose turn it is. Where the config has
firsts, who has the first turn stores; nobody has cleared the sum. A warp adds a chunk once its turn
has come, and gives the turn to the next once the chunk has arrived, which takes as long as a block
of products. So it adds the next chunk first, if that is there by then and has its turn. It does not
give the turn itself either: a fence would wait for what is under way; another warp is told of chunks
that have arrived. Nothing is owed while a warp waits for a turn, or for a chunk. That other warp serves both consumers in turn: what it owes one may wait until a chunk of the
other has arrived, which itself waits for earlier pieces only. Loads and products wait for no turn,
and run ahead.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Constexpr, Int32, Int64, const_expr, cute

from attnkit.templates.common import device
from attnkit.templates.common.semaphore import (
    OrderRow,
    OrderTable,
    fence_bulk,
    following_turn,
    poll_turn,
    wait_turn,
)
from attnkit.templates.sm90.backward_sums import (
    FIRST_PART,
    NOTE,
    SUM_FREE,
    add_chunk,
    store_chunk,
)

# three words of `info` for each consumer: a chunk that has arrived, its turn, who follows; 16 bytes
# apart, as the assembler reads four at once
OWED = 32
ARRIVAL = 1000  # nanoseconds in which a chunk arrives


class InTurn:
    """The part of a backward kernel that adds to sums in a fixed order."""

    config: Any

    @cute.jit
    def add_in_turn(
        self,
        wg: Constexpr,
        outgoing: cute.Pointer,
        info: cute.Tensor,
        bars: tuple,
        sums: cute.Tensor,
        turns: list,
    ):
        """A warp that adds a consumer's chunks to the sums.

        Args:
            bars: complete once the consumer has left a chunk and its note; once the other warp has
                been told of an arrival; once it has read which.
            turns: see `Backward.__call__`.
        """
        c = self.config
        told = bars[0] + wg
        cute.arch.barrier_arrive(barrier_id=SUM_FREE + wg, number_of_threads=160)
        # a chunk whose turn has come, and one that is under way, whose turn is to be given
        ready, owed, count = Int32(-1), Int32(-1), Int32(0)
        owed_turn, owed_following = Int32(0), Int32(0)
        chunk, lap = Int32(0), Int32(0)
        while chunk >= 0:
            if owed >= 0:
                if not device.soon(told, lap, ARRIVAL):
                    count = self.report((owed, owed_turn, owed_following), 0, count, info, bars, wg)
                    owed = Int32(-1)
            cute.arch.mbarrier_wait(told, lap)
            lap = lap ^ 1
            chunk = info[NOTE + 4 * wg]
            if chunk >= 0:
                turn, following, then = (info[NOTE + 4 * wg + i] for i in range(1, 4))
                first = chunk >= FIRST_PART
                chunk = chunk & (FIRST_PART - 1)
                if owed >= 0 and chunk != ready:
                    ready = poll_turn(turns[OrderTable.SEMAPHORE].iterator + chunk, turn, chunk)
                if chunk != ready:
                    if owed >= 0:
                        count = self.report(
                            (owed, owed_turn, owed_following), 0, count, info, bars, wg
                        )
                        owed = Int32(-1)
                    wait_turn(turns[OrderTable.SEMAPHORE].iterator + chunk, turn)
                    fence_bulk()
                target = sums.iterator + Int64(chunk) * c.chunk
                if const_expr(c.firsts):
                    if first:
                        store_chunk(target, outgoing + wg * c.chunk, c.chunk)
                    else:
                        add_chunk(target, outgoing + wg * c.chunk, c.chunk)
                else:
                    add_chunk(target, outgoing + wg * c.chunk, c.chunk)
                if owed >= 0:
                    count = self.report((owed, owed_turn, owed_following), 1, count, info, bars, wg)
                with cute.arch.elect_one():
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.barrier_arrive(barrier_id=SUM_FREE + wg, number_of_threads=160)
                owed, owed_turn, owed_following = chunk, turn, following
                ready = Int32(-1)
                if then >= 0:
                    then = then & (FIRST_PART - 1)
                    ready = poll_turn(turns[OrderTable.SEMAPHORE].iterator + then, turn, then)
        if owed >= 0:
            count = self.report((owed, owed_turn, owed_following), 0, count, info, bars, wg)
        self.report((Int32(-1), Int32(0), Int32(0)), 0, count, info, bars, wg)

    @cute.jit
    def report(
        self, owed: tuple, flying: Constexpr, count: Int32, info: cute.Tensor, bars: tuple,
        wg: Constexpr,
    ):  # fmt: skip
        """Wait until a chunk has arrived, and tell the warp that gives turns.

        Args:
            owed: the chunk, -1: no more come; whose turn it was, and who follows, or -1.
            flying: how many chunks are under way that were sent after it.
            count: how many were reported before.

        Returns:
            The next count.
        """
        _, arrived, taken = (bar + wg for bar in bars)
        cute.arch.mbarrier_wait(taken, (count & 1) ^ 1)
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(flying, read=False)
            for i in cutlass.range_constexpr(3):
                info[OWED + 4 * wg + i] = owed[i]
            cute.arch.mbarrier_arrive(arrived)
        cute.arch.sync_warp()
        return count + 1

    @cute.jit
    def give_turns(self, info: cute.Tensor, bars: tuple, turns: list):
        """A warp that gives the turns of chunks that have arrived, of both consumers in turn.

        These send equally many.
        """
        count, chunk = Int32(0), Int32(0)
        while chunk >= 0:
            for wg in cutlass.range_constexpr(2):
                _, arrived, taken = (bar + wg for bar in bars)
                cute.arch.mbarrier_wait(arrived, count & 1)
                chunk, turn, following = (info[OWED + 4 * wg + i] for i in range(3))
                cute.arch.mbarrier_arrive(taken)  # every lane, as each has read them
                if chunk >= 0:
                    self.give_turn(chunk, turn, following, turns)
            count += 1

    @cute.jit
    def give_turn(self, chunk: Int32, turn: Int32, following: Int32, turns: list):
        """Give the turn of a chunk that has arrived to the next."""
        bounds, row = turns[OrderTable.ROW], chunk >> 1
        low, high, first, last = Int32(0), Int32(0), Int32(0), Int32(0)
        if following < 0:
            low, high = bounds[row, OrderRow.RUNS_BEGIN], bounds[row, OrderRow.RUNS_END]
            first, last = bounds[row, OrderRow.FIRST_TURN], bounds[row, OrderRow.LAST_TURN]
        cute.arch.fence_acq_rel_gpu()
        if following < 0:
            ascending = self.config.turns == "ascending"
            following = following_turn(ascending, turn, (low, high, first, last), turns)
        with cute.arch.elect_one():
            cute.arch.store(
                turns[OrderTable.SEMAPHORE].iterator + chunk, following, sem="relaxed", scope="gpu"
            )
