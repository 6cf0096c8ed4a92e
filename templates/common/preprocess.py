"""Compute LSE and delta of every row before a backward, and clear the buffers it accumulates into.

The kernel is bound by memory bandwidth and uses no architecture-specific feature.
"""

from __future__ import annotations

from typing import Any, Protocol

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute

from attnkit.templates.common import device
from attnkit.templates.common.constants import LOG2_E
from attnkit.templates.common.lse_in_mma import ROW_WORDS, row_columns, split_bfloat16

ROWS = 64  # rows per CTA
UNIT = 64 * ROWS  # floats in a unit of a float32 sum
VECTOR = 8  # elements of a load: 16 bytes
THREADS = 128
LOADS = 4  # rows that a thread loads before it computes
# -LSE of a fully masked row: finite, because the extra columns of the MMAs multiply it by zeros
MASKED_ROW = -(2.0**60)


class PreprocessConfig(Protocol):
    """Describes the fields of a backward's config that the preprocess reads.

    Attributes:
        head_dim, head_dim_v: head_dim and head_dim_v as the kernel computes them.
        block_q: rows of a q block.
        less_lse, less_delta: whether the MMAs subtract LSE and delta, see `lse_in_mma`.
    """

    @property
    def head_dim(self) -> int: ...
    @property
    def head_dim_v(self) -> int: ...
    @property
    def block_q(self) -> int: ...
    @property
    def less_lse(self) -> bool: ...
    @property
    def less_delta(self) -> bool: ...


