"""Define a warp-specialised matrix product for sm_90a.

It has a TMA ring, wgmma, an elementwise map and a TMA reduction.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.pipeline as pl
import cutlass.tensor_utils
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import cpasync, warpgroup

BM, BN, BK, STAGES = 64, 64, 64, 2
TILE_BYTES = (BM + BN) * BK * 2


class MappedGemm:
    """Compute C += cap tanh(A B^T / cap) for A [m, k], B [n, k] in bf16, C [m, n] in float32.

    Warp 0 loads k-tiles into a ring of two stages. One warpgroup multiplies, applies the map, and
    issues a TMA store that adds.
    """

    def __init__(self, cap: float) -> None:
        self.cap = cap

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
        row = cutlass.tensor_utils.LayoutEnum.ROW_MAJOR
        major = cute.nvgpu.OperandMajorMode.K
        mma = sm90.make_trivial_tiled_mma(
            BFloat16, BFloat16, major, major, Float32, (1, 1, 1), (64, BN)
        )
        tile = (BM, BN, BK)
        la = sm90.make_smem_layout_a(row, tile, BFloat16, STAGES)
        lb = sm90.make_smem_layout_b(row, tile, BFloat16, STAGES)
        lc = cute.make_layout((BM, BN), stride=(BN, 1))
        load = cpasync.CopyBulkTensorTileG2SOp()
        add = cpasync.CopyReduceBulkTensorTileS2GOp(cute.ReductionKind.ADD)
        one = (None, None, 0)
        ta, ga = cpasync.make_tiled_tma_atom(load, a, cute.slice_(la, one), (BM, BK))
        tb, gb = cpasync.make_tiled_tma_atom(load, b, cute.slice_(lb, one), (BN, BK))
        tc, gc = cpasync.make_tiled_tma_atom(add, c, lc, (BM, BN))

        @cute.struct
        class Shared:
            ring: cute.struct.MemRange[cutlass.Int64, STAGES * 2]
            a: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(la)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(lb)], 1024]
            c: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(lc)], 1024]

        self.shared = Shared
        grid = (cute.ceil_div(a.shape[0], BM), cute.ceil_div(b.shape[0], BN), 1)
        self.kernel(mma, ta, ga, tb, gb, tc, gc, la, lb, lc).launch(grid=grid, block=(256, 1, 1))

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        ta: cute.CopyAtom,
        ga: cute.Tensor,
        tb: cute.CopyAtom,
        gb: cute.Tensor,
        tc: cute.CopyAtom,
        gc: cute.Tensor,
        la: cute.ComposedLayout,
        lb: cute.ComposedLayout,
        lc: cute.Layout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        m, n, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        sm = cutlass.memory.SmemAllocator().allocate(self.shared)
        sa = sm.a.get_tensor(la.outer, swizzle=la.inner)
        sb = sm.b.get_tensor(lb.outer, swizzle=lb.inner)
        sc = sm.c.get_tensor(lc)
        group = lambda k: pl.CooperativeGroup(pl.Agent.Thread, k)
        ring = pl.PipelineTmaAsync.create(
            num_stages=STAGES,
            producer_group=group(1),
            consumer_group=group(4),
            tx_count=TILE_BYTES,
            barrier_storage=sm.ring.data_ptr(),
            defer_sync=True,
        )
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        flat = lambda t: cute.group_modes(t, 0, 2)
        one = (0, cute.make_layout(1))
        gat, gbt = (
            cute.local_tile(ga, (BM, BK), (m, None)),
            cute.local_tile(gb, (BN, BK), (n, None)),
        )
        as_, ag = cpasync.tma_partition(ta, *one, flat(sa), flat(gat))
        bs, bg = cpasync.tma_partition(tb, *one, flat(sb), flat(gbt))
        gct = cute.local_tile(gc, (BM, BN), (m, n))
        cs, cg = cpasync.tma_partition(tc, *one, flat(sc), flat(gct))
        steps = gat.shape[2]
        if warp < 4:
            cute.arch.setmaxregister_decrease(24)
            if warp == 0:
                state = pl.make_pipeline_state(pl.PipelineUserType.Producer, STAGES)
                for k in cutlass.range(steps, unroll=1):
                    ring.producer_acquire(state)
                    bar = ring.producer_get_barrier(state)
                    cute.copy(ta, ag[None, k], as_[None, state.index], tma_bar_ptr=bar)
                    cute.copy(tb, bg[None, k], bs[None, state.index], tma_bar_ptr=bar)
                    ring.producer_commit(state)
                    state.advance()
                ring.producer_tail(state)
        else:
            cute.arch.setmaxregister_increase(240)
            thr = mma.get_slice(tid - 128)
            fa = mma.make_fragment_A(thr.partition_A(sa))
            fb = mma.make_fragment_B(thr.partition_B(sb))
            acc = cute.make_rmem_tensor(thr.partition_shape_C((BM, BN)), Float32)
            part = thr.partition_C(sc)
            mma.set(warpgroup.Field.ACCUMULATE, False)
            state = pl.make_pipeline_state(pl.PipelineUserType.Consumer, STAGES)
            for _k in cutlass.range(steps, unroll=1):
                ring.consumer_wait(state)
                warpgroup.fence()
                for kk in cutlass.range_constexpr(cute.size(fa, mode=[2])):
                    at = (None, None, kk, state.index)
                    cute.gemm(mma, acc, fa[at], fb[at], acc)
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                ring.consumer_release(state)
                state.advance()
            for i in cutlass.range_constexpr(cute.size(acc)):
                part[i] = self.cap * cute.math.tanh(acc[i] * (1.0 / self.cap), fastmath=True)
            cute.arch.fence_proxy("async.shared", space="cta")
            pl.NamedBarrier(barrier_id=1, num_threads=128).arrive_and_wait()
            if warp == 4:
                cute.copy(tc, cs, cg)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=False)
