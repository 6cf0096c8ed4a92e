"""Add chunks of dQ, and of shared dK and dV, to their sums in a fixed order, by semaphores.

The order is that of `attnkit.schedule.deterministic_order`: the semaphore of a chunk has the turn,
the kv block that adds next. With first writers, the first turn stores instead of adding, and the
sums need not be cleared. If a consumer sends dQ of a q block in several parts, they have one
semaphore and one turn. It is awaited before the first part and passed on after the last.

Two warps add, one for each consumer, and a third one passes the turns on. A warp adds a chunk once
its turn has come. Then it waits until the chunk is complete in memory, which takes about half as
long as the MMAs of a block, and reports it. The third warp passes the turns of both consumers'
chunks. Its fence takes as long as a poll of a semaphore or longer, so it executes one for both.

With several parts, the second one waits until the first has left shared memory, and the consumer
waits with it. So the warp polls the semaphore of the next q block before its first part is ready.

If the next chunk is ready before the last one is complete, the warp polls that chunk's semaphore
meanwhile. It reports the last chunk before it adds the next one, because the fence between a poll
and a copy waits for the copy in flight anyway.

There is no deadlock: a warp that waits for a turn or for a chunk has reported every chunk that it
added. The third warp passes turns once both consumers have reported. A report waits until a chunk
is complete, which itself waits only for earlier work tiles. Loads and MMAs do not wait for turns.
"""

from __future__ import annotations

from enum import IntEnum

import cutlass
from cutlass import Constexpr, Int32, Int64, const_expr, cute

from attnkit.templates.common import device
from attnkit.templates.common.semaphore import (
    OrderTable,
    fence_bulk,
    look_up_turn,
    poll_turn,
    read_turn,
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


class Report(IntEnum):
    """Indices of the int32 words that tell the third warp which chunk is complete in memory."""

    CHUNK = 0
    FOLLOWING = 1  # the turn after the chunk's own


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
        # semaphore of chunks in flight that are not reported yet, and the turn after theirs; number
        # of reports
        pending, following, count = Int32(-1), Int32(0), Int32(0)
        chunk, phase = Int32(0), Int32(0)
        # turn of the last chunk, and the semaphore that is known to have it; -1 if none is
        turn, granted = Int32(-1), Int32(-1)
        while chunk >= 0:
            if pending >= 0:
                # Not try_wait, which waits until the chunk is ready, whatever its time limit.
                if not device.test_wait(chunk_ready, phase):
                    count = self.report(pending, following, count, info, bars, wg)
                    if const_expr(c.dq_parts > 1):  # most work tiles visit the next q block next
                        number = cutlass.min(pending + CONSUMERS, semaphores.shape[0] - 1)
                        granted = poll_turn(semaphores.iterator + number, turn, number)
                    pending = Int32(-1)
            cute.arch.mbarrier_wait(chunk_ready, phase)
            phase = phase ^ 1
            chunk = read_note(info, wg, ChunkNote.CHUNK)
            if chunk >= 0:
                known_turn, turn = turn, read_note(info, wg, ChunkNote.TURN)
                known = read_note(info, wg, ChunkNote.FOLLOWING)
                first = chunk >= FIRST_WRITER
                chunk = chunk & (FIRST_WRITER - 1)
                number = chunk >> (c.dq_parts.bit_length() - 1)
                part = chunk & (c.dq_parts - 1)
                begins, ends = part == 0, part == c.dq_parts - 1
                if const_expr(c.dq_parts > 1):
                    begins = begins and (number != granted or turn != known_turn)
                    granted = Int32(-1)  # other work tiles have other turns
                if begins:  # later parts of a turn are this CTA's already
                    semaphore = semaphores.iterator + number
                    now = read_turn(semaphore)
                    if pending >= 0:
                        count = self.report(pending, following, count, info, bars, wg)
                    if now != turn:
                        wait_turn(semaphore, turn)
                    fence_bulk()
                target = sums.iterator + Int64(chunk) * c.chunk
                if const_expr(c.first_writer):
                    if first:
                        store_chunk(target, staging + wg * c.chunk, c.chunk)
                    else:
                        add_chunk(target, staging + wg * c.chunk, c.chunk)
                else:
                    add_chunk(target, staging + wg * c.chunk, c.chunk)
                with cute.arch.elect_one():
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                release_staging(wg)
                pending = Int32(-1)
                if ends:
                    pending, following = number, known
                    if known < 0:
                        row = chunk >> (c.chunks.bit_length() - 1)
                        following = look_up_turn(c.sum_order == "ascending", turn, row, order)
        if pending >= 0:
            count = self.report(pending, following, count, info, bars, wg)
        self.report(Int32(-1), Int32(0), count, info, bars, wg)

    @cute.jit
    def report(
        self, chunk: Int32, following: Int32, count: Int32, info: cute.Tensor,
        bars: ChunkBarriers, wg: Constexpr,
    ):  # fmt: skip
        """Wait until a chunk is complete in memory, and report it to the warp that passes turns.

        Args:
            chunk: the chunk's semaphore; -1 if no more chunks follow.
            following: the turn after the chunk's own.
            count: number of earlier reports.
            info: int32 words in shared memory.
            bars: mbarriers.
            wg: index of the consumer.

        Returns:
            The count for the next report.
        """
        cute.arch.mbarrier_wait(bars.landed_ack + wg, (count & 1) ^ 1)
        at = Word.LANDED + NOTE_WORDS * wg
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0, read=False)
            info[at + Report.CHUNK] = chunk
            info[at + Report.FOLLOWING] = following
            cute.arch.mbarrier_arrive(bars.landed + wg)
        cute.arch.sync_warp()
        return count + 1

    @cute.jit
    def pass_turns(self, info: cute.Tensor, bars: ChunkBarriers, order: list):
        """Run the warp that passes the turns of complete chunks, one of each consumer at a time.

        Both consumers send the same number of chunks.
        """
        semaphores = order[OrderTable.SEMAPHORE]
        count, chunk = Int32(0), Int32(0)
        while chunk >= 0:
            reports = []
            for wg in cutlass.range_constexpr(CONSUMERS):
                cute.arch.mbarrier_wait(bars.landed + wg, count & 1)
                at = Word.LANDED + NOTE_WORDS * wg
                reports.append([info[at + i] for i in Report])
                cute.arch.mbarrier_arrive(bars.landed_ack + wg)  # every lane has read the words
            chunk = reports[0][Report.CHUNK]
            if chunk >= 0:
                cute.arch.fence_acq_rel_gpu()
                with cute.arch.elect_one():
                    for wg in cutlass.range_constexpr(CONSUMERS):
                        own, following = reports[wg]
                        cute.arch.store(
                            semaphores.iterator + own, following, sem="relaxed", scope="gpu"
                        )
            count += 1
