"""Round float32 sums to gradients of the dtype: the postprocess of the Blackwell backward."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from attnkit.templates.common import device
from attnkit.templates.sm100.backward_config import SLICE, UNIT, BackwardConfig


class Postprocess:
    """Rounds float32 sums, in the layout of `backward_dq_reduce`, to a gradient in the dtype.

    Args:
        config: config of the main kernel.
        head_dim: head dim of the gradient as the main kernel computes it.
        block: positions per block of the work list, to which lengths are rounded up; each CTA of
            the main kernel adds an equal part of them.
    """

    def __init__(self, config: BackwardConfig, head_dim: int, block: int) -> None:
        self.config = config
        self.head_dim = head_dim
        self.block = block
        self.rows = block // config.ctas
        self.dtype = device.DTYPES[config.dtype]

    @cute.jit
    def __call__(
        self, sums: cute.Tensor, grad: cute.Tensor, first: Int32, factor: Float32, stream: Any
    ):
        """Launch the kernel with one CTA per tile of the sums.

        Args:
            sums: float32, the sums of all gradients, in units of 4096.
            grad: [B, H, S, D] of the dtype, written; rows are contiguous, D is a multiple of 8, the
                other strides and the address are multiples of 16 bytes.
            first: index of the gradient's first unit.
            factor: multiplies the sums.
            stream: CUDA stream.
        """
        blocks = (grad.shape[2] + self.block - 1) // self.block * self.config.ctas
        self.kernel(sums, grad, first, factor).launch(
            grid=(blocks, grad.shape[1], grad.shape[0]),
            block=(self.rows, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, sums: cute.Tensor, grad: cute.Tensor, first: Int32, factor: Float32):
        """Round one tile of the sums, with a row per thread."""
        thread, _, _ = cute.arch.thread_idx()
        block, h, b = cute.arch.block_idx()
        blocks, heads, _ = cute.arch.grid_dim()
        tile = (b * heads + h) * blocks + block
        size = self.rows * self.head_dim
        start = sums.iterator + (Int64(first) * UNIT + Int64(tile) * size + thread * 4)
        q, depth = block * self.rows + thread, grad.shape[3]
        for i in cutlass.range_constexpr(min(self.head_dim, depth) // SLICE + (depth % SLICE > 0)):
            part = cute.make_rmem_tensor(SLICE, Float32)  # f32 [32], of the thread's row
            source = (start + i * SLICE * self.rows).align(16)
            cute.autovec_copy(
                cute.make_tensor(
                    source, cute.make_layout((4, SLICE // 4), stride=(1, 4 * self.rows))
                ),
                cute.make_tensor(part.iterator, cute.make_layout((4, SLICE // 4))),
            )
            if q < grad.shape[2]:
                for v in cutlass.range_constexpr(min(SLICE, depth - i * SLICE) // 8):
                    packed = cute.make_rmem_tensor(4, Int32)  # 8 elements of the dtype
                    for k in cutlass.range_constexpr(4):
                        low, high = part[8 * v + 2 * k], part[8 * v + 2 * k + 1]
                        packed[k] = device.pack(low * factor, high * factor, self.dtype)
                    at = cute.domain_offset((b, h, q, i * SLICE + 8 * v), grad).iterator.align(16)
                    cute.autovec_copy(
                        packed,
                        cute.make_tensor(cute.recast_ptr(at, dtype=Int32), cute.make_layout(4)),
                    )
