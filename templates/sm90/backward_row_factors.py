"""Multiply dQ by a factor of each row, after the Hopper backward, and differentiate the factor.

A mod that multiplies the scores of row q by t has dQ = t * scale * A, where A = dF K for the
gradients dF of the modified scores. The main kernel sums A. The gradient of t is the sum of
dF * score over the row, which is scale * Q . A. It costs nothing per score.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from attnkit.templates.common import device
from attnkit.templates.common.exact_sums import ExactSums
from attnkit.templates.common.hooks import RowHooks
from attnkit.templates.common.preprocess import add_row_gradients, reversed_block_idx
from attnkit.templates.common.site import Site
from attnkit.templates.sm90.backward_config import ROWS, UNIT, BackwardConfig
from attnkit.templates.sm90.backward_postprocess import THREADS, VECTOR, Postprocess


class RowFactors(Postprocess, ExactSums):
    """Builds the kernel that rounds the sums of dQ, times factors of rows, to the dtype.

    Args:
        config, head_dim, block: see `Postprocess`.
        hooks: hooks of the factors.
    """

    def __init__(self, config: BackwardConfig, head_dim: int, block: int, hooks: RowHooks) -> None:
        super().__init__(config, head_dim, block)
        self.hooks = hooks

    @cute.jit
    def __call__(
        self,
        sums: cute.Tensor,
        grad: cute.Tensor,
        query: cute.Tensor,
        captured: list,
        totals: list,
        first: Int32,
        factor: Float32,
        stream: Any,
    ):
        """Launch one CTA for every 64 rows.

        Args:
            sums: float32, all units.
            grad, query: [B, H, S, D] of the dtype, with a contiguous last dimension; `grad` is
                written.
            captured: captured tensors of the score.
            totals: gradients of those that require grad, as for the main kernel.
            first: index of the gradient's first unit.
            factor: softmax scale.
            stream: CUDA stream.
        """
        blocks = (grad.shape[2] + self.block - 1) // self.block * (self.block // ROWS)
        self.kernel(sums, grad, query, captured, totals, first, factor).launch(
            grid=(blocks, grad.shape[1], grad.shape[0]),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        sums: cute.Tensor,
        grad: cute.Tensor,
        query: cute.Tensor,
        captured: list,
        totals: list,
        first: Int32,
        factor: Float32,
    ):
        """Round 64 rows of dQ, and add the gradients of their factors."""
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.griddepcontrol_wait()  # wait for the main kernel, which writes the sums
        (block, h, b), (blocks, heads, _) = reversed_block_idx()
        warp, lane = thread // 32, thread % 32
        length, depth = grad.shape[2], grad.shape[3]
        row = block * ROWS + warp * 16 + lane // 4
        inside = [cutlass.min(row + 8 * half, length - 1) for half in range(2)]
        site = Site(captured, b, h, length, Int32(0), factor, Int32(0))
        slopes = [self.hooks.value(site, q) * factor for q in inside]
        dots = [Float32(0.0), Float32(0.0)]  # Q . A of both rows, over this thread's columns
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
                place = (b, h, inside[half])
                dots[half] = dots[half] + self.dot(part, query, place, i, half, lane, depth)
                for group in cutlass.range_constexpr(2):
                    column = i * ROWS + group * 32 + lane % 4 * VECTOR
                    pairs = self.row(part, half, group, slopes[half], lane)
                    if q < length and column < depth:
                        at = cute.domain_offset((b, h, q, column), grad).iterator.align(16)
                        device.store_vector(at, pairs)
        for half in cutlass.range_constexpr(2):
            total = device.quad_sum(dots[half]) * factor
            lead = (lane % 4 == 0) & (row + 8 * half < length)
            total = cutlass.select_(lead, total, Float32(0.0))
            add_row_gradients(self, site, inside[half], total, totals)

    def dot(
        self, part: Any, query: Any, place: Any, i: int, half: int, lane: Any, depth: Any
    ) -> Any:
        """Return the product of Q and A in one row, over the thread's 16 columns of a unit.

        Args:
            part: the unit of A, f32 [64, 64] / 128 threads.
            query: [B, H, S, D].
            place: batch element, head and row.
            i: index of the unit in the row.
            half: 0, or 1 for the row 8 rows below.
            lane: index of the thread in its warp.
            depth: columns of the query.
        """
        total = Float32(0.0)
        for j in range(8):
            column = i * ROWS + 8 * j + 2 * (lane % 4)
            # all eight columns of a vector are inside, or none
            at = cute.domain_offset((*place, cutlass.min(column, depth - 2)), query).iterator
            pair = cute.make_rmem_tensor(2, self.dtype)
            cute.autovec_copy(cute.make_tensor(at.align(4), cute.make_layout(2)), pair)
            low = part[4 * j + 2 * half] * Float32(pair[0])
            high = part[4 * j + 2 * half + 1] * Float32(pair[1])
            total = total + cutlass.select_(column < depth, low + high, Float32(0.0))
        return total
