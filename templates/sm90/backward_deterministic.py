"""Add chunks of dQ, and of shared dK and dV, to their sums in a fixed order, by semaphores.

The order is that of `attnkit.schedule.deterministic_order`: the semaphore of a chunk has the turn,
the kv block that adds next. With first writers, the first turn stores instead of adding, and the
sums need not be cleared.

A warp adds a chunk once its turn has come. The turn passes to the next kv block once the chunk is
complete in memory, which takes as long as the MMAs of a block. Meanwhile the warp adds the next
chunk, if it is ready and has its turn. The warp does not pass the turn itself, because a fence
would wait for all copies in flight. It reports complete chunks to another warp, which passes their
turns.

There is no deadlock: a warp that waits for a turn or for a chunk has reported every chunk that it
added. The warp that passes turns serves both consumers alternately. A report of one consumer may
wait until a chunk of the other is complete, which itself waits only for earlier work tiles. Loads
and MMAs do not wait for turns.
"""

from __future__ import annotations

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
from attnkit.templates.sm90.backward_config import BackwardConfig
from attnkit.templates.sm90.backward_dq_reduce import (
    add_chunk,
    read_note,
    release_staging,
    store_chunk,
)
from attnkit.templates.sm90.backward_shared import (
    CONSUMERS,
    FIRST_WRITER,
    NOTE_WORDS,
    ChunkBarriers,
    ChunkNote,
    Word,
)

LANDING = 1000  # nanoseconds until a bulk reduction is complete in memory
LANDED_WORDS = 3  # chunk, turn, following turn: the first words of the note


