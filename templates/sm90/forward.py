"""Compute the forward on Hopper (sm_90a) with FlashAttention-3's algorithm and a variant's hooks.

The kernel is persistent, with one CTA per SM. The warps of a CTA have these roles:

    warp 0              producer: iterates over the kv blocks of a work tile, loads Q, K, V by TMA
    warp 1              tile scheduler: fetches work tiles, longest first
    warps 2 and 3       write the fully masked tiles, compare captured data with its fingerprints;
                        before that, copy a full bias to shared memory, see `bias_in_smem`;
                        with `columns_in_mma`, warp 3 writes terms of columns instead
    warpgroups 1 and up consumers, 64 query rows each

A consumer computes S = Q K^T into registers, applies mod, mask and softmax there, and uses P from
registers as the A operand of O += P V. It issues Q K of a block before P V of the previous block,
so that the tensor cores work during the softmax. If shared memory holds two query tiles, the
consumer does the same across work tiles. Warp scheduler barriers (ping-pong) make the warpgroups
take turns on the tensor cores: one does its softmax while another runs its MMAs (Shah et al. 2024,
FlashAttention-3).

Blocks that need the mask come first. The others follow in a loop without mask instructions. Mods of
many instructions have one loop for both, so that the kernel compiles faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.memory
import cutlass.tensor_utils
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import hopper_helpers

from attnkit.templates.common import device
from attnkit.templates.common.fingerprint import compare_chunks
from attnkit.templates.common.forward_work import Scalars
from attnkit.templates.common.hooks import ForwardHooks
from attnkit.templates.common.site import Site
from attnkit.templates.common.tma import ordered
from attnkit.templates.sm90.bias_in_smem import BiasCopier, BiasRing
from attnkit.templates.sm90.columns_in_mma import (
    COLUMNS_WARP,
    ColumnWriter,
    columns_mma,
    write_constants,
)
from attnkit.templates.sm90.config import (
    SMEM_ALIGNMENT,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
    WARPGROUP_WARPS,
    ForwardConfig,
)
from attnkit.templates.sm90.dropout import drop_forward
from attnkit.templates.sm90.forward_barriers import ForwardBarriers, pingpong_pass, pingpong_wait
from attnkit.templates.sm90.forward_epilogue import Epilogue, Results, RowPlace
from attnkit.templates.sm90.forward_mma import ForwardMma
from attnkit.templates.sm90.forward_producer import (
    FIRST_BLOCK_NUMBER,
    FIRST_SHIFT,
    INFO_WORDS,
    NEXT_WORDS,
    Producer,
    SharedMemory,
    TileScheduler,
    Work,
    WorkTile,
    record_of,
)
from attnkit.templates.sm90.pair_table import in_shared_memory
from attnkit.templates.sm90.scores import Scores, TileValues
from attnkit.templates.sm90.slope_in_mma import slope_mma, write_columns
from attnkit.templates.sm90.softmax import RowState, Softmax

PRODUCER_WARP, SCHEDULER_WARP, CLEARING_WARP = 0, 1, 2

ROW = cutlass.tensor_utils.LayoutEnum.ROW_MAJOR
COLUMN = cutlass.tensor_utils.LayoutEnum.COL_MAJOR


@dataclass(frozen=True)
class ConsumerThread:
    """Describes the position of a consumer thread in the CTA and in its tile.

    Attributes:
        warpgroup: index of its consumer warpgroup, from 0.
        warp: index of its warp in the CTA.
        lane: index of the thread in its warp.
        row: the thread's first row within its warpgroup's 64 rows; the second is 8 rows below.
    """

    warpgroup: Int32
    warp: Int32
    lane: Int32
    row: Int32


@dataclass(frozen=True)
class Consumer:
    """Holds the state of a consumer thread; `bias` is None if no bias is copied ahead."""

    thread: ConsumerThread
    mma: ForwardMma
    state: RowState
    smem: SharedMemory
    bars: ForwardBarriers
    bias: BiasRing | None


class Forward:
    """Builds the Hopper forward kernel of one configuration and one variant.

    Args:
        config: compile-time configuration.
        hooks: hooks of the variant.
    """

    def __init__(self, config: ForwardConfig, hooks: ForwardHooks) -> None:
        self.config = config
        self.hooks = hooks
        self.dtype = device.DTYPES[config.dtype]
        self.scheduler = TileScheduler()
        self.producer = Producer(config, hooks)
        self.column_writer = ColumnWriter(config, hooks)
        self.scores = Scores(config, hooks)
        self.softmax = Softmax(config, hooks, self.scores)
        self.epilogue = Epilogue(config, hooks)
        self.bias_copier = BiasCopier(config, hooks)

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
        """Launch the kernel.

        Args:
            query, key, value, out: [B, H, S, D] of the config's dtype, with a contiguous last
                dimension; the other strides and the address are multiples of 16 bytes.
            lse, max_scores: float32 [B, H, S]; the maxima are written only with `need_max`. With
                `need_entropy`, `max_scores` is [1 or 2, B, H, S]: entropies, then maxima if needed.
            work_tiles: int32 [work tiles, 12], see `WorkItem`.
            partial_runs, full_runs: int32 [2, runs], starts and lengths of runs of kv blocks.
            counter: int32 [1], zero; the kernel resets it to zero.
            split_out, split_lse: float32 [slots, block_q, Dv] and [slots, block_q], output and LSE
                of the parts of split rows by slot; `Combine` merges them.
            captured: captured tensors; then, with `checks_data`, the table of `compare_chunks`.
            scale: softmax scale.
            group: query heads per kv head.
            ctas: CTAs to launch, at most the number of work tiles.
            stream: CUDA stream.
        """
        c, dtype = self.config, self.dtype
        head_dim, head_dim_v, block_kv = c.head_dim, c.head_dim_v, c.block_kv
        rows_out = out
        query, key, out = (ordered(t, (2, 3, 1, 0)) for t in (query, key, out))
        value = ordered(value, (3, 2, 1, 0))
        # MMA shapes are those of one warpgroup: 64 rows. In the layouts of Q and O, each warpgroup
        # has its own stages.
        rows, k_major, mn_major = WARPGROUP_ROWS, OperandMajorMode.K, OperandMajorMode.MN
        shape_qk, shape_pv = (rows, block_kv, head_dim), (rows, head_dim_v, block_kv)  # (m, n, k)
        mma_qk = hopper_helpers.make_trivial_tiled_mma(
            dtype, dtype, k_major, k_major, Float32, (1, 1, 1), shape_qk[:2]
        )
        p_source = warpgroup.OperandSource.RMEM
        mma_pv = hopper_helpers.make_trivial_tiled_mma(
            dtype, dtype, k_major, mn_major, Float32, (1, 1, 1), shape_pv[:2], a_source=p_source
        )
        # the first is a copy, which overwrites its accumulator
        mmas: tuple = (mma_qk, mma_qk, mma_pv)
        if const_expr(c.slope_in_mma):
            mmas = (*mmas, slope_mma(block_kv))
        if const_expr(c.columns_in_mma):
            mmas = (*mmas, columns_mma(block_kv))
        q_tiles_in_smem = c.warpgroups * c.q_stages
        layouts = (
            hopper_helpers.make_smem_layout_a(ROW, shape_qk, dtype, q_tiles_in_smem),
            hopper_helpers.make_smem_layout_b(ROW, shape_qk, dtype, c.stages),
            hopper_helpers.make_smem_layout_b(COLUMN, shape_pv, dtype, c.stages),
            hopper_helpers.make_smem_layout_epi(dtype, ROW, (rows, head_dim_v), c.warpgroups),
        )
        q_layout, k_layout, v_layout, o_layout = layouts
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        one = (None, None, 0)  # takes one stage of a layout
        tma_q, q_tiles = cpasync.make_tiled_tma_atom(
            load, query, cute.slice_(q_layout, one), (rows, head_dim)
        )
        tma_k, k_tiles = cpasync.make_tiled_tma_atom(
            load, key, cute.slice_(k_layout, one), (block_kv, head_dim)
        )
        tma_v, v_tiles = cpasync.make_tiled_tma_atom(
            load, value, cute.slice_(v_layout, one), (head_dim_v, block_kv)
        )
        tma_o, o_tiles = cpasync.make_tiled_tma_atom(
            store, out, cute.slice_(o_layout, one), (rows, head_dim_v)
        )
        # unused if the output is stored from registers, but a struct field needs a size
        o_size = 8 if const_expr(c.store_from_registers) else cute.cosize(o_layout)

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, ForwardBarriers.count(c)]
            info: cute.struct.MemRange[Int32, INFO_WORDS]
            next_tile: cute.struct.MemRange[Int32, NEXT_WORDS]
            q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(q_layout)], SMEM_ALIGNMENT]
            k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(k_layout)], SMEM_ALIGNMENT]
            v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(v_layout)], SMEM_ALIGNMENT]
            o: cute.struct.Align[cute.struct.MemRange[dtype, o_size], SMEM_ALIGNMENT]

        self.storage = Storage
        lengths = (query.shape[0], key.shape[0], key.shape[3])
        self.kernel(
            mmas,
            (tma_q, tma_k, tma_v, tma_o),
            (q_tiles, k_tiles, v_tiles, o_tiles),
            layouts,
            rows_out,
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
            grid=(ctas, 1, 1),
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
        allocator = cutlass.memory.SmemAllocator()
        storage = allocator.allocate(self.storage)
        smem = self._shared_memory(storage, layouts)
        tables = None  # f32 [warpgroups, rows, row stride], see `pair_table`
        if const_expr(c.pair_table):
            tables = allocator.allocate_array(Float32, c.table_floats, byte_alignment=16)
        words = None  # i32 [words], see `slope_in_mma` and `columns_in_mma`
        if const_expr(c.column_words > 0):
            words = allocator.allocate_array(Int32, c.column_words, byte_alignment=128)
            if const_expr(c.slope_in_mma):
                write_columns(words, c.block_kv)
            else:
                write_constants(words, c)
        biases = None  # memory of the rings of the bias, see `bias_in_smem`
        if const_expr(c.bias_stages):
            biases = allocator.allocate_array(Int32, c.bias_ring_bytes // 4, byte_alignment=128)
        bars = ForwardBarriers.at(storage.barriers.data_ptr(), c)
        if warp == PRODUCER_WARP:
            with cute.arch.elect_one():
                bars.init(c)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # The code below uses global memory, which the kernel before this one may still use.
        cute.arch.griddepcontrol_wait()

        scalars = Scalars(*numbers)
        results = Results(out, lse, max_scores, *splits)
        consumer_registers, producer_registers = c.registers
        if warp < WARPGROUP_WARPS:
            cute.arch.setmaxregister_decrease(producer_registers)
            runs = partial_runs, full_runs
            if warp == PRODUCER_WARP:
                self.producer.run(atoms[:3], tiles[:3], smem, bars, runs, scalars)
            elif warp == SCHEDULER_WARP:
                self.scheduler.run(work_tiles, counter, smem.next_tile, bars.work)
            elif const_expr(not c.columns_in_mma):
                if const_expr(c.bias_stages):
                    wg = warp - CLEARING_WARP
                    self.bias_copier.run(
                        wg, biases, smem.next_tile, bars, runs, captured, scalars, out.shape[0]
                    )
                self._clear_and_compare(work_tiles, results, captured, checks, warp)
            elif warp == COLUMNS_WARP:
                self.column_writer.run(words, smem, bars, captured, scalars)
            else:
                self._clear_and_compare(work_tiles, results, captured, checks, warp)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            output = atoms[3], tiles[3]
            memory = tables, words, biases
            self.consume(mmas, smem, memory, output, bars, results, captured, scalars)

    def _clear_and_compare(
        self, work_tiles: cute.Tensor, results: Results, captured: list, checks: list, warp: Int32
    ) -> None:
        """Run a warp that writes the fully masked tiles, then compares captured data."""
        warps, index = self.config.clearing_warps, warp - CLEARING_WARP
        self.epilogue.clear_masked_tiles(work_tiles, results, captured, index)
        if self.config.checks_data:
            cta, _, _ = cute.arch.block_idx()
            ctas, _, _ = cute.arch.grid_dim()
            compare_chunks(checks[0], warps * cta + index, warps * ctas)

    def _shared_memory(self, storage: Any, layouts: tuple) -> SharedMemory:
        """Return the tensor views of shared memory; `SharedMemory` gives their shapes."""
        q_layout, k_layout, v_layout, o_layout = layouts
        return SharedMemory(
            q=storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner),
            k=storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner),
            v=storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner),
            o=storage.o.get_tensor(o_layout.outer, swizzle=o_layout.inner),
            info=storage.info.get_tensor(cute.make_layout(INFO_WORDS)),
            next_tile=storage.next_tile.get_tensor(cute.make_layout(NEXT_WORDS)),
        )

    @cute.jit
    def consume(
        self,
        mmas: tuple,
        smem: SharedMemory,
        memory: tuple,
        tma_o: tuple,
        bars: ForwardBarriers,
        results: Results,
        captured: list,
        scalars: Scalars,
    ):
        """Run a consumer warpgroup: the MMAs, softmax and epilogue of each work tile.

        Args:
            mmas: see `ForwardMma.create`.
            smem: the tiles in shared memory.
            memory: shared memory of the tables of pairs, of the words of columns and of the rings of
                the bias; None for what the config does not need.
            tma_o: TMA atom and tensor of the output.
            bars: the mbarriers.
            results: the tensors to write.
            captured: captured tensors.
            scalars: scalar arguments of the call.
        """
        c = self.config
        tables, words, biases = memory
        thread_idx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        wg, ct = warp // WARPGROUP_WARPS - 1, thread_idx % WARPGROUP_THREADS
        thread = ConsumerThread(wg, warp, lane, (warp % WARPGROUP_WARPS) * 16 + lane // 4)
        first_column = (lane % 4) * 2
        mma = ForwardMma.create(c, mmas, smem, ct, words)
        state = RowState.create(c.need_entropy)
        mma.set_accumulate()
        ring = None
        if const_expr(c.bias_stages):
            ring = BiasRing.of(c, biases, bars, wg)
        consumer = Consumer(thread, mma, state, smem, bars, ring)
        output = self.epilogue.output_tile(mma, smem.o, tma_o, ct)

        if wg == 0:
            pingpong_pass(0)  # warpgroup 0 begins
        # kv_pos: position in the K and V rings; tile_idx: index of the CTA's work tile;
        # kv_block: the kv block of S; k_ready: whether `test_k` has found K at kv_pos full;
        # next_tile: the next work tile, read while the last MMAs of the previous one run
        kv_pos, tile_idx, kv_block, k_ready = Int32(0), Int32(0), Int32(0), Boolean(False)
        shift = None  # of the block's terms, see `columns_in_mma`
        if const_expr(c.columns_in_mma):
            shift = Float32(0.0)
        cute.arch.mbarrier_wait(bars.q.full, 0)
        valid = cute.arch.make_warp_uniform(smem.info[record_of(Int32(0)) + WorkTile.VALID])
        if const_expr(c.chained):
            next_tile = self.read_record(tile_idx, smem)
            # Q K of the first work tile's first block; `issue_next_tile` issues it for later tiles
            if valid != 0:
                cute.arch.mbarrier_wait(bars.k.full, 0)
                kv_block = smem.info[FIRST_BLOCK_NUMBER]
                if const_expr(c.columns_in_mma):
                    shift = self.read_shift(Int32(0), smem)
                if const_expr(c.slope_in_mma):
                    self.write_slope(tile_idx, consumer, captured, scalars)
                if const_expr(c.bias_first):
                    first = kv_block, kv_pos
                    self.load_first_bias(first, next_tile[0], consumer, captured, scalars)
                    device.settle(mma.acc_s)
                warpgroup.fence()
                mma.issue_qk(wg, 0)
                warpgroup.wait_group(0)
                device.arrive(bars.k.empty)
        while valid != 0:
            q_stage = bars.q.stage(tile_idx)
            if const_expr(c.chained):
                work, num_masked, num_unmasked = next_tile
            else:
                work, num_masked, num_unmasked = self.read_record(tile_idx, smem)
            site, place = self._place(work, thread, captured, scalars)
            if const_expr(c.pair_table):
                site = in_shared_memory(self.hooks, site, tables, wg)
            tile = self.scores.begin_tile(site, first_column, place.row, results.lse.shape[1])
            q_tile = wg + c.warpgroups * q_stage
            mma.acc_o.fill(0.0)
            state.reset()
            if const_expr(not c.chained):
                kv_block = self.first_scores(kv_pos, q_tile, consumer)
            block = self.scores.block_values(tile, kv_block, True, cute.size(mma.acc_s), shift)
            base = self.scores.apply_score_mod(tile, block, mma.acc_s)
            left_only = Boolean(False)  # whether the warp keeps nothing in the right half
            if num_masked != 0:
                bits = self.scores.mask_bits(tile, kv_block, True)
                self.scores.apply_mask(bits, mma.acc_s)
                if const_expr(c.left_half_softmax):
                    left_only = self.scores.right_half_is_empty(bits)
            base = self.softmax.bases(tile, block, base, mma.acc_s, state)
            if const_expr(c.left_half_softmax):
                if left_only:
                    self.softmax.first_block(tile, base, mma.acc_s, mma.p_now, state, True)
                else:
                    self.softmax.first_block(tile, base, mma.acc_s, mma.p_now, state)
            else:
                self.softmax.first_block(tile, base, mma.acc_s, mma.p_now, state)
            drop_forward(self.scores.dropout_words(tile, block.start), mma.p_now)
            kv_pos += 1
            k_ready = self.test_k(kv_pos, bars)

            # masked blocks first; the loop over the other blocks has no mask instructions
            if const_expr(self.scores.one_loop):
                for j in cutlass.range(1, num_masked + num_unmasked, unroll=1):
                    masked = j < num_masked
                    k_ready = self.mainloop_step(masked, k_ready, kv_pos, q_tile, tile, consumer)
                    kv_pos += 1
            else:
                if const_expr(not c.edge_only):  # else the first block is the only masked one
                    for _ in cutlass.range(1, num_masked, unroll=1):
                        k_ready = self.mainloop_step(True, k_ready, kv_pos, q_tile, tile, consumer)
                        kv_pos += 1
                first_is_unmasked = cutlass.select_(num_masked == 0, Int32(1), Int32(0))
                for _ in cutlass.range(num_unmasked - first_is_unmasked, unroll=1):
                    k_ready = self.mainloop_step(False, k_ready, kv_pos, q_tile, tile, consumer)
                    kv_pos += 1

            if const_expr(c.chained):
                device.arrive(bars.q.empty + q_stage)
            tile_idx += 1
            v_stage = bars.v.stage(kv_pos - 1)
            if const_expr(c.chained):
                valid, kv_block, shift, stage = self.issue_next_tile(
                    tile_idx, k_ready, kv_pos, consumer, captured, scalars
                )
            cute.arch.mbarrier_wait(bars.v.full + v_stage, bars.v.phase(kv_pos - 1))
            if const_expr(not c.chained):
                warpgroup.fence()
            mma.issue_pv(v_stage)
            if const_expr(c.chained):
                self._pass_turn(wg)

            # Read the record again, which saves registers in the mainloop.
            work = Work.read(smem.info, record_of(tile_idx - 1))
            site, place = self._place(work, thread, captured, scalars)
            lse_terms = self.scores.lse_terms(site, place.row)
            sink = self.softmax.sink(site, work.split_slot)
            # overlaps with the MMAs in flight
            self.epilogue.write_rows(
                self.scores.factor(tile), lse_terms, sink, state, results, place
            )
            self.softmax.scale_survivors(captured, state)
            if const_expr(c.chained):
                # both overlap with the MMAs in flight too
                next_tile = self.read_record(tile_idx, smem)
                self.epilogue.await_previous_store(wg)
            warpgroup.wait_group(0)
            if const_expr(c.chained):
                device.arrive(bars.k.empty + stage)
            device.arrive(bars.v.empty + v_stage)
            self.epilogue.normalise(mma.acc_o, state)
            self.epilogue.store(mma, output, results, place, wg, warp)
            if const_expr(not c.chained):
                bars.q.wait_full(tile_idx)
                valid = cute.arch.make_warp_uniform(smem.info[record_of(tile_idx) + WorkTile.VALID])
        if const_expr(not c.store_from_registers):
            # the CTA must not exit before its last TMA store is complete
            if warp % WARPGROUP_WARPS == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=False)

    def read_record(self, tile_idx: Int32, smem: SharedMemory) -> tuple[Work, Int32, Int32]:
        """Read a work tile and its block counts from the record that the producer wrote.

        Returns:
            The work tile, and how many of its kv blocks need the mask and how many do not. They
            mean nothing after the last work tile.
        """
        info, record = smem.info, record_of(tile_idx)
        work = Work.read(info, record)
        # made warp-uniform, so that the compiler sees that the MMAs do not diverge
        num_masked = cute.arch.make_warp_uniform(info[record + WorkTile.NUM_MASKED])
        num_unmasked = cute.arch.make_warp_uniform(info[record + WorkTile.NUM_UNMASKED])
        return work, num_masked, num_unmasked

    def read_shift(self, stage: Int32, smem: SharedMemory) -> Float32 | None:
        """Read the shift of the terms in a K stage; None without `columns_in_mma`."""
        if not self.config.columns_in_mma:
            return None
        return device.pinned(smem.info[FIRST_SHIFT + stage])

    def test_k(self, kv_pos: Int32, bars: ForwardBarriers, ahead: int = 0) -> Boolean:
        """Test whether a K block has arrived in shared memory, and return at once.

        The test of the next block comes before the last wait of a step, which hides its latency.
        Without chained work tiles the result is False, so that `wait_k` waits.

        Args:
            kv_pos: position in the K ring.
            bars: the mbarriers.
            ahead: added to the position.
        """
        if not self.config.chained:
            return Boolean(False)
        if ahead:
            # opaque, because the compiler would count this position too, in another register
            kv_pos = device.recomputed(kv_pos, kv_pos) + ahead
        full = bars.k.full + bars.k.stage(kv_pos)
        return cute.arch.mbarrier_test_wait(full, bars.k.phase(kv_pos))

    @cute.jit
    def wait_k(self, ready: Boolean, kv_pos: Int32, bars: ForwardBarriers):
        """Wait until the K block at a position of the ring has arrived.

        `ready` is the result of `test_k`; if it is set, there is no wait.
        """
        if const_expr(self.config.chained):
            if not ready:
                bars.k.wait_full(kv_pos)
        else:
            bars.k.wait_full(kv_pos)

    def first_scores(self, kv_pos: Int32, q_tile: Int32, consumer: Consumer) -> Int32:
        """Compute S of a work tile's first block, for configs whose work tiles are not chained.

        Args:
            kv_pos: position of the block in the rings.
            q_tile: index of the 64 rows of Q in shared memory.

        Returns:
            The number of the kv block, as in `SharedMemory.info`.
        """
        mma, bars = consumer.mma, consumer.bars
        stage = bars.k.wait_full(kv_pos)
        kv_block = consumer.smem.info[stage]
        warpgroup.fence()
        mma.issue_qk(q_tile, stage)
        warpgroup.wait_group(0)
        mma.release_k(bars.k, stage)
        return kv_block

    def issue_next_tile(
        self,
        tile_idx: Int32,
        k_ready: Boolean,
        kv_pos: Int32,
        consumer: Consumer,
        captured: list,
        scalars: Scalars,
    ) -> tuple[Int32, Int32, Float32 | None, Int32]:
        """Issue Q K of the next work tile's first block, before the last P V of the current one.

        The tensor cores then stay busy during the current tile's epilogue. If there is no next
        tile, Q K of the last block is issued again and its result is ignored.

        Returns:
            Whether there is a next tile, its first kv block, the result of `read_shift` for it, and
            the K stage to release.
        """
        c, mma, bars, info = self.config, consumer.mma, consumer.bars, consumer.smem.info
        wg = consumer.thread.warpgroup
        bars.q.wait_full(tile_idx)
        valid = cute.arch.make_warp_uniform(info[record_of(tile_idx) + WorkTile.VALID])
        again = cutlass.select_(valid == 0, Int32(1), Int32(0))
        self.wait_k(k_ready, kv_pos - again, bars)
        stage = bars.k.stage(kv_pos - again)
        kv_block, shift = info[stage], self.read_shift(stage, consumer.smem)
        if const_expr(c.slope_in_mma):  # the next work tile may belong to another head
            self.write_slope(tile_idx - again, consumer, captured, scalars)
        if const_expr(c.bias_first):
            work = Work.read(info, record_of(tile_idx - again))
            first = kv_block, kv_pos - again
            self.load_first_bias(first, work, consumer, captured, scalars)
        pingpong_wait(wg)
        if const_expr(c.bias_first):
            device.settle(mma.acc_s)
        warpgroup.fence()
        mma.issue_qk(wg + c.warpgroups * bars.q.stage(tile_idx - again), stage)
        return valid, kv_block, shift, stage

    def write_slope(
        self, tile_idx: Int32, consumer: Consumer, captured: list, scalars: Scalars
    ) -> None:
        """Write the operand that adds the slope of a work tile's head, while no MMA is in flight."""
        work = Work.read(consumer.smem.info, record_of(tile_idx))
        site, _ = self._place(work, consumer.thread, captured, scalars)
        operands = consumer.mma.slope
        assert operands is not None
        operands.write(self.hooks.column_slope(self.hooks.head(site)))

    def load_first_bias(
        self,
        first: tuple[Int32, Int32],
        work: Work,
        consumer: Consumer,
        captured: list,
        scalars: Scalars,
    ) -> None:
        """Load the bias of a work tile's first kv block to the accumulator of S.

        `first` holds the number of the kv block and its position in the rings.
        """
        site, place = self._place(work, consumer.thread, captured, scalars)
        first_column = consumer.thread.lane % 4 * 2
        # without the number of heads, which only dropout needs
        tile = self.scores.begin_tile(site, first_column, place.row, Int32(0))
        kv_block, kv_pos = first
        self.load_bias(tile, kv_block, kv_pos, True, consumer)

    def load_bias(
        self, tile: TileValues, kv_block: Int32, kv_pos: Int32, masked: bool, consumer: Consumer
    ) -> None:
        """Load the bias of a kv block to the accumulator of S, from the ring if it is copied ahead."""
        ring, scores, acc_s = consumer.bias, self.scores, consumer.mma.acc_s
        if ring is None:
            scores.load_bias(tile, kv_block, masked, acc_s)
        else:
            thread, dtype = consumer.thread, self.hooks.bias_type(tile.site)
            values = ring.read(kv_pos, thread.row, thread.lane, dtype)
            scores.begin_with_bias(tile, kv_block, masked, values, acc_s)

    def mainloop_step(
        self,
        masked: bool | Boolean,
        k_ready: Boolean,
        kv_pos: Int32,
        q_tile: Int32,
        tile: TileValues,
        consumer: Consumer,
    ) -> Boolean:
        """Issue Q K of a kv block and P V of the previous one, then compute the block's softmax.

        Args:
            masked: whether the block needs the mask; known at run time only with `one_loop`.
            k_ready: result of `test_k` for the block.
            kv_pos: position of the block in the rings.
            q_tile: index of the 64 rows of Q in shared memory.
            tile: values of the work tile.
            consumer: state of the thread.

        Returns:
            The result of `test_k` for the next block.
        """
        scores, softmax = self.scores, self.softmax
        mma, state, bars = consumer.mma, consumer.state, consumer.bars
        warpgroup_idx, count = consumer.thread.warpgroup, cute.size(mma.acc_s)
        k_stage, v_stage = bars.k.stage(kv_pos), bars.v.stage(kv_pos - 1)
        self.wait_k(k_ready, kv_pos, bars)
        kv_block = consumer.smem.info[k_stage]
        shift = self.read_shift(k_stage, consumer.smem)
        if scores.one_loop:  # loads of the mod must stay inside their tensors in any block
            bits, clamps, mask = None, True, (masked, kv_block)
        else:
            bits, clamps, mask = scores.mask_bits(tile, kv_block, masked), masked, None
        if self.config.bias_first:  # arrives while the other warpgroups have their turns
            self.load_bias(tile, kv_block, kv_pos, clamps, consumer)
        pingpong_wait(warpgroup_idx)
        if self.config.bias_first:
            device.settle(mma.acc_s)
        warpgroup.fence()
        mma.issue_qk(q_tile, k_stage)  # asynchronous, the first group
        if self.hooks.prefetches:  # overlap the latency of a mod's loads with the MMAs
            block = scores.block_values(tile, kv_block, clamps, count, shift)
        # P V waits for Q K, so that random bits are drawn in the meantime if registers allow it
        words = None
        if self.config.chained:
            words = scores.dropout_words(tile, scores.first_column(tile, kv_block))
        cute.arch.mbarrier_wait(bars.v.full + v_stage, bars.v.phase(kv_pos - 1))
        mma.issue_pv(v_stage)  # asynchronous, the second group; it reads P from registers
        if not self.hooks.prefetches:
            block = scores.block_values(tile, kv_block, clamps, count, shift)
        self._pass_turn(warpgroup_idx)
        warpgroup.wait_group(1)  # S is complete; P V may still run
        mma.release_k(bars.k, k_stage)
        # with two P buffers, write the second one: P V still reads the first
        p_next = mma.p_next if self.config.double_buffer_p else None
        softmax.next_block(tile, block, bits, mma.acc_s, p_next, state, mask)
        if self.config.double_buffer_p and not self.config.chained:  # before the wait
            words = scores.dropout_words(tile, block.start)
        if self.config.exp_before_wait:
            keep_exponentials_here(state)
        next_ready = self.test_k(kv_pos, bars, ahead=1)
        warpgroup.wait_group(0)  # O is complete, and P may be overwritten
        device.arrive(bars.v.empty + v_stage)
        if self.config.double_buffer_p:
            mma.advance_p()
        else:
            self.epilogue.pack(mma.acc_s, mma.p_now)
            if not self.config.chained:
                words = scores.dropout_words(tile, block.start)
        drop_forward(words, mma.p_now)
        softmax.rescale(mma.acc_o, state.scale)
        return next_ready

    def _place(
        self, work: Work, thread: ConsumerThread, captured: list, scalars: Scalars
    ) -> tuple[Site, RowPlace]:
        """Return the work tile's site for the hooks and the position of the thread's rows."""
        first_row = work.q_block * self.config.block_q
        row = first_row + thread.warpgroup * WARPGROUP_ROWS + thread.row
        tile_row = thread.warpgroup * WARPGROUP_ROWS + thread.row
        site = self.scores.site(captured, work.batch, work.head, scalars, first_row)
        return site, RowPlace(row, tile_row, work, thread.lane)

    def _pass_turn(self, warpgroup: Int32) -> None:
        pingpong_pass((warpgroup + 1) % self.config.warpgroups)


def keep_exponentials_here(state: RowState) -> None:
    """Keep the exponentials before the wait for P V, where the assembler would move the wait up.

    The emitted `nanosleep` is predicated on a negative sum of the exponentials. The sum is never
    negative, so that it never executes, but the assembler does not know this.
    """
    row_sum = state.sum
    cute.arch.inline_ptx("nanosleep.u32 1;", predicate=(row_sum[0] + row_sum[1]) < Float32(0.0))
