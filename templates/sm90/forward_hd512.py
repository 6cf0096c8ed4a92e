"""Compute the forward on Hopper (sm_90a) for head dims above 256, to (576, 512).

The output accumulator of 64 rows by 512 value columns would fill the registers of an SM. So a CTA
computes 128 rows by half of the value columns, and two CTAs share a work tile. Both compute S: half
as many MMAs again, but each K block that is loaded serves 128 rows. With 64 rows and all columns, a
CTA would load 64 bytes a cycle, twice what L2 delivers to all SMs at once.

The query tile takes most of the shared memory, so that K and V of a block arrive in chunks, and a
chunk is released as soon as its MMAs are complete. Roles, hooks, softmax and work list are those of
`forward.py`. There are no ping-pong barriers: if both warpgroups read the same chunk at about the
same time, its stage is free earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.memory
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import hopper_helpers

from attnkit.templates.common import device
from attnkit.templates.common.fingerprint import compare_chunks
from attnkit.templates.common.forward_work import Scalars
from attnkit.templates.common.hooks import ForwardHooks
from attnkit.templates.common.site import Site
from attnkit.templates.common.tma import ordered
from attnkit.templates.sm90.config import (
    SMEM_ALIGNMENT,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
    WARPGROUP_WARPS,
)
from attnkit.templates.sm90.dropout import drop_forward
from attnkit.templates.sm90.forward import (
    CLEARING_WARP,
    COLUMN,
    PRODUCER_WARP,
    ROW,
    SCHEDULER_WARP,
    ConsumerThread,
    keep_exponentials_here,
)
from attnkit.templates.sm90.forward_epilogue import Results
from attnkit.templates.sm90.forward_hd512_barriers import Hd512Barriers, chunk_place
from attnkit.templates.sm90.forward_hd512_config import Hd512Config
from attnkit.templates.sm90.forward_hd512_epilogue import Hd512Epilogue, PartPlace
from attnkit.templates.sm90.forward_hd512_producer import BLOCK_SLOTS, Hd512Producer
from attnkit.templates.sm90.forward_mma import ForwardMma
from attnkit.templates.sm90.forward_producer import (
    INFO_WORDS,
    NEXT_WORDS,
    SharedMemory,
    TileScheduler,
    Work,
    WorkTile,
    record_of,
)
from attnkit.templates.sm90.scores import Scores, TileValues
from attnkit.templates.sm90.softmax import RowState, Softmax


@dataclass(frozen=True)
class Consumer:
    """Holds the state of a consumer thread for the whole kernel."""

    thread: ConsumerThread
    mma: ForwardMma
    state: RowState
    smem: SharedMemory
    bars: Hd512Barriers


class ForwardHd512:
    """Builds the Hopper forward kernel of one configuration and one variant.

    Args:
        config: compile-time configuration.
        hooks: hooks of the variant.
    """

    def __init__(self, config: Hd512Config, hooks: ForwardHooks) -> None:
        self.config = config
        self.hooks = hooks
        self.dtype = device.DTYPES[config.dtype]
        self.scheduler = TileScheduler(config.value_parts)
        self.producer = Hd512Producer(config, hooks)
        self.scores = Scores(config, hooks)
        self.softmax = Softmax(config, hooks, self.scores)
        self.epilogue = Hd512Epilogue(config, hooks)

    # ------------------------------------------------------------------------------------ host

    @cute.jit
    def __call__(
        self,
        query: cute.Tensor,
        key: cute.Tensor,
        value: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        max_scores: cute.Tensor,
        work_tiles: cute.Tensor,
        partial_runs: cute.Tensor,
        full_runs: cute.Tensor,
        counter: cute.Tensor,
        split_out: cute.Tensor,
        split_lse: cute.Tensor,
        captured: list,
        scale: Float32,
        group: Int32,
        ctas: Int32,
        stream: Any,
    ):
        """Launch the kernel with `value_parts` times `ctas` CTAs.

        Args:
            query, key, value, out: [B, H, S, D] of the config's dtype, with a contiguous last
                dimension; the other strides and the address are multiples of 16 bytes.
            lse, max_scores: float32 [B, H, S]; the maxima are written only with `need_max`. With
                `need_entropy`, `max_scores` is [1 or 2, B, H, S]: entropies, then maxima if needed.
            work_tiles: int32 [work tiles, 12], see `WorkItem`.
            partial_runs, full_runs: int32 [2, runs], starts and lengths of runs of kv blocks.
            counter: int32 [1], zero; the kernel resets it to zero.
            split_out, split_lse: float32 [slots, block_q, value_parts * head_dim_v] and
                [slots, block_q], output and LSE of the parts of split rows by slot.
            captured: captured tensors; then, with `checks_data`, the table of `compare_chunks`.
            scale: softmax scale.
            group: query heads per kv head.
            ctas: the CTAs of one part of the value columns, at most the number of work tiles.
            stream: CUDA stream.
        """
        c, dtype = self.config, self.dtype
        query, key = (ordered(t, (2, 3, 1, 0)) for t in (query, key))
        value = ordered(value, (3, 2, 1, 0))
        rows, k_major, mn_major = WARPGROUP_ROWS, OperandMajorMode.K, OperandMajorMode.MN
        # (m, n, k) of the MMAs of one warpgroup on a chunk
        shape_qk, shape_pv = (rows, c.block_kv, c.k_chunk), (rows, c.head_dim_v, c.v_chunk)
        mma_qk = hopper_helpers.make_trivial_tiled_mma(
            dtype, dtype, k_major, k_major, Float32, (1, 1, 1), shape_qk[:2]
        )
        p_source = warpgroup.OperandSource.RMEM
        mma_pv = hopper_helpers.make_trivial_tiled_mma(
            dtype, dtype, k_major, mn_major, Float32, (1, 1, 1), shape_pv[:2], a_source=p_source
        )
        layouts = (
            hopper_helpers.make_smem_layout_a(
                ROW, (rows, c.block_kv, c.head_dim), dtype, c.warpgroups
            ),
            hopper_helpers.make_smem_layout_b(ROW, shape_qk, dtype, c.k_stages),
            hopper_helpers.make_smem_layout_b(COLUMN, shape_pv, dtype, c.v_stages),
        )
        q_layout, k_layout, v_layout = layouts
        load, one = cpasync.CopyBulkTensorTileG2SOp(), (None, None, 0)  # one stage of a layout
        tma_q, q_tiles = cpasync.make_tiled_tma_atom(
            load, query, cute.slice_(q_layout, one), (rows, c.head_dim)
        )
        tma_k, k_tiles = cpasync.make_tiled_tma_atom(
            load, key, cute.slice_(k_layout, one), (c.block_kv, c.k_chunk)
        )
        tma_v, v_tiles = cpasync.make_tiled_tma_atom(
            load, value, cute.slice_(v_layout, one), (c.head_dim_v, c.v_chunk)
        )

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, Hd512Barriers.count_of(c)]
            info: cute.struct.MemRange[Int32, INFO_WORDS]
            next_tile: cute.struct.MemRange[Int32, NEXT_WORDS]
            q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(q_layout)], SMEM_ALIGNMENT]
            k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(k_layout)], SMEM_ALIGNMENT]
            v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(v_layout)], SMEM_ALIGNMENT]

        self.storage = Storage
        lengths = (query.shape[0], key.shape[0], key.shape[3])
        self.kernel(
            (mma_qk, mma_qk, mma_pv),  # the first is a copy, which overwrites its accumulator
            (tma_q, tma_k, tma_v),
            (q_tiles, k_tiles, v_tiles),
            layouts,
            out,
            lse,
            max_scores,
            work_tiles,
            partial_runs,
            full_runs,
            counter,
            (split_out, split_lse),
            captured,
            (scale, group, *lengths),
        ).launch(
            grid=(ctas * c.value_parts, 1, 1),
            block=(c.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    # ---------------------------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        mmas: tuple,
        atoms: tuple,
        tiles: tuple,
        layouts: tuple,
        out: cute.Tensor,
        lse: cute.Tensor,
        max_scores: cute.Tensor,
        work_tiles: cute.Tensor,
        partial_runs: cute.Tensor,
        full_runs: cute.Tensor,
        counter: cute.Tensor,
        splits: tuple,
        captured: list,
        numbers: tuple,
    ):
        """Set up shared memory and barriers, then branch to the role of the warp."""
        c = self.config
        count = len(captured) - (1 if const_expr(c.checks_data) else 0)
        captured, checks = captured[:count], captured[count:]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == PRODUCER_WARP:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        smem = self._shared_memory(storage, layouts)
        bars = Hd512Barriers.of(storage.barriers.data_ptr(), c)
        if warp == PRODUCER_WARP:
            with cute.arch.elect_one():
                bars.init_all(c)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # The code below uses global memory, which the kernel before this one may still use.
        cute.arch.griddepcontrol_wait()

        scalars = Scalars(*numbers)
        results = Results(out, lse, max_scores, *splits)
        consumer_registers, producer_registers = c.registers
        if warp < WARPGROUP_WARPS:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp == PRODUCER_WARP:
                runs = partial_runs, full_runs
                self.producer.run(atoms, tiles, smem, bars, runs, scalars)
            elif warp == SCHEDULER_WARP:
                self.scheduler.run(work_tiles, counter, smem.next_tile, bars.work)
            else:
                self.epilogue.clear_masked_tiles(
                    work_tiles, results, captured, warp - CLEARING_WARP
                )
                if const_expr(c.checks_data):
                    cta, _, _ = cute.arch.block_idx()
                    ctas, _, _ = cute.arch.grid_dim()
                    first = c.clearing_warps * cta + warp - CLEARING_WARP
                    compare_chunks(checks[0], first, c.clearing_warps * ctas)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            self.consume(mmas, smem, bars, results, captured, scalars)

    def _shared_memory(self, storage: Any, layouts: tuple) -> SharedMemory:
        """Return the tensor views of shared memory; a stage of K or V is a chunk of a block."""
        q_layout, k_layout, v_layout = layouts
        q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        return SharedMemory(
            q=q,
            k=storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner),
            v=storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner),
            o=q,  # unused: the output is stored from registers
            info=storage.info.get_tensor(cute.make_layout(INFO_WORDS)),
            next_tile=storage.next_tile.get_tensor(cute.make_layout(NEXT_WORDS)),
        )

    @cute.jit
    def consume(
        self,
        mmas: tuple,
        smem: SharedMemory,
        bars: Hd512Barriers,
        results: Results,
        captured: list,
        scalars: Scalars,
    ):
        """Run a consumer warpgroup: the MMAs, softmax and epilogue of each work tile."""
        c = self.config
        thread_idx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        wg, ct = warp // WARPGROUP_WARPS - 1, thread_idx % WARPGROUP_THREADS
        thread = ConsumerThread(wg, warp, lane, (warp % WARPGROUP_WARPS) * 16 + lane // 4)
        first_column = (lane % 4) * 2
        mma = ForwardMma.create(c, mmas, smem, ct)
        state = RowState.create(c.need_entropy)
        mma.set_accumulate()
        consumer = Consumer(thread, mma, state, smem, bars)
        # 16 bits [64, head_dim_v] / 128 threads
        rounded = cute.make_rmem_tensor(mma.acc_o.layout, self.dtype)

        # kv_pos: position among the kv blocks of the CTA; tile_idx: index of its work tile
        kv_pos, tile_idx = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(bars.q.full, 0)
        valid = cute.arch.make_warp_uniform(smem.info[record_of(Int32(0)) + WorkTile.VALID])
        while valid != 0:
            record = record_of(tile_idx)
            # made warp-uniform, so that the compiler sees that the MMAs below do not diverge
            num_masked = cute.arch.make_warp_uniform(smem.info[record + WorkTile.NUM_MASKED])
            num_unmasked = cute.arch.make_warp_uniform(smem.info[record + WorkTile.NUM_UNMASKED])
            site, place = self._place(record, consumer, captured, scalars)
            tile = self.scores.begin_tile(site, first_column, place.row, results.lse.shape[1])
            mma.acc_o.fill(0.0)
            state.reset()
            kv_block = self.first_scores(kv_pos, consumer)
            block = self.scores.block_values(tile, kv_block, True, cute.size(mma.acc_s))
            base = self.scores.apply_score_mod(tile, block, mma.acc_s)
            if num_masked != 0:
                self.scores.apply_mask(self.scores.mask_bits(tile, kv_block, True), mma.acc_s)
            self.softmax.first_block(tile, base, mma.acc_s, mma.p_now, state)
            drop_forward(self.scores.dropout_words(tile, block.start), mma.p_now)
            kv_pos += 1

            # masked blocks first; the loop over the other blocks has no mask instructions
            for _ in cutlass.range(1, num_masked, unroll=1):
                self.mainloop_step(True, kv_pos, tile, consumer)
                kv_pos += 1
            first_is_unmasked = cutlass.select_(num_masked == 0, Int32(1), Int32(0))
            for _ in cutlass.range(num_unmasked - first_is_unmasked, unroll=1):
                self.mainloop_step(False, kv_pos, tile, consumer)
                kv_pos += 1

            warpgroup.fence()
            for j in cutlass.range_constexpr(c.v_chunks):
                self.issue_pv(kv_pos - 1, j, consumer)
            tile_idx += 1
            # Read the record again, which saves registers in the mainloop.
            site, place = self._place(record_of(tile_idx - 1), consumer, captured, scalars)
            lse_terms = self.scores.lse_terms(site, place.row)
            sink = self.softmax.sink(site, place.work.split_slot)
            # overlaps with the MMAs in flight
            self.epilogue.write_rows(
                self.scores.factor(tile), lse_terms, sink, state, results, place
            )
            self.softmax.scale_survivors(captured, state)
            warpgroup.wait_group(0)
            self.release_v(kv_pos - 1, consumer)
            self.epilogue.normalise(mma.acc_o, state)
            self.epilogue.store_part(mma, rounded, results, place, wg)
            bars.q.wait_full(tile_idx)
            valid = cute.arch.make_warp_uniform(smem.info[record_of(tile_idx) + WorkTile.VALID])

    def first_scores(self, kv_pos: Int32, consumer: Consumer) -> Int32:
        """Compute S of a work tile's first block; return the number of the block."""
        kv_block = self.wait_block(kv_pos, consumer)
        warpgroup.fence()
        self.issue_qk(kv_pos, consumer)
        warpgroup.wait_group(0)
        self.release_k(kv_pos, self.config.k_chunks - 1, consumer)
        return kv_block

    def mainloop_step(
        self, masked: bool, kv_pos: Int32, tile: TileValues, consumer: Consumer
    ) -> None:
        """Issue Q K of a kv block and P V of the previous one, then compute the block's softmax.

        Args:
            masked: whether the block needs the mask.
            kv_pos: position of the block.
            tile: values of the work tile.
            consumer: state of the thread.
        """
        c, scores, softmax = self.config, self.scores, self.softmax
        mma, state = consumer.mma, consumer.state
        count = cute.size(mma.acc_s)
        kv_block = self.wait_block(kv_pos, consumer)
        bits = scores.mask_bits(tile, kv_block, masked)
        warpgroup.fence()
        self.issue_qk(kv_pos, consumer)
        if self.hooks.prefetches:  # overlap the latency of a mod's loads with the MMAs
            block = scores.block_values(tile, kv_block, masked, count)
        self.issue_pv(kv_pos - 1, 0, consumer)
        warpgroup.wait_group(1)  # S is complete
        self.release_k(kv_pos, c.k_chunks - 1, consumer)
        for j in range(1, c.v_chunks):
            self.issue_pv(kv_pos - 1, j, consumer)
        if not self.hooks.prefetches:
            block = scores.block_values(tile, kv_block, masked, count)
        # with two P buffers, write the second one: P V still reads the first
        p_next = mma.p_next if c.double_buffer_p else None
        softmax.next_block(tile, block, bits, mma.acc_s, p_next, state)
        words = None
        if c.double_buffer_p:  # before the wait; without registers for that, after it
            words = scores.dropout_words(tile, block.start)
        if c.exp_before_wait:
            keep_exponentials_here(state)
        warpgroup.wait_group(0)  # O is complete, and P may be overwritten
        self.release_v(kv_pos - 1, consumer)
        if c.double_buffer_p:
            mma.advance_p()
        else:
            self.epilogue.pack(mma.acc_s, mma.p_now)
            words = scores.dropout_words(tile, block.start)
        drop_forward(words, mma.p_now)
        softmax.rescale(mma.acc_o, state.scale)

    def wait_block(self, kv_pos: Int32, consumer: Consumer) -> Int32:
        """Wait for the first chunk of a K block; return its number, as in `SharedMemory.info`.

        One lane of the warp releases the chunk for all. The warp barrier orders the reads of the
        others before that.
        """
        bars = consumer.bars
        stage, phase = chunk_place(bars.k, kv_pos, self.config.k_chunks, 0)
        cute.arch.mbarrier_wait(bars.k.full + stage, phase)
        kv_block = consumer.smem.info[kv_pos & (BLOCK_SLOTS - 1)]
        cute.arch.sync_warp()
        return kv_block

    def issue_qk(self, kv_pos: Int32, consumer: Consumer) -> None:
        """Issue S = Q K^T chunk by chunk, and release each chunk but the last when it was read.

        `wait_block` has waited for the first chunk. The MMAs of the last chunk are in flight at the
        end.
        """
        mma, bars, wg = consumer.mma, consumer.bars, consumer.thread.warpgroup
        chunks, steps = self.config.k_chunks, cute.size(mma.frag_k, mode=[2])
        for j in range(chunks):
            stage, phase = chunk_place(bars.k, kv_pos, chunks, j)
            if j > 0:
                cute.arch.mbarrier_wait(bars.k.full + stage, phase)
            for k in range(steps):
                cute.gemm(
                    mma.qk_first if j == k == 0 else mma.qk,
                    mma.acc_s,
                    mma.frag_q[None, None, j * steps + k, wg],
                    mma.frag_k[None, None, k, stage],
                    mma.acc_s,
                )
            warpgroup.commit_group()
            if j > 0:
                warpgroup.wait_group(1)
                self.release_k(kv_pos, j - 1, consumer)

    def issue_pv(self, kv_pos: Int32, j: int, consumer: Consumer) -> None:
        """Wait for chunk `j` of a V block, and issue O += P V on it asynchronously."""
        mma, ring, chunks = consumer.mma, consumer.bars.v, self.config.v_chunks
        stage, phase = chunk_place(ring, kv_pos, chunks, j)
        cute.arch.mbarrier_wait(ring.full + stage, phase)
        steps = cute.size(mma.frag_v, mode=[2])
        for k in range(steps):
            cute.gemm(
                mma.pv,
                mma.acc_o,
                mma.p[None, None, j * steps + k],
                mma.frag_v[None, None, k, stage],
                mma.acc_o,
            )
        warpgroup.commit_group()

    def release_k(self, kv_pos: Int32, j: int, consumer: Consumer) -> None:
        """Release chunk `j` of a K block."""
        ring = consumer.bars.k
        stage, _ = chunk_place(ring, kv_pos, self.config.k_chunks, j)
        device.arrive(ring.empty + stage)

    def release_v(self, kv_pos: Int32, consumer: Consumer) -> None:
        """Release the chunks of a V block."""
        ring = consumer.bars.v
        for j in range(self.config.v_chunks):
            stage, _ = chunk_place(ring, kv_pos, self.config.v_chunks, j)
            device.arrive(ring.empty + stage)

    def _place(
        self, record: Int32, consumer: Consumer, captured: list, scalars: Scalars
    ) -> tuple[Site, PartPlace]:
        """Return a work tile's site for the hooks and the position of the thread's rows."""
        info, thread = consumer.smem.info, consumer.thread
        work = Work.read(info, record)
        part = Int32(0)
        if self.config.value_parts > 1:
            part = info[record + WorkTile.VALUE_PART]
        first_row = work.q_block * self.config.block_q
        tile_row = thread.warpgroup * WARPGROUP_ROWS + thread.row
        site = self.scores.site(captured, work.batch, work.head, scalars, first_row)
        return site, PartPlace(first_row + tile_row, tile_row, work, thread.lane, part)
