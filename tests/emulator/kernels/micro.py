"""Define small kernels for sm_90a and later: a ring of mbarriers, and a sum over a cluster."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32

STAGES = 3
WIDTH = 32


class Ring:
    """Compute y = 2 x; one warp passes 32 numbers at a time to another, by a ring of 3 stages."""

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor):
        self.kernel(x, y).launch(grid=(1, 1, 1), block=(64, 1, 1))

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = tid % 32
        smem = cutlass.memory.SmemAllocator()
        full = smem.allocate_array(cutlass.Int64, STAGES)
        free = smem.allocate_array(cutlass.Int64, STAGES)
        data = smem.allocate_tensor(Float32, cute.make_layout((WIDTH, STAGES)))
        if tid == 0:
            for i in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(full + i, 32)
                cute.arch.mbarrier_init(free + i, 32)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        steps = x.shape[0] // WIDTH
        if warp == 0:
            for k in cutlass.range(steps, unroll=1):
                stage, lap = k % STAGES, k // STAGES
                cute.arch.mbarrier_wait(free + stage, (lap + 1) % 2)
                data[lane, stage] = x[k * WIDTH + lane]
                cute.arch.mbarrier_arrive(full + stage)
        else:
            for k in cutlass.range(steps, unroll=1):
                stage, lap = k % STAGES, k // STAGES
                cute.arch.mbarrier_wait(full + stage, lap % 2)
                value = data[lane, stage]
                cute.arch.mbarrier_arrive(free + stage)
                y[k * WIDTH + lane] = value * Float32(2.0)


class ClusterSum:
    """Sum x over the four CTAs of a cluster into out [block]; each CTA sends its part to all."""

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor):
        self.kernel(x, out).launch(
            grid=(out.shape[0], 1, 1), block=(WIDTH, 1, 1), cluster=(4, 1, 1)
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rank = cute.arch.block_idx_in_cluster()
        smem = cutlass.memory.SmemAllocator()
        bar = smem.allocate_array(cutlass.Int64, 1)
        parts = smem.allocate_tensor(Int32, cute.make_layout(4), byte_alignment=16)
        if tid == 0:
            cute.arch.mbarrier_init(bar, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(bar, 16)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        value = cute.arch.warp_redux_sync(x[block * WIDTH + tid], "add")
        if tid == 0:
            for peer in cutlass.range_constexpr(4):
                cute.arch.store_async_dsmem(parts.iterator + rank, value, bar, Int32(peer))
        cute.arch.mbarrier_wait(bar, 0)
        total = parts[0] + parts[1] + parts[2] + parts[3]
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if tid == 0:
            out[block] = total
