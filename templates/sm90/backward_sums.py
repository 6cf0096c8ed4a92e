"""The warps that add chunks of dQ, and of shared dK and dV, to float32 sums in memory.

A consumer leaves a chunk in shared memory and a note of where it goes; a warp of its own adds it
by one bulk reduction. Sums in a fixed order are those of `backward_turns`.
"""

from __future__ import annotations

from typing import Any

from cutlass import Constexpr, Int32, Int64, cute

# int32 words of the notes in `info`, four for each consumer: the chunk (-1: no more), whose turn
# it is, who follows (-1: look it up), the chunk that comes next (-1: not known)
NOTE = 16
SUM_FULL, SUM_FREE = 1, 3  # named barriers, two each
FIRST_PART = 1 << 27  # of a chunk's number in a note: nobody has added to it before


class Sums:
    """The part of a backward kernel that adds to sums in memory."""

    config: Any

    @cute.jit
    def add_up(self, wg: Constexpr, outgoing: cute.Pointer, info: cute.Tensor, sums: cute.Tensor):
        """A warp that adds a consumer's chunks to the sums."""
        size = self.config.chunk
        cute.arch.barrier_arrive(barrier_id=SUM_FREE + wg, number_of_threads=160)
        chunk = Int32(0)
        while chunk >= 0:
            cute.arch.barrier(barrier_id=SUM_FULL + wg, number_of_threads=160)
            chunk = info[NOTE + 4 * wg]
            if chunk >= 0:
                add_chunk(sums.iterator + Int64(chunk) * size, outgoing + wg * size, size)
                with cute.arch.elect_one():
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.barrier_arrive(barrier_id=SUM_FREE + wg, number_of_threads=160)
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0, read=False)


def store_chunk(target: cute.Pointer, source: cute.Pointer, size: int) -> None:
    """Begin to store floats in shared memory to memory; one group of bulk copies."""
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
            read_only_args=[target.toint(), source.toint(), Int32(4 * size)],
        )
        cute.arch.cp_async_bulk_commit_group()


def add_chunk(target: cute.Pointer, source: cute.Pointer, size: int) -> None:
    """Begin to add floats in shared memory to a sum in memory; one group of bulk copies."""
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
            read_only_args=[target.toint(), source.toint(), Int32(4 * size)],
        )
        cute.arch.cp_async_bulk_commit_group()
