"""Compute LSE and delta of every row before a backward, and clear the buffers it accumulates into.

The kernel is bound by memory bandwidth and uses no architecture-specific feature. It also compares
captured data with its fingerprints, which saves the launch of a kernel, and does the work of terms
that shift whole rows of scores. They do not change the probabilities: the main kernel computes
scores without them, from an LSE without them. The gradient of such a term is the sum over the row
of the gradients of its scores, which is the gradient of the row's LSE, less that of an attention
sink, which the term does not shift.
"""

from __future__ import annotations

from typing import Any, Protocol

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute

from attnkit.templates.common import device
from attnkit.templates.common.constants import LOG2_E
from attnkit.templates.common.dropout import log_survivor_scale, survivor_scale
from attnkit.templates.common.exact_sums import ExactSums
from attnkit.templates.common.fingerprint import compare_chunks
from attnkit.templates.common.hooks import RowHooks
from attnkit.templates.common.lse_in_mma import ROW_WORDS, row_columns, split_bfloat16
from attnkit.templates.common.site import Site

ROWS = 64  # rows per CTA
UNIT = 64 * ROWS  # floats in a unit of a float32 sum
VECTOR = 8  # elements of a load: 16 bytes
THREADS, WARP = 128, 32
CHECKING_CTAS = 256  # CTAs that compare captured data; most CTAs do not read its table
LOADS = 4  # rows that a thread loads before it computes
# -LSE of a fully masked row: finite, because the extra columns of the MMAs multiply it by zeros
MASKED_ROW = -(2.0**60)


