"""Puts the parts of rows that were split along kv together, exactly.

Each part is a softmax over some of the columns, with its LSE; the output of the row is their mean
weighted by 2**(LSE in log2), which needs no second look at the scores (Milakov and Gimelshein 2018).
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, cute

from attnkit.templates.common import device
from attnkit.templates.common.constants import LOG2_E, NEG_INF

WARPS = 4


class Combine:
    """The kernel that follows a forward with split rows.

    Args:
        dtype: "bfloat16" or "float16", of the output.
        value_dim: head dim of the output.
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
        stream: Any,
    ):
        """Launch.

        Args:
            parts, part_lse: float32 [slots, rows, >= Dv] and [slots, rows].
            split: int32 [n, 3], the (b, h, tile) of each split row of tiles.
            split_ptr: int32 [n + 1], its slots.
            out: [B, H, S, Dv].
            lse: float32 [B, H, S].
        """
        rows = part_lse.shape[1]
        self.kernel(parts, part_lse, split, split_ptr, out, lse).launch(
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
    ):
        """A warp a row."""
        item, chunk, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        lane, within = thread % 32, chunk * WARPS + thread // 32
        b, h, tile = split[item, 0], split[item, 1], split[item, 2]
        row = tile * part_lse.shape[1] + within
        first, last = split_ptr[item], split_ptr[item + 1]
        if row < lse.shape[2]:
            most = Float32(NEG_INF)
            for slot in cutlass.range(first, last, unroll=1):
                most = cute.arch.fmax(most, part_lse[slot, within])
            shift = cutlass.select_(most == Float32(NEG_INF), Float32(0.0), most)
            total = Float32(0.0)
            columns = cute.make_rmem_tensor((self.value_dim + 31) // 32, Float32)
            columns.fill(0.0)
            for slot in cutlass.range(first, last, unroll=1):
                weight = device.exp2((part_lse[slot, within] - shift) * Float32(LOG2_E))
                total = total + weight
                for j in cutlass.range_constexpr((self.value_dim + 31) // 32):
                    columns[j] = columns[j] + weight * parts[slot, within, lane + 32 * j]
            dead = total == Float32(0.0)
            scale = cutlass.select_(dead, Float32(0.0), Float32(1.0) / total)
            for j in cutlass.range_constexpr((self.value_dim + 31) // 32):
                if lane + 32 * j < self.value_dim:
                    out[b, h, row, lane + 32 * j] = self.dtype(columns[j] * scale)
            if lane == 0:
                value = shift + cute.math.log(total)
                lse[b, h, row] = cutlass.select_(dead, Float32(NEG_INF), value)
