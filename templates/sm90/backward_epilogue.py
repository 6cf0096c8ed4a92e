"""Send dQ of each q block, and write dK and dV of each kv block, in the Hopper backward.

dK and dV are rounded and written in whole rows, through the staging memory of dQ, because the
memory of K and V already contains the next work tile. If several work tiles share a kv block, each
adds its part to float32 sums, and the last one rounds and writes the sums. Another warp writes
zeros for fully masked kv blocks, and to dQ of q blocks that no kv block visits if this kernel writes
dQ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute

from attnkit.templates.common import device
from attnkit.templates.common.backward_work import Problem
from attnkit.templates.common.tma import ordered
from attnkit.templates.common.work_tile import WorkItem, WorkTile
from attnkit.templates.sm90.backward_arrivals import Arrivals, ArrivalTable
from attnkit.templates.sm90.backward_config import ROWS, BackwardConfig
from attnkit.templates.sm90.backward_shared import (
    CONSUMERS,
    DQ_THREADS,
    NO_CHUNK,
    NOTE_WORDS,
    WARP,
    WARPGROUP,
    WARPS,
    Barriers,
    ChunkNote,
    NamedBarrier,
    RolesBarriers,
    Word,
    record_of,
)
from attnkit.templates.sm90.backward_whole_heads import WholeHeads

VECTOR = 8  # elements of 16 bytes
SQUARE = 64 * 64  # elements of a swizzled square of shared memory
# Counters per split kv block, one for each consumer warp: the number of parts added so far. The
# host allocates them (`splice.backward_work`) after the counter of the work list.
COUNTERS = CONSUMERS * WARPS
LANE_STRIDE = 4 * WARPGROUP  # floats between two 16-byte vectors of a thread in a chunk


@dataclass(frozen=True)
class Results:
    """Holds the destinations of a consumer's results.

    Attributes:
        grad_key, grad_value: [S, D, H, B] of the dtype.
        staging: f32 [2, chunk] in shared memory, one chunk per consumer.
        sums: float32 sums in global memory.
        counter: int32 in global memory, counters of the work list and of split kv blocks.
    """

    grad_key: cute.Tensor
    grad_value: cute.Tensor
    staging: cute.Pointer
    sums: cute.Tensor
    counter: cute.Tensor


@dataclass(frozen=True)
class Outputs:
    """Holds what a consumer thread needs to send or write its results.

    Attributes:
        to: destinations of the results.
        problem: sizes of the launch.
        info: int32 words in shared memory.
        bars: mbarriers.
        wg, thread: index of the consumer, and of the thread in it.
    """

    to: Results
    problem: Problem
    info: cute.Tensor
    bars: Barriers | RolesBarriers
    wg: Int32
    thread: Int32


class Epilogue:
    """Sends chunks of dQ to the warp that adds them, and writes dK and dV.

    Args:
        config: compile-time configuration.
    """

    def __init__(self, config: BackwardConfig) -> None:
        self.config = config
        self.dtype = device.DTYPES[config.dtype]
        self.finisher = Arrivals(config) if config.arrivals else WholeHeads(config)

    # ------------------------------------------------------------------------------- chunks of dQ

    @cute.jit
    def send_last_dq(
        self, dq: cute.Tensor, note: tuple, out: Outputs, q_count: Int32, kv_count: Int32,
        waited: cutlass.Constexpr = False, next_chunk: Any = None,
    ):  # fmt: skip
        """Send the last dQ of the previous work tile, if there is one, and release its K.

        `waited` is whether the staging memory is known to have been read. `next_chunk` is that of
        the current work tile's first q block, if it is needed.
        """
        if kv_count > 0:
            k_empty = out.bars.load.k_empty + ((kv_count - 1) & 1)
            if const_expr(self.config.writes_dq):  # the note reads the record
                self.send_dq(dq, note, out, q_count - 1, False, next_chunk, kv_count - 1)
                cute.arch.mbarrier_arrive(k_empty)
            else:
                # every lane arrives, because every lane has read the record
                cute.arch.mbarrier_arrive(k_empty)
                # without `accumulate`, `write_dk_dv` has already waited
                free = waited or not self.config.accumulate
                if const_expr(self.config.leaders):
                    self.send_dq(dq, note, out, q_count - 1, free, next_chunk, kv_count)
                else:
                    self.send_dq(dq, note, out, q_count - 1, free)
        elif const_expr(self.config.leaders):  # the kernel's first q block: no chunk precedes it
            self.announce_first(next_chunk, kv_count, out)
        elif const_expr(self.config.arrivals):
            wait_staging_empty(out.wg)
            self.finisher.request_sum(next_chunk, kv_count, out)
            self.announce(out)

    def announce_first(self, next_chunk: Any, kv_count: Any, out: Outputs) -> None:
        """Send a note without a chunk, which announces the first q block, see `backward_leaders`."""
        wait_staging_empty(out.wg)
        note = (Int32(NO_CHUNK), Int32(0), Int32(-1), next_chunk, kv_count)
        self.write_note(out.info, note, out.wg, out.thread)
        self.announce(out)

    def send_dq(
        self, dq: cute.Tensor, note: tuple, out: Outputs, q_count: Int32, free: bool = False,
        next_chunk: Any = None, kv_count: Any = None,
    ) -> None:  # fmt: skip
        """Send the dQ of q block `q_count`, and release its dS.

        Args:
            dq: f32 [chunk] / 128 threads.
            note: (chunk, turn).
            out: destinations.
            q_count: index of the q block.
            free: see `send`.
            next_chunk: the consumer's next chunk, if it is known; not used in a fixed order.
            kv_count: index of the chunk's work tile, if the main kernel writes dQ; of that of the next chunk
                with leaders.
        """
        device.arrive(out.bars.ds_empty + (q_count & 1))
        if self.config.writes_dq:
            following = Int32(-1) if next_chunk is None else next_chunk
            if not free:
                wait_staging_empty(out.wg)
            self.finisher.send(dq, note[0], following, kv_count, out)
            self.announce(out)
            return
        rest: tuple = () if next_chunk is None else (next_chunk,)
        if self.config.leaders and rest:
            rest = next_chunk, kv_count
        self.send(dq, (*note, Int32(-1), *rest), out, free)

    def send(self, chunk: cute.Tensor, note: tuple, out: Outputs, free: bool = False) -> None:
        """Write a chunk to shared memory and signal the warp that adds it to the sums.

        Args:
            chunk: f32 [chunk] / 128 threads.
            note: words of `ChunkNote`.
            out: destinations.
            free: whether that warp is known to have read the previous chunk.
        """
        count = self.config.chunk // LANE_STRIDE
        if not free:
            wait_staging_empty(out.wg)
        self.write_note(out.info, note, out.wg, out.thread)
        start = out.to.staging + (out.wg * self.config.chunk + out.thread * 4)
        cute.autovec_copy(
            cute.make_tensor(chunk.iterator, cute.make_layout((4, count))),
            cute.make_tensor(
                start.align(16), cute.make_layout((4, count), stride=(1, LANE_STRIDE))
            ),
        )
        # bulk reductions read shared memory by the async proxy
        cute.arch.fence_proxy("async.shared", space="cta")
        self.announce(out)

    def announce(self, out: Outputs) -> None:
        """Signal the warp that adds chunks that a note is written."""
        if self.config.sum_order:
            cute.arch.sync_warp()
            device.arrive(out.bars.chunk.ready + out.wg)
        else:
            cute.arch.barrier_arrive(
                barrier_id=NamedBarrier.DQ_FULL + out.wg, number_of_threads=DQ_THREADS
            )

    def finish(self, out: Outputs) -> None:
        """Signal the warp that adds chunks that no more chunks follow."""
        wait_staging_empty(out.wg)
        self.write_end(out.info, out.wg, out.thread)
        self.announce(out)

    @cute.jit
    def write_note(self, info: cute.Tensor, note: tuple, wg: Int32, thread: Int32):
        """Write the note of a chunk to shared memory, by thread 0 of the consumer."""
        if thread == 0:
            at = Word.NOTE + NOTE_WORDS * wg
            info[at + ChunkNote.CHUNK] = note[0]
            if const_expr(self.config.sum_order):
                for i in (ChunkNote.TURN, ChunkNote.FOLLOWING):
                    info[at + i] = note[i]
            elif const_expr(self.config.first_writer or self.config.leaders):
                info[at + ChunkNote.NEXT_CHUNK] = note[3] if len(note) > 3 else Int32(-1)
            if const_expr(self.config.leaders and len(note) > 4):
                record = record_of(self.config, note[4] & 1)
                info[at + ChunkNote.NEXT_KV_BLOCK] = info[record + WorkTile.KV_BLOCK]

    @cute.jit
    def write_end(self, info: cute.Tensor, wg: Int32, thread: Int32):
        """Write the note that no more chunks follow, by thread 0 of the consumer."""
        if thread == 0:
            info[Word.NOTE + NOTE_WORDS * wg] = Int32(-1)

    # ------------------------------------------------------------------------------ dK and dV

    @cute.jit
    def write_dk_dv(
        self, dk: cute.Tensor, dv: cute.Tensor, out: Outputs, kv_count: Int32, chunk: Int32
    ):
        """Write dK and dV of the previous work tile, if there is one.

        Args:
            dk, dv: f32 [64, head_dim] and [64, head_dim_v] / 128 threads.
            out: destinations.
            kv_count: index of the current work tile.
            chunk: index, with flags, of the chunk of dQ that is sent next.
        """
        if kv_count > 0:
            info, wg = out.info, out.wg
            record = record_of(self.config, (kv_count - 1) & 1)
            place = (
                info[record + WorkTile.KV_BLOCK],
                info[record + WorkTile.HEAD],
                info[record + WorkTile.BATCH],
            )
            if const_expr(self.config.accumulate):
                self.add_shared(dk, dv, place, record, out)
            else:
                complete = Int32(1)
                if const_expr(self.config.joins):
                    split = info[record + WorkTile.SPLIT]
                    parts = info[record + WorkTile.NUM_PARTS]
                    if split >= 0:
                        complete = self.join(dk, dv, split, parts, out)
                wait_staging_empty(wg)
                if complete != 0:
                    # VALID is 1. Its late read delays the address computation, which would
                    # otherwise take registers through the mainloop.
                    lane = cute.arch.lane_idx() * info[record + WorkTile.VALID]
                    self.write(dv, out.to.grad_value, place, None, out.to.staging, wg, lane)
                    self.write(
                        dk, out.to.grad_key, place, out.problem.scale, out.to.staging, wg, lane
                    )
                # all warps have read the staging memory before the next dQ is written to it
                if const_expr(self.config.writes_dq):
                    self.finisher.request_sum(chunk, kv_count - 1, out)
                    self.announce(out)
                else:
                    cute.arch.barrier(
                        barrier_id=NamedBarrier.EPILOGUE + wg, number_of_threads=WARPGROUP
                    )

    @cute.jit
    def join(self, dk: cute.Tensor, dv: cute.Tensor, split: Int32, parts: Int32, out: Outputs):
        """Add a consumer's dK and dV to the sums of a split kv block; the last part loads the sums.

        Each warp works independently, because no other warp has its rows.

        Args:
            dk, dv: f32 [64, head_dim] and [64, head_dim_v] / 128 threads.
            split: index of the kv block among the split ones.
            parts: number of its work tiles.
            out: destinations.

        Returns:
            1 in a warp whose registers now contain the sums of all parts, else 0.
        """
        c, p = self.config, out.problem
        blocks = (p.q_len + c.block_q - 1) // c.block_q
        own = ROWS * (c.head_dim + c.head_dim_v)  # floats per consumer
        at = Int64(p.batch * p.heads * blocks) * (c.block_q * c.head_dim)
        at = at + Int64(CONSUMERS * split + out.wg) * own
        start = (out.to.sums.iterator + (at + out.thread * 4)).toint()
        add_all(dk, start)
        add_all(dv, start + cute.size(dk) * 4 * WARPGROUP)
        cute.arch.sync_warp()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS
        arrived = out.to.counter.iterator + (1 + COUNTERS * split + WARPS * out.wg + warp)
        before = Int32(0)
        if cute.arch.lane_idx() == 0:
            # release this part's sums; acquire the sums of the other parts
            before = cute.arch.atomic_add(arrived, Int32(1), sem="acq_rel", scope="gpu")
            if before == parts - 1:  # reset to zero for the next launch
                cute.arch.store(arrived, Int32(0), sem="relaxed", scope="gpu")
        before = cute.arch.shuffle_sync(before, 0)
        cute.arch.sync_warp()
        complete = Int32(0)
        if before == parts - 1:
            complete = Int32(1)
            load_all(dk, start)
            load_all(dv, start + cute.size(dk) * 4 * WARPGROUP)
        return complete

    def chunks(self, p: Problem, place: Any) -> list[tuple[Any, int]]:
        """Return (first chunk, chunks per 64 rows) for dK and for dV of a kv block.

        Args:
            p: sizes of the launch.
            place: the kv block, head and batch element.
        """
        c = self.config
        kv_block, h, b = place
        blocks = (p.q_len + c.block_q - 1) // c.block_q
        kv_blocks = (p.kv_len + c.block_kv - 1) // c.block_kv
        tile = (cutlass.min(b, p.kv_batch - 1) * p.kv_heads + h // p.group) * kv_blocks + kv_block
        first, chunks = p.batch * p.heads * blocks * 2, []
        for head_dim in (c.head_dim, c.head_dim_v):
            count = ROWS * head_dim // c.chunk
            chunks.append((first + 2 * count * tile, count))
            first = first + p.kv_batch * p.kv_heads * kv_blocks * 2 * count
        return chunks

    def add_shared(
        self, dk: cute.Tensor, dv: cute.Tensor, place: tuple, record: Int32, out: Outputs
    ) -> None:
        """Send a consumer's dK and dV to the sums that the query heads of a kv head share."""
        turn = out.info[record + WorkTile.TURN]
        turns = out.info[record + WorkTile.NUM_TURNS]
        following = cutlass.select_(turn + 1 == turns, Int32(0), turn + 1)
        for acc, (first, count) in zip((dk, dv), self.chunks(out.problem, place), strict=True):
            for i in range(count):
                note = (first + out.wg * count + i, turn, following)
                self.send(chunk_of(acc, i, self.config.chunk), note, out)

    def write(
        self,
        acc: cute.Tensor,
        target: cute.Tensor,
        place: tuple,
        factor: Float32 | None,
        staging: cute.Pointer,
        wg: Int32,
        lane: Int32,
    ) -> None:
        """Round a consumer's dK or dV and write it, each warp through its part of `staging`.

        Args:
            acc: f32 [64, head_dim] / 128 threads.
            target: the gradient, [S, D, H, B].
            place: the kv block, head and batch element.
            factor: multiplies the values; None for 1.
            staging: the staging memory of dQ, which the warp that adds dQ must not be reading.
            wg: index of the consumer.
            lane: index of the thread in its warp.
        """
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS
        kv_block, h, b = place
        squares, room = cute.size(acc) // 32, self.config.chunk * 4 // (2 * SQUARE)
        start = cute.recast_ptr(staging + wg * self.config.chunk, dtype=self.dtype)
        # squares of 64 x 64 with rows of 128 bytes, whose 16-byte vectors are swizzled by row
        own_row = (16 * warp + lane % 16) * 64
        first = kv_block * self.config.block_kv + wg * ROWS + 16 * warp + lane // 8
        column = lane % 8 * VECTOR
        # computed once: an address from four coordinates costs as much as the rest of this method
        base = cute.domain_offset((first, column, h, b), target).iterator
        for left in range(0, squares, room):
            batch = range(left, min(left + room, squares))
            cute.arch.sync_warp()
            for i in batch:
                for g in range(4):
                    words = []
                    for k in range(4):
                        at = 32 * i + 8 * g + 2 * k
                        low, high = acc[at], acc[at + 1]
                        if factor is not None:
                            low, high = low * factor, high * factor
                        words.append(device.pack(low, high, self.dtype))
                    vector = (2 * g + lane // 16) ^ (lane % 8)
                    to = start + ((i - left) * SQUARE + own_row + vector * VECTOR)
                    device.store_matrix(to, words)
            cute.arch.sync_warp()
            for i in batch:
                for step in range(4):
                    row = lane // 8 + 4 * step
                    at = (i - left) * SQUARE + (16 * warp + row) * 64
                    at = start + (at + (lane % 8 ^ row % 8) * VECTOR)
                    words = cute.make_rmem_tensor(4, Int32)  # 8 of the dtype
                    source = cute.recast_ptr(at.align(16), dtype=Int32)
                    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), words)
                    inside = first + 4 * step < target.shape[0]
                    inside = inside & (column + 64 * i < target.shape[1])
                    to = base + (4 * step * target.stride[0] + 64 * i)
                    device.store_where(inside, to, [words[k] for k in range(4)])

    # ------------------------------------------------------------------------ fully masked blocks

    @cute.jit
    def clear_masked(self, items: cute.Tensor, grad_key: cute.Tensor, grad_value: cute.Tensor):
        """Write zeros to dK and dV of fully masked kv blocks, by one warp.

        Gradients that query heads share need no zeros, because their sums are initially zero.
        """
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        c = self.config
        total = 0 if const_expr(c.accumulate) else items.shape[0]
        # Masked kv blocks are neighbours in the list, so neighbours belong to different CTAs.
        for first in cutlass.range(cta, total, WARP * ctas, unroll=1):
            item = cutlass.min(first + ctas * lane, total - 1)
            blocks = items[item, WorkItem.NUM_PARTIAL] + items[item, WorkItem.NUM_FULL]
            masked = (blocks == 0) & (first + ctas * lane < total)
            lanes = cute.arch.vote_ballot_sync(masked)
            while lanes != 0:
                index = first + ctas * cute.arch.popc((lanes & -lanes) - 1)
                lanes = lanes & (lanes - 1)
                place = (
                    items[index, WorkItem.KV_BLOCK],
                    items[index, WorkItem.HEAD],
                    items[index, WorkItem.BATCH],
                )
                self.zero(grad_key, c.head_dim, place, c.block_kv)
                self.zero(grad_value, c.head_dim_v, place, c.block_kv)

    @cute.jit
    def clear_unvisited(self, order: list, problem: Problem):
        """Write zeros to dQ of the q blocks that no kv block visits, by one warp."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        visits, bm = order[ArrivalTable.VISITS], self.config.block_q
        target = ordered(order[ArrivalTable.GRAD_QUERY], (2, 3, 1, 0))
        blocks = (problem.q_len + bm - 1) // bm
        total = visits.shape[0]
        for first in cutlass.range(cta, total, WARP * ctas, unroll=1):
            own = first + ctas * cute.arch.lane_idx()
            empty = (visits[cutlass.min(own, total - 1)] == 0) & (own < total)
            lanes = cute.arch.vote_ballot_sync(empty)
            while lanes != 0:
                index = first + ctas * cute.arch.popc((lanes & -lanes) - 1)
                lanes = lanes & (lanes - 1)
                block, head = index % blocks, index // blocks
                place = block, head % problem.heads, head // problem.heads
                self.zero(target, self.config.head_dim, place, bm)

    @cute.jit
    def zero(
        self, target: cute.Tensor, width: cutlass.Constexpr, place: tuple, rows: cutlass.Constexpr
    ):
        """Write zeros to a block of a gradient, by one warp.

        Args:
            target: the gradient, [S, D, H, B].
            width: its head dim, rounded up to that of the kernel.
            place: the block, head and batch element.
            rows: rows of a block.
        """
        block, h, b = place
        lane = cute.arch.lane_idx()
        vectors = width // VECTOR  # of a row; a constant, because division is slow
        first = block * rows
        zeros = cute.make_rmem_tensor(4, Int32)  # 8 of the dtype
        zeros.fill(0)
        words = [zeros[k] for k in range(4)]
        # more stores at once spill: the producer warps have 24 registers
        for i in cutlass.range(lane, rows * vectors, WARP, unroll=2):
            row, column = first + i // vectors, i % vectors * VECTOR
            inside = (row < target.shape[0]) & (column < target.shape[1])
            to = cute.domain_offset((row, column, h, b), target).iterator
            device.store_where(inside, to, words)


def wait_staging_empty(wg: Any) -> None:
    """Wait until the consumer's previous chunk has been read from shared memory."""
    cute.arch.barrier(barrier_id=NamedBarrier.DQ_EMPTY + wg, number_of_threads=DQ_THREADS)


