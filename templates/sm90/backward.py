"""Compute the backward on Hopper (sm_90a): a work tile is a kv block, with a loop over q blocks.

The kernel is persistent, with one CTA per SM. In warpgroup 0, one warp loads by TMA, two warps add
dQ to float32 sums, and one warp writes the gradients of fully masked kv blocks. With whole heads or
arrivals the two warps also write dQ, and with arrivals the last one clears dQ of masked q blocks. It
copies a full bias to shared memory, see `backward_bias_in_smem`. The other two warpgroups are
consumers with 64 kv positions each. For every q block a consumer recomputes S^T = K Q^T and
dP^T = V dO^T, computes P and dS in registers, and adds dV += P^T dO and dK += dS^T Q with P and dS
from registers. Shared memory bandwidth limits the kernel. If the variant leaves registers, four
k-steps of 16 columns of K are kept in registers and loaded once per kv block.

dS is also written to shared memory, transposed: each consumer reads both halves for its part of
dQ = dS K. It issues dQ of the previous q block, so that consumers do not wait for each other and
the tensor cores have MMAs of one consumer while the other computes. dQ is added to memory through
shared memory, by bulk reductions.

Work tiles overlap. K has two stages, so that K of the next work tile is loaded early. V has one
stage, which is released after dP of the last q block. dK and dV are written from registers while
the first S and dP of the next work tile are computed. The next work tile first issues dQ of the
last q block of the current one.

Query and kv blocks are visited in ascending order, with PARTIAL and FULL blocks mixed. Only blocks
that need the mask run mask instructions. Float32 sums are stored in units of 64 x 64 in the order
of the accumulator registers, so that they are read and written in whole cache lines;
`backward_postprocess` restores the order of rows and columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.memory
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp

from attnkit.templates.common import device
from attnkit.templates.common.backward_work import Lists, Problem
from attnkit.templates.common.dropout import DropoutState
from attnkit.templates.common.hooks import BackwardHooks
from attnkit.templates.common.lse_in_mma import CORE_WORDS
from attnkit.templates.common.place_runs import CapturedSums
from attnkit.templates.common.site import Site
from attnkit.templates.common.tma import ordered
from attnkit.templates.common.work_tile import RECORD, WorkTile
from attnkit.templates.sm90.backward_alibi import Alibi
from attnkit.templates.sm90.backward_arrivals import ArrivalTable
from attnkit.templates.sm90.backward_bias_first import BiasFirst, wait_unless
from attnkit.templates.sm90.backward_bias_in_smem import (
    BackwardBiasCopier,
    BiasBarriers,
    BiasReader,
    CopiedBias,
    ReadTile,
    tile_start,
)
from attnkit.templates.sm90.backward_captured_grads import CapturedGrads, follows_p
from attnkit.templates.sm90.backward_config import ROWS, BackwardConfig
from attnkit.templates.sm90.backward_deterministic import DeterministicReduce
from attnkit.templates.sm90.backward_dq_reduce import DqReduce, Reduce
from attnkit.templates.sm90.backward_epilogue import (
    Epilogue,
    Outputs,
    Results,
    wait_staging_empty,
)
from attnkit.templates.sm90.backward_first_writer import FirstWriterReduce
from attnkit.templates.sm90.backward_leaders import LeaderReduce
from attnkit.templates.sm90.backward_lse_in_mma import LseInMma
from attnkit.templates.sm90.backward_mma import (
    ConsumerMma,
    SmemLayouts,
    TiledMmas,
    consumer_mma,
    in_layout_of,
    smem_layouts,
    tiled_mmas,
)
from attnkit.templates.sm90.backward_one_hot import OneHot
from attnkit.templates.sm90.backward_producer import LoadTargets, Producer
from attnkit.templates.sm90.backward_row_slopes import RowSlopes
from attnkit.templates.sm90.backward_shared import (
    CLEAR_WARP,
    CONSUMERS,
    DQ_WARP,
    GRAD_QUERY,
    LOAD_WARP,
    THREADS,
    WARPGROUP,
    WARPS,
    Barriers,
    Word,
    barrier_count,
    heads_before,
    init_barriers,
    k_phase,
    place_barriers,
    q_blocks_of,
    q_phase,
    q_stage,
    record_of,
    row_pairs,
)
from attnkit.templates.sm90.backward_softmax import KvBlock, QBlock, SoftmaxBackward, init_dp

HELD_STEPS = 4  # k-steps of 16 columns of K in registers, for variants that leave registers


@dataclass(frozen=True)
class Consumer:
    """Holds the state of a consumer thread for the whole kernel.

    Attributes:
        mma: operands, accumulators and MMA instructions.
        bars: mbarriers.
        smem: LSE, delta and words in shared memory.
        out: destinations of the results.
        row0: the thread's first row within a q block.
        entropy_grads: the gradient of the entropies, f32 [B, H, S]; empty without entropies.
        ds_copy, ds_thread, ds_smem: copy of dS to shared memory, the thread's slice of it, and its
            target: dtype [64, block_q, 2 stages].
        classes: `ClassSums`; None without `one_hot`.
        bias: where the tiles of a copied bias are; None without one.
    """

    mma: ConsumerMma
    bars: Barriers
    smem: LoadTargets
    out: Outputs
    row0: Int32
    entropy_grads: list
    ds_copy: Any
    ds_thread: Any
    ds_smem: cute.Tensor
    classes: Any
    bias: CopiedBias | None = None


class Backward:
    """Builds the Hopper backward kernel of one configuration and one variant, head dims up to 128.

    Args:
        config: compile-time configuration.
        hooks: hooks of the variant.

    Raises:
        ValueError: the configuration is not supported; the message says why.
    """

    storage: Any  # struct of a CTA's shared memory, created by `__call__`

    def __init__(self, config: BackwardConfig, hooks: BackwardHooks) -> None:
        problem = config.problem()
        if problem:
            raise ValueError(problem)
        if config.rounded and (hooks.gradient_levels or hooks.has_derivative):
            raise ValueError(
                f"block_q={config.block_q} for a mod with a slope or gradients of captured tensors: "
                f"expected {ROWS}, as registers hold no more"
            )
        self.config = config
        self.hooks = hooks
        self.dtype = device.DTYPES[config.dtype]
        self.lse_in_mma = LseInMma(config, hooks)
        self.producer = Producer(config)
        alibi = Alibi(hooks, config.block_q, self.lse_in_mma.with_slope)
        # whether gradients of captured tensors are computed from S and dP together
        self.by_score = bool(hooks.gradient_levels) and not follows_p(config, hooks)
        late = not (hooks.has_derivative or self.by_score or config.weights or config.rounded)
        self.softmax = SoftmaxBackward(config, hooks, alibi, late, self.by_score)
        self.captured_grads = CapturedGrads(config, self.softmax)
        self.row_slopes = RowSlopes(hooks, self.dtype)
        self.bias_first = BiasFirst(self.softmax) if config.bias_first else None
        self.bias_copier = BackwardBiasCopier(config, hooks)
        self.bias_reader = BiasReader(config)
        self.epilogue = Epilogue(config)
        self.finisher = self.epilogue.finisher
        self.deterministic = DeterministicReduce(config)
        leaves_last = not config.bias_bytes
        self.dq_reduce: Reduce = DqReduce(config.chunk, leaves_last)
        if config.sum_order:
            self.dq_reduce = self.deterministic
        elif config.first_writer:
            self.dq_reduce = FirstWriterReduce(config.chunk, leaves_last)
        elif config.leaders:
            self.dq_reduce = LeaderReduce(config.chunk)
        self.one_hot: Any = OneHot(config, hooks) if config.one_hot else None
        self.held_steps = _held_steps(config, hooks, self.by_score)
        if self.lse_in_mma.with_slope and self.held_steps:
            self.held_steps -= 1  # registers for K's extra columns with the slope

    # ------------------------------------------------------------------------------------ host

    @cute.jit
    def __call__(
        self,
        query: cute.Tensor,
        key: cute.Tensor,
        value: cute.Tensor,
        grad_out: cute.Tensor,
        grad_key: cute.Tensor,
        grad_value: cute.Tensor,
        lse: cute.Tensor,
        delta: cute.Tensor,
        sums: cute.Tensor,
        items: cute.Tensor,
        partial: cute.Tensor,
        full: cute.Tensor,
        counter: cute.Tensor,
        captured: list,
        totals: list,
        order: list,
        scale: Float32,
        group: Int32,
        ctas: Int32,
        stream: Any,
    ):
        """Launch the kernel.

        Args:
            query, key, value, grad_out, grad_key, grad_value: [B, H, S, D] of the config's dtype,
                with a contiguous last dimension; the other strides and the address are multiples
                of 16 bytes. With `accumulate`, grad_key and grad_value are not written.
            lse, delta: float32 [B * H * q blocks * block_q], from `common.preprocess.Preprocess`.
            sums: float32 sums, zero; with `whole_heads`, memory for dQ of one head for each CTA,
                which need not be zero; with `first_writer` or `arrivals`, the sums of dQ need not
                be zero. First the units of dQ. Then, with `accumulate`, the units of dK and of dV;
                with `joins`, dK and dV of every split kv block.
            items: the work list, int32 [work tiles, 12], see `WorkItem`.
            partial, full: int32 [2, runs], starts and lengths of the transposed runs.
            counter: int32 [1 + 8 * split kv blocks], zero; the kernel resets it to zero.
            captured: captured tensors; then, with `with_entropy`, the gradient of the rows'
                entropies, float32 [B, H, S]; with `with_dropout`, the state of dropout, int64 [2].
            totals: gradients of captured tensors that require grad, float32, in the shapes of the
                tensors; the kernel adds to them. With `sum_order`, int64 with a last dimension of
                bins, see `common.exact_sums`.
            order: empty if sums have no order. With `whole_heads`: `HEAD_STARTS` and `GRAD_QUERY`.
                With `arrivals`: see `ArrivalTable`. With `first_writer` only: int32 flags of the
                chunks of dQ, zero. With `leaders` only: int32 [kv blocks, H * q blocks], zero, see
                `backward_leaders`. With `sum_order`: the tensors of `common.semaphore.OrderTable`. The
                semaphores of dQ are initially the first turn of their row, those of dK and dV are
                0; there is one per chunk of the sums. The kernel restores these values.
            scale: softmax scale.
            group: query heads per kv head.
            ctas: CTAs to launch, at most the number of work tiles.
            stream: CUDA stream.
        """
        c, dtype = self.config, self.dtype
        head_dim, head_dim_v, bm = c.head_dim, c.head_dim_v, c.block_q
        store = ()
        if const_expr(c.writes_dq):
            at = ArrivalTable.GRAD_QUERY if const_expr(c.arrivals) else GRAD_QUERY
            store = self.finisher.tma(order[at])
        query, key, value, grad_out, grad_key, grad_value = (  # [S, D, H, B]
            ordered(t, (2, 3, 1, 0)) for t in (query, key, value, grad_out, grad_key, grad_value)
        )
        mmas = tiled_mmas(c, dtype, self.lse_in_mma.with_slope)
        layouts = smem_layouts(c, dtype)
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma = [
            cpasync.make_tiled_tma_atom(load, t, cute.slice_(layout, (None, None, 0)), shape)
            for t, layout, shape in (
                (query, layouts.q, (bm, head_dim)),
                (key, layouts.k, (ROWS, head_dim)),
                (value, layouts.v, (ROWS, head_dim_v)),
                (grad_out, layouts.do, (bm, head_dim_v)),
            )
        ]

        mbarriers = barrier_count(c) + (BiasBarriers.COUNT if c.bias_bytes else 0)

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, mbarriers]
            info: cute.struct.MemRange[Int32, Word.COUNT]
            factors: cute.struct.Align[cute.struct.MemRange[Int32, CORE_WORDS], 128]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, c.stages * bm * c.words[0]], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, c.stages * bm], 128]
            # Run time depends on which fields are below 128 KiB: at head dim 128, K, Q and dO.
            # Other orders cost up to 13 % (docs/hopper.md, "Two halves of shared memory").
            k: cute.struct.Align[
                cute.struct.MemRange[dtype, 2 * c.k_stages * ROWS * head_dim], 1024
            ]
            q: cute.struct.Align[cute.struct.MemRange[dtype, c.stages * bm * head_dim], 1024]
            do: cute.struct.Align[cute.struct.MemRange[dtype, c.stages * bm * head_dim_v], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, 2 * ROWS * head_dim_v], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[dtype, 2 * c.stages * ROWS * bm], 1024]
            dq: cute.struct.Align[cute.struct.MemRange[Float32, 2 * c.chunk], 128]

        self.storage = Storage
        lengths = (query.shape[0], key.shape[0])
        heads = (query.shape[2], key.shape[2], query.shape[3], key.shape[3])
        self.kernel(
            mmas.without_none(),
            mmas.without_none(),
            tuple(atom for atom, _ in tma),
            tuple(tiles for _, tiles in tma),
            tuple(layouts),
            (grad_key, grad_value),
            lse,
            delta,
            sums,
            items,
            partial,
            full,
            counter,
            captured,
            totals,
            order,
            store,
            (scale, group, *lengths, *heads),
        ).launch(
            grid=(ctas, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    # ---------------------------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        mmas_overwrite: tuple,
        mmas_accumulate: tuple,
        atoms: tuple,
        tiles: tuple,
        layouts: tuple,
        grads: tuple,
        lse: cute.Tensor,
        delta: cute.Tensor,
        sums: cute.Tensor,
        items: cute.Tensor,
        partial: cute.Tensor,
        full: cute.Tensor,
        counter: cute.Tensor,
        captured: list,
        totals: list,
        order: list,
        store: tuple,
        sizes: tuple,
    ):
        """Set up shared memory and barriers, then branch to the warp's role (`backward_shared`)."""
        c = self.config
        count = len(captured) - (1 if const_expr(c.with_entropy or c.with_dropout) else 0)
        captured, others = captured[:count], captured[count:]
        problem, (grad_key, grad_value) = Problem(*sizes), grads
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        allocator = cutlass.memory.SmemAllocator()
        storage = allocator.allocate(self.storage)
        info = storage.info.get_tensor(cute.make_layout(Word.COUNT))  # int32 [words]
        smem_lse = storage.lse.get_tensor(  # f32 [block_q * words, stages]
            cute.make_layout((c.block_q * c.words[0], c.stages))
        )
        smem_delta = storage.delta.get_tensor(  # f32 [block_q, stages]
            cute.make_layout((c.block_q, c.stages))
        )
        memory = (
            storage.k, storage.v, storage.q, storage.do, storage.ds,
            storage.q, storage.do, storage.ds, storage.k,
        )  # fmt: skip
        views = SmemLayouts(  # tensors of these shapes
            *(
                part.get_tensor(layout.outer, swizzle=layout.inner)
                for part, layout in zip(memory, layouts, strict=True)
            )
        )
        staging = storage.dq.data_ptr()
        bars = place_barriers(c, storage.barriers.data_ptr())
        bias: Any = None
        if const_expr(c.bias_bytes):
            memory = storage.k.data_ptr().toint()
            if const_expr(c.own_bias_bytes):
                size = c.own_bias_bytes // 4
                memory = allocator.allocate_array(Int32, size, byte_alignment=128).toint()
            bias_bars = BiasBarriers.at(storage.barriers.data_ptr() + barrier_count(c))
            bias = CopiedBias(memory, bias_bars)
        smem = LoadTargets(views.k, views.v, views.q, views.do, smem_lse, smem_delta, info)
        if warp == LOAD_WARP:
            with cute.arch.elect_one():
                init_barriers(c, bars)
                if const_expr(c.bias_bytes):
                    bias.bars.init()
        factors = storage.factors.data_ptr()
        if const_expr(c.less_lse and not self.lse_in_mma.with_slope):
            self.lse_in_mma.write_factors(factors, problem.scale, warp)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()  # the code below reads the preprocess's results

        if warp < WARPS:
            cute.arch.setmaxregister_decrease(c.producer_registers)
            if warp == LOAD_WARP:
                lists = Lists(lse, delta, items, partial, full, counter, order)
                notes = bias.bars if const_expr(c.bias_bytes) else None
                self.producer.run(atoms, tiles, smem, bars.load, lists, problem, notes)
            for wg in cutlass.range_constexpr(CONSUMERS):
                if warp == DQ_WARP + wg:
                    if const_expr(c.whole_heads):
                        self.finisher.run(wg, staging, info, bars.chunk, sums, store, problem)
                    elif const_expr(c.arrivals):
                        self.finisher.run(
                            wg, staging, info, bars.chunk, sums, store, problem, order
                        )
                    else:
                        self.dq_reduce.run(wg, staging, info, bars.chunk, sums, order)
            if warp == CLEAR_WARP:
                self.epilogue.clear_masked(items, grad_key, grad_value)
                if const_expr(c.arrivals):
                    self.epilogue.clear_unvisited(order, problem)
                if const_expr(c.bias_bytes):
                    self.bias_copier.run(bias, info, bars.load.k_empty, captured, problem)
                if const_expr(c.sum_order):
                    self.deterministic.pass_turns(info, bars.chunk, order)
        else:
            cute.arch.setmaxregister_increase(c.consumer_registers)
            self.consume(
                (mmas_overwrite, mmas_accumulate), views, smem, bars, factors,
                (captured, others), totals,
                Results(grad_key, grad_value, staging, sums, counter), problem, bias,
            )  # fmt: skip

    @cute.jit
    def consume(
        self,
        mmas: tuple,
        views: SmemLayouts,
        smem: LoadTargets,
        bars: Barriers,
        factors: cute.Pointer,
        read: tuple,
        totals: list,
        results: Results,
        problem: Problem,
        bias: Any,
    ):
        """Run a consumer warpgroup: the MMAs, P, dS, and the epilogue of each work tile.

        `read` are the captured tensors, and the gradient of the entropies or the state of dropout.
        """
        c, p, info = self.config, problem, smem.info
        captured, others = read
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        wg, thread = warp // WARPS - 1, thread % WARPGROUP
        column0 = wg * ROWS + (warp % WARPS) * 16 + lane // 4
        row0 = (lane % 4) * 2
        out = Outputs(results, problem, info, bars, wg, thread)
        entropy_grads = others if const_expr(c.with_entropy) else []
        consumer = self.set_up(mmas, views, smem, bars, factors, out, row0, entropy_grads, totals)
        consumer = replace(consumer, bias=bias)
        mma = consumer.mma
        q_chunks = q_blocks_of(c, p) * 2  # of a work tile's heads
        sums = self.captured_grads.begin(totals)
        q_count, kv_count = Int32(0), Int32(0)  # indices of the q block and the work tile
        note = (Int32(0), Int32(0))  # chunk and turn of the previous q block's dQ
        for acc in (mma.dk, mma.dv):  # defined before the loop, whose first MMAs overwrite them
            acc.fill(0.0)
        cute.arch.mbarrier_wait(bars.load.k_full, 0)
        valid = info[RECORD + WorkTile.VALID]
        while valid != 0:
            # prologue: load part of K to registers, process the first q block
            for k in cutlass.range_constexpr(self.held_steps):
                mma.load_k(k, kv_count & 1)
            record = record_of(c, kv_count & 1)
            if const_expr(self.lse_in_mma.with_slope):  # K's extra columns depend on the head
                where = info[record + WorkTile.BATCH], info[record + WorkTile.HEAD]
                scaled = self.lse_in_mma.scale(p.scale)
                site = Site(captured, *where, p.q_len, p.kv_len, scaled, Int32(0))
                self.lse_in_mma.write_slope(mma.lse[0], site)
            tile: Any = None
            if const_expr(c.bias_first):  # S of the first block begins with its bias
                tile = self.begin_tile(captured, others, record, column0, out)
            # S and dP of this work tile run while dK and dV of the previous one are written
            block = self.start_block(True, consumer, q_count, kv_count, note[0], tile)
            kv_block, h, b, count = (
                info[record + i]
                for i in (WorkTile.KV_BLOCK, WorkTile.HEAD, WorkTile.BATCH, WorkTile.NUM_BLOCKS)
            )
            turn = kv_block if const_expr(c.sum_order) else Int32(0)
            # chunk of the head's first q block in dQ, and turn of the kv block
            first_chunk = heads_before(c, p, b, h) * q_chunks
            # of the CTA's memory, which has one head
            place = (wg if const_expr(c.whole_heads) else first_chunk + wg, turn)
            if const_expr(not c.bias_first):
                tile = self.begin_tile(captured, others, record, column0, out)
            self.captured_grads.reset(sums)
            note = self.finish_block(
                True, count == 1, consumer, block, tile, sums, place, q_count, kv_count, note
            )
            q_count += 1
            # mainloop
            if const_expr(c.one_hot):  # counts down, which takes one register and not two
                left = count - 1
                while left > 0:
                    note = self.next_block(
                        left == 1, consumer, tile, sums, place, q_count, kv_count, note
                    )
                    left -= 1
                    q_count += 1
            else:
                for j in cutlass.range(count - 1, unroll=1):
                    note = self.next_block(
                        j == count - 2, consumer, tile, sums, place, q_count, kv_count, note
                    )
                    q_count += 1
            self.captured_grads.flush(tile, sums)
            kv_count += 1
            cute.arch.mbarrier_wait(bars.load.k_full + (kv_count & 1), k_phase(c, kv_count))
            valid = info[record_of(c, kv_count & 1) + WorkTile.VALID]
        # epilogue of the last work tile; for other work tiles, the next one does this
        if kv_count > 0:
            mma.issue_dq(bars, q_count - 1, kv_count - 1)
            warpgroup.wait_group(0)
            self.epilogue.write_dk_dv(mma.dk, mma.dv, out, kv_count, note[0])
            # in that case `write_dk_dv` has already waited
            free = not (c.accumulate or c.writes_dq)
            if const_expr(c.one_hot):
                site = self.site_of(kv_count - 1, captured, out)
                q_block = self.q_block(kv_count - 1, note, out)
                self.prepare_classes(consumer, site, q_count, free)
                self.one_hot.issue(consumer.classes, mma, q_count - 1)
                warpgroup.wait_group(0)
                places = self.one_hot.places(consumer.classes, site, q_block)
                self.one_hot.add(consumer.classes, places, cutlass.Boolean(True))
                free = True
            self.epilogue.send_dq(mma.dq, note, out, q_count - 1, free, None, kv_count - 1)
        self.epilogue.finish(out)

    # ------------------------------------------------ parts of the consumer, inlined while tracing

    def set_up(
        self, mmas: tuple, views: SmemLayouts, smem: LoadTargets, bars: Barriers, factors: Any,
        out: Outputs, row0: Int32, entropy_grads: list, totals: list,
    ) -> Consumer:  # fmt: skip
        """Create the operands and accumulators, and the copy of dS to shared memory."""
        c = self.config
        overwrite, accumulate = (TiledMmas(*m) for m in mmas)
        # set once here: a value that is set in a helper cannot be used outside of its region
        pairs = zip(overwrite.without_none(), accumulate.without_none(), strict=True)
        for first, further in pairs:
            first.set(warpgroup.Field.ACCUMULATE, False)
            further.set(warpgroup.Field.ACCUMULATE, True)
        mma = consumer_mma(c, overwrite, accumulate, views, self.held_steps, out.wg, out.thread)
        if c.less_lse:
            lse = self.lse_in_mma.operands(accumulate.lse, factors, smem.lse)
            mma = replace(mma, lse=lse)
        ds_copy = cute.make_tiled_copy_C(
            cute.make_copy_atom(StMatrix8x8x16bOp(True, 4), self.dtype), accumulate.s
        )
        ds_thread = ds_copy.get_slice(out.thread)
        ds_smem = ds_thread.partition_D(views.ds_written)
        classes = None
        if self.one_hot is not None:
            instructions = overwrite.one_hot, accumulate.one_hot
            classes = self.one_hot.begin(instructions, out.to.staging, totals, out.wg, out.thread)
        return Consumer(
            mma, bars, smem, out, row0, entropy_grads, ds_copy, ds_thread, ds_smem, classes
        )

    def begin_tile(
        self, captured: list, others: list, record: Int32, column0: Int32, out: Outputs
    ) -> KvBlock:
        """Compute the values that a thread uses for a whole work tile.

        Args:
            captured: captured tensors.
            others: the gradient of the entropies, or the state of dropout.
            record: index of the work tile's record in shared memory.
            column0: the thread's first column within the kv block.
            out: destinations of the results.
        """
        p, words = out.problem, (WorkTile.KV_BLOCK, WorkTile.HEAD, WorkTile.BATCH)
        kv_block, h, b = (out.info[record + i] for i in words)
        scaled = self.lse_in_mma.scale(p.scale)
        site = Site(captured, b, h, p.q_len, p.kv_len, scaled, kv_block * self.config.block_kv)
        dropout = None
        if self.config.with_dropout:
            dropout = DropoutState.read(others[0], b * p.heads + h)
        return self.softmax.begin(site, column0, dropout)

    def start_block(
        self, first: bool, w: Consumer, q_count: Int32, kv_count: Int32, pending: Any = None,
        tile: Any = None,
    ) -> QBlock:  # fmt: skip
        """Issue S and dP of a q block; at a work tile's first, also write the previous dK and dV.

        Args:
            first: whether this is the first q block of its work tile.
            w: state of the thread.
            q_count, kv_count: indices of the q block and the work tile.
            pending: chunk of dQ of the previous work tile's last q block; None unless `first`.
            tile: values of the kv block; needed only if `first` and `bias_first`.
        """
        c, mma, load, out = self.config, w.mma, w.bars.load, w.out
        s, phase, rounded = q_stage(c, q_count), q_phase(c, q_count), c.rounded
        lse = None if c.less_lse else row_pairs(w.smem.lse, s, w.row0, c.block_q, c.block_q)
        delta = row_pairs(w.smem.delta, s, w.row0, c.block_q, c.block_q)
        if not (first or rounded):
            cute.arch.mbarrier_wait(load.do_full + s, phase)
            init_dp(mma.dp, delta)
        cute.arch.mbarrier_wait(load.q_full + s, phase)
        block = self.q_block_at(w, s, lse, delta)
        if self.bias_first is not None:
            if first:
                self.bias_first.load(block, tile, mma.s)
            device.settle(mma.s)
        warpgroup.fence()
        mma.issue_s(s, kv_count & 1)
        if first:  # waits for nothing, but tells the assembler that dK and dV are complete
            warpgroup.wait_group(1)
            if rounded:  # before dP, to save registers
                self.epilogue.write_dk_dv(mma.dk, mma.dv, out, kv_count, pending)
        if first or rounded:
            cute.arch.mbarrier_wait(load.do_full + s, phase)
        if first:  # V is loaded last
            cute.arch.mbarrier_wait(load.v_full + out.wg, kv_count & 1)
            if not rounded:
                init_dp(mma.dp, delta)
                warpgroup.fence()
        mma.issue_dp(s)
        if first and not rounded:
            warpgroup.wait_group(2)
            self.epilogue.write_dk_dv(mma.dk, mma.dv, out, kv_count, pending)
        return block

    def q_block_at(self, w: Consumer, s: Int32, lse: Any = None, delta: Any = None) -> QBlock:
        """Describe the q block in stage `s` of Q; `lse` and `delta` are those of `QBlock`."""
        # read where it is used, which takes no register until then
        packed_row = w.smem.info.iterator + Word.PACKED_ROW + s if self.config.pack_gqa else None
        return QBlock(w.smem.info[s], w.row0, lse, delta, packed_row)

    def next_block(
        self, last: Any, w: Consumer, tile: KvBlock, sums: CapturedSums, place: Any,
        q_count: Int32, kv_count: Int32, note: Any,
    ) -> Any:  # fmt: skip
        """Process a q block that is not the first of its work tile, see `finish_block`."""
        block = self.start_block(False, w, q_count, kv_count)
        return self.finish_block(False, last, w, block, tile, sums, place, q_count, kv_count, note)

    def finish_block(
        self, first: bool, last: Any, w: Consumer, block: QBlock, tile: KvBlock,
        sums: CapturedSums, place: Any, q_count: Int32, kv_count: Int32, note: Any,
    ) -> Any:  # fmt: skip
        """Compute P and dS of a q block, and issue its dV and dK and the previous q block's dQ.

        Args:
            first, last: whether this is the first and the last q block of its work tile.
            w: state of the thread.
            block: the q block.
            tile: values of the kv block.
            sums: sums of the gradients of captured tensors.
            place: chunk of the head's first q block in dQ, and turn of the kv block.
            q_count, kv_count: indices of the q block and the work tile.
            note: chunk and turn of the previous q block's dQ, possibly from the previous work tile.

        Returns:
            Chunk and turn of this q block's dQ.
        """
        c, mma, bars, out = self.config, w.mma, w.bars, w.out
        # P and dS as A operands, viewed in the layout of the accumulator of S
        p, ds = in_layout_of(mma.p, mma.s), in_layout_of(mma.ds, mma.s)
        to_dq = ds  # what dQ = dS K reads from shared memory
        s, phase = q_stage(c, q_count), q_phase(c, q_count)
        v_empty = bars.load.v_empty + out.wg
        if self.by_score:
            warpgroup.wait_group(0)
            self.release_last(last, v_empty)
            self.captured_grads.compute_p_ds(block, tile, mma.s, p, mma.dp, ds, sums, first)
        else:
            groups = cute.size(mma.s) // 4
            dropout = self.softmax.dropout(block, tile, groups)  # draws while S is computed
            warpgroup.wait_group(1)  # S is complete; dP runs during the exponentials
            factors = self.row_slopes.allocate(mma.s)
            self.softmax.compute_p(block, tile, mma.s, mma.s, p, factors)
            entropy = self.softmax.entropy_factors(w.entropy_grads, block, tile, groups)
            warpgroup.wait_group(0)  # dP is complete
            self.release_last(last, v_empty)
            if self.hooks.gradient_levels:
                self.captured_grads.compute_ds(block, tile, mma.s, p, mma.dp, ds, sums)
            elif factors is not None:
                to_dq = self.row_slopes.compute_ds(mma.s, mma.dp, factors, ds, p, dropout)
            else:
                self.softmax.compute_ds(mma.s, p, mma.dp, block.delta, ds, entropy, dropout)
        if self.one_hot is not None:  # do not keep addresses of the stage through the exponentials
            q_count = device.recomputed(q_count, block.word)
            s, phase = q_stage(c, q_count), q_phase(c, q_count)
            block = replace(block, word=out.info[s])
            own = device.recomputed(kv_count, q_count)
            place = self.first_chunk(own, out), place[1]
        # wait until both consumers have read dS of the block that used this stage before
        cute.arch.mbarrier_wait(bars.ds_empty + s, phase ^ 1)
        cute.copy(
            w.ds_copy,
            w.ds_thread.retile(to_dq),
            w.ds_smem[None, None, None, s * CONSUMERS + out.wg],
        )
        # wgmma of both consumers reads dS by the async proxy
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        device.arrive(bars.ds_full + s)
        warpgroup.fence()  # P and dS are operands in registers
        mma.issue_dv(s, first)
        if self.one_hot is not None:
            tile_idx = _before(kv_count) if first else kv_count
            tensors = tile.site.tensors
            site = self.site_of(device.recomputed(tile_idx, q_count), tensors, out)
            # `write_dk_dv` has already waited for the staging, unless it sends chunks itself
            free = first and not c.accumulate
            self.prepare_classes(w, site, q_count, free, kv_count if first else None)
        if (
            first
        ):  # the kernel's first block has no previous one: it issues its own dQ, which is not sent
            mma.issue_dq(bars, _before(q_count), _before(kv_count))
        else:
            mma.issue_dq(bars, q_count - 1, kv_count)
        if self.one_hot is not None:
            self.one_hot.issue(w.classes, mma, _before(q_count))
        mma.issue_dk(s, first)
        warpgroup.wait_group(1)  # dQ is complete; dK runs
        if self.one_hot is not None:
            some = kv_count > 0 if first else cutlass.Boolean(True)
            tile_idx = device.recomputed(tile_idx, q_count)
            site, q_block = self.site_of(tile_idx, tensors, out), self.q_block(tile_idx, note, out)
            self.one_hot.add(w.classes, self.one_hot.places(w.classes, site, q_block), some)
        free = self.one_hot is not None
        next_chunk = None
        if c.writes_dq:  # before a work tile's last chunk, dK and dV pass through the staging
            own = place[0] + 2 * (block.word >> 2)
            next_chunk = cutlass.select_(last, Int32(-1), own)
        elif c.leaders:
            next_chunk = place[0] + 2 * (block.word >> 2)
        if first:
            self.epilogue.send_last_dq(mma.dq, note, out, q_count, kv_count, free, next_chunk)
        else:
            if not c.writes_dq:
                next_chunk = place[0] + 2 * (block.word >> 2)
            self.epilogue.send_dq(mma.dq, note, out, q_count - 1, free, next_chunk, kv_count)
        if self.bias_first is not None:
            t = q_stage(c, q_count + 1)
            wait_unless(last, bars.load.q_full + t, q_phase(c, q_count + 1))
            t = cutlass.select_(last, s, t)
            if c.bias_bytes:
                self.read_bias(last, w, self.q_block_at(w, t), tile, q_count, kv_count)
            else:
                # After the last q block, load its own bias once more: a branch around the loads
                # would take registers.
                self.bias_first.load(self.q_block_at(w, t), tile, mma.s)
        warpgroup.wait_group(0)
        # every lane arrives, because every lane has read LSE and delta
        cute.arch.mbarrier_arrive(bars.load.q_empty + s)
        cute.arch.mbarrier_arrive(bars.load.do_empty + s)
        return place[0] + 2 * (block.word >> 2), place[1]

    def read_bias(
        self, last: Any, w: Consumer, block: QBlock, tile: KvBlock, q_count: Int32, kv_count: Int32
    ) -> None:
        """Initialise the accumulator of S to the copied bias of the next q block.

        Args:
            last: whether the work tile has no next q block.
            w: state of the thread.
            block: the next q block.
            tile: values of the kv block.
            q_count, kv_count: indices of the current q block and the work tile.
        """
        assert w.bias is not None
        assert self.bias_first is not None
        bars = w.bias.bars
        start = tile_start(self.config, w.bias.memory, kv_count, w.out.wg)
        # Tiles are counted without the first q block of each work tile, whose bias is not copied.
        read = ReadTile(start, q_count - kv_count, ~last, self.hooks.bias_type(tile.site))
        self.bias_reader.wait(read, bars.full + w.out.wg)
        biases = self.bias_reader.read(read, w.out.thread)
        self.bias_first.set(block, tile, biases, w.mma.s)
        self.bias_reader.release(read, bars.empty + w.out.wg)

    @cute.jit
    def prepare_classes(
        self, w: Consumer, site: Site, q_count: Int32, free: cutlass.Constexpr, kv_count: Any = None
    ):
        """Write the operand of `one_hot`, when the staging memory of dQ has been read.

        Args:
            w: state of the thread.
            site: the kv block.
            q_count: index of the q block.
            free: whether it is known to have been read.
            kv_count: index of the work tile, if this is its first q block: nothing is staged before
                the first work tile.
        """
        if const_expr(not free):
            if const_expr(kv_count is None):
                wait_staging_empty(w.out.wg)
            elif kv_count > 0:
                wait_staging_empty(w.out.wg)
        self.one_hot.write_operand(w.classes, site, q_count)

    def site_of(self, tile_idx: Int32, captured: list, out: Outputs) -> Site:
        """Return the site of a work tile, read from its record, which saves registers."""
        c, p, record = self.config, out.problem, record_of(self.config, tile_idx & 1)
        kv_block, h, b = (
            out.info[record + i] for i in (WorkTile.KV_BLOCK, WorkTile.HEAD, WorkTile.BATCH)
        )
        scaled = self.lse_in_mma.scale(p.scale)
        return Site(captured, b, h, p.q_len, p.kv_len, scaled, kv_block * c.block_kv)

    def q_block(self, tile_idx: Int32, note: Any, out: Outputs) -> Any:
        """Return the index, in its work tile, of the q block whose dQ `note` describes."""
        return cutlass.max((note[0] - self.first_chunk(tile_idx, out)) // 2, Int32(0))

    def first_chunk(self, tile_idx: Int32, out: Outputs) -> Any:
        """Return the chunk of dQ of the first q block of a work tile's head."""
        c, p, record = self.config, out.problem, record_of(self.config, tile_idx & 1)
        h, b = (out.info[record + i] for i in (WorkTile.HEAD, WorkTile.BATCH))
        return heads_before(c, p, b, h) * (q_blocks_of(c, p) * 2) + out.wg

    @cute.jit
    def release_last(self, last: cutlass.Boolean, barrier: cute.Pointer):
        """Release V of the work tile by arriving at `barrier`, if `last` is set."""
        if last:
            device.arrive(barrier)


def _held_steps(config: BackwardConfig, hooks: BackwardHooks, by_score: bool) -> int:
    """Return the number of k-steps of 16 columns of K that the variant leaves registers for."""
    sums_by_place = any(hooks.gradient_repeats) or config.one_hot
    if hooks.has_derivative or by_score or config.weights or sums_by_place:
        return 0
    # each of these needs registers, and so does a q block of 128 rows: there is room for one
    by_element = hooks.loads_per_element or (hooks.has_mask and hooks.intervals is None)
    if config.rounded + by_element + hooks.loads_per_score > 1:
        return 0
    return HELD_STEPS // 2 if config.with_dropout else HELD_STEPS


def _before(count: Int32) -> Any:
    return cutlass.max(count - 1, Int32(0))
