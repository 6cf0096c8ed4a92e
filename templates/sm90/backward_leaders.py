"""Store the gradient of a bias that batch elements share in one of them, and add it in the others.

A bias `table[h, q, kv]` has one element for the scores of all batch elements. Batch element 0, the
leader, stores its dS, so that the gradient need not be zero before. The others, the followers, add
theirs once the leader has stored that block of dS.

Each block of dS has a counter, which is 0 before the launch. The consumers of the leader store dS of
a q block, then send dQ of the q block before it to the warp that adds it. That warp adds 1 to the
counter of the block that is stored, once for each consumer. The producer of a follower waits for
both consumers before it loads Q of the block, so that the consumers of the follower wait for nothing
new.

There is no deadlock. A work tile waits only for earlier ones of the list. CTAs claim them in the
order of the list, so that the earliest one that is not complete waits for none. For this, no CTA may
wait for dQ of another one: the last dQ of a work tile is sent during the next work tile of the CTA,
which may be waiting for its leader. So no kv block is first writer of dQ.
"""

from __future__ import annotations

from typing import Any

from cutlass import Constexpr, Int32, Int64, cute

from attnkit.templates.sm90.backward_dq_reduce import (
    add_chunk,
    read_note,
    release_staging,
    wait_staging,
)
from attnkit.templates.sm90.backward_shared import (
    CONSUMERS,
    NO_CHUNK,
    ChunkBarriers,
    ChunkNote,
)

LEADER = 0  # the batch element that stores


class LeaderReduce:
    """Adds chunks in any order to sums that are initially zero, and counts stored blocks of dS.

    Args:
        chunk: floats per chunk.
    """

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    @cute.jit
    def run(
        self, wg: Constexpr, staging: cute.Pointer, info: cute.Tensor, bars: ChunkBarriers,
        sums: cute.Tensor, order: list,
    ):  # fmt: skip
        """Run the warp that adds a consumer's chunks of dQ, see `backward_dq_reduce.Reduce.run`."""
        size, counters = self.chunk, order[0]
        release_staging(wg)
        chunk = Int32(0)
        while chunk >= 0:
            wait_staging(wg)
            chunk = read_note(info, wg, ChunkNote.CHUNK)
            if chunk >= 0:
                stored = read_note(info, wg, ChunkNote.NEXT_CHUNK)
                kv_block = read_note(info, wg, ChunkNote.NEXT_KV_BLOCK)
                if chunk != NO_CHUNK:
                    target, source = sums.iterator + Int64(chunk) * size, staging + wg * size
                    add_chunk(target, source, size, leaves_last=False)  # as beside any full bias
                    with cute.arch.elect_one():
                        # wait until the bulk reduction has read shared memory
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
                release_staging(wg)
                # chunks of the leader are the first
                if stored >= 0 and stored < CONSUMERS * counters.shape[1]:
                    self.count(counter_of(counters, kv_block, stored // CONSUMERS))
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def count(self, counter: cute.Pointer):
        """Add 1 to a counter; the earlier stores of the consumer are visible before it."""
        cute.arch.fence_acq_rel_gpu()
        with cute.arch.elect_one():
            cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="relaxed", scope="gpu")
        cute.arch.sync_warp()


@cute.jit
def wait_for_leader(counters: cute.Tensor, kv_block: Int32, b: Int32, q_block: Int32):
    """Wait until the leader has stored a block of dS, unless `b` is the leader.

    Args:
        counters: int32 [kv blocks, heads * q blocks].
        kv_block: the kv block.
        b: the batch element that waits.
        q_block: the q block, counted through the heads.
    """
    if b != LEADER:
        counter = counter_of(counters, kv_block, q_block)
        now = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
        while now != CONSUMERS:
            now = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")


def counter_of(counters: cute.Tensor, kv_block: Any, q_block: Any) -> cute.Pointer:
    """Return the address of the counter of a block of dS."""
    return counters.iterator + (Int64(kv_block) * counters.shape[1] + q_block)
