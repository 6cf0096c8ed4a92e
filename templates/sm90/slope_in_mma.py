"""Add slope * column to the scores inside their MMA, with one extra k-step, in the Hopper forward.

ALiBi adds slope * (kv - q) to each score. The part that is the same for a block or a row costs
little. The part that differs from column to column would cost an FMA per score and a register per
column. Instead, the rows of Q get 16 more columns whose products with 16 more columns of K add it.
Here j is the column, counted from the middle of its block, so that the terms and their rounding
errors are half as large as from its start:

    K's extra columns of row j:     j j j 0 0 0 ...     in shared memory, the same for all blocks
    Q's extra columns of any row:   t0 t1 t2 0 0 0 ...  in registers, as they depend on the head

t0 + t1 + t2 is the slope divided by the factor of the score, a float32 number, in three bfloat16
numbers. j is exact in bfloat16 up to 256. The extra columns are bfloat16 for every dtype of the
tensors, because the numbers could exceed the range of float16.

In shared memory the columns are core matrices without swizzle: eight rows of eight columns in 128
bytes. A stride of zero repeats the first eight columns: the second eight are multiplied by zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from attnkit.templates.common import device
from attnkit.templates.common.lse_in_mma import ROW_WORDS, split_bfloat16
from attnkit.templates.sm90.config import WARPGROUP_ROWS

STEP = 16  # columns of a k-step
LANES = 4  # lanes that share a row of an A operand; each has two neighbouring columns
MAX_COLUMNS = 256  # columns of a block whose numbers are exact in bfloat16


def slope_mma(block_kv: int) -> cute.TiledMma:
    """Return the MMA of the extra k-step, with Q's columns in registers."""
    assert block_kv <= MAX_COLUMNS
    k_major, source = OperandMajorMode.K, warpgroup.OperandSource.RMEM
    return hopper_helpers.make_trivial_tiled_mma(
        *(BFloat16, BFloat16, k_major, k_major, Float32),
        (1, 1, 1),
        (WARPGROUP_ROWS, block_kv),
        a_source=source,
    )


def middle(block_kv: int) -> int:
    """Return the column of a kv block from which its positions are counted, the middle one."""
    return block_kv // 2


@cute.jit
def write_columns(columns: cute.Pointer, block_kv: cutlass.Constexpr[int]):
    """Write K's extra columns to shared memory; all threads of the CTA call it.

    A barrier of the CTA must follow.

    Args:
        columns: int32 pointer to shared memory, `ForwardConfig.column_words` words.
        block_kv: rows.
    """
    row, _, _ = cute.arch.thread_idx()
    if row < block_kv:
        column = Float32(row - middle(block_kv))
        pair = device.pack(column, column, BFloat16)
        for word in range(ROW_WORDS):
            (columns + ROW_WORDS * row + word).store(pair)
    # the tensor cores read the columns by the async proxy
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()


@dataclass(frozen=True)
class SlopeOperands:
    """Holds the MMA of the extra k-step and its operands.

    Attributes:
        mma: the MMA, which accumulates.
        q_columns: bf16 [64, 16] / 128 threads, Q's extra columns in registers.
        k_columns: descriptors of K's extra columns in shared memory.
    """

    mma: cute.TiledMma
    q_columns: cute.Tensor
    k_columns: cute.Tensor

    @staticmethod
    def create(mma: cute.TiledMma, columns: cute.Pointer, block_kv: int) -> SlopeOperands:
        """Create the operands of a consumer warpgroup; `columns` is that of `write_columns`."""
        thr = mma.get_slice(0)
        layout = cute.make_layout(((8, block_kv // 8), (8, 2), 1), stride=((8, 64), (1, 0), 0))
        smem = cute.make_tensor(cute.recast_ptr(columns.align(128), dtype=BFloat16), layout)
        b = mma.make_fragment_B(thr.partition_B(smem))[None, None, 0, 0]
        shape = thr.partition_shape_A((WARPGROUP_ROWS, STEP))
        a = cute.make_rmem_tensor(shape, BFloat16)[None, None, 0]
        return SlopeOperands(mma, a, b)

    def write(self, slope: Float32) -> None:
        """Write Q's extra columns of a head; no MMA that reads them may be in flight."""
        first, second, third = split_bfloat16(slope)
        lane = cute.arch.lane_idx() % LANES
        word = device.pack(first, second, BFloat16)
        word = cutlass.select_(lane == 1, device.pack(third, Float32(0.0), BFloat16), word)
        word = cutlass.select_(lane > 1, Int32(0), word)
        words = cute.recast_tensor(self.q_columns, Int32)
        # opaque moves: no copy or zero may be made between the fence and the MMA that reads it
        for r in range(2):  # rows 8 apart
            for i, x in ((r, word), (2 + r, Int32(0))):
                words[i] = cute.arch.inline_ptx(
                    "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x]
                )

    def issue(self, acc: cute.Tensor) -> None:
        """Issue the extra k-step asynchronously; it belongs to the next group to be committed."""
        cute.gemm(self.mma, acc, self.q_columns, self.k_columns, acc)
