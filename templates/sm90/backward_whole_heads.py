"""Sum dQ of whole heads in one CTA, which rounds and writes it (Hopper backward, short sequences).

A CTA computes all kv blocks of a head, in ascending order. Nobody else adds to dQ of that head, so
the CTA knows which of its kv blocks is the first and which the last to add to a q block. The first
one stores its part in float32, and those in between add theirs, to memory that the CTA reuses for
its next head. The last one adds its part to what the others have stored, rounds the sum and writes
it to dQ. Compared with sums of all heads in memory, this needs no memset before the kernel and no
rounding after it.

The parts of a sum are added in the order of the kv blocks, because each is complete in memory before
the next one is sent. So the same inputs give the same bits, and a deterministic backward needs no
semaphores here.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Constexpr, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import hopper_helpers

from attnkit.templates.common import device
from attnkit.templates.common.backward_work import Problem
from attnkit.templates.common.semaphore import fence_bulk
from attnkit.templates.common.tma import ordered, partition
from attnkit.templates.common.work_tile import WorkTile
from attnkit.templates.sm90.backward_config import ROWS, BackwardConfig
from attnkit.templates.sm90.backward_dq_reduce import (
    add_chunk,
    read_note,
    release_staging,
    store_chunk,
    wait_staging,
)
from attnkit.templates.sm90.backward_shared import (
    CHUNK_MASK,
    CONSUMERS,
    FIRST_WRITER,
    LAST_WRITER,
    NO_CHUNK,
    NOTE_WORDS,
    WARPGROUP,
    WARPS,
    ChunkBarriers,
    ChunkNote,
    NamedBarrier,
    Word,
    q_blocks_of,
    record_of,
)

ROW_MAJOR = cutlass.tensor_utils.LayoutEnum.ROW_MAJOR
VECTOR = 8  # elements of 16 bytes
LANE_STRIDE = 4 * WARPGROUP  # floats between two 16-byte vectors of a thread in a chunk


class WholeHeads:
    """Sends chunks of dQ from a consumer, and stores, adds or finishes them in another warp.

    A chunk is 64 x 64 elements: half of the columns of a q block, or of its rows if it has 128. Its
    index counts from the first q block of the head.

    Args:
        config: compile-time configuration.
    """

    def __init__(self, config: BackwardConfig) -> None:
        self.config = config
        self.dtype = device.DTYPES[config.dtype]

    def rounded_layout(self) -> Any:
        """Return the layout of rounded chunks in the staging memory of dQ.

        It is dtype [64, 64, 4], swizzled; those of the two consumers are the stages 0 and 2.
        """
        stages = 2 * CONSUMERS  # a chunk of float32 takes as much memory as two rounded ones
        return hopper_helpers.make_smem_layout_epi(self.dtype, ROW_MAJOR, (ROWS, ROWS), stages)

    def tma(self, grad_query: Any) -> tuple:
        """Return the TMA store of a rounded chunk, and the coordinate tensor of dQ [S, D, H, B].

        Args:
            grad_query: [B, H, S, D] of the dtype.
        """
        one = cute.slice_(self.rounded_layout(), (None, None, 0))
        target = ordered(grad_query, (2, 3, 1, 0))
        store = cpasync.CopyBulkTensorTileS2GOp()
        atom, tiles = cpasync.make_tiled_tma_atom(store, target, one, (ROWS, ROWS))
        return atom, tiles

    # ------------------------------------------------------------------------ of a consumer thread

    @cute.jit
    def send(self, dq: cute.Tensor, chunk: Int32, next_chunk: Int32, kv_count: Int32, out: Any):
        """Write a chunk to shared memory: in float32, or summed and rounded if it is the last part.

        The staging memory must have been read. If this is the last part of several, it contains the
        sum of the others.

        Args:
            dq: f32 [chunk] / 128 threads; modified.
            chunk, next_chunk: indices of this chunk and of the consumer's next one, with flags.
            kv_count: index of the chunk's work tile, whose record is valid.
            out: see `backward_epilogue.Outputs`.
        """
        self.write_note(out.info, chunk, next_chunk, kv_count, out)
        size = self.config.chunk
        start = out.to.staging + (out.wg * size + out.thread * 4)
        staged = cute.make_tensor(  # f32 [4, 8] of the thread
            start.align(16), cute.make_layout((4, size // LANE_STRIDE), stride=(1, LANE_STRIDE))
        )
        own = cute.make_tensor(dq.iterator, cute.make_layout((4, size // LANE_STRIDE)))
        role = self.role(chunk, out)
        if role < LAST_WRITER:
            cute.autovec_copy(own, staged)
        else:
            if (role & FIRST_WRITER) == 0:
                others = cute.make_rmem_tensor(own.layout, own.element_type)  # f32 [4, 8]
                cute.autovec_copy(staged, others)
                for i in range(cute.size(own)):
                    own[i] = own[i] + others[i]
            # all warps have read the sums before rounded values overwrite them
            cute.arch.barrier(
                barrier_id=NamedBarrier.EPILOGUE + out.wg, number_of_threads=WARPGROUP
            )
            self.write_rounded(dq, out)
        # bulk copies and TMA read shared memory by the async proxy
        cute.arch.fence_proxy("async.shared", space="cta")

    def role(self, chunk: Int32, out: Any) -> Any:
        """Return a number with the flags that say how the chunk is summed."""
        return chunk

    def request_sum(self, chunk: Int32, kv_count: Int32, out: Any) -> None:
        """Request the sum of the earlier parts of a chunk, after other use of the staging memory.

        Args:
            chunk: index of the chunk that is sent next, with flags.
            kv_count: index of its work tile, whose record is valid.
            out: see `backward_epilogue.Outputs`.
        """
        self.write_note(out.info, Int32(NO_CHUNK), chunk, kv_count, out)
        # the sum is written by the async proxy
        cute.arch.fence_proxy("async.shared", space="cta")

    def write_rounded(self, dq: Any, out: Any) -> None:
        """Round a chunk, times the softmax scale, and write it to shared memory by `stmatrix`."""
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS
        start = cute.recast_ptr(out.to.staging + out.wg * self.config.chunk, dtype=self.dtype)
        own_row = start + (16 * warp + lane % 16) * ROWS
        scale = out.problem.scale
        for g in range(4):  # 16 columns each
            words = []
            for k in range(4):
                at = 8 * g + 2 * k
                words.append(device.pack(dq[at] * scale, dq[at + 1] * scale, self.dtype))
            # 16-byte vectors are swizzled by row, as in `rounded_layout`
            vector = (2 * g + lane // 16) ^ (lane % 8)
            device.store_matrix(own_row + vector * VECTOR, words)

    @cute.jit
    def write_note(
        self, info: cute.Tensor, chunk: Int32, next_chunk: Int32, kv_count: Int32, out: Any
    ):
        """Write the note of a chunk to shared memory, by thread 0 of the consumer."""
        if out.thread == 0:
            at = Word.NOTE + NOTE_WORDS * out.wg
            record = record_of(self.config, kv_count & 1)
            info[at + ChunkNote.CHUNK] = chunk
            info[at + ChunkNote.NEXT_CHUNK] = next_chunk
            info[at + ChunkNote.HEAD] = info[record + WorkTile.HEAD]
            info[at + ChunkNote.BATCH] = info[record + WorkTile.BATCH]

    # --------------------------------------------------------------------------- of another warp

    @cute.jit
    def run(
        self, wg: Constexpr, staging: cute.Pointer, info: cute.Tensor, bars: ChunkBarriers,
        sums: cute.Tensor, tma: tuple, problem: Problem,
    ):  # fmt: skip
        """Run the warp that stores, adds and finishes a consumer's chunks.

        Args:
            wg: index of the consumer.
            staging: f32 [2, chunk] in shared memory, one chunk per consumer.
            info: int32 words in shared memory, with the notes.
            bars: mbarriers.
            sums: float32 in global memory, the chunks of one head for each CTA; not initialized.
            tma: the result of `tma`.
            problem: sizes of the launch.
        """
        c, size = self.config, self.config.chunk
        cta, _, _ = cute.arch.block_idx()
        chunks = q_blocks_of(c, problem) * 2
        slot = sums.iterator + Int64(cta) * (Int64(chunks) * size)
        source = staging + wg * size
        store, store_from, store_to = self.store_views(staging, tma)
        release_staging(wg)
        chunk, sent, loads = Int32(0), Int32(-1), Int32(0)
        while chunk >= 0:
            wait_staging(wg)
            chunk = read_note(info, wg, ChunkNote.CHUNK)
            if chunk >= 0:
                next_chunk = read_note(info, wg, ChunkNote.NEXT_CHUNK)
                at, last = chunk & CHUNK_MASK, sent
                if at != NO_CHUNK:
                    sent = at
                if at == NO_CHUNK:
                    pass
                elif chunk >= LAST_WRITER:
                    head, row, column = self.place(at, wg, info, problem)
                    batch = read_note(info, wg, ChunkNote.BATCH)
                    target = store_to[None, row, column, head, batch]
                    cute.copy(store, store_from[None, 2 * wg], target)
                    cute.arch.cp_async_bulk_commit_group()
                elif chunk >= FIRST_WRITER:
                    store_chunk(slot + Int64(at) * size, source, size)
                else:
                    if at == last:  # the part before this one may still be on its way
                        self.complete(0)
                    add_chunk(slot + Int64(at) * size, source, size, not self.config.bias_bytes)
                with cute.arch.elect_one():
                    # wait until shared memory has been read; the copy may complete later
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
                if (next_chunk >= LAST_WRITER) & ((next_chunk & FIRST_WRITER) == 0):
                    same = (next_chunk & CHUNK_MASK) == sent
                    earlier = slot + Int64(next_chunk & CHUNK_MASK) * size
                    self.load_sum(earlier, source, same, bars.landed + wg, loads & 1)
                    loads += 1
                release_staging(wg)
                # while the consumer computes its next chunk
                self.complete(1)
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    def complete(self, in_flight: int) -> None:
        """Wait until all bulk copies of this warp but the latest `in_flight` are complete."""
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(in_flight, read=False)
        fence_bulk()

    def store_views(self, staging: cute.Pointer, tma: tuple) -> tuple:
        """Return the copy operation of `tma`, and its views of the staging memory and of dQ."""
        layout = self.rounded_layout()
        rounded = cute.make_tensor(  # dtype [64, 64, 4]
            cute.recast_ptr(staging, layout.inner, dtype=self.dtype), layout.outer
        )
        store, tiles = tma
        views = partition(store, rounded, tiles, (ROWS, ROWS), (None, None, None, None))
        return store, *views

    def place(self, chunk: Int32, wg: int, info: cute.Tensor, problem: Problem) -> tuple:
        """Return the head of dQ, and the square of 64 x 64 in it, that a chunk belongs to."""
        c = self.config
        block, head = chunk >> 1, read_note(info, wg, ChunkNote.HEAD)
        if const_expr(c.pack_gqa):  # blocks go on from head to head
            blocks = (problem.q_len + c.block_q - 1) // c.block_q
            head, block = head * problem.group + block // blocks, block % blocks
        if const_expr(c.block_q == ROWS):
            return head, block, wg
        return head, 2 * block + wg, 0

    @cute.jit
    def load_sum(
        self, source: cute.Pointer, target: cute.Pointer, same: cute.typing.Boolean,
        barrier: cute.Pointer, phase: Int32,
    ):  # fmt: skip
        """Load the sum of a chunk's earlier parts to shared memory, and wait for it.

        Args:
            source, target: f32 [chunk] in global and in shared memory.
            same: whether the last part was sent by the bulk copy that was issued last.
            barrier, phase: mbarrier of the load, and the parity to wait for.
        """
        # the earlier parts are complete in memory
        if same:
            self.complete(0)
        else:
            self.complete(1)
        self.issue_load(source, target, barrier)
        cute.arch.mbarrier_wait(barrier, phase)

    def issue_load(self, source: cute.Pointer, target: cute.Pointer, barrier: cute.Pointer) -> None:
        """Issue the load of the sum of a chunk's other parts; `barrier` completes when it has arrived."""
        size = Int32(4 * self.config.chunk)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
            cute.arch.inline_ptx(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
                read_only_args=[target.toint(), source.toint(), size, barrier.toint()],
            )
        cute.arch.sync_warp()