def add_all(acc: cute.Tensor, start: Any) -> None:
    """Add an accumulator to sums of the same layout in global memory, 16 bytes per thread."""
    for i in range(0, cute.size(acc), 4):
        cute.arch.inline_ptx(
            f"red.relaxed.gpu.global.add.v4.f32 [{{$r0}}+{512 * i}], {{{{$r1}}, {{$r2}}, {{$r3}}, "
            "{$r4}};",
            read_only_args=[start, *(acc[i + k] for k in range(4))],
        )


def load_all(acc: cute.Tensor, start: Any) -> None:
    """Load an accumulator from the sums of `add_all`.

    The loads bypass the L1 cache, which may contain old values.
    """
    for i in range(0, cute.size(acc), 4):
        words = cute.arch.inline_ptx(
            f"ld.relaxed.gpu.global.v4.f32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}+{512 * i}];",
            write_only_types=[Float32] * 4,
            read_only_args=[start],
        )
        for k in range(4):
            acc[i + k] = words[k]


def chunk_of(acc: cute.Tensor, i: int, size: int) -> Any:
    """Return the `i`-th chunk of an accumulator's columns, f32 [size] / 128 threads."""
    return cute.make_tensor(acc.iterator + size // WARPGROUP * i, chunk_layout(size))


def chunk_layout(size: int) -> Any:
    """Return the register layout of a thread's part of a chunk of `size` floats."""
    return cute.make_layout(((2, 2, size // LANE_STRIDE), 1, 1), stride=((1, 2, 4), 0, 0))
