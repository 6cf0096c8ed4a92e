"""Define kernels without tensor cores, for any architecture: row softmax and block sum."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_compact_tensor

THREADS = 128


def matrix(dtype, rows=None, columns=None):
    shape = (rows or cute.sym_int(), columns or cute.sym_int())
    return make_fake_compact_tensor(dtype, shape, stride_order=(1, 0), assumed_align=16)


def vector(dtype):
    return make_fake_compact_tensor(dtype, (cute.sym_int(),))


class Softmax:
    """Compute the softmax of each row with one CTA: by shuffles in a warp, then across warps."""

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor):
        self.kernel(x, y).launch(grid=(x.shape[0], 1, 1), block=(THREADS, 1, 1))

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        part = smem.allocate_tensor(Float32, cute.make_layout(THREADS // 32 * 2))
        top = -Float32.inf
        for c in cutlass.range(tid, x.shape[1], THREADS):
            top = cute.arch.fmax(top, x[row, c])
        for step in cutlass.range_constexpr(5):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 16 >> step))
        if tid % 32 == 0:
            part[tid // 32] = top
        cute.arch.sync_threads()
        for w in cutlass.range_constexpr(THREADS // 32):
            top = cute.arch.fmax(top, part[w])
        total = Float32(0.0)
        for c in cutlass.range(tid, x.shape[1], THREADS):
            total = total + cute.math.exp(x[row, c] - top, fastmath=True)
        for step in cutlass.range_constexpr(5):
            total = total + cute.arch.shuffle_sync_bfly(total, 16 >> step)
        if tid % 32 == 0:
            part[THREADS // 32 + tid // 32] = total
        cute.arch.sync_threads()
        total = Float32(0.0)
        for w in cutlass.range_constexpr(THREADS // 32):
            total = total + part[THREADS // 32 + w]
        for c in cutlass.range(tid, x.shape[1], THREADS):
            y[row, c] = cute.math.exp(x[row, c] - top, fastmath=True) / total


class BlockSum:
    """Sum a vector: by a tree in shared memory in each CTA, then by an atomic integer addition."""

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor):
        self.kernel(x, out).launch(
            grid=(cute.ceil_div(x.shape[0], THREADS), 1, 1), block=(THREADS, 1, 1)
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        tree = smem.allocate_tensor(Int32, cute.make_layout(THREADS))
        i = block * THREADS + tid
        value = Int32(0)
        if i < x.shape[0]:
            value = x[i]
        tree[tid] = value
        cute.arch.sync_threads()
        for step in cutlass.range_constexpr(7):
            half = THREADS >> (step + 1)
            if tid < half:
                tree[tid] = tree[tid] + tree[tid + half]
            cute.arch.sync_threads()
        if tid == 0:
            cute.arch.atomic_add(out.iterator, tree[0])
