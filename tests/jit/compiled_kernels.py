"""Define small kernels and host functions that the tests of compiled kernels use."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.tensor_utils
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from attnkit.jit.kernel import Build

STREAM = cuda.CUstream(0)


def vector(dtype: Any = Float32) -> Any:
    return make_fake_compact_tensor(dtype, (cute.sym_int(),))


def matrix(dtype: Any = Float32) -> Any:
    """Return a fake matrix whose row length and 64-bit stride are multiples of 8."""
    shape = (cute.sym_int(), cute.sym_int(divisibility=8))
    stride = (cute.sym_int64(divisibility=8), 1)
    return make_fake_tensor(dtype, shape, stride, assumed_align=16)


class Affine:
    """Kernel: y[i, 0] = x[i, 0] a + constant + the sum of the captured vectors' c[i], for i < n."""

    def __init__(self, constant: float = 0.0) -> None:
        self.constant = constant

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        y: cute.Tensor,
        captured: list,
        a: Float32,
        n: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(x, y, captured, a, n).launch(
            grid=[(n + 127) // 128, 1, 1], block=[128, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, captured: list, a: Float32, n: Int32):
        t, _, _ = cute.arch.thread_idx()
        b, _, _ = cute.arch.block_idx()
        i = b * 128 + t
        if i < n:
            value = x[i, 0] * a + self.constant
            for c in captured:
                value = value + c[i]
            y[i, 0] = value


def affine(constant: float = 0.0, captured: int = 2) -> Build:
    vectors = [vector() for _ in range(captured)]
    fakes = (matrix(), matrix(), vectors, Float32(1.0), Int32(1), STREAM)
    return Build(Affine(constant), fakes)


@cute.jit
def report(out: cute.Tensor, tensors: list, a: Int32, b: Float32, c: Int64, d: Boolean):
    """Write the received arguments into `out`: sizes, strides and address of each tensor, numbers.

    The function runs on the CPU and launches nothing.
    """
    k = 0
    for t in tensors:
        for n in (*t.shape, *t.stride):
            out[k] = Int64(n)
            k += 1
        out[k] = t.iterator.toint().to(Int64)
        k += 1
    for x in (a, b, c, d):
        out[k] = Int64(x)
        k += 1


class RegisterProduct:
    """Kernel: C [64, 64] += A B^T four times, with A [64, 64] in registers.

    A changes between the products. If it changes while the previous product may still read it
    (`hasty`), the assembler waits for every single instruction. If it changes after a wait, the
    assembler does not.
    """

    def __init__(self, hasty: bool) -> None:
        self.hasty = hasty

    @cute.jit
    def __call__(self, b: cute.Tensor, c: cute.Tensor, steps: Int32, stream: cuda.CUstream):
        major = cute.nvgpu.OperandMajorMode.K
        mma = sm90.make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            major,
            major,
            Float32,
            (1, 1, 1),
            (64, 64),
            a_source=warpgroup.OperandSource.RMEM,
        )
        row = cutlass.tensor_utils.LayoutEnum.ROW_MAJOR
        layout = sm90.make_smem_layout_b(row, (64, 64, 64), BFloat16, 1)
        self.kernel(mma, b, c, steps, layout).launch(
            grid=[1, 1, 1], block=[128, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        b: cute.Tensor,
        c: cute.Tensor,
        steps: Int32,
        layout: cute.ComposedLayout,
    ):
        t, _, _ = cute.arch.thread_idx()
        smem = cutlass.memory.SmemAllocator()
        sb = smem.allocate_tensor(BFloat16, layout.outer, 1024, layout.inner)
        for i in cutlass.range(t, 4096, 128):
            sb[i // 64, i % 64, 0] = b[i // 64, i % 64]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        thr = mma.get_slice(t)
        fb = mma.make_fragment_B(thr.partition_B(sb))
        a = cute.make_rmem_tensor(thr.partition_shape_A((64, 64)), BFloat16)
        acc = cute.make_rmem_tensor(thr.partition_shape_C((64, 64)), Float32)
        acc.fill(0.0)
        a.fill(1.0)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        for step in cutlass.range(steps, unroll=1):
            warpgroup.fence()
            for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
                at = (None, None, k)
                cute.gemm(mma, acc, a[at], fb[(None, None, k, 0)], acc)
            warpgroup.commit_group()
            if cutlass.const_expr(not self.hasty):
                warpgroup.wait_group(0)
            for i in cutlass.range_constexpr(cute.size(a)):
                a[i] = (a[i].to(Float32) * step.to(Float32)).to(BFloat16)
        warpgroup.wait_group(0)
        part = thr.partition_C(c)
        for i in cutlass.range_constexpr(cute.size(acc)):
            part[i] = acc[i]


def register_product(hasty: bool) -> Build:
    b = make_fake_compact_tensor(BFloat16, (64, 64), stride_order=(1, 0), assumed_align=16)
    c = make_fake_compact_tensor(Float32, (64, 64), stride_order=(1, 0), assumed_align=16)
    return Build(RegisterProduct(hasty), (b, c, Int32(1), STREAM))


class Spilling:
    """Kernel that keeps more values than a thread has registers: 300 loads, then their products."""

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, y).launch(grid=[1, 1, 1], block=[512, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        t, _, _ = cute.arch.thread_idx()
        kept = cute.make_rmem_tensor(300, Float32)
        for i in cutlass.range(300, unroll_full=True):
            kept[i] = x[t + 512 * i]
        cute.arch.sync_threads()
        for i in cutlass.range(300, unroll_full=True):
            y[t + 512 * i] = kept[i] * kept[299 - i] + kept[(7 * i) % 300]


def spilling() -> Build:
    return Build(Spilling(), (vector(), vector(), STREAM))
