"""What the Hopper backward needs before and after its main kernel.

`Prepare` writes the statistics of every row and clears the sums of dQ, or the marks of those that
begin with a store (`backward_firsts`); `Finish` turns float32 sums into gradients of the dtype. Both
are bound by memory and use nothing of Hopper.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute

from attnkit.templates.common import device
from attnkit.templates.sm90.backward_config import ROWS, UNIT, BackwardConfig
from attnkit.templates.sm90.backward_math import LOG2_E

VECTOR = 8  # elements of a load: 16 bytes
THREADS = 128
AHEAD = 4  # rows that a thread loads before it computes
NOTHING = -(2.0**60)  # -LSE of a row that keeps nothing, finite for those who multiply it by zeros


class Prepare:
    """-delta = dLSE - rowsum(dO * O), the LSE in log2 units, and zeros for dQ.

    Args:
        config: that of the main kernel.
        with_lse: whether the LSE has a gradient.
        marks: of the chunks of 64 rows of dQ, which are cleared in place of the sums; None for these.
    """

    def __init__(self, config: BackwardConfig, with_lse: bool, marks: int | None = None) -> None:
        self.config = config
        self.with_lse = with_lse
        self.marks = marks

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
        """Launch, a CTA for 64 rows.

        Args:
            out, grad_out: [B, H, S, Dv] as for the main kernel.
            lse: float32 [B, H, S], natural units; -inf for rows that keep nothing.
            grad_lse: float32 [B, H, S]; not read unless `with_lse`.
            rows_lse, rows_delta: float32 [B * H * q blocks * block_q], written, -delta in the
                second; beyond the ends, and for rows that keep nothing, inf and 0.
            sums: float32, of which the units of dQ are cleared; marks, if there are any.
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
        # threads of a row, a power of two
        lanes = 1 << (self.config.value_width // VECTOR - 1).bit_length()
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.griddepcontrol_launch_dependents()
        (block, h, b), (blocks, heads, _) = _place()
        length, depth = out.shape[2], out.shape[3]
        first = (b * heads + h) * blocks + block
        column = thread % lanes * VECTOR
        some = cutlass.min(column, depth - VECTOR)
        passes = ROWS * lanes // THREADS
        # a lane writes the statistics of one of its rows: their LSE is there when the sums are
        own = thread % lanes % passes
        mine = thread // lanes + own * (THREADS // lanes)
        place = (b, h, cutlass.min(block * ROWS + mine, lse.shape[2] - 1))
        value, delta = lse[place], Float32(0.0)
        if const_expr(self.with_lse):
            delta = grad_lse[place]
        for start in cutlass.range_constexpr(0, passes, AHEAD):
            loads = []
            for i in cutlass.range_constexpr(start, min(start + AHEAD, passes)):
                row = thread // lanes + i * (THREADS // lanes)
                q = cutlass.min(block * ROWS + row, length - 1)
                a = cute.make_rmem_tensor(VECTOR, out.element_type)
                g = cute.make_rmem_tensor(VECTOR, out.element_type)
                cute.autovec_copy(_vector(out, (b, h, q, some)), a)
                cute.autovec_copy(_vector(grad_out, (b, h, q, some)), g)
                loads.append((i, a, g))
            for i, a, g in loads:
                product = a.load().to(Float32) * g.load().to(Float32)
                total = product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
                total = cutlass.select_(column < depth, total, Float32(0.0))
                step = lanes // 2
                while const_expr(step > 0):
                    total = total + cute.arch.shuffle_sync_bfly(total, step)
                    step //= 2
                delta = delta - cutlass.select_(own == i, total, Float32(0.0))
        if thread % lanes < passes:
            kept = (block * ROWS + mine < lse.shape[2]) & (value != Float32(float("-inf")))
            self.write_row(first * ROWS + mine, kept, value, delta, rows_lse, rows_delta)
        self.clear(sums, first, thread)

    def write_row(
        self, at: Any, kept: Any, value: Any, delta: Any, rows_lse: Any, rows_delta: Any
    ) -> None:
        """Write a row's statistics; `kept`: it keeps something, and `value` is its LSE."""
        less, statistic, delta = (
            cutlass.select_(kept, x, Float32(none))
            for x, none in ((-value, NOTHING), (value * LOG2_E, float("inf")), (delta, 0.0))
        )
        self.put(at, less, statistic, delta, rows_lse, rows_delta)

    def put(
        self, at: Any, less: Any, statistic: Any, delta: Any, rows_lse: Any, rows_delta: Any
    ) -> None:
        """Write a row's LSE, of which there are -LSE and LSE in log2 units, and its -delta."""
        rows_lse[at] = statistic
        rows_delta[at] = delta

    @cute.jit
    def clear(self, sums: cute.Tensor, first: Int32, thread: Int32):
        """Zeros for the sums of 64 rows of dQ, or for their marks."""
        if const_expr(self.marks is not None):
            if thread < self.marks:
                sums[first * self.marks + thread] = Float32(0.0)
        else:
            wide = self.config.width // ROWS
            zero = cute.make_rmem_tensor(4, Float32)
            zero.fill(0.0)
            to = sums.iterator + (Int64(first) * (wide * UNIT) + thread * 4)
            for i in cutlass.range_constexpr(wide * UNIT // (4 * THREADS)):
                start = (to + i * (4 * THREADS)).align(16)
                cute.autovec_copy(zero, cute.make_tensor(start, cute.make_layout(4)))


class Finish:
    """A gradient of the dtype from its float32 sums.

    Args:
        config: that of the main kernel.
        width: the gradient's head dim as computed.
        block: positions of a tile, to which lengths are rounded up.
    """

    def __init__(self, config: BackwardConfig, width: int, block: int) -> None:
        self.config = config
        self.width = width
        self.block = block
        self.dtype = device.DTYPES[config.dtype]

    @cute.jit
    def __call__(
        self, sums: cute.Tensor, grad: cute.Tensor, first: Int32, factor: Float32, stream: Any
    ):
        """Launch, a CTA for 64 rows.

        Args:
            sums: float32, all units.
            grad: [B, H, S, D] of the dtype, the last dimension contiguous.
            first: number of the gradient's first unit.
            factor: what the sums are multiplied by.
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
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.griddepcontrol_wait()
        (block, h, b), (blocks, heads, _) = _place()
        warp, lane = thread // 32, thread % 32
        row = block * ROWS + warp * 16 + lane // 4
        wide = self.width // ROWS
        unit = first + ((b * heads + h) * blocks + block) * wide
        for i in cutlass.range_constexpr(wide):
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
                        store_vector(at, pairs)

    def row(self, part: Any, half: int, group: int, factor: Any, lane: Any) -> list[Any]:
        """Eight columns of a row, of 32 that four lanes have two by two."""
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


def _place() -> tuple[Any, Any]:
    """Block, head and batch element of a CTA, from the last to the first; and the grid.

    Of what `Prepare` writes, the second-level cache then holds what the main kernel reads first, and
    `Finish` begins with what that has written last.
    """
    grid = cute.arch.grid_dim()
    at = cute.arch.block_idx()
    return tuple(n - 1 - i for n, i in zip(grid, at, strict=True)), grid


def _vector(tensor: Any, at: Any) -> Any:
    """Eight elements of a tensor from a position on."""
    start = cute.domain_offset(at, tensor).iterator.align(16)
    return cute.make_tensor(start, cute.make_layout(VECTOR))


def store_vector(to: Any, words: list[Any]) -> None:
    """Four words to memory, 16 bytes at a multiple of that; a copy of Int32 is made word by word."""
    cute.arch.inline_ptx(
        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[to.toint(), *words],
    )
