"""Add chunks of dQ, and of shared dK and dV, to float32 sums in global memory, in any order.

A consumer writes a chunk to shared memory, with a note of its index in the sums. One warp per
consumer adds chunks by bulk reductions. `backward_first_writer`, `backward_arrivals`,
`backward_whole_heads` and `backward_deterministic` implement other orders.
"""

from __future__ import annotations

from typing import Any, Protocol

from cutlass import Constexpr, Int32, Int64, cute

from attnkit.templates.common.cache_policy import evict_last, evict_normal
from attnkit.templates.sm90.backward_shared import (
    DQ_THREADS,
    NOTE_WORDS,
    ChunkBarriers,
    ChunkNote,
    NamedBarrier,
    Word,
)


class Reduce(Protocol):
    """Adds the chunks of a consumer to sums in global memory."""

    def run(
        self, wg: int, staging: Any, info: Any, bars: ChunkBarriers, sums: Any, order: Any
    ) -> None:
        """Run the warp that adds a consumer's chunks.

        Args:
            wg: index of the consumer.
            staging: f32 [2, chunk] in shared memory, one chunk per consumer.
            info: int32 words in shared memory, with the notes.
            bars: mbarriers, used only for a fixed order.
            sums: float32 sums in global memory, by chunks.
            order: flags or semaphores of the chunks, see `Backward.__call__`.
        """


class DqReduce:
    """Adds chunks in any order to sums that are initially zero.

    Args:
        chunk: floats per chunk.
        leaves_last: see `add_chunk`. A full bias passes through L2 beside the sums, and the kernel is
            slower if they leave last then.
    """

    def __init__(self, chunk: int, leaves_last: bool) -> None:
        self.chunk = chunk
        self.leaves_last = leaves_last

    @cute.jit
    def run(
        self, wg: Constexpr, staging: cute.Pointer, info: cute.Tensor, bars: ChunkBarriers,
        sums: cute.Tensor, order: list,
    ):  # fmt: skip
        """Run the warp that adds a consumer's chunks, see `Reduce.run`."""
        size = self.chunk
        release_staging(wg)
        chunk = Int32(0)
        while chunk >= 0:
            wait_staging(wg)
            chunk = read_note(info, wg, ChunkNote.CHUNK)
            if chunk >= 0:
                target, source = sums.iterator + Int64(chunk) * size, staging + wg * size
                add_chunk(target, source, size, self.leaves_last)
                with cute.arch.elect_one():
                    # wait until the bulk reduction has read shared memory; it may complete later
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                release_staging(wg)
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0, read=False)


def wait_staging(wg: Any) -> None:
    """Wait until a consumer has written a chunk and its note."""
    cute.arch.barrier(barrier_id=NamedBarrier.DQ_FULL + wg, number_of_threads=DQ_THREADS)


def release_staging(wg: Any) -> None:
    """Signal a consumer that it may write its next chunk."""
    cute.arch.barrier_arrive(barrier_id=NamedBarrier.DQ_EMPTY + wg, number_of_threads=DQ_THREADS)


def read_note(info: cute.Tensor, wg: Any, word: ChunkNote) -> Any:
    """Return word `word` of a consumer's note."""
    return info[Word.NOTE + NOTE_WORDS * wg + word]


def store_chunk(target: cute.Pointer, source: cute.Pointer, size: int) -> None:
    """Issue the bulk copy of `size` floats from shared to global memory, as one bulk group."""
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
            read_only_args=[target.toint(), source.toint(), Int32(4 * size)],
        )
        cute.arch.cp_async_bulk_commit_group()


def add_chunk(
    target: cute.Pointer, source: cute.Pointer, size: int, leaves_last: bool = True
) -> None:
    """Issue the bulk reduction of `size` floats from shared to global memory, as one bulk group.

    With `leaves_last` the lines leave L2 after others, because each further kv tile adds to them.
    """
    policy = evict_last() if leaves_last else evict_normal()
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 "
            "[{$r0}], [{$r1}], {$r2}, {$r3};",
            read_only_args=[target.toint(), source.toint(), Int32(4 * size), policy],
        )
        cute.arch.cp_async_bulk_commit_group()
