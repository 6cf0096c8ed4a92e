"""Add chunks of dQ, and of shared dK and dV, to their sums in a fixed order, by semaphores.

The order is that of `attnkit.schedule.deterministic_order`: the semaphore of a chunk has the turn,
the kv block that adds next. With first writers, the first turn stores instead of adding, and the
sums need not be cleared.

A warp adds a chunk once its turn has come. The turn passes to the next kv block once the chunk is
complete in memory, which takes as long as the MMAs of a block. Meanwhile the warp adds the next
chunk, if it is ready and has its turn. The warp does not pass the turn itself, because a fence
would wait for all copies in flight. It reports complete chunks to another warp, which passes their
turns. The warp that adds reads the turn of a chunk only when the chunk is ready. The fence after
that read waits for the copy in flight, and a later fence has less left to wait for. While a copy is
in flight, this warp looks up who follows.

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
    OrderTable,
    fence_bulk,
    look_up_turn,
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

# Nanoseconds to wait for the next chunk before reporting the one in flight. A bulk reduction takes
# about 2000 until it is complete in memory, and a consumer as long for the next chunk.
LANDING = 2000
LANDED_WORDS = 2  # chunk and following turn


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
        # a chunk in flight that is not reported yet, and the turn after its own; number of reports
        pending, following, count = Int32(-1), Int32(0), Int32(0)
        chunk, phase = Int32(0), Int32(0)
        while chunk >= 0:
            if pending >= 0:
                # if the consumer is slower than the copy, report before waiting for the consumer
                if not device.try_wait(chunk_ready, phase, LANDING):
                    count = self.report((pending, following), 0, count, info, bars, wg)
                    pending = Int32(-1)
            cute.arch.mbarrier_wait(chunk_ready, phase)
            phase = phase ^ 1
            chunk = read_note(info, wg, ChunkNote.CHUNK)
            if chunk >= 0:
                turn = read_note(info, wg, ChunkNote.TURN)
                known = read_note(info, wg, ChunkNote.FOLLOWING)
                first = chunk >= FIRST_WRITER
                chunk = chunk & (FIRST_WRITER - 1)
                if poll_turn(semaphores.iterator + chunk, turn, chunk) < 0:
                    if pending >= 0:  # avoid a deadlock: this wait may depend on the report
                        count = self.report((pending, following), 0, count, info, bars, wg)
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
                    count = self.report((pending, following), 1, count, info, bars, wg)
                with cute.arch.elect_one():
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                release_staging(wg)
                pending, following = chunk, known
                if known < 0:
                    row = chunk >> (c.chunks.bit_length() - 1)
                    following = look_up_turn(c.sum_order == "ascending", turn, row, order)
        if pending >= 0:
            count = self.report((pending, following), 0, count, info, bars, wg)
        self.report((Int32(-1), Int32(0)), 0, count, info, bars, wg)

    @cute.jit
    def report(
        self, pending: tuple, in_flight: Constexpr, count: Int32, info: cute.Tensor,
        bars: ChunkBarriers, wg: Constexpr,
    ):  # fmt: skip
        """Wait until a chunk is complete in memory, and report it to the warp that passes turns.

        Args:
            pending: (chunk, following turn). A chunk of -1 means that no more chunks follow.
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
                chunk, following = (
                    info[Word.LANDED + NOTE_WORDS * wg + i] for i in range(LANDED_WORDS)
                )
                cute.arch.mbarrier_arrive(bars.landed_ack + wg)  # every lane has read the words
                if chunk >= 0:
                    cute.arch.fence_acq_rel_gpu()
                    with cute.arch.elect_one():
                        semaphore = order[OrderTable.SEMAPHORE].iterator + chunk
                        cute.arch.store(semaphore, following, sem="relaxed", scope="gpu")
            count += 1
