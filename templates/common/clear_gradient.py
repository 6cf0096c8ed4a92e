"""Clear the elements of a full bias's gradient to which no score belongs.

A backward may store the gradient of a bias instead of adding to it. It then writes the elements of
the blocks that it visits, and those alone. This kernel sets the others to zero: blocks that the mask
leaves empty, and what a bias has beyond the lengths of the call.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

ROWS = 16  # rows per CTA, a divisor of the rows of a q block
BLOCK = 64, 128  # rows and columns that a bit of `visited` stands for
WORD = 32  # blocks per word of `visited`
WARP, WARPS = 32, 4
VECTOR = 4  # floats of a store: 16 bytes, so that a warp stores a row of a block


class ClearGradient:
    """Builds the kernel that clears what no score writes."""

    @cute.jit
    def __call__(
        self,
        total: cute.Tensor,
        visited: cute.Tensor,
        slices: cute.Tensor,
        q_len: Int32,
        kv_len: Int32,
        stream: Any,
    ):
        """Launch one CTA for every 16 rows.

        Args:
            total: float32 [slices, rows, columns], contiguous: the gradient.
            visited: int32 [masks, q blocks, words], a bit for each block: 1 if the backward writes
                the scores of the block that are inside the lengths.
            slices: int32 [slices], the mask of each slice; -1 if the backward does not write it.
            q_len, kv_len: lengths of the call, at most the rows and columns of `total`.
            stream: CUDA stream.
        """
        count, rows, _ = total.shape
        self.kernel(total, visited, slices, q_len, kv_len).launch(
            grid=((rows + ROWS - 1) // ROWS, count, 1), block=(WARPS * WARP, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        total: cute.Tensor,
        visited: cute.Tensor,
        slices: cute.Tensor,
        q_len: Int32,
        kv_len: Int32,
    ):
        """Clear the unwritten elements of 16 rows; each warp takes every fourth row."""
        group, at, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // WARP, thread % WARP
        _, rows, columns = total.shape
        aligned = columns % VECTOR == 0  # the first row is
        mask, q_block = slices[at], group * ROWS // BLOCK[0]
        known = (mask >= 0) & (q_block < visited.shape[1])
        word = Int32(0)
        for block in cutlass.range((columns + BLOCK[1] - 1) // BLOCK[1], unroll=1):
            if block % WORD == 0:
                word = Int32(0)
                if known & (block // WORD < visited.shape[2]):
                    word = visited[mask, q_block, block // WORD]
            seen = ((word >> (block % WORD)) & 1) != 0
            for i in cutlass.range_constexpr(ROWS // WARPS):
                row = group * ROWS + warp + i * WARPS
                # the first column that no score of the block writes
                first = cutlass.select_(seen & (row < q_len), kv_len, Int32(0))
                if row < rows:
                    start = total.iterator + (Int64(at) * rows + row) * columns
                    self.clear(start, block * BLOCK[1], first, columns, aligned, lane)

    @cute.jit
    def clear(
        self,
        row: cute.Pointer,
        start: Int32,
        first: Int32,
        end: Int32,
        aligned: Boolean,
        lane: Int32,
    ):
        """Clear the columns from `first` to `end` of a row of a block, by a warp.

        Args:
            row: address of the row.
            start: first column of the block.
            first, end: the columns to clear, of those in the block.
            aligned: whether the row begins at a multiple of 16 bytes, and so does its end.
            lane: index of the thread in its warp.
        """
        if aligned & (first <= start):
            column = start + lane * VECTOR
            if column < end:
                zeros = cute.make_rmem_tensor(VECTOR, Float32)  # f32 [4]
                zeros.fill(0.0)
                to = cute.make_tensor((row + column).align(16), cute.make_layout(VECTOR))
                cute.autovec_copy(zeros, to)
        else:
            for i in cutlass.range_constexpr(BLOCK[1] // WARP):
                column = start + lane + i * WARP
                if (column >= first) & (column < end):
                    (row + column).store(Float32(0.0))
