"""Sum dQ in the order in which its parts arrive (Hopper backward, sparse block lists).

Several CTAs compute parts of the same chunk of dQ at about the same time. The work list does not say
which of them comes first or last. So each part draws a ticket from the chunk's counter. The first
part is stored in float32, and later parts are added to it. The warp with the last ticket waits until
the other parts are complete in memory, and loads their sum. Its consumer adds its own part and rounds
the result, and the warp writes it to dQ. If a chunk has only one part, that part is rounded and
written. So dQ needs no memset before the kernel and no postprocess after it.

A warp draws the ticket while its consumer still computes the part. So the sum of the others is in
shared memory when the consumer needs it.

This cannot deadlock. Before a warp waits for lower tickets of a chunk, it counts the part that it
sent last. So each lower ticket that is missing belongs to a warp that itself waits at this chunk, or
to one whose consumer still computes. Only the other consumer of the CTA can hold up that consumer:
through dS, or through the producer, which reuses a stage only when both have released it. The
mainloop writes dS of a q block before it sends dQ of the previous q block. So the other consumer is
at an earlier q block, and `run` ensures that it is in the same work tile. A work tile visits its q
blocks in ascending order. Along a chain of waits the q block of a head decreases, or it stays the
same and the ticket decreases. So every chain ends.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import cutlass
from cutlass import Constexpr, Int32, Int64, cute

from attnkit.templates.common.backward_work import Problem
from attnkit.templates.common.semaphore import fence_bulk, read_turn
from attnkit.templates.sm90.backward_dq_reduce import (
    add_chunk,
    read_note,
    release_staging,
    store_chunk,
    wait_staging,
)
from attnkit.templates.sm90.backward_shared import (
    CONSUMERS,
    FIRST_WRITER,
    LAST_WRITER,
    NO_CHUNK,
    NOTE_WORDS,
    WARP,
    ChunkBarriers,
    ChunkNote,
    NamedBarrier,
    Word,
    heads_before,
    q_blocks_of,
)
from attnkit.templates.sm90.backward_whole_heads import WholeHeads


class ArrivalTable(IntEnum):
    """Names the tensors in the kernel argument `order` of a kernel that counts parts of dQ."""

    COUNTERS = 0  # int32 [chunks of dQ], zero, see `COMPLETE`
    VISITS = 1  # int32 [B * H * q blocks], how many kv blocks add to each q block
    GRAD_QUERY = 2  # [B, H, S, D] of the dtype


# A chunk's counter is the number of tickets drawn, plus this for each part that is complete in memory.
# An int32 counts 2^15 - 1 parts; `schedule.arrivals` has far fewer.
COMPLETE = 1 << 16
LINE = 32  # floats of a cache line
ARRIVAL_THREADS = CONSUMERS * WARP  # one warp for each consumer


class Arrivals(WholeHeads):
    """Sends chunks of dQ from a consumer, and stores, adds or finishes them in another warp.

    The indices of chunks count from the first q block of all heads.
    """

    def role(self, chunk: Int32, out: Any) -> Any:
        """Read from shared memory whether this is the first or the last part of the chunk."""
        return out.info[Word.ROLE + NOTE_WORDS * out.wg]

    # --------------------------------------------------------------------------- of another warp

    @cute.jit
    def run(
        self, wg: Constexpr, staging: cute.Pointer, info: cute.Tensor, bars: ChunkBarriers,
        sums: cute.Tensor, tma: tuple, problem: Problem, order: list,
    ):  # fmt: skip
        """Run the warp that stores, adds and finishes a consumer's chunks.

        Args:
            wg, staging, info, bars, tma, problem: see `WholeHeads.run`.
            sums: float32 in global memory, the chunks of all heads; not initialized.
            order: see `ArrivalTable`.
        """
        size = self.config.chunk
        counters = order[ArrivalTable.COUNTERS]
        source = staging + wg * size
        store, store_from, store_to = self.store_views(staging, tma)
        release_staging(wg)
        # `counter` is the chunk's counter as it was when its part drew a ticket
        chunk, counter, role, loads = (Int32(0),) * 4
        while chunk >= 0:
            wait_staging(wg)
            # A note without a chunk comes before the last chunk of each work tile, and before the
            # kernel's first chunk, where the barrier below is not needed.
            before_last = chunk == NO_CHUNK
            chunk = read_note(info, wg, ChunkNote.CHUNK)
            if chunk >= 0:
                sent = Int32(NO_CHUNK)  # the part to count
                if chunk == NO_CHUNK:
                    pass
                elif role >= LAST_WRITER:
                    head, batch = (
                        read_note(info, wg, i) for i in (ChunkNote.HEAD, ChunkNote.BATCH)
                    )
                    before = heads_before(self.config, problem, batch, head)
                    own = chunk - before * (q_blocks_of(self.config, problem) * 2)
                    head, row, column = self.place(own, wg, info, problem)
                    to = store_to[None, row, column, head, batch]
                    cute.copy(store, store_from[None, 2 * wg], to)
                    cute.arch.cp_async_bulk_commit_group()
                else:
                    sent = chunk
                    target = sums.iterator + Int64(chunk) * size
                    if role >= FIRST_WRITER:
                        store_chunk(target, source, size)
                    else:  # the first part must be complete
                        self.wait_parts(counters, chunk, counter, Int32(1))
                        add_chunk(target, source, size)
                if before_last:
                    # No warp draws a ticket of the next work tile while the other may wait for a part
                    # of this one. A warp counts its part before it waits here.
                    self.count(counters, sent)
                    sent = Int32(NO_CHUNK)
                    cute.arch.barrier(
                        barrier_id=NamedBarrier.BOTH_ARRIVALS, number_of_threads=ARRIVAL_THREADS
                    )
                next_chunk = read_note(info, wg, ChunkNote.NEXT_CHUNK)
                if next_chunk >= 0:
                    if cute.arch.lane_idx() == 0:
                        counter = cute.arch.atomic_add(
                            counters.iterator + next_chunk, Int32(1), sem="acquire", scope="gpu"
                        )
                with cute.arch.elect_one():
                    # wait until shared memory has been read; the copy may complete later
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
                if next_chunk >= 0:
                    counter = cute.arch.shuffle_sync(counter, 0)
                    parts = order[ArrivalTable.VISITS][next_chunk >> 1]
                    ticket = counter & (COMPLETE - 1)
                    role = cutlass.select_(ticket == 0, Int32(FIRST_WRITER), Int32(0))
                    role += cutlass.select_(ticket == parts - 1, Int32(LAST_WRITER), Int32(0))
                    # a vote, as in `wait_parts`
                    if cute.arch.vote_any_sync(role == LAST_WRITER):
                        if cute.arch.vote_any_sync(counter < (parts - 1) * COMPLETE):
                            # Count this part first: the warps that this one waits for may wait for it.
                            self.count(counters, sent)
                            sent = Int32(NO_CHUNK)
                        self.wait_parts(counters, next_chunk, counter, parts - 1)
                        earlier = sums.iterator + Int64(next_chunk) * size
                        self.load(earlier, source, bars.landed + wg, loads & 1)
                        loads += 1
                    with cute.arch.elect_one():
                        info[Word.ROLE + NOTE_WORDS * wg] = role
                    cute.arch.sync_warp()
                release_staging(wg)
                self.count(counters, sent)  # while the consumer computes its next chunk
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def wait_parts(self, counters: cute.Tensor, chunk: Int32, counter: Int32, parts: Int32):
        """Wait until at least `parts` parts of a chunk are complete, for bulk copies that follow.

        `counter` is an earlier value of its counter, read with acquire semantics.
        """
        # a vote, so that the warp is known to be together at the fence
        while cute.arch.vote_any_sync(counter < parts * COMPLETE):
            counter = read_turn(counters.iterator + chunk)
        cute.arch.sync_warp()
        fence_bulk()

    @cute.jit
    def count(self, counters: cute.Tensor, chunk: Int32):
        """Wait until the part that this warp sent last is complete in memory, then count it.

        Args:
            counters: see `ArrivalTable`.
            chunk: index of its chunk; `NO_CHUNK` if there is nothing to count.
        """
        if chunk != NO_CHUNK:
            with cute.arch.elect_one():
                cute.arch.cp_async_bulk_wait_group(0, read=False)
            cute.arch.sync_warp()
            fence_bulk()  # orders the bulk copy (async proxy) before the counter
            with cute.arch.elect_one():
                cute.arch.atomic_add(
                    counters.iterator + chunk, Int32(COMPLETE), sem="release", scope="gpu"
                )
            cute.arch.sync_warp()

    @cute.jit
    def load(self, source: cute.Pointer, target: cute.Pointer, barrier: cute.Pointer, phase: Int32):
        """Load the sum of a chunk's other parts to shared memory, and wait for it.

        Args:
            source, target: f32 [chunk] in global and in shared memory.
            barrier, phase: mbarrier of the load, and the parity to wait for.
        """
        self.issue_load(source, target, barrier)
        cute.arch.mbarrier_wait(barrier, phase)
        # Nobody reads the sum again: L2 need not write it to memory.
        for i in range(self.config.chunk // (LINE * WARP)):
            at = source + LINE * (WARP * i + cute.arch.lane_idx())
            cute.arch.inline_ptx("discard.global.L2 [{$r0}], 128;", read_only_args=[at.toint()])
