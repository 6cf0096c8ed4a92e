"""Sums of dQ that begin with what the first kv tile stores: see `attnkit.schedule.first_writer`.

A chunk has a mark, 0 until its first part has arrived. The warp that stores that part waits for its
arrival before it takes the next chunk: a band's kv tiles are first at few. The others look at the
mark of the next chunk while they wait for that anyway.
"""

from __future__ import annotations

from typing import Any

from cutlass import Constexpr, Int32, Int64, cute

from attnkit.templates.common.semaphore import fence_bulk, poll_turn, wait_turn
from attnkit.templates.sm90.backward_sums import (
    FIRST_PART,
    NOTE,
    SUM_FREE,
    SUM_FULL,
    add_chunk,
    store_chunk,
)

ARRIVED = 1


class FirstParts:
    """The part of a backward kernel that adds to sums that nobody has cleared."""

    config: Any

    @cute.jit
    def add_to_first(
        self,
        wg: Constexpr,
        outgoing: cute.Pointer,
        info: cute.Tensor,
        sums: cute.Tensor,
        marks: cute.Tensor,
    ):
        """A warp that stores a consumer's chunks where they are first, and adds them elsewhere.

        Args:
            marks: of the chunks of dQ; sums behind these are zero before.
        """
        size = self.config.chunk
        source = outgoing + wg * size
        cute.arch.barrier_arrive(barrier_id=SUM_FREE + wg, number_of_threads=160)
        ready, chunk = Int32(-1), Int32(0)
        while chunk >= 0:
            cute.arch.barrier(barrier_id=SUM_FULL + wg, number_of_threads=160)
            chunk = info[NOTE + 4 * wg]
            if chunk >= 0:
                then = info[NOTE + 4 * wg + 3]
                at = chunk & (FIRST_PART - 1)
                target = sums.iterator + Int64(at) * size
                if chunk >= FIRST_PART:
                    store_chunk(target, source, size)
                else:
                    if chunk != ready and chunk < marks.shape[0]:
                        wait_turn(marks.iterator + chunk, Int32(ARRIVED))
                        fence_bulk()
                    add_chunk(target, source, size)
                with cute.arch.elect_one():
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
                cute.arch.barrier_arrive(barrier_id=SUM_FREE + wg, number_of_threads=160)
                if chunk >= FIRST_PART:
                    self.set_mark(marks.iterator + at)
                ready = Int32(-1)
                if then >= 0 and then < FIRST_PART:
                    ready = poll_turn(marks.iterator + then, Int32(ARRIVED), then)
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def set_mark(self, mark: cute.Pointer):
        """Tell all others that a chunk has been stored, once that has arrived."""
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0, read=False)
        cute.arch.sync_warp()
        fence_bulk()
        with cute.arch.elect_one():
            cute.arch.store(mark, Int32(ARRIVED), sem="release", scope="gpu")
        cute.arch.sync_warp()
