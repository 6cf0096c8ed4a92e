"""Define a matrix product for sm_80: cp.async, ldmatrix, mma.sync."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import cpasync, warp

BM, BN, BK, STAGES = 64, 64, 32, 2


class Gemm:
    """Compute C [m, n] = A [m, k] B [n, k]^T, bf16 to float32; tiles divide m, n and k."""

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
        op = warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16))
        mma = cute.make_tiled_mma(op, cute.make_layout((2, 2, 1)), permutation_mnk=(32, 32, 16))
        load = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL),
            BFloat16,
            num_bits_per_copy=128,
        )
        copy = cute.make_tiled_copy_tv(
            load, cute.make_layout((32, 4), stride=(4, 1)), cute.make_layout((1, 8))
        )
        grid = (a.shape[0] // BM, b.shape[0] // BN, 1)
        self.kernel(a, b, c, mma, copy).launch(grid=grid, block=(128, 1, 1))

    @cute.kernel
    def kernel(self, a, b, c, mma: cute.TiledMma, copy: cute.TiledCopy):
        tid, _, _ = cute.arch.thread_idx()
        m, n, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        # Rows are padded by 16 bytes, so that ldmatrix has no bank conflicts.
        rows = cute.make_layout((BM, BK, STAGES), stride=(BK + 8, 1, BM * (BK + 8)))
        sa = smem.allocate_tensor(BFloat16, rows, byte_alignment=16)
        sb = smem.allocate_tensor(BFloat16, rows, byte_alignment=16)
        ga = cute.local_tile(a, (BM, BK), (m, None))
        gb = cute.local_tile(b, (BN, BK), (n, None))
        gc = cute.local_tile(c, (BM, BN), (m, n))
        mine = copy.get_slice(tid)
        ag, as_ = mine.partition_S(ga), mine.partition_D(sa)
        bg, bs = mine.partition_S(gb), mine.partition_D(sb)
        thr = mma.get_slice(tid)
        ra = mma.make_fragment_A(thr.partition_A(sa[None, None, 0]))
        rb = mma.make_fragment_B(thr.partition_B(sb[None, None, 0]))
        out = thr.partition_C(gc)
        acc = mma.make_fragment_C(out)
        acc.fill(0.0)
        ldm = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), BFloat16)
        ca, cb = cute.make_tiled_copy_A(ldm, mma), cute.make_tiled_copy_B(ldm, mma)
        ta, tb = ca.get_slice(tid), cb.get_slice(tid)
        pa, va = ta.partition_S(sa), ta.retile(ra)
        pb, vb = tb.partition_S(sb), tb.retile(rb)
        steps = ag.shape[3]
        cute.copy(copy, ag[None, None, None, 0], as_[None, None, None, 0])
        cute.copy(copy, bg[None, None, None, 0], bs[None, None, None, 0])
        cute.arch.cp_async_commit_group()
        for k in cutlass.range(steps, unroll=1):
            nxt, stage = k + 1, k % STAGES
            if nxt < steps:
                cute.copy(copy, ag[None, None, None, nxt], as_[None, None, None, nxt % STAGES])
                cute.copy(copy, bg[None, None, None, nxt], bs[None, None, None, nxt % STAGES])
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(1)
            cute.arch.sync_threads()
            for kk in cutlass.range_constexpr(BK // 16):
                cute.copy(ca, pa[None, None, kk, stage], va[None, None, kk])
                cute.copy(cb, pb[None, None, kk, stage], vb[None, None, kk])
                cute.gemm(mma, acc, ra[None, None, kk], rb[None, None, kk], acc)
            cute.arch.sync_threads()
        for i in cutlass.range_constexpr(cute.size(acc)):
            out[i] = acc[i]
