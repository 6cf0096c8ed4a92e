"""Round float32 sums to gradients of the dtype, after the Hopper backward (postprocess).

The kernel is bound by memory bandwidth. Its only dependence on Hopper is the order of the
accumulators.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from attnkit.templates.common import device
from attnkit.templates.common.preprocess import reversed_block_idx
from attnkit.templates.sm90.backward_config import ROWS, UNIT, BackwardConfig

VECTOR = 8  # elements of a store: 16 bytes
THREADS = 128


class Postprocess:
    """Builds the kernel that rounds the float32 sums of a gradient to the dtype.

    Args:
        config: config of the main kernel.
        head_dim: head dim of the gradient as the main kernel computes it.
        block: positions per block; lengths are rounded up to whole blocks.
    """

    def __init__(self, config: BackwardConfig, head_dim: int, block: int) -> None:
        self.config = config
        self.head_dim = head_dim
        self.block = block
        self.dtype = device.DTYPES[config.dtype]

    @cute.jit
    def __call__(
        self, sums: cute.Tensor, grad: cute.Tensor, first: Int32, factor: Float32, stream: Any
    ):
        """Launch one CTA for every 64 rows.

        Args:
            sums: float32, all units.
            grad: [B, H, S, D] of the dtype, with a contiguous last dimension, written.
            first: index of the gradient's first unit.
            factor: multiplies the sums.
            stream: CUDA stream.
        """
        blocks = (grad.shape[2] + self.block - 1) // self.block * (self.block // ROWS)
        self.kernel(sums, grad, first, factor).launch(
            grid=(blocks, grad.shape[1], grad.shape[0]),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, sums: cute.Tensor, grad: cute.Tensor, first: Int32, factor: Float32):
        """Round 64 rows of a gradient."""
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.griddepcontrol_wait()  # wait for the main kernel, which writes the sums
        (block, h, b), (blocks, heads, _) = reversed_block_idx()
        warp, lane = thread // 32, thread % 32
        row = block * ROWS + warp * 16 + lane // 4
        wide = self.head_dim // ROWS
        unit = first + ((b * heads + h) * blocks + block) * wide
        for i in cutlass.range_constexpr(wide):
            # f32 [64, 64] / 128 threads: a unit, in the order of an accumulator
            part = cute.make_rmem_tensor(32, Float32)
            start = sums.iterator + (Int64(unit + i) * UNIT + thread * 4)
            cute.autovec_copy(
                cute.make_tensor(start.align(16), cute.make_layout((4, 8), stride=(1, 512))),
                cute.make_tensor(part.iterator, cute.make_layout((4, 8))),
            )
            for half in cutlass.range_constexpr(2):  # eight rows apart
                q = row + 8 * half
                for group in cutlass.range_constexpr(2):
                    column = i * ROWS + group * 32 + lane % 4 * VECTOR
                    pairs = self.row(part, half, group, factor, lane)
                    if q < grad.shape[2] and column < grad.shape[3]:
                        at = cute.domain_offset((b, h, q, column), grad).iterator.align(16)
                        device.store_vector(at, pairs)

    def row(self, part: Any, half: int, group: int, factor: Any, lane: Any) -> list[Any]:
        """Return eight neighbouring columns of a row as four words.

        The four lanes of a row have 32 columns, each lane pairs of them, and exchange words.

        Args:
            part: a unit, f32 [64, 64] / 128 threads.
            half: 0, or 1 for the row 8 rows below.
            group: which half of the unit's 64 columns.
            factor: multiplies the values.
            lane: index of the thread in its warp.
        """
        pairs = []
        for k in range(4):
            at = 16 * group + 4 * k + 2 * half
            pairs.append(device.pack(part[at] * factor, part[at + 1] * factor, self.dtype))
        for bit in (1, 2):
            upper = (lane & bit) != 0
            for k in (k for k in range(4) if not k & bit):
                low, high = pairs[k], pairs[k | bit]
                own, other = cutlass.select_(upper, high, low), cutlass.select_(upper, low, high)
                other = cute.arch.shuffle_sync_bfly(other, bit)
                pairs[k] = cutlass.select_(upper, other, own)
                pairs[k | bit] = cutlass.select_(upper, own, other)
        return pairs