class DeterministicReduce:
    """Adds chunks in the order of their semaphores.

    Args:
        config: `sum_order` is the order; with `first_writer`, the first turn stores.
    """

    def __init__(self, config: BackwardConfig) -> None:
        self.config = config

    @cute.jit
    def run(
        self, wg: Constexpr, staging: cute.Pointer, info: cute.Tensor, bars: ChunkBarriers,
        sums: cute.Tensor, order: list,
    ):  # fmt: skip
        """Run the warp that adds a consumer's chunks, see `backward_dq_reduce.Reduce.run`."""
        c = self.config
        semaphores = order[OrderTable.SEMAPHORE]
        chunk_ready = bars.ready + wg
        release_staging(wg)
        # ready: a chunk whose turn has come; pending: a chunk in flight that is not reported yet
        ready, pending, count = Int32(-1), Int32(-1), Int32(0)
        pending_turn, pending_following = Int32(0), Int32(0)
        chunk, phase = Int32(0), Int32(0)
        while chunk >= 0:
            if pending >= 0:
                # if the consumer is slower than the copy, report before waiting for the consumer
                if not device.try_wait(chunk_ready, phase, LANDING):
                    count = self.report(
                        (pending, pending_turn, pending_following), 0, count, info, bars, wg
                    )
                    pending = Int32(-1)
            cute.arch.mbarrier_wait(chunk_ready, phase)
            phase = phase ^ 1
            chunk = read_note(info, wg, ChunkNote.CHUNK)
            if chunk >= 0:
                turn = read_note(info, wg, ChunkNote.TURN)
                following = read_note(info, wg, ChunkNote.FOLLOWING)
                next_chunk = read_note(info, wg, ChunkNote.NEXT_CHUNK)
                first = chunk >= FIRST_WRITER
                chunk = chunk & (FIRST_WRITER - 1)
                if pending >= 0 and chunk != ready:
                    ready = poll_turn(semaphores.iterator + chunk, turn, chunk)
                if chunk != ready:
                    if pending >= 0:  # avoid a deadlock: this wait may depend on the report
                        count = self.report(
                            (pending, pending_turn, pending_following), 0, count, info, bars, wg
                        )
                        pending = Int32(-1)
                    wait_turn(semaphores.iterator + chunk, turn)
                    fence_bulk()
                target = sums.iterator + Int64(chunk) * c.chunk
                if const_expr(c.first_writer):
                    if first:
                        store_chunk(target, staging + wg * c.chunk, c.chunk)
                    else:
                        add_chunk(target, staging + wg * c.chunk, c.chunk)
                else:
                    add_chunk(target, staging + wg * c.chunk, c.chunk)
                if pending >= 0:
                    count = self.report(
                        (pending, pending_turn, pending_following), 1, count, info, bars, wg
                    )
                with cute.arch.elect_one():
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                release_staging(wg)
                pending, pending_turn, pending_following = chunk, turn, following
                ready = Int32(-1)
                if next_chunk >= 0:
                    next_chunk = next_chunk & (FIRST_WRITER - 1)
                    ready = poll_turn(semaphores.iterator + next_chunk, turn, next_chunk)
        if pending >= 0:
            count = self.report(
                (pending, pending_turn, pending_following), 0, count, info, bars, wg
            )
        self.report((Int32(-1), Int32(0), Int32(0)), 0, count, info, bars, wg)

    @cute.jit
    def report(
        self, pending: tuple, in_flight: Constexpr, count: Int32, info: cute.Tensor,
        bars: ChunkBarriers, wg: Constexpr,
    ):  # fmt: skip
        """Wait until a chunk is complete in memory, and report it to the warp that passes turns.

        Args:
            pending: (chunk, turn, following turn). A chunk of -1 means that no more chunks follow,
                a following turn of -1 that it is not known.
            in_flight: number of later chunks that may still be in flight.
            count: number of earlier reports.
            info: int32 words in shared memory.
            bars: mbarriers.
            wg: index of the consumer.

        Returns:
            The count for the next report.
        """
        cute.arch.mbarrier_wait(bars.landed_ack + wg, (count & 1) ^ 1)
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(in_flight, read=False)
            for i in cutlass.range_constexpr(LANDED_WORDS):
                info[Word.LANDED + NOTE_WORDS * wg + i] = pending[i]
            cute.arch.mbarrier_arrive(bars.landed + wg)
        cute.arch.sync_warp()
        return count + 1

    @cute.jit
    def pass_turns(self, info: cute.Tensor, bars: ChunkBarriers, order: list):
        """Run the warp that passes the turns of complete chunks, alternately for both consumers.

        Both consumers send the same number of chunks.
        """
        count, chunk = Int32(0), Int32(0)
        while chunk >= 0:
            for wg in cutlass.range_constexpr(CONSUMERS):
                cute.arch.mbarrier_wait(bars.landed + wg, count & 1)
                chunk, turn, following = (
                    info[Word.LANDED + NOTE_WORDS * wg + i] for i in range(LANDED_WORDS)
                )
                cute.arch.mbarrier_arrive(bars.landed_ack + wg)  # every lane has read the words
                if chunk >= 0:
                    self.pass_turn(chunk, turn, following, order)
            count += 1

    @cute.jit
    def pass_turn(self, chunk: Int32, turn: Int32, following: Int32, order: list):
        """Pass the turn of a chunk that is complete in memory to the next kv block."""
        rows, row = order[OrderTable.ROW], chunk >> (self.config.chunks.bit_length() - 1)
        low, high, first, last = Int32(0), Int32(0), Int32(0), Int32(0)
        if following < 0:  # before the fence, which would delay these loads
            low, high = rows[row, OrderRow.RUNS_BEGIN], rows[row, OrderRow.RUNS_END]
            first, last = rows[row, OrderRow.FIRST_TURN], rows[row, OrderRow.LAST_TURN]
        cute.arch.fence_acq_rel_gpu()
        if following < 0:
            ascending = self.config.sum_order == "ascending"
            following = following_turn(ascending, turn, (low, high, first, last), order)
        with cute.arch.elect_one():
            cute.arch.store(
                order[OrderTable.SEMAPHORE].iterator + chunk, following, sem="relaxed", scope="gpu"
            )
