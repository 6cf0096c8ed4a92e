"""Compute the backward on Hopper (sm_90a) for head dims (192, 128), those of MLA.

As in `backward`, a CTA takes a kv block of 128 keys and loops over its q blocks, and each consumer
warpgroup has 64 keys: S^T = K Q^T, dP^T = V dO^T, dV += P^T dO and dK += dS^T Q. dK and dV take 160
of 240 registers, which leaves room for one or two more accumulators at a time:

    tensor cores:  S     dP dV   dK   dQ of the previous q block
    other:           P      dS                                   dQ to memory

dV runs while dS is computed. Otherwise the tensor cores have MMAs of one consumer while the other
computes or waits. dS is exchanged
through shared memory. Each consumer computes its half of the columns of dQ = dS K, of the previous
q block, for which both halves of dS are ready. It adds dQ to float32 sums from registers. Shared
memory has no room to stage it, and its bandwidth is nearly exhausted.

With a fixed order of sums, two warps wait for turns and pass them on while the consumers compute,
see `backward_hd256_deterministic`.

Variants whose score_mod has a slope and gradients of captured tensors use `backward_hd256`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.memory
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp

from attnkit.templates.common import device
from attnkit.templates.common.backward_work import Lists, Problem
from attnkit.templates.common.hooks import BackwardHooks
from attnkit.templates.common.site import Site
from attnkit.templates.common.tma import ordered, partition
from attnkit.templates.common.work_tile import RECORD, WorkTile
from attnkit.templates.sm90.backward_alibi import Alibi
from attnkit.templates.sm90.backward_config import ROWS
from attnkit.templates.sm90.backward_hd192_config import Hd192Config
from attnkit.templates.sm90.backward_hd192_mma import (
    HALVES,
    Hd192Mma,
    Hd192SmemLayouts,
    Hd192TiledMmas,
    hd192_mma,
    hd192_smem_layouts,
    hd192_tiled_mmas,
)
from attnkit.templates.sm90.backward_hd256 import (
    COLUMNS,
    PASS_TURN_WARP,
    WAIT_TURN_WARP,
    add,
)
from attnkit.templates.sm90.backward_hd256_deterministic import Hd256Deterministic
from attnkit.templates.sm90.backward_mma import in_layout_of
from attnkit.templates.sm90.backward_producer import LoadTargets, Producer
from attnkit.templates.sm90.backward_shared import (
    CONSUMER_THREADS,
    LOAD_WARP,
    THREADS,
    WARPGROUP,
    WARPS,
    Hd192Barriers,
    Hd256Barrier,
    Word,
    hd192_barrier_count,
    init_hd192_barriers,
    place_hd192_barriers,
    row_pairs,
)
from attnkit.templates.sm90.backward_softmax import KvBlock, QBlock, SoftmaxBackward


@dataclass(frozen=True)
class Hd192Consumer:
    """Holds the state of a consumer thread for the whole kernel.

    Attributes:
        mma: operands, accumulators and instructions of the MMAs.
        smem: LSE, delta and words in shared memory.
        bars: mbarriers.
        sums: float32 sums in global memory.
        wg, thread: index of the consumer, and of the thread in it.
        row0: the thread's first row within a q block.
        copy, part: copy of dS to shared memory, and the thread's slice of it.
        ds_smem: target of the copy: dtype [64, block_q, halves * stages].
    """

    mma: Hd192Mma
    smem: LoadTargets
    bars: Hd192Barriers
    sums: cute.Tensor
    wg: Int32
    thread: Int32
    row0: Int32
    copy: Any
    part: Any
    ds_smem: cute.Tensor


class BackwardHd192:
    """Builds the Hopper backward kernel of one configuration and one variant, (192, 128).

    Args:
        config: compile-time configuration.
        hooks: hooks of the variant.

    Raises:
        ValueError: the configuration or the variant is not supported; the message says why.
    """

    storage: Any  # struct of a CTA's shared memory, created by `__call__`

    def __init__(self, config: Hd192Config, hooks: BackwardHooks) -> None:
        problem = config.problem()
        if problem:
            raise ValueError(problem)
        if hooks.gradient_levels or hooks.has_derivative:
            raise ValueError(
                "a mod with a slope or gradients of captured tensors: expected neither, as registers "
                "hold no more"
            )
        self.config = config
        self.hooks = hooks
        self.dtype = device.DTYPES[config.dtype]
        self.producer = Producer(config)
        self.softmax = SoftmaxBackward(config, hooks, Alibi(hooks, config.block_q, False))
        self.turns = Hd256Deterministic(config)

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
        mmas, layouts = hd192_tiled_mmas(c, dtype), hd192_smem_layouts(c, dtype)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma = [
            cpasync.make_tiled_tma_atom(op, t, cute.slice_(layout, (None, None, 0)), shape)
            for op, t, layout, shape in (
                (load, query, layouts.q, (bm, head_dim)),
                (load, key, layouts.k, (ROWS, head_dim)),
                (load, value, layouts.v, (ROWS, head_dim_v)),
                (load, grad_out, layouts.do, (bm, head_dim_v)),
                (store, grad_key, layouts.dk, (ROWS, head_dim)),
                (store, grad_value, layouts.dv, (ROWS, head_dim_v)),
            )
        ]

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, hd192_barrier_count(c)]
            info: cute.struct.MemRange[Int32, Word.COUNT]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, c.stages * bm], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, c.stages * bm], 128]
            k: cute.struct.Align[cute.struct.MemRange[dtype, HALVES * ROWS * head_dim], 1024]
            q: cute.struct.Align[cute.struct.MemRange[dtype, c.stages * bm * head_dim], 1024]
            do: cute.struct.Align[cute.struct.MemRange[dtype, c.stages * bm * head_dim_v], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, HALVES * ROWS * head_dim_v], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[dtype, HALVES * c.stages * ROWS * bm], 1024]

        self.storage = Storage
        lengths = (query.shape[0], key.shape[0])
        heads = (query.shape[2], key.shape[2], query.shape[3], key.shape[3])
        self.kernel(
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
    def kernel(
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

        Warp 0 loads, and warpgroups 1 and 2 are consumers. With a fixed order of sums, warps 1 and 2
        wait for turns and pass them on.
        """
        c = self.config
        problem, work = Problem(*sizes), Lists(*lists)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        info = storage.info.get_tensor(cute.make_layout(Word.COUNT))  # int32 [words]
        rows = cute.make_layout((c.block_q, c.stages))
        smem_lse = storage.lse.get_tensor(rows)  # f32 [block_q, stages]
        smem_delta = storage.delta.get_tensor(rows)  # f32 [block_q, stages]
        memory = (
            storage.k, storage.v, storage.q, storage.do, storage.ds,
            storage.q, storage.do, storage.ds, storage.k, storage.k, storage.v,
        )  # fmt: skip
        views = Hd192SmemLayouts(  # tensors of these shapes
            *(
                part.get_tensor(layout.outer, swizzle=layout.inner)
                for part, layout in zip(memory, layouts, strict=True)
            )
        )
        smem = LoadTargets(views.k, views.v, views.q, views.do, smem_lse, smem_delta, info)
        bars = place_hd192_barriers(c, storage.barriers.data_ptr())
        if warp == LOAD_WARP:
            with cute.arch.elect_one():
                init_hd192_barriers(c, bars)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()  # the code below reads the preprocess's results

        if warp < WARPS:
            cute.arch.setmaxregister_decrease(c.producer_registers)
            if warp == LOAD_WARP:
                self.producer.run(atoms[:4], tiles[:4], smem, bars.load, work, problem)
            if const_expr(c.sum_order):
                if warp == WAIT_TURN_WARP:
                    self.turns.wait_turns(bars.turns, info, work.order)
                if warp == PASS_TURN_WARP:
                    self.turns.pass_turns(bars.turns, info, work.order)
        else:
            cute.arch.setmaxregister_increase(c.consumer_registers)
            self.consume(
                (mmas_overwrite, mmas_accumulate), views, smem, (atoms[4:], tiles[4:]), bars,
                sums, captured, work.order, problem,
            )  # fmt: skip

    @cute.jit
    def consume(
        self,
        mmas: tuple,
        views: Hd192SmemLayouts,
        smem: LoadTargets,
        store_tma: tuple,
        bars: Hd192Barriers,
        sums: cute.Tensor,
        captured: list,
        order: list,
        problem: Problem,
    ):
        """Run a consumer warpgroup: the MMAs, P, dS, and the epilogue of each work tile."""
        c, p, info, load = self.config, problem, smem.info, bars.load
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        wg, thread = warp // WARPS - 1, thread % WARPGROUP
        column0 = wg * ROWS + (warp % WARPS) * 16 + lane // 4
        w = self.set_up(mmas, views, smem, bars, sums, wg, thread, (lane % 4) * 2)
        mma = w.mma
        blocks = (p.q_len + c.block_q - 1) // c.block_q
        q_count = Int32(0)  # index of the q block
        for acc in (mma.dk, mma.dv):  # defined before the loop, whose first MMAs overwrite them
            acc.fill(0.0)
        cute.arch.mbarrier_wait(load.k_full, 0)
        valid = info[RECORD + WorkTile.VALID]
        while valid != 0:
            kv_block, h = info[RECORD + WorkTile.KV_BLOCK], info[RECORD + WorkTile.HEAD]
            b, count = info[RECORD + WorkTile.BATCH], info[RECORD + WorkTile.NUM_BLOCKS]
            site = Site(captured, b, h, p.q_len, p.kv_len, p.scale, kv_block * c.block_kv)
            tile = self.softmax.begin(site, column0, None)
            first_row = (b * p.heads + h) * blocks
            cute.arch.mbarrier_wait(load.v_full + wg, valid - 1)  # `valid` is 1 + the parity
            if count > 0:
                row = self.compute_block(True, w, tile, first_row, q_count)
                self.announce(w, 2 * row, q_count)
                q_count += 1
                # mainloop: a q block, then dQ of the one before, whose dS both consumers have written
                for _ in cutlass.range(count - 1, unroll=1):
                    next_row = self.compute_block(False, w, tile, first_row, q_count)
                    self.add_dq(w, row, q_count - 1)
                    self.announce(w, 2 * next_row, q_count)
                    row = next_row
                    q_count += 1
                self.add_dq(w, row, q_count - 1)
            else:
                for acc in (mma.dk, mma.dv):
                    acc.fill(0.0)
            # epilogue
            place = (
                info[RECORD + WorkTile.KV_BLOCK],
                info[RECORD + WorkTile.HEAD],
                info[RECORD + WorkTile.BATCH],
            )
            if const_expr(c.accumulate):
                if count > 0:
                    self.add_shared(w, place, p, order)
            else:
                # dK is stored through the memory of K, which both consumers read for dQ
                cute.arch.barrier(
                    barrier_id=Hd256Barrier.BOTH_CONSUMERS, number_of_threads=CONSUMER_THREADS
                )
                one, scale = Float32(1.0), p.scale
                self.store(w, mma.accumulate.dv, mma.dv, views.dv, store_tma, 1, place, one)
                self.store(w, mma.accumulate.dk, mma.dk, views.dk, store_tma, 0, place, scale)
                if warp % WARPS == 0:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
            parity = info[RECORD + WorkTile.VALID] & 1  # of the next work tile
            cute.arch.sync_warp()  # the warp that stores has read the memory of V
            device.arrive(load.v_empty + wg)
            # every lane arrives, because every lane has read the record
            cute.arch.mbarrier_arrive(load.k_empty)
            cute.arch.mbarrier_wait(load.k_full, parity)
            valid = info[RECORD + WorkTile.VALID]
        if const_expr(c.sum_order):
            self.turns.end(bars.turns, info, q_count, wg, thread)
        if warp % WARPS == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    # ------------------------------------------------ parts of the consumer, inlined while tracing

    def set_up(
        self, mmas: tuple, views: Hd192SmemLayouts, smem: LoadTargets, bars: Hd192Barriers,
        sums: cute.Tensor, wg: Int32, thread: Int32, row0: Int32,
    ) -> Hd192Consumer:  # fmt: skip
        """Create the operands and accumulators, and the copy of dS to shared memory."""
        overwrite, accumulate = (Hd192TiledMmas(*m) for m in mmas)
        # set once here: a value that is set in a helper cannot be used outside of its region
        for tiled_mma in overwrite:
            tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        for tiled_mma in accumulate:
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        mma = hd192_mma(self.config, wg, thread, overwrite, accumulate, views)
        copy = cute.make_tiled_copy_C(
            cute.make_copy_atom(StMatrix8x8x16bOp(True, 4), self.dtype), accumulate.s
        )
        part = copy.get_slice(thread)
        ds_smem = part.partition_D(views.ds_t)
        return Hd192Consumer(mma, smem, bars, sums, wg, thread, row0, copy, part, ds_smem)

    def rows(self, w: Hd192Consumer, values: cute.Tensor, stage: Int32) -> cute.Tensor:
        """Return a view of the thread's rows of LSE or delta in shared memory, f32 [2, pairs]."""
        return row_pairs(values, stage, w.row0, self.config.block_q, self.config.block_q)

    def compute_block(
        self, first: bool, w: Hd192Consumer, tile: KvBlock, first_row: Int32, count: Int32
    ) -> Int32:
        """Compute P and dS of a q block, write dS to shared memory, and add to dV and dK.

        Args:
            first: whether this is the first q block of its work tile, which overwrites dV and dK.
            w: state of the thread.
            tile: values of the kv block.
            first_row: index of the head's first q block.
            count: index of the q block in the CTA.

        Returns:
            The index of the q block over all heads.
        """
        mma, load, tiles = w.mma, w.bars.load, w.bars.tiles
        s, phase = count & 1, (count >> 1) & 1
        # P and dS as A operands, viewed in the layout of the accumulator of S
        p, ds = in_layout_of(mma.p, mma.s), in_layout_of(mma.ds_held, mma.s)
        cute.arch.mbarrier_wait(load.q_full + s, phase)
        word = w.smem.info[s]
        mma.issue_s(s)
        warpgroup.wait_group(0)
        block = QBlock(word, w.row0, self.rows(w, w.smem.lse, s))
        self.softmax.compute_p(block, tile, mma.s, mma.s, p)
        cute.arch.mbarrier_wait(load.do_full + s, phase)
        mma.issue_dp(s)
        mma.issue_dv(s, first)
        warpgroup.wait_group(1)  # dP is complete; dV runs
        self.softmax.compute_ds(mma.s, p, mma.dp, self.rows(w, w.smem.delta, s), ds)
        # wait until both consumers have read dS of the block that used this stage before
        cute.arch.mbarrier_wait(tiles.ds_empty + s, phase ^ 1)
        cute.copy(w.copy, w.part.retile(ds), w.ds_smem[None, None, None, s * HALVES + w.wg])
        # wgmma of both consumers reads dS by the async proxy
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        device.arrive(tiles.ds_full + s)
        mma.issue_dk(s, first)
        warpgroup.wait_group(0)
        # every lane arrives, because every lane has read LSE, delta and the word
        cute.arch.mbarrier_arrive(load.do_empty + s)
        cute.arch.mbarrier_arrive(load.q_empty + s)
        return first_row + (word >> 2)

    def add_dq(self, w: Hd192Consumer, row: Int32, count: Int32) -> None:
        """Compute the consumer's columns of the dQ of a q block and add them to its sums.

        Args:
            w: state of the thread.
            row: index of the q block over all heads.
            count: index of the q block in the CTA.
        """
        s, groups, tiles = count & 1, self.config.head_dim // COLUMNS, w.bars.tiles
        cute.arch.mbarrier_wait(tiles.ds_full + s, (count >> 1) & 1)
        w.mma.issue_dq(s)
        warpgroup.wait_group(0)
        device.arrive(tiles.ds_empty + s)
        if self.config.sum_order:
            self.turns.may_add(w.bars.turns, count)
        add(w.sums, w.mma.dq, row * groups + w.wg * (groups // 2), w.thread)
        if self.config.sum_order:
            self.turns.has_added(w.bars.turns)

    def announce(self, w: Hd192Consumer, chunk: Int32, count: Int32) -> None:
        """Announce the q block whose dQ is added next, if sums have an order.

        The turn of the q block before has come, see `Hd256Deterministic.announce`.

        Args:
            w: state of the thread.
            chunk: index of the q block's semaphore; -1 if no more q blocks follow.
            count: index of the q block in the CTA.
        """
        if self.config.sum_order:
            self.turns.announce(w.bars.turns, w.smem.info, chunk, count, w.wg, w.thread)

    def add_shared(self, w: Hd192Consumer, place: tuple, p: Problem, order: list) -> None:
        """Add dK and dV to the sums that the query heads of a kv head share.

        Args:
            w: state of the thread.
            place: the kv block, head and batch element.
            p: sizes of the launch.
            order: tensors of `common.semaphore.OrderTable`, if sums have an order.
        """
        c, (kv_block, h, b) = self.config, place
        blocks = (p.q_len + c.block_q - 1) // c.block_q
        kv_blocks = (p.kv_len + c.block_kv - 1) // c.block_kv
        tile = (cutlass.min(b, p.kv_batch - 1) * p.kv_heads + h // p.group) * kv_blocks + kv_block
        q_tiles, kv_tiles = p.batch * p.heads * blocks, p.kv_batch * p.kv_heads * kv_blocks
        first = q_tiles * (c.head_dim // COLUMNS)
        turn, turns = (w.smem.info[RECORD + i] for i in (WorkTile.TURN, WorkTile.NUM_TURNS))
        following = cutlass.select_(turn + 1 == turns, Int32(0), turn + 1)
        semaphore = HALVES * (q_tiles + tile) + w.wg
        for acc, head_dim in ((w.mma.dk, c.head_dim), (w.mma.dv, c.head_dim_v)):
            groups = head_dim // COLUMNS
            if c.sum_order:
                self.turns.enter_turn(semaphore, turn, order, w.wg, w.thread)
            add(w.sums, acc, first + (HALVES * tile + w.wg) * groups, w.thread)
            if c.sum_order:
                self.turns.leave_turn(semaphore, following, order, w.wg, w.thread)
            first = first + kv_tiles * HALVES * groups
            semaphore = semaphore + HALVES * kv_tiles

    def store(
        self, w: Hd192Consumer, mma: cute.TiledMma, acc: cute.Tensor, smem: cute.Tensor, tma: tuple,
        which: int, place: tuple, factor: Any,
    ) -> None:  # fmt: skip
        """Round a consumer's rows of dK or dV and store them by TMA.

        Args:
            w: state of the thread.
            mma: the instruction of `acc`.
            acc: f32 [64, columns] / 128 threads.
            smem: dtype [64, columns, halves].
            tma: atoms and tiles of dK and dV.
            which: 0 for dK, 1 for dV.
            place: the kv block, head and batch element.
            factor: multiplies the values.
        """
        copy = cute.make_tiled_copy_C(
            cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), self.dtype), mma
        )
        thr = copy.get_slice(w.thread)
        rounded = cute.make_rmem_tensor(acc.layout, self.dtype)  # dtype [64, columns] / 128 threads
        pairs = cute.recast_tensor(rounded, Int32)
        for i in range(cute.size(pairs)):
            pairs[i] = device.pack(acc[2 * i] * factor, acc[2 * i + 1] * factor, self.dtype)
        cute.copy(copy, thr.retile(rounded), thr.partition_D(smem)[None, None, None, w.wg])
        # TMA reads shared memory by the async proxy
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=Hd256Barrier.CONSUMER + w.wg, number_of_threads=WARPGROUP)
        atoms, tiles = tma
        shape = (ROWS, self.config.head_dim_v if which else self.config.head_dim)
        source, to = partition(atoms[which], smem, tiles[which], shape, (None, 0, None, None))
        self.issue_store(atoms[which], source, to, place, w.wg)

    @cute.jit
    def issue_store(
        self, atom: cute.CopyAtom, source: cute.Tensor, to: cute.Tensor, place: tuple, wg: Int32
    ):
        """Issue the TMA store of a consumer's rows from its first warp."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp % WARPS == 0:
            kv_block, h, b = place
            cute.copy(atom, source[None, wg], to[None, HALVES * kv_block + wg, h, b])
            cute.arch.cp_async_bulk_commit_group()
