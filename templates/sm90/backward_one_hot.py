"""Sum the gradient of a table of pairs over columns of the same class, in an MMA, on Hopper.

The scores of a row q and of all columns whose class is c read the same entry of the table, such as
`table[types[q], c]`. Their gradient is the sum of dS over these columns. With a one-hot matrix,
which is 1 where a column has class c, all sums of a q block are the product dS [64, 128] times
one-hot [128, classes]: one more MMA beside dQ = dS K, with the same operand dS. A row then adds one
number per class in memory, not one per column.

Each consumer computes half of the classes, for the previous q block, as with dQ. It writes its half
of the one-hot matrix to the staging memory of its dQ, which is free until the chunk is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import hopper_helpers

from attnkit.templates.common import device
from attnkit.templates.common.hooks import BackwardHooks
from attnkit.templates.common.site import Site
from attnkit.templates.sm90.backward_config import CLASSES, ROWS, BackwardConfig
from attnkit.templates.sm90.backward_mma import COLUMN, ConsumerMma
from attnkit.templates.sm90.backward_shared import (
    CONSUMERS,
    WARPGROUP,
    NamedBarrier,
)

HALF = CLASSES // CONSUMERS  # classes of a consumer
VECTORS = HALF * 2 // 16  # 16-byte vectors of a column's row in the one-hot matrix
ONE = {"bfloat16": 0x3F80, "float16": 0x3C00}  # the bits of 1


@dataclass(frozen=True)
class ClassSums:
    """Holds the operands and the state of a consumer thread.

    Attributes:
        mmas: the MMA that overwrites its result, and the one that adds to it.
        operand: one-hot matrix as B operand, dtype [32, 128] in shared memory.
        memory: the same matrix, int32 words.
        acc: f32 [64, 32] / 128 threads, sums of a q block.
        total: the gradient of the table in global memory.
        axis: its axis of classes.
        wg, thread: index of the consumer, and of the thread in it.
    """

    mmas: tuple[cute.TiledMma, cute.TiledMma]
    operand: cute.Tensor
    memory: cute.Pointer
    acc: cute.Tensor
    total: cute.Tensor
    axis: int
    wg: Int32
    thread: Int32


class OneHot:
    """Sums the gradient of the table that the hooks' `class_gradient` returns.

    Args:
        config: compile-time configuration.
        hooks: hooks of the variant.
    """

    def __init__(self, config: BackwardConfig, hooks: BackwardHooks) -> None:
        self.config = config
        self.hooks = hooks
        self.dtype = device.DTYPES[config.dtype]

    def begin(
        self,
        mmas: tuple[cute.TiledMma, cute.TiledMma],
        staging: cute.Pointer,
        totals: list,
        wg: Int32,
        thread: Int32,
    ) -> ClassSums:
        """Create the operands and allocate the registers of a consumer thread.

        Args:
            mmas: see `ClassSums`.
            staging: f32 [2, chunk] in shared memory, the staging memory of dQ.
            totals: gradients of the captured tensors that need one.
            wg, thread: index of the consumer, and of the thread in it.
        """
        # [32 classes, 128 columns, 1]
        layout = hopper_helpers.make_smem_layout_b(
            COLUMN, (ROWS, HALF, self.config.block_kv), self.dtype, 1
        )
        start = (staging + wg * self.config.chunk).align(1024)
        matrix = cute.make_tensor(
            cute.recast_ptr(start, layout.inner, dtype=self.dtype), layout.outer
        )
        mma = mmas[1]
        operand = mma.make_fragment_B(mma.get_slice(0).partition_B(matrix))
        shape = mma.get_slice(thread).partition_shape_C((ROWS, HALF))
        acc = cute.make_rmem_tensor(shape, Float32)  # f32 [64, 32] / 128 threads
        total, axis = self.hooks.class_gradient(totals)
        memory = cute.recast_ptr(start, dtype=Int32)
        return ClassSums(mmas, operand, memory, acc, total, axis, wg, thread)

    def write_operand(self, sums: ClassSums, site: Site, q_count: Int32) -> None:
        """Write the one-hot matrix of the kv block at `site`; the staging must be free.

        Its columns are looked up at each q block (`q_count`), because no register is left to keep
        them.
        """
        thread = device.recomputed(sums.thread, q_count)
        kv = cutlass.min(site.origin + thread, site.kv_len - 1)
        own = self.hooks.column_class(site, kv) - sums.wg * HALF
        # thread t writes row t, 64 bytes; at a time eight threads write vectors in different banks
        row = sums.memory + thread * (HALF // 2)
        # the matrix is swizzled: vector v of row t is at v ^ (t // 2 % 4)
        turn = (thread >> 1) & (VECTORS - 1)
        one = Int32(ONE[self.config.dtype])
        pair = cutlass.select_((own & 1) != 0, one << 16, one)
        for i in range(VECTORS):
            place = (i + turn) & (VECTORS - 1)
            vector = place ^ turn
            at = (own >> 1) - 4 * vector
            words = [cutlass.select_(at == k, pair, Int32(0)) for k in range(4)]
            cute.arch.inline_ptx(
                "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[(row + 4 * place).toint(), *words],
            )
        # the MMA reads the matrix by the async proxy
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync(sums)

    def sync(self, sums: ClassSums) -> None:
        """Synchronise the consumer; a warp's wait for its MMA says nothing of other warps."""
        cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE + sums.wg, number_of_threads=WARPGROUP)

    def issue(self, sums: ClassSums, mma: ConsumerMma, q_count: Int32) -> None:
        """Issue the sums of q block `q_count`, after its dQ; `write_operand` is before."""
        stage = q_count & 1
        for half in range(CONSUMERS):  # the keys of each consumer
            row = stage * CONSUMERS + half
            steps = cute.size(mma.ds_smem, mode=[2])
            for k in range(steps):
                one = sums.mmas[0 if half == 0 and k == 0 else 1]
                a = mma.ds_smem[None, None, k, row]
                b = sums.operand[None, None, half * steps + k, 0]
                cute.gemm(one, sums.acc, a, b, sums.acc)
        warpgroup.commit_group()

    def places(self, sums: ClassSums, site: Site, q_block: Int32) -> list[Any]:
        """Return offsets in the gradient of class 0 of the thread's two rows, and the lane."""
        thread = device.recomputed(sums.thread, q_block)
        first = q_block * self.config.block_q + thread // 32 * 16 + thread % 32 // 4
        base, places = sums.total.iterator.toint(), []
        for r in range(2):
            q = cutlass.min(first + 8 * r, site.q_len - 1)
            place = cute.domain_offset(self.hooks.class_place(site, q), sums.total).iterator
            places.append(Int32((place.toint() - base) // 4))
        return [*places, thread % 32]

    @cute.jit
    def add(self, sums: ClassSums, places: list, some: cutlass.Boolean):
        """Add the sums of a q block to the table's gradient at offsets `places`, if `some` is True.

        If all rows of a warp have the same entries, it adds their sums only. At the end all warps
        have read the one-hot matrix, so that dQ may be staged in its memory.
        """
        acc = sums.acc
        if some:
            equal = (places[0] == places[1]) & (places[0] == cute.arch.shuffle_sync(places[0], 0))
            if cute.arch.vote_all_sync(equal):
                for i in cutlass.range_constexpr(cute.size(acc) // 4):
                    for c in cutlass.range_constexpr(2):
                        value = acc[4 * i + c] + acc[4 * i + 2 + c]
                        for step in cutlass.range_constexpr(3):
                            value = value + cute.arch.shuffle_sync_bfly(value, 4 << step)
                        self.add_value(sums, i, c, places, 0, value, places[2] < 4)
            else:
                for i in cutlass.range_constexpr(cute.size(acc)):
                    row, every = i // 2 % 2, cutlass.Boolean(True)
                    self.add_value(sums, i // 4, i % 2, places, row, acc[i], every)
        self.sync(sums)

    def add_value(
        self, sums: ClassSums, i: int, c: int, places: list, row: int, value: Any, condition: Any
    ) -> None:
        """Add the sum of a row and the thread's class 8 * i + c, where `condition` holds."""
        place, lane = places[row], places[2]
        number = sums.wg * HALF + (8 * i + c) + lane % 4 * 2
        size, stride = sums.total.shape[sums.axis], sums.total.stride[sums.axis]
        inside = condition & (number < size) & (value != Float32(0.0))
        self.add_at(inside, sums.total.iterator + (place + number * stride), value)

    @cute.jit
    def add_at(self, condition: cutlass.Boolean, target: cute.Pointer, value: Float32):
        """Add `value` to a float32 in global memory, in the lanes where `condition` is true."""
        if condition:
            cute.arch.red(target, value, op="add", dtype="f32", sem="relaxed", scope="gpu")
