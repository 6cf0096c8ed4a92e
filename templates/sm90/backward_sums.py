"""The warps that add chunks of dQ, and of shared dK and dV, to float32 sums in memory.

A consumer leaves a chunk in shared memory and a note of where it goes; a warp of its own adds it
by one bulk reduction. In deterministic mode the warp waits for the chunk's turn first: a semaphore
a chunk, in the order of `attnkit.turns`. Nothing else waits for turns, so that loads and products
run ahead.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Constexpr, Int32, Int64, const_expr, cute

# int32 words of the notes in `info`, four for each consumer: the chunk (-1: no more), whose turn
# it is, who follows (-1: look it up)
NOTE = 16
SUM_FULL, SUM_FREE = 1, 3  # named barriers, two each


class Sums:
    """The part of a backward kernel that adds to sums in memory."""

    config: Any

    @cute.jit
    def add_up(
        self,
        wg: Constexpr,
        outgoing: cute.Pointer,
        info: cute.Tensor,
        sums: cute.Tensor,
        turns: list,
    ):
        """A warp that adds a consumer's chunks to the sums.

        Args:
            turns: see `Backward.__call__`.
        """
        c = self.config
        cute.arch.barrier_arrive(barrier_id=SUM_FREE + wg, number_of_threads=160)
        chunk = Int32(0)
        while chunk >= 0:
            cute.arch.barrier(barrier_id=SUM_FULL + wg, number_of_threads=160)
            chunk = info[NOTE + 4 * wg]
            if chunk >= 0:
                following = Int32(0)
                if const_expr(c.turns):
                    turn = info[NOTE + 4 * wg + 1]
                    following = self.after(chunk, turn, info[NOTE + 4 * wg + 2], turns)
                    self.await_turn(turns[0].iterator + chunk, turn)
                target = sums.iterator + Int64(chunk) * c.chunk
                with cute.arch.elect_one():
                    cute.arch.inline_ptx(
                        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 "
                        "[{$r0}], [{$r1}], {$r2};",
                        read_only_args=[
                            target.toint(),
                            (outgoing + wg * c.chunk).toint(),
                            Int32(4 * c.chunk),
                        ],
                    )
                    cute.arch.cp_async_bulk_commit_group()
                    if const_expr(c.turns):
                        cute.arch.cp_async_bulk_wait_group(0, read=False)
                        cute.arch.fence_proxy("async")
                        cute.arch.fence_acq_rel_gpu()
                        cute.arch.store(
                            turns[0].iterator + chunk, following, sem="release", scope="gpu"
                        )
                    else:
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.barrier_arrive(barrier_id=SUM_FREE + wg, number_of_threads=160)
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def await_turn(self, semaphore: cute.Pointer, turn: Int32):
        """Wait until a semaphore holds a turn."""
        now = cute.arch.load(semaphore, Int32, sem="acquire", scope="gpu")
        while now != turn:
            now = cute.arch.load(semaphore, Int32, sem="acquire", scope="gpu")
        cute.arch.fence_proxy("async")

    @cute.jit
    def after(self, chunk: Int32, turn: Int32, following: Int32, turns: list):
        """Whose turn is next: the next kv tile that the mask keeps in a row, or the first again."""
        if following < 0:
            _, bounds, starts, lengths, _ = turns
            low, high = bounds[chunk >> 1, 0], bounds[chunk >> 1, 1]
            for i in cutlass.range(low, high, unroll=1):
                end = starts[i] + lengths[i]
                if turn >= starts[i] and turn < end:
                    if const_expr(self.config.turns == "ascending"):
                        following = turn + 1
                        if turn + 1 == end:
                            following = starts[cutlass.select_(i + 1 < high, i + 1, low)]
                    else:
                        following = turn - 1
                        if turn == starts[i]:
                            before = cutlass.select_(i > low, i, high) - 1
                            following = starts[before] + lengths[before] - 1
        return following
