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
# it is, who follows (-1: look it up), the chunk that comes next (-1: not known)
NOTE = 16
SUM_FULL, SUM_FREE = 1, 3  # named barriers, two each
FIRST, LAST = 2, 3  # where the first and last turn of a row stand in its entry


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
        chunk, ready = Int32(0), Int32(-1)  # a chunk whose turn has come
        while chunk >= 0:
            cute.arch.barrier(barrier_id=SUM_FULL + wg, number_of_threads=160)
            chunk = info[NOTE + 4 * wg]
            if chunk >= 0:
                turn, following, then = Int32(0), Int32(0), Int32(0)
                if const_expr(c.turns):
                    turn, following, then = (info[NOTE + 4 * wg + i] for i in range(1, 4))
                    if chunk != ready:
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
                if const_expr(c.turns):  # looked up while the chunk is on its way
                    following = self.after(chunk, turn, following, turns)
                with cute.arch.elect_one():
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.barrier_arrive(barrier_id=SUM_FREE + wg, number_of_threads=160)
                if const_expr(c.turns):
                    ready = self.pass_on(chunk, following, then, turn, turns[0])
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def pass_on(
        self, chunk: Int32, following: Int32, then: Int32, turn: Int32, semaphores: cute.Tensor
    ):
        """Give a chunk's turn to the next once the chunk has arrived.

        Args:
            then: the chunk that comes next, or -1; meanwhile its semaphore is looked at.
            turn: whose turn it is there.

        Returns:
            The chunk that comes next if its turn has come, or -1.
        """
        now = Int32(-1)
        if then >= 0:
            now = cute.arch.load(semaphores.iterator + then, Int32, sem="relaxed", scope="gpu")
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0, read=False)
            cute.arch.fence_proxy("async")
        cute.arch.sync_warp()
        cute.arch.fence_acq_rel_gpu()  # of the store below and of the load above
        with cute.arch.elect_one():
            cute.arch.store(semaphores.iterator + chunk, following, sem="relaxed", scope="gpu")
            cute.arch.fence_proxy("async")
        cute.arch.sync_warp()
        ready = Int32(-1)
        if then >= 0 and now == turn:
            ready = then
        return ready

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
            row = chunk >> 1
            low, high = bounds[row, 0], bounds[row, 1]
            if turn == bounds[row, LAST]:
                following = bounds[row, FIRST]
            elif low + 1 == high:
                following = turn + (1 if self.config.turns == "ascending" else -1)
            else:
                following = self.across(turn, (low, high), starts, lengths)
        return following

    @cute.jit
    def across(self, turn: Int32, bounds: tuple, starts: cute.Tensor, lengths: cute.Tensor):
        """The turn after one that is not the last of a row of several runs."""
        low, high = bounds
        following = Int32(0)
        for i in cutlass.range(low, high, unroll=1):
            if const_expr(self.config.turns == "ascending"):
                if turn >= starts[i] and turn < starts[i] + lengths[i]:
                    following = turn + 1
                    if turn + 1 == starts[i] + lengths[i]:
                        following = starts[i + 1]
            else:
                if turn >= starts[i] and turn < starts[i] + lengths[i]:
                    following = turn - 1
                    if turn == starts[i]:
                        following = starts[i - 1] + lengths[i - 1] - 1
        return following