class Preprocess:
    """Computes -delta = dLSE - rowsum(dO * O) and LSE in log2 units, and clears dQ or its flags.

    If the MMAs subtract LSE or delta, the kernel writes it as extra columns, see `lse_in_mma`.

    Args:
        config: config of the main kernel.
        with_lse: whether the LSE has a gradient.
        flags: number of flags per 64 rows of dQ, which are cleared instead of the sums; None to
            clear the sums.
    """

    def __init__(self, config: PreprocessConfig, with_lse: bool, flags: int | None = None) -> None:
        self.config = config
        self.with_lse = with_lse
        self.flags = flags

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        grad_out: cute.Tensor,
        lse: cute.Tensor,
        grad_lse: cute.Tensor,
        rows_lse: cute.Tensor,
        rows_delta: cute.Tensor,
        sums: cute.Tensor,
        stream: Any,
    ):
        """Launch one CTA for every 64 rows.

        Args:
            out, grad_out: [B, H, S, Dv], as for the main kernel.
            lse: float32 [B, H, S], natural units; -inf for fully masked rows.
            grad_lse: float32 [B, H, S]; not read unless `with_lse`.
            rows_lse: float32 [B * H * q blocks * block_q], written: LSE in log2 units, inf for
                fully masked rows and beyond the ends. As extra columns: [..., 4] words of -LSE.
            rows_delta: -delta in the same form, 0 for fully masked rows and beyond the ends.
            sums: float32 sums of dQ, cleared; with `flags`, the flags instead.
            stream: CUDA stream.
        """
        length, heads, batch = out.shape[2], out.shape[1], out.shape[0]
        bm = self.config.block_q
        blocks = (length + bm - 1) // bm * (bm // ROWS)
        self.kernel(out, grad_out, lse, grad_lse, rows_lse, rows_delta, sums).launch(
            grid=(blocks, heads, batch), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        out: cute.Tensor,
        grad_out: cute.Tensor,
        lse: cute.Tensor,
        grad_lse: cute.Tensor,
        rows_lse: cute.Tensor,
        rows_delta: cute.Tensor,
        sums: cute.Tensor,
    ):
        """Write LSE and delta of 64 rows, and clear the sums or the flags of these rows of dQ."""
        # threads per row, a power of two
        lanes = 1 << (self.config.head_dim_v // VECTOR - 1).bit_length()
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.griddepcontrol_launch_dependents()
        (block, h, b), (blocks, heads, _) = reversed_block_idx()
        length, depth = out.shape[2], out.shape[3]
        first = (b * heads + h) * blocks + block
        column = thread % lanes * VECTOR
        loaded_column = cutlass.min(column, depth - VECTOR)
        passes = ROWS * lanes // THREADS
        # A lane writes LSE and delta of one of its rows. It loads that LSE first, to overlap the
        # load with the row's reduction.
        own = thread % lanes % passes
        own_row = thread // lanes + own * (THREADS // lanes)
        place = (b, h, cutlass.min(block * ROWS + own_row, lse.shape[2] - 1))
        value, delta = lse[place], Float32(0.0)
        if const_expr(self.with_lse):
            delta = grad_lse[place]
        for start in cutlass.range_constexpr(0, passes, LOADS):
            loads = []
            for i in cutlass.range_constexpr(start, min(start + LOADS, passes)):
                row = thread // lanes + i * (THREADS // lanes)
                q = cutlass.min(block * ROWS + row, length - 1)
                o = cute.make_rmem_tensor(VECTOR, out.element_type)  # dtype [8]
                do = cute.make_rmem_tensor(VECTOR, out.element_type)  # dtype [8]
                cute.autovec_copy(_vector(out, (b, h, q, loaded_column)), o)
                cute.autovec_copy(_vector(grad_out, (b, h, q, loaded_column)), do)
                loads.append((i, o, do))
            for i, o, do in loads:
                product = o.load().to(Float32) * do.load().to(Float32)
                total = product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
                total = cutlass.select_(column < depth, total, Float32(0.0))
                step = lanes // 2
                while const_expr(step > 0):
                    total = total + cute.arch.shuffle_sync_bfly(total, step)
                    step //= 2
                delta = delta - cutlass.select_(own == i, total, Float32(0.0))
        if thread % lanes < passes:
            unmasked = block * ROWS + own_row < lse.shape[2]
            unmasked = unmasked & (value != Float32(float("-inf")))
            self.write_row(first * ROWS + own_row, unmasked, value, delta, rows_lse, rows_delta)
        self.clear(sums, first, thread)

    def write_row(
        self, row: Any, unmasked: Any, lse: Any, delta: Any, rows_lse: Any, rows_delta: Any
    ) -> None:
        """Write LSE and delta of one row.

        Args:
            unmasked: whether the row lies inside the tensor and is not fully masked.
        """
        less, statistic, delta = (
            cutlass.select_(unmasked, x, Float32(masked))
            for x, masked in ((-lse, MASKED_ROW), (lse * LOG2_E, float("inf")), (delta, 0.0))
        )
        if self.config.less_lse:
            self.write_columns(rows_lse, row, less)
        else:
            rows_lse[row] = statistic
        if self.config.less_delta:
            self.write_columns(rows_delta, row, delta)
        else:
            rows_delta[row] = delta

    def write_columns(self, rows: Any, row: Any, value: Any) -> None:
        """Write LSE or delta of one row as the extra columns that the MMAs read."""
        position = Float32(row % self.config.block_q)
        device.store_vector(
            rows.iterator + row * ROW_WORDS,
            row_columns(split_bfloat16(value), (position, position)),
        )

    @cute.jit
    def clear(self, sums: cute.Tensor, first: Int32, thread: Int32):
        """Zero the sums of 64 rows of dQ, or their flags."""
        if const_expr(self.flags is not None):
            if thread < self.flags:
                sums[first * self.flags + thread] = Float32(0.0)
        else:
            wide = self.config.head_dim // ROWS
            zero = cute.make_rmem_tensor(4, Float32)  # f32 [4]
            zero.fill(0.0)
            to = sums.iterator + (Int64(first) * (wide * UNIT) + thread * 4)
            for i in cutlass.range_constexpr(wide * UNIT // (4 * THREADS)):
                start = (to + i * (4 * THREADS)).align(16)
                cute.autovec_copy(zero, cute.make_tensor(start, cute.make_layout(4)))


def reversed_block_idx() -> tuple[Any, Any]:
    """Return (block, head, batch element) of this CTA in reversed order, and the grid's shape.

    The preprocess ends with the rows that the main kernel reads first, and the postprocess begins
    with the rows that the main kernel wrote last. These rows are then still in the L2 cache.
    """
    grid = cute.arch.grid_dim()
    index = cute.arch.block_idx()
    return tuple(n - 1 - i for n, i in zip(grid, index, strict=True)), grid


def _vector(tensor: Any, place: Any) -> Any:
    start = cute.domain_offset(place, tensor).iterator.align(16)
    return cute.make_tensor(start, cute.make_layout(VECTOR))  # dtype [8]
