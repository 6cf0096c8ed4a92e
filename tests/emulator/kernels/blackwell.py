"""Define a warp-specialised matrix product for sm_100a: TMA ring, tcgen05.mma, row sums."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.pipeline as pl
import cutlass.utils.blackwell_helpers as sm100
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import cpasync, make_tiled_tma_atom_A, make_tiled_tma_atom_B, tcgen05

BM, BN, BK, STAGES = 128, 64, 64, 2


class Scores:
    """Compute S [m, n] = A [m, k] B [n, k]^T, and sums [m] of 2^S over n.

    The kernel loops over tiles of n. Warp 5 loads, warp 4 issues MMAs, and warps 0 to 3 read tensor
    memory with one row per thread.
    """

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, s: cute.Tensor, sums: cute.Tensor):
        major = cute.nvgpu.OperandMajorMode.K
        mma = sm100.make_trivial_tiled_mma(
            BFloat16, BFloat16, major, major, Float32, tcgen05.CtaGroup.ONE, (BM, BN)
        )
        tile = (BM, BN, BK)
        la = sm100.make_smem_layout_a(mma, tile, BFloat16, 1)
        lb = sm100.make_smem_layout_b(mma, tile, BFloat16, STAGES)
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        one = lambda x: cute.select(x, mode=[0, 1, 2])
        ta, ga = make_tiled_tma_atom_A(load, a, one(la), tile, mma)
        tb, gb = make_tiled_tma_atom_B(load, b, one(lb), tile, mma)

        @cute.struct
        class Shared:
            a_bar: cute.struct.MemRange[cutlass.Int64, 2]
            b_bar: cute.struct.MemRange[cutlass.Int64, STAGES * 2]
            s_bar: cute.struct.MemRange[cutlass.Int64, 2]
            base: Int32
            a: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(la)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(lb)], 1024]

        self.shared = Shared
        self.kernel(mma, ta, ga, tb, gb, s, sums, la, lb).launch(
            grid=(cute.ceil_div(a.shape[0], BM), 1, 1), block=(192, 1, 1)
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        ta: cute.CopyAtom,
        ga: cute.Tensor,
        tb: cute.CopyAtom,
        gb: cute.Tensor,
        s: cute.Tensor,
        sums: cute.Tensor,
        la: cute.ComposedLayout,
        lb: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        m, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        sm = cutlass.memory.SmemAllocator().allocate(self.shared)
        sa = sm.a.get_tensor(la.outer, swizzle=la.inner)
        sb = sm.b.get_tensor(lb.outer, swizzle=lb.inner)
        one = lambda k=1: pl.CooperativeGroup(pl.Agent.Thread, k)
        loads = lambda bar, stages, size: pl.PipelineTmaUmma.create(
            num_stages=stages,
            producer_group=one(),
            consumer_group=one(),
            tx_count=size,
            barrier_storage=bar.data_ptr(),
            defer_sync=True,
        ).make_participants()
        ap, ac = loads(sm.a_bar, 1, BM * BK * 2)
        bp, bc = loads(sm.b_bar, STAGES, BN * BK * 2)
        sp, sc = pl.PipelineUmmaAsync.create(
            num_stages=1,
            producer_group=one(),
            consumer_group=one(128),
            barrier_storage=sm.s_bar.data_ptr(),
            defer_sync=True,
        ).make_participants()
        known = pl.NamedBarrier(barrier_id=1, num_threads=160)
        memory = cutlass.memory.TmemAllocator(
            sm.base.ptr, barrier_for_retrieve=known, allocator_warp_id=0
        )
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        thr = mma.get_slice(0)
        flat = lambda t: cute.group_modes(t, 0, 3)
        unit = (0, cute.make_layout(1))
        gat = thr.partition_A(cute.local_tile(ga, (BM, BK), (m, 0)))
        gbt = thr.partition_B(cute.local_tile(gb, (BN, BK), (None, 0)))
        as_, ag = cpasync.tma_partition(ta, *unit, flat(sa), flat(gat))
        bs, bg = cpasync.tma_partition(tb, *unit, flat(sb), flat(gbt))
        fa, fb = mma.make_fragment_A(sa), mma.make_fragment_B(sb)
        shape = mma.make_fragment_C(mma.partition_shape_C((BM, BN)))
        steps = bg.shape[1]
        if warp == 5:
            h = ap.acquire_and_advance()
            cute.copy(ta, ag, as_[None, h.index], tma_bar_ptr=h.barrier)
            for i in cutlass.range(steps, unroll=1):
                h = bp.acquire_and_advance()
                cute.copy(tb, bg[None, i], bs[None, h.index], tma_bar_ptr=h.barrier)
            bp.tail()
        if warp == 4:
            memory.wait_for_alloc()
            acc = cute.make_tensor(memory.retrieve_ptr(Float32), shape.layout)
            ha = ac.wait_and_advance()
            for _ in cutlass.range(steps, unroll=1):
                hs = sp.acquire_and_advance()
                hb = bc.wait_and_advance()
                mma.set(tcgen05.Field.ACCUMULATE, False)
                for k in cutlass.range_constexpr(cute.size(fa, mode=[2])):
                    cute.gemm(mma, acc, fa[None, None, k, 0], fb[None, None, k, hb.index], acc)
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                hb.release()
                hs.commit()
            ha.release()
            sp.tail()
        if warp < 4:
            memory.allocate(BN)
            memory.wait_for_alloc()
            pointer = memory.retrieve_ptr(Float32)
            acc = cute.make_tensor(pointer, shape.layout)[(None, None), 0, 0]
            atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), Float32)
            copy = tcgen05.make_tmem_copy(atom, acc)
            mine = copy.get_slice(tid)
            tile = thr.partition_C(cute.make_identity_tensor((BM, BN)))[(None, None), 0, 0]
            at = mine.partition_D(tile)
            source, regs = mine.partition_S(acc), cute.make_rmem_tensor(at.shape, Float32)
            row = m * BM + at[0][0]
            total = Float32(0.0)
            for i in cutlass.range(steps, unroll=1):
                hs = sc.wait_and_advance()
                cute.copy(copy, source, regs)
                cute.arch.fence_view_async_tmem_load()
                hs.release()
                for j in cutlass.range_constexpr(cute.size(regs)):
                    s[row, i * BN + at[j][1]] = regs[j]
                    total = total + cute.math.exp2(regs[j], fastmath=True)
            sums[row] = total
            memory.relinquish_alloc_permit()
            cute.arch.barrier(barrier_id=2, number_of_threads=128)
            memory.free(pointer)
