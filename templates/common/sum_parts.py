"""Add up the partial results of rows that were split along kv, without a softmax."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, cute

from attnkit.templates.common import device
from attnkit.templates.common.combine import WARPS


class SumParts:
    """Builds the kernel that adds the parts of split rows after a forward without a softmax.

    Args:
        dtype: dtype of the output, "bfloat16" or "float16".
        value_dim: head_dim_v of the output.
    """

    def __init__(self, dtype: str, value_dim: int) -> None:
        self.dtype = device.DTYPES[dtype]
        self.value_dim = value_dim

    @cute.jit
    def __call__(
        self,
        parts: cute.Tensor,
        part_lse: cute.Tensor,
        split: cute.Tensor,
        split_ptr: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        sinks: list,
        stream: Any,
    ):
        """Launch the kernel with one warp per row.

        Args:
            parts: float32 [slots, block_q, >= Dv], partial outputs.
            split: int32 [n, 3], the (b, h, q block) of each split q block.
            split_ptr: int32 [n + 1], the first slot of each split q block.
            out: [B, H, S, Dv], written.
            part_lse, lse, sinks: as for `Combine`; not read and not written.
            stream: CUDA stream.
        """
        rows = part_lse.shape[1]
        self.kernel(parts, split, split_ptr, out).launch(
            grid=(split.shape[0], rows // WARPS, 1), block=(32 * WARPS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, parts: cute.Tensor, split: cute.Tensor, split_ptr: cute.Tensor, out: cute.Tensor
    ):
        """Add the parts of one row in each warp, in the order of their slots."""
        item, chunk, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        lane, within = thread % 32, chunk * WARPS + thread // 32
        b, h, tile = split[item, 0], split[item, 1], split[item, 2]
        row = tile * parts.shape[1] + within
        if row < out.shape[2]:
            columns = cute.make_rmem_tensor((self.value_dim + 31) // 32, Float32)  # f32 [Dv] / 32
            columns.fill(0.0)
            for slot in cutlass.range(split_ptr[item], split_ptr[item + 1], unroll=1):
                for j in cutlass.range_constexpr((self.value_dim + 31) // 32):
                    columns[j] = columns[j] + parts[slot, within, lane + 32 * j]
            for j in cutlass.range_constexpr((self.value_dim + 31) // 32):
                if lane + 32 * j < self.value_dim:
                    out[b, h, row, lane + 32 * j] = self.dtype(columns[j])
