"""Store the first part of each dQ chunk instead of adding it, so that dQ needs no memset.

See `attnkit.schedule.first_writer`. A chunk has a flag, which is 0 until its first part is complete
in memory. The warp that stores the first part waits for its completion before it takes the next
chunk; for a banded mask few kv blocks are the first of a row. Other warps poll the flag of the next
chunk while they would wait for that chunk anyway.
"""

from __future__ import annotations

from cutlass import Constexpr, Int32, Int64, cute

from attnkit.templates.common.semaphore import OrderTable, fence_bulk, poll_turn, wait_turn
from attnkit.templates.sm90.backward_dq_reduce import (
    add_chunk,
    read_note,
    release_staging,
    store_chunk,
    wait_staging,
)
from attnkit.templates.sm90.backward_shared import FIRST_WRITER, ChunkBarriers, ChunkNote

STORED = 1  # value of a chunk's flag once its first part is complete in memory


class FirstWriterReduce:
    """Stores the first part of each chunk, and adds the other parts.

    Args:
        chunk: floats per chunk.
        leaves_last: see `DqReduce`.
    """

    def __init__(self, chunk: int, leaves_last: bool) -> None:
        self.chunk = chunk
        self.leaves_last = leaves_last

    @cute.jit
    def run(
        self, wg: Constexpr, staging: cute.Pointer, info: cute.Tensor, bars: ChunkBarriers,
        sums: cute.Tensor, order: list,
    ):  # fmt: skip
        """Run the warp that stores or adds a consumer's chunks, see `Reduce.run`.

        The sums of dK and dV, which follow those of dQ, must be zero initially.
        """
        size, flags = self.chunk, order[OrderTable.SEMAPHORE]
        source = staging + wg * size
        release_staging(wg)
        ready, chunk = Int32(-1), Int32(0)
        while chunk >= 0:
            wait_staging(wg)
            chunk = read_note(info, wg, ChunkNote.CHUNK)
            if chunk >= 0:
                next_chunk = read_note(info, wg, ChunkNote.NEXT_CHUNK)
                at = chunk & (FIRST_WRITER - 1)
                target = sums.iterator + Int64(at) * size
                if chunk >= FIRST_WRITER:
                    store_chunk(target, source, size)
                else:
                    # chunks of dK and dV have no flag
                    if chunk != ready and chunk < flags.shape[0]:
                        wait_turn(flags.iterator + chunk, Int32(STORED))
                        fence_bulk()
                    add_chunk(target, source, size, self.leaves_last)
                with cute.arch.elect_one():
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
                release_staging(wg)
                if chunk >= FIRST_WRITER:
                    self.set_flag(flags.iterator + at)
                ready = Int32(-1)
                if next_chunk >= 0 and next_chunk < FIRST_WRITER:
                    ready = poll_turn(flags.iterator + next_chunk, Int32(STORED), next_chunk)
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def set_flag(self, flag: cute.Pointer):
        """Set the flag of a chunk once its store is complete in global memory."""
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0, read=False)
        cute.arch.sync_warp()
        # orders the bulk copy (async proxy) before the flag
        fence_bulk()
        with cute.arch.elect_one():
            cute.arch.store(flag, Int32(STORED), sem="release", scope="gpu")
        cute.arch.sync_warp()