class PreprocessConfig(Protocol):
    """Describes the fields of a backward's config that the preprocess reads.

    Attributes:
        head_dim, head_dim_v: head_dim and head_dim_v as the kernel computes them.
        block_q: rows of a q block.
        less_lse, less_delta: whether the MMAs subtract LSE and delta, see `lse_in_mma`.
        sum_order: "" if sums have no order.
        with_dropout: whether elements of the softmax are dropped.
        with_entropy: whether the rows' entropies have a gradient.
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
    @property
    def sum_order(self) -> str: ...
    @property
    def with_dropout(self) -> bool: ...
    @property
    def with_entropy(self) -> bool: ...


class Preprocess(ExactSums):
    """Computes -delta = dLSE - rowsum(dO * O) and LSE in log2 units, and clears dQ or its flags.

    If the MMAs subtract LSE or delta, the kernel writes it as extra columns, see `lse_in_mma`. The
    gradient of an attention sink is the sum of exp(sink - LSE) (dLSE - delta) over all rows of its
    head. The kernel writes the sums over the rows of each warp; their order is fixed.

    With dropout it writes LSE - log(s) and delta / s for the survivors' scale s, see `sm90.dropout`.

    Args:
        config: config of the main kernel.
        with_lse: whether the LSE has a gradient.
        flags: number of flags or counters per 64 rows of dQ, cleared instead of the sums; None to
            clear the sums.
        hooks: hooks of the terms that shift rows; None if the variant has none.
    """

    def __init__(
        self,
        config: PreprocessConfig,
        with_lse: bool,
        flags: int | None = None,
        hooks: RowHooks | None = None,
    ) -> None:
        self.config = config
        self.hooks = hooks
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
        checks: list,
        captured: list,
        totals: list,
        sinks: list,
        stream: Any,
    ):
        """Launch one CTA for every 64 rows.

        Args:
            out, grad_out: [B, H, S, Dv], as for the main kernel.
            lse: float32 [B, H, S], natural units; for fully masked rows -inf, or the sink.
            grad_lse: float32 [B, H, S]; not read unless `with_lse`.
            rows_lse: float32 [B * H * q blocks * block_q], written: LSE in log2 units, inf for
                fully masked rows and beyond the ends. As extra columns: [..., 4] words of -LSE.
            rows_delta: -delta in the same form, 0 for fully masked rows and beyond the ends.
            sums: float32 sums of dQ, cleared; with `flags`, the flags instead.
            checks: the table of `compare_chunks`, or nothing.
            captured: captured tensors of the score; empty without hooks.
            totals: gradients of those that require grad, as for the main kernel; empty without
                hooks.
            sinks: the attention sink, float32 [H], if the kernel needs it; and the sums of its
                gradient, float32 [B, H, 4 * grid blocks], written, if that is needed. With
                `with_dropout` the state of dropout follows, int64 [2]. With `with_entropy`, if
                there are `totals`, follows float32 [B, H, S]: for each row the sum of the gradients
                of its scores, less the one that `grad_lse` implies.
            stream: CUDA stream.
        """
        length, heads, batch = out.shape[2], out.shape[1], out.shape[0]
        bm = self.config.block_q
        blocks = (length + bm - 1) // bm * (bm // ROWS)
        self.kernel(
            out,
            grad_out,
            lse,
            grad_lse,
            rows_lse,
            rows_delta,
            sums,
            checks,
            captured,
            totals,
            sinks,
        ).launch(grid=(blocks, heads, batch), block=(THREADS, 1, 1), stream=stream, use_pdl=True)

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
        checks: list,
        captured: list,
        totals: list,
        sinks: list,
    ):
        """Write LSE and delta of 64 rows, and clear the sums or the flags of these rows of dQ."""
        count = len(sinks) - (1 if const_expr(self.config.with_entropy and len(totals) > 0) else 0)
        sinks, more = sinks[:count], sinks[count:]
        count = count - (1 if const_expr(self.config.with_dropout) else 0)
        sinks, dropout = sinks[:count], sinks[count:]
        # threads per row, a power of two; at most a warp, which sums the row
        lanes = min(1 << (self.config.head_dim_v // VECTOR - 1).bit_length(), WARP)
        vectors = -(-self.config.head_dim_v // (VECTOR * lanes))  # per lane and row
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()  # wait for the kernel that writes the inputs
        (block, h, b), (blocks, heads, _) = reversed_block_idx()
        length, depth = out.shape[2], out.shape[3]
        first = (b * heads + h) * blocks + block
        column = thread % lanes * VECTOR
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
                for v in cutlass.range_constexpr(vectors):
                    at = column + v * VECTOR * lanes
                    loaded_column = cutlass.min(at, depth - VECTOR)
                    o = cute.make_rmem_tensor(VECTOR, out.element_type)  # dtype [8]
                    do = cute.make_rmem_tensor(VECTOR, out.element_type)  # dtype [8]
                    cute.autovec_copy(_vector(out, (b, h, q, loaded_column)), o)
                    cute.autovec_copy(_vector(grad_out, (b, h, q, loaded_column)), do)
                    loads.append((i, at, o, do))
            for first_load in cutlass.range_constexpr(0, len(loads), vectors):
                i = loads[first_load][0]
                total = _sum_of_products(loads[first_load : first_load + vectors], depth)
                step = lanes // 2
                while const_expr(step > 0):
                    total = total + cute.arch.shuffle_sync_bfly(total, step)
                    step //= 2
                delta = delta - cutlass.select_(own == i, total, Float32(0.0))
        # Other lanes of a row, and rows beyond the end, count nothing.
        own_inside = (thread % lanes < passes) & (block * ROWS + own_row < lse.shape[2])
        sink_grad = Float32(0.0)
        if const_expr(len(sinks) > 0):
            sink_grad = self.sink_gradient(sinks[0][h], own_inside, value, delta)
        if const_expr(len(sinks) > 1):
            self.write_sink_sum(sinks[1], (b, h, block), sink_grad)
        if const_expr(self.hooks is not None):
            site = Site(captured, b, h, length, Int32(0), Float32(0.0), Int32(0))
            # The softmax weights of a row and of its sink sum to 1, so do the gradients to dLSE.
            total = grad_lse[place] if const_expr(self.with_lse) else Float32(0.0)
            total = total - sink_grad
            if const_expr(len(more) > 0):
                total = total + more[0][place]
            self.add_shifts(site, place[2], own_inside, value, delta, total, totals)
        if thread % lanes < passes:
            unmasked = block * ROWS + own_row < lse.shape[2]
            unmasked = unmasked & (value != Float32(float("-inf")))
            if const_expr(self.hooks is not None):
                value = self.less_term(site, place[2], value)
            if const_expr(self.config.with_dropout):
                value = value - log_survivor_scale(dropout[0])
                delta = delta / survivor_scale(dropout[0])
            self.write_row(first * ROWS + own_row, unmasked, value, delta, rows_lse, rows_delta)
        self.clear(sums, first, thread)
        if const_expr(len(checks) > 0):
            self.check(checks, first)

    def less_term(self, site: Any, q: Any, lse: Any) -> Any:
        """Return the LSE of row `q` of the scores without the terms that shift the row."""
        term = self.hooks.value(site, q)
        return lse if term is None else lse - term

    def add_shifts(
        self, site: Any, q: Any, inside: Any, lse: Any, delta: Any, total: Any, totals: Any
    ) -> None:
        """Add the gradients of the terms that shift row `q`; all lanes of a warp must call it.

        Args:
            site: position of the rows.
            q: the row.
            inside: whether this thread has a row of its own.
            lse, delta: LSE in natural units, and -delta.
            total: sum of the gradients of the row's scores.
            totals: gradients of captured tensors in global memory.
        """
        unmasked = inside & (lse != Float32(float("-inf")))
        # NaN and infinities of the row's scores and of their gradients are in LSE and delta
        total = total + (delta + lse) * Float32(0.0)
        total = cutlass.select_(unmasked, total, Float32(0.0))
        add_row_gradients(self, site, q, total, totals)

    def sink_gradient(self, sink: Any, inside: Any, lse: Any, delta: Any) -> Any:
        """Return exp(sink - LSE) (dLSE - delta), the gradient that a row adds to its sink.

        Args:
            sink: the sink of the row's head.
            inside: whether this thread has a row of its own.
            lse, delta: LSE and dLSE - delta of the row.
        """
        counts = inside & (lse != Float32(float("-inf")))
        share = device.exp2((sink - lse) * Float32(LOG2_E)) * delta
        return cutlass.select_(counts, share, Float32(0.0))

    @cute.jit
    def write_sink_sum(self, sums: cute.Tensor, place: tuple, share: Float32):
        """Write the sum of `sink_gradient` over the rows of a warp.

        Args:
            sums: float32 [B, H, 4 * grid blocks], written.
            place: batch element, head and block of 64 rows.
            share: the gradient of this thread's row, or 0.
        """
        b, h, block = place
        thread, _, _ = cute.arch.thread_idx()
        for step in cutlass.range_constexpr(5):
            share = share + cute.arch.shuffle_sync_bfly(share, 16 >> step)
        if thread % WARP == 0:
            sums[b, h, block * (THREADS // WARP) + thread // WARP] = share

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
    def check(self, checks: list, row_block: Int32):
        """Compare captured data with its fingerprints in the first CTAs.

        `row_block` is the number of the 64 rows of this CTA, in the order of memory.
        """
        blocks, heads, batch = cute.arch.grid_dim()
        total = blocks * heads * batch
        cta = total - 1 - row_block  # those that start first
        if cta < CHECKING_CTAS:
            warps = THREADS // 32
            ctas = cutlass.min(total, CHECKING_CTAS)
            warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
            compare_chunks(checks[0], cta * warps + warp, ctas * warps)

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


def add_row_gradients(sums: ExactSums, site: Any, q: Any, total: Any, totals: Any) -> None:
    """Add the gradients that `RowHooks` derive from a sum over row `q`; a warp must call it whole.

    Args:
        sums: the kernel, with `RowHooks` as its hooks.
        site: position of the rows.
        q: the thread's row.
        total: the sum; 0 if another thread adds it.
        totals: gradients of captured tensors in global memory.
    """
    values = sums.hooks.gradients(site, q, total)
    for i, (level, value) in enumerate(zip(sums.hooks.gradient_levels, values, strict=True)):
        target = totals[sums.hooks.gradient_slots[i]]
        if level == "head":
            for step in (16, 8, 4, 2, 1):
                value = value + cute.arch.shuffle_sync_bfly(value, step)
            lead = (cute.arch.lane_idx() == 0) & (value != Float32(0.0))
            sums.add_where(lead, sums.place_of(i, site, target, None, None), value)
        else:
            place = sums.place_of(i, site, target, q, None)
            sums.add_where(value != Float32(0.0), place, value)


def reversed_block_idx() -> tuple[Any, Any]:
    """Return (block, head, batch element) of this CTA in reversed order, and the grid's shape.

    The preprocess ends with the rows that the main kernel reads first, and the postprocess begins
    with the rows that the main kernel wrote last. These rows are then still in the L2 cache.
    """
    grid = cute.arch.grid_dim()
    index = cute.arch.block_idx()
    return tuple(n - 1 - i for n, i in zip(grid, index, strict=True)), grid


def _sum_of_products(loads: list[Any], depth: Any) -> Any:
    """Return the sum of dO * O over a lane's columns of a row.

    Args:
        loads: (pass, first column, O, dO) of each of the lane's vectors.
        depth: columns of the tensors.
    """
    totals = []
    for _, column, o, do in loads:
        product = o.load().to(Float32) * do.load().to(Float32)
        total = product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        totals.append(cutlass.select_(column < depth, total, Float32(0.0)))
    first, *others = totals
    return sum(others, first)


def _vector(tensor: Any, place: Any) -> Any:
    start = cute.domain_offset(place, tensor).iterator.align(16)
    return cute.make_tensor(start, cute.make_layout(VECTOR))  # dtype [8]
