"""Merge the partial results of rows that were split along kv (split KV combine).

Each part is a softmax over some of the columns, with its LSE. The output of a row is the mean of
the parts' outputs, weighted by exp(LSE). This is exact and does not need the scores again
(Milakov and Gimelshein 2018). An attention sink is one more logit of the row; the parts do not
include it.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, const_expr, cute

from attnkit.templates.common import device
from attnkit.templates.common.constants import LOG2_E, NEG_INF

WARPS = 4


class Combine:
    """Builds the kernel that merges the parts of split rows after a forward.

    Args:
        dtype: dtype of the output, "bfloat16" or "float16".
        value_dim: head_dim_v of the output.
        has_sink: whether the rows have an attention sink.
    """

    def __init__(self, dtype: str, value_dim: int, has_sink: bool = False) -> None:
        self.dtype = device.DTYPES[dtype]
        self.value_dim = value_dim
        self.has_sink = has_sink

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
            parts, part_lse: float32 [slots, block_q, >= Dv] and [slots, block_q], partial outputs
                and their LSE.
            split: int32 [n, 3], the (b, h, q block) of each split q block.
            split_ptr: int32 [n + 1], the first slot of each split q block.
            out: [B, H, S, Dv], written.
            lse: float32 [B, H, S], written.
            sinks: the attention sink, float32 [H]; empty without a sink.
        """
        rows = part_lse.shape[1]
        self.kernel(parts, part_lse, split, split_ptr, out, lse, sinks).launch(
            grid=(split.shape[0], rows // WARPS, 1), block=(32 * WARPS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        parts: cute.Tensor,
        part_lse: cute.Tensor,
        split: cute.Tensor,
        split_ptr: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        sinks: list,
    ):
        """Merge the parts of one row in each warp."""
        item, chunk, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        lane, within = thread % 32, chunk * WARPS + thread // 32
        b, h, tile = split[item, 0], split[item, 1], split[item, 2]
        row = tile * part_lse.shape[1] + within
        first, last = split_ptr[item], split_ptr[item + 1]
        if row < lse.shape[2]:
            highest = Float32(NEG_INF)
            for slot in cutlass.range(first, last, unroll=1):
                highest = cute.arch.fmax(highest, part_lse[slot, within])
            empty = highest == Float32(NEG_INF)
            if const_expr(self.has_sink):
                highest = cute.arch.fmax(highest, sinks[0][h])
            shift = cutlass.select_(highest == Float32(NEG_INF), Float32(0.0), highest)
            total = Float32(0.0)
            columns = cute.make_rmem_tensor((self.value_dim + 31) // 32, Float32)  # f32 [Dv] / 32
            columns.fill(0.0)
            for slot in cutlass.range(first, last, unroll=1):
                weight = device.exp2((part_lse[slot, within] - shift) * Float32(LOG2_E))
                total = total + weight
                for j in cutlass.range_constexpr((self.value_dim + 31) // 32):
                    columns[j] = columns[j] + weight * parts[slot, within, lane + 32 * j]
            masked = total == Float32(0.0)
            if const_expr(self.has_sink):
                masked = masked & empty  # else the parts are far below the sink
                total = total + device.exp2((sinks[0][h] - shift) * Float32(LOG2_E))
            scale = cutlass.select_(masked, Float32(0.0), Float32(1.0) / total)
            for j in cutlass.range_constexpr((self.value_dim + 31) // 32):
                if lane + 32 * j < self.value_dim:
                    out[b, h, row, lane + 32 * j] = self.dtype(columns[j] * scale)
            if lane == 0:
                value = shift + cute.math.log(total)
                if const_expr(self.has_sink):
                    lse[b, h, row] = cutlass.select_(masked, sinks[0][h], value)
                else:
                    lse[b, h, row] = cutlass.select_(masked, Float32(NEG_INF), value)
