"""Compute the backward on Hopper (sm_90a) for head dim 256, with a role for each consumer.

As in `backward_hd256`, a CTA takes a kv block of 64 keys and loops over its q blocks, and the
consumer warpgroups split dV += P^T dO, dK += dS^T Q and dQ = dS K by columns. Here consumer 0
computes all of S^T = K Q^T and P, and consumer 1 all of dP^T = V dO^T and dS. A q block takes

    consumer 0:  dV    | dK dQ S of the next block | dQ and P of the next block
    consumer 1:  dV dS | dK dQ                     | dQ and dP of the next block

This reads K and V once per block for S and dP. With half of the rows for each consumer, both would
read all of K and V. A thread of consumer 0 gives P to the same thread of consumer 1, whose
registers have the same elements. In both, P is an operand of dV in registers.

The bandwidth of shared memory is nearly exhausted. dQ nevertheless leaves through it, in two parts
per consumer, by bulk reduce-add. Added from registers, it would take more than twice as long: an SM
sends about 26 bytes per cycle to the L2 cache, and its consumers do nothing else meanwhile. The two
parts are far apart in time, because the first one has to leave before the second one is written.

With a fixed order of sums, the warps that add dQ wait for the turn of each chunk, and another warp
passes turns on, see `backward_deterministic`.

Variants whose score_mod has a slope, sums of gradients of captured tensors score by score, sums in
a fixed order whose dK and dV query heads share, and dropout use `backward_hd256`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.memory
from cutlass import Constexpr, Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp

from attnkit.templates.common import device
from attnkit.templates.common.backward_work import Lists, Problem
from attnkit.templates.common.hooks import BackwardHooks
from attnkit.templates.common.site import Site
from attnkit.templates.common.tma import ordered
from attnkit.templates.common.work_tile import RECORD, WorkTile
from attnkit.templates.sm90.backward_config import ROWS
from attnkit.templates.sm90.backward_deterministic import DeterministicReduce
from attnkit.templates.sm90.backward_dq_reduce import DqReduce, Reduce
from attnkit.templates.sm90.backward_epilogue import LANE_STRIDE, Epilogue, Outputs, Results
from attnkit.templates.sm90.backward_hd256 import BackwardHd256
from attnkit.templates.sm90.backward_hd256_mma import hd256_smem_layouts
from attnkit.templates.sm90.backward_hd256_roles_config import Hd256RolesConfig
from attnkit.templates.sm90.backward_hd256_roles_mma import (
    RolesMma,
    RolesSmemLayouts,
    RolesTiledMmas,
    roles_mma,
    roles_tiled_mmas,
)
from attnkit.templates.sm90.backward_mma import in_layout_of
from attnkit.templates.sm90.backward_producer import LoadTargets
from attnkit.templates.sm90.backward_shared import (
    CLEAR_WARP,
    CONSUMER_THREADS,
    CONSUMERS,
    DQ_WARP,
    LOAD_WARP,
    THREADS,
    WARPGROUP,
    WARPS,
    NamedBarrier,
    RolesBarriers,
    Word,
    init_roles_barriers,
    place_roles_barriers,
    roles_barrier_count,
    row_pairs,
)
from attnkit.templates.sm90.backward_softmax import KvBlock, QBlock

P_WORDS = 16  # 32-bit words of P per thread


@dataclass(frozen=True)
class RolesConsumer:
    """Holds the state of a consumer thread for the whole kernel.

    Attributes:
        mma: operands, accumulators and instructions of the MMAs.
        smem: LSE, delta and words in shared memory.
        bars: mbarriers.
        out: destinations of dQ.
        sums: float32 sums in global memory.
        wg, thread: index of the consumer, and of the thread in it.
        row0: the thread's first row within a q block.
        exchange: the thread's P in shared memory, f32 [4, 4]; a float32 holds two of the dtype.
        copy, part: copy of dS to shared memory, and the thread's slice of it.
        ds_smem: target of the copy: dtype [64, block_q, 1].
    """

    mma: RolesMma
    smem: LoadTargets
    bars: RolesBarriers
    out: Outputs
    sums: cute.Tensor
    wg: Int32
    thread: Int32
    row0: Int32
    exchange: cute.Tensor
    copy: Any
    part: Any
    ds_smem: cute.Tensor


class BackwardHd256Roles(BackwardHd256):
    """Builds the Hopper backward kernel of one configuration and one variant, head dim 256.

    Args:
        config: compile-time configuration.
        hooks: hooks of the variant.

    Raises:
        ValueError: the configuration or the variant is not supported; the message says why.
    """

    config: Hd256RolesConfig
    consumer_barrier = NamedBarrier.EPILOGUE  # chunks of dQ use the first ids

    def __init__(self, config: Hd256RolesConfig, hooks: BackwardHooks) -> None:
        super().__init__(config, hooks)
        if hooks.gradient_levels or hooks.has_derivative:
            raise ValueError(
                "a mod with a slope or gradients of captured tensors: expected neither, as consumer "
                "1 knows only P"
            )
        self.epilogue = Epilogue(config)
        # int32 words in shared memory; reports of complete chunks are the last ones
        self.word_count = Word.COUNT if config.sum_order else Word.HD256_COUNT
        self.ordered = DeterministicReduce(config)
        self.dq_reduce: Reduce = self.ordered
        if not config.sum_order:
            self.dq_reduce = DqReduce(config.chunk, leaves_last=True)

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
        """Launch the kernel; the arguments are those of `backward.Backward`; `totals` is empty."""
        c, dtype = self.config, self.dtype
        head_dim, head_dim_v, bm = c.head_dim, c.head_dim_v, c.block_q
        query, key, value, grad_out, grad_key, grad_value = (  # [S, D, H, B]
            ordered(t, (2, 3, 1, 0)) for t in (query, key, value, grad_out, grad_key, grad_value)
        )
        mmas, shapes = roles_tiled_mmas(c, dtype), hd256_smem_layouts(c, dtype)
        layouts = RolesSmemLayouts(*(getattr(shapes, name) for name in RolesSmemLayouts._fields))
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma = [
            cpasync.make_tiled_tma_atom(op, t, cute.slice_(layout, (None, None, 0)), shape)
            for op, t, layout, shape in (
                (load, query, layouts.q, (bm, head_dim)),
                (load, key, layouts.k, (ROWS, head_dim)),
                (load, value, layouts.v, (ROWS, head_dim_v)),
                (load, grad_out, layouts.do, (bm, head_dim_v)),
                (store, grad_key, layouts.dk, (ROWS, head_dim // 2)),
                (store, grad_value, layouts.dv, (ROWS, head_dim_v // 2)),
            )
        ]

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, roles_barrier_count(c)]
            info: cute.struct.MemRange[Int32, self.word_count]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, c.q_stages * bm], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, c.stages * bm], 128]
            # Run time depends on which fields are below 128 KiB: here half of dO, V and dQ are above.
            # Seven other orders cost 3 to 13 % (docs/hopper.md, "Two halves of shared memory").
            k: cute.struct.Align[cute.struct.MemRange[dtype, ROWS * head_dim], 1024]
            p: cute.struct.Align[cute.struct.MemRange[Float32, P_WORDS * WARPGROUP], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[dtype, ROWS * bm], 1024]
            q: cute.struct.Align[cute.struct.MemRange[dtype, c.q_stages * bm * head_dim], 1024]
            do: cute.struct.Align[cute.struct.MemRange[dtype, c.stages * bm * head_dim_v], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, ROWS * head_dim_v], 1024]
            dq: cute.struct.Align[cute.struct.MemRange[Float32, CONSUMERS * c.chunk], 128]

        self.storage = Storage
        lengths = (query.shape[0], key.shape[0])
        heads = (query.shape[2], key.shape[2], query.shape[3], key.shape[3])
        self.roles_kernel(
            tuple(mmas),
            tuple(mmas),
            tuple(atom for atom, _ in tma),
            tuple(tiles for _, tiles in tma),
            tuple(layouts),
            (lse, delta, items, partial, full, counter, order),
            sums,
            captured,
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
    def roles_kernel(
        self,
        mmas_overwrite: tuple,
        mmas_accumulate: tuple,
        atoms: tuple,
        tiles: tuple,
        layouts: tuple,
        lists: tuple,
        sums: cute.Tensor,
        captured: list,
        sizes: tuple,
    ):
        """Set up shared memory and barriers, then branch to the role of the warp.

        Warp 0 loads, warps 1 and 2 add dQ, and warpgroups 1 and 2 are consumers. With a fixed order
        of sums, warp 3 passes turns.
        """
        c = self.config
        problem, work = Problem(*sizes), Lists(*lists)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        info = storage.info.get_tensor(cute.make_layout(self.word_count))  # int32 [words]
        # f32 [block_q, q_stages] and [block_q, stages]
        smem_lse = storage.lse.get_tensor(cute.make_layout((c.block_q, c.q_stages)))
        smem_delta = storage.delta.get_tensor(cute.make_layout((c.block_q, c.stages)))
        memory = (
            storage.k, storage.v, storage.q, storage.do, storage.ds,
            storage.q, storage.do, storage.ds, storage.k, storage.k, storage.v,
        )  # fmt: skip
        views = RolesSmemLayouts(  # tensors of these shapes
            *(
                part.get_tensor(layout.outer, swizzle=layout.inner)
                for part, layout in zip(memory, layouts, strict=True)
            )
        )
        smem = LoadTargets(views.k, views.v, views.q, views.do, smem_lse, smem_delta, info)
        exchange, staging = storage.p.data_ptr(), storage.dq.data_ptr()
        bars = place_roles_barriers(c, storage.barriers.data_ptr())
        if warp == LOAD_WARP:
            with cute.arch.elect_one():
                init_roles_barriers(c, bars)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()  # the code below reads the preprocess's results

        # set here, because a value that is set in one role cannot be used in another
        for tiled_mma in mmas_overwrite:
            tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        for tiled_mma in mmas_accumulate:
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        if warp < WARPS:
            cute.arch.setmaxregister_decrease(c.producer_registers)
            if warp == LOAD_WARP:
                self.producer.run(atoms[:4], tiles[:4], smem, bars.load, work, problem)
            for wg in cutlass.range_constexpr(CONSUMERS):
                if warp == DQ_WARP + wg:
                    self.dq_reduce.run(wg, staging, info, bars.chunk, sums, work.order)
            if const_expr(c.sum_order):
                if warp == CLEAR_WARP:
                    self.ordered.pass_turns(info, bars.chunk, work.order)
        else:
            cute.arch.setmaxregister_increase(c.consumer_registers)
            if warp < 2 * WARPS:
                self.consume_as(
                    0, (mmas_overwrite, mmas_accumulate), views, smem, (atoms[4:], tiles[4:]),
                    bars, exchange, Results(None, None, staging, sums, None), captured, problem,
                )  # fmt: skip
            else:
                self.consume_as(
                    1, (mmas_overwrite, mmas_accumulate), views, smem, (atoms[4:], tiles[4:]),
                    bars, exchange, Results(None, None, staging, sums, None), captured, problem,
                )  # fmt: skip

    @cute.jit
    def consume_as(
        self,
        wg: Constexpr,
        mmas: tuple,
        views: RolesSmemLayouts,
        smem: LoadTargets,
        store_tma: tuple,
        bars: RolesBarriers,
        exchange: cute.Pointer,
        results: Results,
        captured: list,
        problem: Problem,
    ):
        """Run a consumer warpgroup: its MMAs, P or dS, and the epilogue of each work tile."""
        c, p, info, load = self.config, problem, smem.info, bars.load
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        thread = thread % WARPGROUP
        column0 = (warp % WARPS) * 16 + lane // 4
        out = Outputs(results, p, info, bars, wg, thread)
        w = self.set_up_role(mmas, views, smem, bars, exchange, out, (lane % 4) * 2)
        mma = w.mma
        blocks = (p.q_len + c.block_q - 1) // c.block_q
        kv_blocks = (p.kv_len + c.block_kv - 1) // c.block_kv
        q_tiles, kv_tiles = p.batch * p.heads * blocks, p.kv_batch * p.kv_heads * kv_blocks
        q_count = Int32(0)  # index of the q block
        cute.arch.mbarrier_wait(load.k_full, 0)
        valid = info[RECORD + WorkTile.VALID]
        while valid != 0:
            kv_block, h = info[RECORD + WorkTile.KV_BLOCK], info[RECORD + WorkTile.HEAD]
            b, count = info[RECORD + WorkTile.BATCH], info[RECORD + WorkTile.NUM_BLOCKS]
            first_row = (b * p.heads + h) * blocks
            mma.dk.fill(0.0)
            mma.dv.fill(0.0)
            if const_expr(wg == 0):
                site = Site(captured, b, h, p.q_len, p.kv_len, p.scale, kv_block * c.block_kv)
                tile = self.softmax.begin(site, column0, None)
                if count > 0:
                    word = self.begin_s(w, q_count)
                    warpgroup.wait_group(0)
                    self.compute_next_p(w, tile, word, q_count)
                    for _ in cutlass.range(count - 1, unroll=1):
                        word = self.step_p(False, w, tile, first_row + (word >> 2), q_count)
                        q_count += 1
                    self.step_p(True, w, tile, first_row + (word >> 2), q_count)
                    q_count += 1
            else:
                cute.arch.mbarrier_wait(load.v_full, valid - 1)  # `valid` is 1 + the parity
                if count > 0:
                    cute.arch.mbarrier_wait(load.do_full, q_count & 1)
                    mma.issue_dp()
                    for _ in cutlass.range(count - 1, unroll=1):
                        self.step_ds(False, w, first_row, q_count)
                        q_count += 1
                    self.step_ds(True, w, first_row, q_count)
                    q_count += 1
            # epilogue: read the record again to save registers in the mainloop
            place = (
                info[RECORD + WorkTile.KV_BLOCK],
                info[RECORD + WorkTile.HEAD],
                info[RECORD + WorkTile.BATCH],
            )
            if const_expr(c.accumulate):
                if count > 0:
                    kv_block, h, b = place
                    kv_tile = cutlass.min(b, p.kv_batch - 1) * p.kv_heads + h // p.group
                    kv_tile = kv_tile * kv_blocks + kv_block
                    self.add_shared(w, mma.dk, mma.dv, kv_tile, q_tiles, kv_tiles, [])
            else:
                # dK and dV are stored through the memory of K and V, which both consumers read
                cute.arch.barrier(
                    barrier_id=NamedBarrier.BOTH_CONSUMERS, number_of_threads=CONSUMER_THREADS
                )
                one, scale = Float32(1.0), p.scale
                self.store(w, mma.accumulate.dv, mma.dv, views.dv, store_tma, 1, place, one)
                self.store(w, mma.accumulate.dk, mma.dk, views.dk, store_tma, 0, place, scale)
                if warp % WARPS == 0:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
            parity = info[RECORD + WorkTile.VALID] & 1  # of the next work tile
            # every lane arrives, because every lane has read the record
            cute.arch.mbarrier_arrive(load.k_empty)
            cute.arch.mbarrier_wait(load.k_full, parity)
            valid = info[RECORD + WorkTile.VALID]
        self.epilogue.finish(out)
        if warp % WARPS == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    # ------------------------------------------------ parts of the consumer, inlined while tracing

    def set_up_role(
        self, mmas: tuple, views: RolesSmemLayouts, smem: LoadTargets, bars: RolesBarriers,
        exchange: cute.Pointer, out: Outputs, row0: Int32,
    ) -> RolesConsumer:  # fmt: skip
        """Create the operands and accumulators, and the copies of P and dS to shared memory."""
        overwrite, accumulate = (RolesTiledMmas(*m) for m in mmas)
        mma = roles_mma(self.config, out.wg, out.thread, overwrite, accumulate, views)
        copy = cute.make_tiled_copy_C(
            cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), self.dtype), accumulate.s
        )
        part = copy.get_slice(out.thread)
        own = cute.make_tensor(
            (exchange + out.thread * 4).align(16),
            cute.make_layout((4, P_WORDS // 4), stride=(1, LANE_STRIDE)),
        )
        ds_smem = part.partition_D(views.ds_t)
        sums, wg, thread = out.to.sums, Int32(out.wg), out.thread
        return RolesConsumer(mma, smem, bars, out, sums, wg, thread, row0, own, copy, part, ds_smem)

    def all_rows(self, w: RolesConsumer, values: cute.Tensor, stage: Any) -> cute.Tensor:
        """Return a view of the thread's rows of LSE or delta in shared memory, f32 [2, pairs]."""
        return row_pairs(values, stage, w.row0, self.config.block_q, self.config.block_q)

    # ---------------------------------------------------------------------------- consumer 0: P

    def begin_s(self, w: RolesConsumer, count: Int32) -> Int32:
        """Issue S of the `count`-th q block as soon as its Q is there; return its word."""
        stage = count & 1
        cute.arch.mbarrier_wait(w.bars.load.q_full + stage, (count >> 1) & 1)
        w.mma.issue_s(stage)
        return w.smem.info[stage]

    def compute_next_p(self, w: RolesConsumer, tile: KvBlock, word: Int32, count: Int32) -> None:
        """Compute P of the `count`-th q block and give it to consumer 1."""
        mma = w.mma
        block = QBlock(word, w.row0, self.all_rows(w, w.smem.lse, count & 1))
        p = in_layout_of(mma.p, mma.s)  # P as an A operand, viewed in the layout of S
        self.softmax.compute_p(block, tile, mma.s, mma.s, p)
        cute.arch.mbarrier_wait(w.bars.p_empty, (count & 1) ^ 1)
        cute.autovec_copy(self.words(w), w.exchange)
        cute.arch.sync_warp()
        device.arrive(w.bars.p_full)

    def words(self, w: RolesConsumer) -> cute.Tensor:
        """Return the registers of P as f32 [4, 4]."""
        words = cute.recast_tensor(w.mma.p, Float32)
        return cute.make_tensor(words.iterator, cute.make_layout((4, P_WORDS // 4)))

    def step_p(
        self, last: bool, w: RolesConsumer, tile: KvBlock, row: Int32, count: Int32
    ) -> Int32 | None:
        """Run consumer 0 for a q block whose P it has computed, then compute P of the next block.

        Args:
            last: whether this is the last q block of its work tile.
            w: state of the thread.
            tile: values of the kv block.
            row: index of the q block over all heads.
            count: index of the q block in the CTA.

        Returns:
            The word of the next q block; None for the last one.
        """
        c, mma, bars, load = self.config, w.mma, w.bars, w.bars.load
        word = None
        cute.arch.mbarrier_wait(load.do_full, count & 1)
        mma.issue_dv()
        warpgroup.wait_group(0)
        cute.arch.mbarrier_arrive(load.do_empty)
        cute.arch.mbarrier_wait(bars.ds_full, count & 1)
        mma.issue_dk(count & 1)
        mma.issue_dq(0, c.dq_parts)
        if not last:
            word = self.begin_s(w, count + 1)
        warpgroup.wait_group(0 if last else 1)  # dK and dQ are complete; the next S runs
        # every lane arrives, because every lane has read LSE and the word
        cute.arch.mbarrier_arrive(load.q_empty + (count & 1))
        self.send_dq(w, row, 0)
        mma.issue_dq(1, c.dq_parts)
        if not last:
            warpgroup.wait_group(1)  # S is complete; dQ runs
            self.compute_next_p(w, tile, word, count + 1)
        warpgroup.wait_group(0)
        device.arrive(bars.ds_empty)
        self.send_dq(w, row, 1)
        return word

    # --------------------------------------------------------------------------- consumer 1: dS

    def step_ds(self, last: bool, w: RolesConsumer, first_row: Int32, count: Int32) -> None:
        """Run consumer 1 for a q block whose dP it has issued, then issue dP of the next block.

        Args:
            last: whether this is the last q block of its work tile.
            w: state of the thread.
            first_row: index of the head's first q block.
            count: index of the q block in the CTA.
        """
        c, mma, bars, load = self.config, w.mma, w.bars, w.bars.load
        stage, phase = count & 1, (count >> 1) & 1
        cute.arch.mbarrier_wait(bars.p_full, count & 1)
        cute.autovec_copy(w.exchange, self.words(w))
        # also keeps the compiler from moving the loads behind the fence of dV
        cute.arch.sync_warp()
        device.arrive(bars.p_empty)
        # Wait for all groups. If the assembler had to count groups across iterations, it would
        # serialise the MMAs.
        warpgroup.wait_group(0)
        mma.issue_dv()
        p, ds = in_layout_of(mma.p, mma.s), in_layout_of(mma.ds, mma.s)
        self.softmax.compute_ds(mma.s, p, mma.s, self.all_rows(w, w.smem.delta, 0), ds)
        # wait until both consumers have read dS of the block before
        cute.arch.mbarrier_wait(bars.ds_empty, (count & 1) ^ 1)
        cute.copy(w.copy, w.part.retile(ds), w.ds_smem[None, None, None, 0])
        # wgmma of both consumers reads dS by the async proxy
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        device.arrive(bars.ds_full)
        cute.arch.mbarrier_wait(load.q_full + stage, phase)
        row = first_row + (w.smem.info[stage] >> 2)
        mma.issue_dk(stage)
        warpgroup.wait_group(1)  # dV is complete
        # every lane arrives, because every lane has read delta
        cute.arch.mbarrier_arrive(load.do_empty)
        cute.arch.mbarrier_wait(bars.ds_full, count & 1)  # all warps have written dS
        mma.issue_dq(0, c.dq_parts)
        warpgroup.wait_group(0)
        # every lane arrives, because every lane has read the word
        cute.arch.mbarrier_arrive(load.q_empty + stage)
        self.send_dq(w, row, 0)
        mma.issue_dq(1, c.dq_parts)
        if not last:
            cute.arch.mbarrier_wait(load.do_full, (count + 1) & 1)
            mma.issue_dp()
        warpgroup.wait_group(0 if last else 1)  # dQ is complete; the next dP runs
        device.arrive(bars.ds_empty)
        self.send_dq(w, row, 1)

    def send_dq(self, w: RolesConsumer, row: Int32, part: int) -> None:
        """Give one part of the consumer's columns of a q block's dQ to the warp that adds it."""
        parts = self.config.dq_parts
        chunk = row * (CONSUMERS * parts) + (w.out.wg * parts + part)
        note: tuple = (chunk,)
        if self.config.sum_order:
            note = chunk, w.smem.info[RECORD + WorkTile.KV_BLOCK], Int32(-1)
        self.epilogue.send(w.mma.dq, note, w.out)
