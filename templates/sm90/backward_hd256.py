"""Compute the backward on Hopper (sm_90a) for head dims above 128.

As in `backward`, a CTA takes a kv block and loops over its q blocks. A warpgroup that computes the
scores of a block has no registers for all of its dK and dV. A block therefore has 64 positions, and
the two consumers split the MMAs: S^T = K Q^T and dP^T = V dO^T by rows of the q block; dV +=
P^T dO, dK += dS^T Q and dQ = dS K by columns. P and dS are exchanged through shared memory.

    tensor cores: S dP | dV dQ dK S dP | dV ...

P is computed while dP runs, and dS while dV runs. S and dP of the next q block follow dQ and dK.

dQ is added to its float32 sums directly from registers, 512 contiguous bytes per warp instruction,
while dK and the next S, or the next dP and dV, run. Staging dQ in shared memory would take a third
of the shared memory bandwidth, which limits these MMAs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Protocol

import cutlass
import cutlass.memory
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp

from attnkit.templates.common import device
from attnkit.templates.common.backward_work import Lists, Problem
from attnkit.templates.common.dropout import DropoutState
from attnkit.templates.common.hooks import BackwardHooks
from attnkit.templates.common.place_runs import CapturedSums
from attnkit.templates.common.site import Site
from attnkit.templates.common.tma import ordered, partition
from attnkit.templates.common.work_tile import RECORD, WorkTile
from attnkit.templates.sm90.backward_alibi import Alibi
from attnkit.templates.sm90.backward_captured_grads import CapturedGrads
from attnkit.templates.sm90.backward_config import ROWS
from attnkit.templates.sm90.backward_hd256_config import Hd256Config
from attnkit.templates.sm90.backward_hd256_deterministic import Hd256Deterministic
from attnkit.templates.sm90.backward_hd256_mma import (
    Hd256Mma,
    Hd256SmemLayouts,
    Hd256TiledMmas,
    hd256_mma,
    hd256_smem_layouts,
    hd256_tiled_mmas,
)
from attnkit.templates.sm90.backward_producer import LoadTargets, Producer
from attnkit.templates.sm90.backward_shared import (
    CONSUMER_THREADS,
    LOAD_WARP,
    THREADS,
    WARPGROUP,
    WARPS,
    Hd256Barrier,
    Hd256Barriers,
    Partial,
    Word,
    do_phase,
    do_stage,
    hd256_barrier_count,
    init_hd256_barriers,
    place_hd256_barriers,
    row_pairs,
)
from attnkit.templates.sm90.backward_softmax import KvBlock, QBlock, SoftmaxBackward

WAIT_TURN_WARP, PASS_TURN_WARP = 1, 2  # used only if sums have a fixed order
GROUP = 512  # floats per group: 64 rows and 8 columns of a sum
COLUMNS = 8  # columns per group


@dataclass(frozen=True)
class Hd256Consumer:
    """Holds the state of a consumer thread for the whole kernel.

    Attributes:
        mma: operands and instructions of the MMAs.
        smem: LSE, delta and words in shared memory.
        bars: mbarriers.
        exchange: memory for sums with another CTA, see `Exchange`; None for none.
        sums: float32 sums in global memory.
        wg, thread: index of the consumer, and of the thread in it.
        row0: the thread's first row within a q block.
        copy, part: copy of P and dS to shared memory, and the thread's slice of it.
        p_smem, ds_smem: targets of the copy: dtype [64, block_q / 2, stages] and [64, block_q / 2,
            1].
        scores: S, f32 [64, block_q / 2] / 128 threads.
        dp: dP - delta, f32 [64, block_q / 2] / 128 threads.
        dq: a part of dQ, f32 [64, columns] / 128 threads.
        p: P, dtype [64, block_q / 2] / 128 threads.
        words: int32 [2], the random bits of dropout, see `sm90.dropout`; None without dropout.
    """

    mma: Hd256Mma
    smem: LoadTargets
    bars: Hd256Barriers
    exchange: Any
    sums: cute.Tensor
    wg: Int32
    thread: Int32
    row0: Int32
    copy: Any
    part: Any
    p_smem: cute.Tensor
    ds_smem: cute.Tensor
    scores: cute.Tensor
    dp: cute.Tensor
    dq: cute.Tensor
    p: cute.Tensor
    words: cute.Tensor | None


class ColumnsOwner(Protocol):
    """Describes what the epilogue reads of a consumer that has half of the columns of dK and dV."""

    @property
    def smem(self) -> LoadTargets: ...
    @property
    def sums(self) -> cute.Tensor: ...
    @property
    def wg(self) -> Int32 | int: ...
    @property
    def thread(self) -> Int32: ...


class BackwardHd256:
    """Builds the Hopper backward kernel of one configuration and one variant, head dims above 128.

    Args:
        config: compile-time configuration.
        hooks: hooks of the variant.

    Raises:
        ValueError: the configuration is not supported; the message says why.
    """

    storage: Any  # struct of a CTA's shared memory, created by `__call__`
    consumer_barrier: IntEnum = Hd256Barrier.CONSUMER  # add the index of the consumer warpgroup
    ctas_per_tile = 1  # CTAs of a cluster, which share a work tile

    def __init__(self, config: Hd256Config, hooks: BackwardHooks) -> None:
        problem = config.problem()
        if problem:
            raise ValueError(problem)
        self.config = config
        self.hooks = hooks
        self.dtype = device.DTYPES[config.dtype]
        self.producer = Producer(config)
        self.softmax = SoftmaxBackward(config, hooks, Alibi(hooks, config.block_q, False))
        self.captured_grads = CapturedGrads(config, self.softmax)
        self.deterministic = Hd256Deterministic(config)
        # with few registers left, add dQ to memory before P is computed
        self.tight = bool(hooks.gradient_levels)

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
        """Launch the kernel; the arguments are those of `backward.Backward`.

        The semaphores of `order` are two per q block, of which one is used, then two per kv block
        for dK, then two per kv block for dV.
        """
        c, dtype = self.config, self.dtype
        head_dim, head_dim_v, bm = c.head_dim, c.head_dim_v, c.block_q
        query, key, value, grad_out, grad_key, grad_value = (  # [S, D, H, B]
            ordered(t, (2, 3, 1, 0)) for t in (query, key, value, grad_out, grad_key, grad_value)
        )

        mmas, layouts = hd256_tiled_mmas(c, dtype), hd256_smem_layouts(c, dtype)
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

        self.storage = cute.struct(type("Storage", (), {"__annotations__": self.fields()}))
        lengths = (query.shape[0], key.shape[0])
        heads = (query.shape[2], key.shape[2], query.shape[3], key.shape[3])
        self.kernel(
            (mmas.s, mmas.dq),
            tuple(mmas),
            tuple(atom for atom, _ in tma),
            tuple(tiles for _, tiles in tma),
            tuple(layouts),
            (lse, delta, items, partial, full, counter, order),
            sums,
            captured,
            totals,
            (scale, group, *lengths, *heads),
        ).launch(
            grid=(ctas * self.ctas_per_tile, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(self.ctas_per_tile, 1, 1) if const_expr(self.ctas_per_tile > 1) else None,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    def barrier_count(self) -> int:
        """Return the number of mbarriers."""
        return hd256_barrier_count(self.config)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a CTA's shared memory, in the order of their addresses."""
        c, dtype, bm = self.config, self.dtype, self.config.block_q
        sizes = {  # of the dtype
            "k": ROWS * c.head_dim,
            "p": c.p_stages * ROWS * bm,
            "ds": ROWS * bm,
            "q": c.q_stages * bm * c.head_dim,
            "do": c.stages * bm * c.head_dim_v,
            "v": ROWS * c.head_dim_v,
        }
        # Run time depends on which fields are below 128 KiB: at head dim 256, all but dO and V
        # (docs/hopper.md, "Two halves of shared memory").
        aligned, of = cute.struct.Align, cute.struct.MemRange
        return {
            "barriers": of[Int64, self.barrier_count()],
            "info": of[Int32, Word.HD256_COUNT],
            "lse": aligned[of[Float32, c.q_stages * bm], 128],
            "delta": aligned[of[Float32, c.stages * bm], 128],
        } | {name: aligned[of[dtype, size], 1024] for name, size in sizes.items()}

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
        totals: list,
        sizes: tuple,
    ):
        """Set up shared memory and barriers, then branch to the role of the warp.

        Warp 0 loads, warps 1 and 2 keep the order of sums, and warpgroups 1 and 2 are consumers.
        """
        c = self.config
        count = len(captured) - (1 if const_expr(c.with_dropout) else 0)
        captured, others = captured[:count], captured[count:]
        problem, work = Problem(*sizes), Lists(*lists)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        info = storage.info.get_tensor(cute.make_layout(Word.HD256_COUNT))  # int32 [words]
        # f32 [block_q, q_stages] and [block_q, stages]
        smem_lse = storage.lse.get_tensor(cute.make_layout((c.block_q, c.q_stages)))
        smem_delta = storage.delta.get_tensor(cute.make_layout((c.block_q, c.stages)))
        memory = (
            storage.k, storage.v, storage.q, storage.do, storage.p, storage.ds,
            storage.q, storage.do, storage.ds, storage.k, storage.k, storage.v,
        )  # fmt: skip
        views = Hd256SmemLayouts(  # tensors of these shapes
            *(
                part.get_tensor(layout.outer, swizzle=layout.inner)
                for part, layout in zip(memory, layouts, strict=True)
            )
        )
        smem = LoadTargets(views.k, views.v, views.q, views.do, smem_lse, smem_delta, info)
        bars = self.place_barriers(storage.barriers.data_ptr())
        if warp == LOAD_WARP:
            with cute.arch.elect_one():
                self.init_barriers(bars)
        cute.arch.mbarrier_init_fence()
        self.sync_all()
        cute.arch.griddepcontrol_wait()  # the code below reads the preprocess's results
        tiles = self.own_columns(tiles)

        if warp < WARPS:
            cute.arch.setmaxregister_decrease(c.producer_registers)
            if warp == LOAD_WARP:
                self.producer.run(atoms[:4], tiles[:4], smem, bars.load, work, problem)
            if const_expr(c.sum_order):
                if warp == WAIT_TURN_WARP:
                    self.deterministic.wait_turns(bars.turns, info, work.order)
                if warp == PASS_TURN_WARP:
                    self.deterministic.pass_turns(bars.turns, info, work.order)
        else:
            cute.arch.setmaxregister_increase(c.consumer_registers)
            self.consume(
                (mmas_overwrite, mmas_accumulate), views, smem, (atoms[4:], tiles[4:]), bars,
                self.exchange_of(storage), sums, (captured, others), totals, work.order, problem,
            )  # fmt: skip
        self.end()

    @cute.jit
    def consume(
        self,
        mmas: tuple,
        views: Hd256SmemLayouts,
        smem: LoadTargets,
        store_tma: tuple,
        bars: Hd256Barriers,
        exchange: Any,
        sums: cute.Tensor,
        read: tuple,
        totals: list,
        order: list,
        problem: Problem,
    ):
        """Run a consumer warpgroup: the MMAs, P, dS, and the epilogue of each work tile.

        `read` are the captured tensors, and the state of dropout if there is one. `exchange` is
        None unless two CTAs share a work tile, see `backward_hd512`.
        """
        captured, others = read
        c, p, info, load = self.config, problem, smem.info, bars.load
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        wg, thread = warp // WARPS - 1, thread % WARPGROUP
        bm = c.block_q
        column0 = (warp % WARPS) * 16 + lane // 4
        row0 = wg * (bm // 2) + (lane % 4) * 2
        w, dk, dv = self.set_up(mmas, views, smem, bars, exchange, sums, wg, thread, row0)
        mma, scores, dp, dq = w.mma, w.scores, w.dp, w.dq
        mma_dv, mma_dk = mma.accumulate.dv, mma.accumulate.dk
        blocks = (p.q_len + bm - 1) // bm
        kv_blocks = (p.kv_len + c.block_kv - 1) // c.block_kv
        # number of q and kv blocks of all heads, for the offsets of sums and semaphores
        q_tiles, kv_tiles = p.batch * p.heads * blocks, p.kv_batch * p.kv_heads * kv_blocks
        learned = self.captured_grads.begin(totals)
        q_count = Int32(0)  # index of the q block
        cute.arch.mbarrier_wait(load.k_full, 0)
        valid = info[RECORD + WorkTile.VALID]
        while valid != 0:
            kv_block, h = info[RECORD + WorkTile.KV_BLOCK], info[RECORD + WorkTile.HEAD]
            b, count = info[RECORD + WorkTile.BATCH], info[RECORD + WorkTile.NUM_BLOCKS]
            origin = kv_block * c.block_kv
            site = Site(captured, b, h, p.q_len, p.kv_len, p.scale, origin)
            dropout = None
            if const_expr(c.with_dropout):
                dropout = DropoutState.read(others[0], b * p.heads + h)
            tile = self.softmax.begin(site, column0, dropout)
            self.captured_grads.reset(learned)
            first_row = (b * p.heads + h) * blocks
            dk.fill(0.0)
            dv.fill(0.0)
            cute.arch.mbarrier_wait(load.v_full, valid - 1)  # `valid` is 1 + the parity
            if count > 0:
                # first q block: S, then dP while P is computed
                r = q_count & 1
                cute.arch.mbarrier_wait(load.q_full + r, (q_count >> 1) & 1)
                mma.issue_s(scores, r)
                warpgroup.wait_group(0)
                self.send_partial(w, Partial.S, scores, q_count)
                s = do_stage(c, q_count)
                cute.arch.mbarrier_wait(load.do_full + s, do_phase(c, q_count))
                mma.issue_dp(dp, self.rows(smem.delta, s, row0), s)
                word = info[r]
                self.announce(w, first_row, word, q_count)
                self.add_partial(w, Partial.S, scores, q_count)
                self.compute_p(w, word, tile, scores, r, r)
                # mainloop: dV, dS, dQ and dK of this q block, then S, dP and P of the next one
                for _ in cutlass.range(count - 1, unroll=1):
                    s, t = q_count & 1, (q_count + 1) & 1  # stages of both
                    self.begin_dv(w, dv, q_count)
                    self.compute_ds(w, word, tile, q_count, learned)
                    mma.issue_dq(dq, 0)
                    mma.issue_dk(dk, s)
                    cute.arch.mbarrier_wait(load.q_full + t, ((q_count + 1) >> 1) & 1)
                    next_scores = self.next_scores(scores)
                    mma.issue_s(next_scores, t)
                    next_word = info[t]
                    warpgroup.wait_group(2)  # dV and dQ are complete; dK and the next S run
                    cute.arch.mbarrier_arrive(load.do_empty + do_stage(c, q_count))
                    self.add_dq(w, first_row, word, q_count, 0)
                    self.announce(w, first_row, next_word, q_count + 1)
                    if const_expr(c.dq_parts == 2):
                        mma.issue_dq(dq, 1)
                    u = do_stage(c, q_count + 1)
                    cute.arch.mbarrier_wait(load.do_full + u, do_phase(c, q_count + 1))
                    mma.issue_dp(dp, self.rows(smem.delta, u, row0), u)
                    # dK and S are complete; dP runs, and the second part of dQ if there is one
                    warpgroup.wait_group(c.dq_parts)
                    cute.arch.mbarrier_arrive(load.q_empty + s)
                    self.send_partial(w, Partial.S, next_scores, q_count + 1)
                    if const_expr(c.dq_parts == 2 and self.tight):
                        warpgroup.wait_group(1)
                        self.add_dq(w, first_row, word, q_count, 1)
                    self.add_partial(w, Partial.S, next_scores, q_count + 1)
                    block = QBlock(next_word, row0, self.rows(smem.lse, t, row0))
                    self.softmax.compute_p(block, tile, next_scores, scores, w.p)
                    warpgroup.wait_group(1)  # this consumer's MMAs no longer read dS
                    self.write_p(w, block, tile, t)
                    if const_expr(c.dq_parts == 2 and not self.tight):
                        self.add_dq(w, first_row, word, q_count, 1)
                    word = next_word
                    q_count += 1
                # last q block: nothing to issue ahead
                s = q_count & 1
                self.begin_dv(w, dv, q_count)
                self.compute_ds(w, word, tile, q_count, learned)
                mma.issue_dq(dq, 0)
                mma.issue_dk(dk, s)
                warpgroup.wait_group(1)  # dV and dQ are complete; dK runs
                cute.arch.mbarrier_arrive(load.do_empty + do_stage(c, q_count))
                self.add_dq(w, first_row, word, q_count, 0)
                for part in cutlass.range_constexpr(1, c.dq_parts):
                    mma.issue_dq(dq, part)
                    warpgroup.wait_group(0)
                    self.add_dq(w, first_row, word, q_count, part)
                warpgroup.wait_group(0)
                cute.arch.mbarrier_arrive(load.q_empty + s)
                q_count += 1
                # read the record again, here and below, to save registers in the mainloop
                kv_block, h = info[RECORD + WorkTile.KV_BLOCK], info[RECORD + WorkTile.HEAD]
                b = info[RECORD + WorkTile.BATCH]
                origin = kv_block * c.block_kv
                site = Site(captured, b, h, p.q_len, p.kv_len, p.scale, origin)
                self.captured_grads.flush(replace(tile, site=site), learned)
            # epilogue
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
                    self.add_shared(w, dk, dv, kv_tile, q_tiles, kv_tiles, order)
                    cute.arch.barrier(
                        barrier_id=Hd256Barrier.CONSUMER + wg, number_of_threads=WARPGROUP
                    )
            else:
                # dK and dV are stored through the memory of K and V, which both consumers read
                cute.arch.barrier(
                    barrier_id=Hd256Barrier.BOTH_CONSUMERS, number_of_threads=CONSUMER_THREADS
                )
                one, scale = Float32(1.0), p.scale
                self.store(w, mma_dv, dv, views.dv, store_tma, 1, place, one)
                self.store(w, mma_dk, dk, views.dk, store_tma, 0, place, scale)
                if warp % WARPS == 0:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
            parity = info[RECORD + WorkTile.VALID] & 1  # of the next work tile
            # every lane arrives, because every lane has read the record
            cute.arch.mbarrier_arrive(load.k_empty)
            cute.arch.mbarrier_wait(load.k_full, parity)
            valid = info[RECORD + WorkTile.VALID]
        if const_expr(c.sum_order):
            self.deterministic.end(bars.turns, info, q_count, wg, thread)
        if warp % WARPS == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    # --------------------------- what differs if two CTAs share a work tile, see `backward_hd512`

    def place_barriers(self, base: cute.Pointer) -> Hd256Barriers:
        """Return the mbarriers, laid out in shared memory from address `base`."""
        return place_hd256_barriers(self.config, base)

    def init_barriers(self, bars: Hd256Barriers) -> None:
        """Initialise the mbarriers; called by one thread."""
        init_hd256_barriers(self.config, bars)

    def sync_all(self) -> None:
        """Synchronise the threads that use the mbarriers."""
        cute.arch.sync_threads()

    def end(self) -> None:
        """Wait until no other CTA reads or writes the memory of this CTA."""

    def own_columns(self, tiles: tuple) -> tuple:
        """Return the TMA tensors from the first column of this CTA on."""
        return tiles

    def exchange_of(self, storage: Any) -> Any:
        """Return the memory in which sums with another CTA are formed; None for none."""
        return None

    def send_partial(
        self, w: Hd256Consumer, which: Partial, acc: cute.Tensor, count: Int32
    ) -> None:
        """Send S or dP of this CTA's columns, of the `count`-th q block, to the other CTA."""

    def add_partial(
        self, w: Hd256Consumer, which: Partial, acc: cute.Tensor, count: Int32
    ) -> None:  # fmt: skip
        """Add S or dP of the other CTA's columns, of the `count`-th q block."""

    def groups(self, head_dim: int) -> int:
        """Return how many groups of `COLUMNS` columns a row of dQ, dK or dV has in float32 memory.

        `head_dim` is the number of columns of this CTA.
        """
        return head_dim // COLUMNS

    def first_group(self, row: Int32, head_dim: int) -> Any:
        """Return the index of this CTA's first group of columns in a row, see `groups`."""
        return row * self.groups(head_dim)

    # ------------------------------------------------ parts of the consumer, inlined while tracing

    def set_up(
        self, mmas: tuple, views: Hd256SmemLayouts, smem: LoadTargets, bars: Hd256Barriers,
        exchange: Any, sums: cute.Tensor, wg: Int32, thread: Int32, row0: Int32,
    ) -> tuple[Hd256Consumer, cute.Tensor, cute.Tensor]:  # fmt: skip
        """Create the operands and accumulators of a consumer thread.

        Returns:
            The consumer, and its dK and dV: f32 [64, head_dim / 2] and [64, head_dim_v / 2] / 128
            threads.
        """
        c, dtype, bm = self.config, self.dtype, self.config.block_q
        overwrite, accumulate = mmas[0], Hd256TiledMmas(*mmas[1])
        mma = hd256_mma(c, wg, overwrite, accumulate, views)

        def registers(tiled_mma: Any, columns: int) -> Any:
            return cute.make_rmem_tensor(  # f32 [64, columns] / 128 threads
                tiled_mma.get_slice(thread).partition_shape_C((ROWS, columns)), Float32
            )

        # the order of these allocations affects the assembler's register allocation
        scores, dp = registers(accumulate.s, bm // 2), registers(accumulate.s, bm // 2)
        dk = registers(accumulate.dk, c.head_dim // 2)
        dv = registers(accumulate.dv, c.head_dim_v // 2)
        dq = registers(accumulate.dq, c.head_dim // 2 // c.dq_parts)
        p = cute.make_rmem_tensor(scores.layout, dtype)  # dtype [64, block_q / 2] / 128 threads
        words = None
        if c.with_dropout:
            words = cute.make_rmem_tensor(2, Int32)
        # set once here: a value that is set in a helper cannot be used outside of its region
        for tiled_mma in overwrite:
            tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        for tiled_mma in accumulate:
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        copy = cute.make_tiled_copy_C(
            cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), dtype), accumulate.s
        )
        part = copy.get_slice(thread)
        p_smem, ds_smem = (
            part.partition_D(cute.local_tile(view, (ROWS, bm // 2), (0, wg, None)))
            for view in (views.p_t, views.ds_t)
        )
        consumer = Hd256Consumer(
            mma,
            smem,
            bars,
            exchange,
            sums,
            wg,
            thread,
            row0,
            copy,
            part,
            p_smem,
            ds_smem,
            scores,
            dp,
            dq,
            p,
            words,
        )
        return consumer, dk, dv

    def rows(self, values: cute.Tensor, stage: Int32, row0: Int32) -> cute.Tensor:
        """Return a view of the thread's rows of LSE or delta in shared memory, f32 [2, pairs]."""
        return row_pairs(values, stage, row0, self.config.block_q, self.config.block_q // 2)

    def next_scores(self, scores: cute.Tensor) -> cute.Tensor:
        """Return registers for S of the next q block, f32 [64, block_q / 2] / 128 threads.

        With gradients of captured tensors these are the registers of `scores`, otherwise new ones;
        the choice avoids register spills.
        """
        if self.hooks.gradient_levels:
            return scores
        return cute.make_rmem_tensor(scores.layout, Float32)

    def compute_p(
        self,
        w: Hd256Consumer,
        word: Int32,
        tile: KvBlock,
        scores: cute.Tensor,
        q_stage: Int32,
        stage: Int32,
    ) -> None:
        """Compute P of the first q block and write it to shared memory."""
        block = QBlock(word, w.row0, self.rows(w.smem.lse, q_stage, w.row0))
        self.softmax.compute_p(block, tile, scores, scores, w.p)
        self.write_p(w, block, tile, stage)

    def write_p(self, w: Hd256Consumer, block: QBlock, tile: KvBlock, stage: Int32) -> None:
        """Write P to shared memory, without the elements that dropout drops."""
        kept, dropout = w.p, self.softmax.dropout(block, tile, cute.size(w.p) // 4)
        if dropout is not None:
            kept = cute.make_rmem_tensor(w.p.layout, self.dtype)  # dtype [64, block_q / 2] / 128
            pairs, results = (cute.recast_tensor(t, Int32) for t in (w.p, kept))
            for i in range(cute.size(pairs)):
                results[i] = dropout.p(2 * i, pairs[i])
            dropout.keep_words(w.words)
        self.write(w, kept, w.p_smem[None, None, None, stage])

    def begin_dv(self, w: Hd256Consumer, dv: cute.Tensor, count: Int32) -> None:
        """Wait for P of both consumers and for dP, then issue dV of the `count`-th q block."""
        self.meet()
        # Wait for all groups before dV. If the assembler had to count groups across iterations, it
        # would serialise the MMAs.
        warpgroup.wait_group(0)
        self.send_partial(w, Partial.DP, w.dp, count)
        w.mma.issue_dv(dv, count & 1, do_stage(self.config, count))

    def compute_ds(
        self, w: Hd256Consumer, word: Int32, tile: KvBlock, count: Int32, learned: CapturedSums
    ) -> None:
        """Compute dS in registers and write it to shared memory, while dV runs."""
        self.add_partial(w, Partial.DP, w.dp, count)
        lse = self.rows(w.smem.lse, count & 1, w.row0)
        delta = self.rows(w.smem.delta, do_stage(self.config, count), w.row0)
        ds = cute.make_rmem_tensor(w.scores.layout, self.dtype)  # dtype [64, block_q / 2] / 128
        if self.hooks.gradient_levels:
            block = QBlock(word, w.row0, lse, delta)
            self.captured_grads.compute(
                block, None, tile, w.scores, w.p, w.dp, ds, learned, words=w.words
            )
        else:
            block = QBlock(word, w.row0, lse, delta)
            dropout = self.softmax.dropout(block, tile, cute.size(w.dp) // 4, w.words)
            self.softmax.compute_ds(w.scores, w.p, w.dp, None, ds, dropout=dropout)
        self.write(w, ds, w.ds_smem[None, None, None, 0])
        self.meet()

    def write(self, w: Hd256Consumer, values: Any, to: Any) -> None:
        """Write the consumer's half of P or dS to shared memory, for the MMAs of both consumers."""
        cute.copy(w.copy, w.part.retile(values), to)
        # wgmma of both consumers reads the values by the async proxy
        cute.arch.fence_proxy("async.shared", space="cta")
        # This makes the assembler wait for the fence here. Otherwise it waits only at the barrier,
        # after the loop's branch, and the other warps read old values on an H200.
        cute.arch.sync_warp()

    def meet(self) -> None:
        """Synchronise both consumers, so that each sees the other's half of P or dS."""
        cute.arch.barrier(
            barrier_id=Hd256Barrier.BOTH_CONSUMERS, number_of_threads=CONSUMER_THREADS
        )

    def announce(self, w: Hd256Consumer, first_row: Int32, word: Int32, count: Int32) -> None:
        """Announce the q block whose turn the `count`-th dQ needs, if sums have a fixed order."""
        if self.config.sum_order:
            chunk = 2 * (first_row + (word >> 2))
            self.deterministic.announce(w.bars.turns, w.smem.info, chunk, count, w.wg, w.thread)

    def add_dq(
        self, w: Hd256Consumer, first_row: Int32, word: Int32, count: Int32, part: int
    ) -> None:
        """Add one part of the `count`-th q block's dQ to its sums.

        Args:
            w: state of the thread.
            first_row: index of the head's first q block.
            word: word of the q block.
            count: index of the q block in the CTA.
            part: index of the part.
        """
        c = self.config
        row, own = first_row + (word >> 2), c.head_dim // COLUMNS // 2  # own: groups per consumer
        to = self.first_group(row, c.head_dim) + w.wg * own + part * (own // c.dq_parts)
        if c.sum_order and part == 0:
            self.deterministic.may_add(w.bars.turns, count)
        add(w.sums, w.dq, to, w.thread)
        if c.sum_order and part == c.dq_parts - 1:
            self.deterministic.has_added(w.bars.turns)

    def add_shared(
        self, w: ColumnsOwner, dk: cute.Tensor, dv: cute.Tensor, kv_tile: Int32, q_tiles: Int32,
        kv_tiles: Int32,
        order: Any,
    ) -> None:  # fmt: skip
        """Add dK and dV to the sums that the query heads of a kv head share.

        Args:
            w: state of the thread.
            dk, dv: accumulators.
            kv_tile: index of the kv block, counted over all kv heads.
            q_tiles, kv_tiles: number of q blocks and of kv blocks over all heads.
            order: tensors of `common.semaphore.OrderTable`.
        """
        c, wg, info = self.config, w.wg, w.smem.info
        turn, turns = info[RECORD + WorkTile.TURN], info[RECORD + WorkTile.NUM_TURNS]
        following = cutlass.select_(turn + 1 == turns, Int32(0), turn + 1)
        first, semaphore = q_tiles * self.groups(c.head_dim), q_tiles
        for acc, head_dim in ((dk, c.head_dim), (dv, c.head_dim_v)):
            own = head_dim // COLUMNS // 2
            to = first + self.first_group(kv_tile, head_dim) + wg * own
            chunk = 2 * (semaphore + kv_tile) + wg
            if c.sum_order:
                self.deterministic.enter_turn(chunk, turn, order, wg, w.thread)
            add(w.sums, acc, to, w.thread)
            if c.sum_order:
                self.deterministic.leave_turn(chunk, following, order, wg, w.thread)
            first = first + kv_tiles * self.groups(head_dim)
            semaphore = semaphore + kv_tiles

    def store(
        self, w: ColumnsOwner, mma: cute.TiledMma, acc: cute.Tensor, smem: cute.Tensor, tma: tuple,
        which: int, place: tuple,
        factor: Any,
    ) -> None:  # fmt: skip
        """Round a consumer's columns of dK or dV and store them by TMA.

        Args:
            w: state of the thread.
            mma: the instruction of `acc`.
            acc: f32 [64, columns] / 128 threads.
            smem: dtype [64, columns, 2].
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
        cute.arch.barrier(barrier_id=self.consumer_barrier + w.wg, number_of_threads=WARPGROUP)
        atoms, tiles = tma
        shape = (ROWS, (self.config.head_dim_v if which else self.config.head_dim) // 2)
        source, to = partition(atoms[which], smem, tiles[which], shape, (None,) * 4)
        self.issue_store(atoms[which], source, to, place, w.wg)

    @cute.jit
    def issue_store(
        self, atom: cute.CopyAtom, source: cute.Tensor, to: cute.Tensor, place: tuple, wg: Int32
    ):
        """Issue the TMA store of a consumer's columns from its first warp."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        stores = warp % WARPS == 0
        if const_expr(cute.size(to, mode=[2]) == 1):
            # All columns of the gradient are consumer 0's. As the index of a single tile, 1 would be
            # taken for 0.
            stores = stores & (wg == 0)
        if stores:
            cute.copy(atom, source[None, wg], to[None, place[0], wg, *place[1:]])
            cute.arch.cp_async_bulk_commit_group()


def add(sums: cute.Tensor, acc: cute.Tensor, to: Any, thread: Int32) -> None:
    """Add an accumulator to the sums in global memory, starting at group `to`."""
    start = (sums.iterator + (Int64(to) * GROUP + thread * 4)).toint()
    for i in range(cute.size(acc) // 4):
        cute.arch.inline_ptx(
            f"red.relaxed.gpu.global.add.v4.f32 [{{$r0}}+{4 * GROUP * i}], "
            "{{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[start, *(acc[4 * i + k] for k in range(4))],
        )
