"""Issue the five MMAs of the Blackwell backward from one warp.

S of the next q block is issued before dQ and dK of the current one, and its dP after them, so that
the tensor cores are busy while P is computed. dQ is issued before dK and waits for dS for both. If
dQ overwrites dS in tensor memory, dK reads dS from shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute

from attnkit.templates.common import device as common_device
from attnkit.templates.common.lse_in_mma import CORE_WORDS, ROW_WORDS
from attnkit.templates.common.work_tile import RECORD, WorkTile
from attnkit.templates.sm100 import backward_device as device
from attnkit.templates.sm100.backward_barriers import BackwardBarriers
from attnkit.templates.sm100.backward_config import BackwardConfig
from attnkit.templates.sm100.backward_lse_in_mma import LseInMma
from attnkit.templates.sm100.backward_shared import Group, do_phase, do_stage, q_phase, q_stage
from attnkit.templates.sm100.device import fence_after


@dataclass(frozen=True)
class Operands:
    """Holds the shared memory addresses of the operands, and the tensor memory address.

    Attributes:
        q: dtype [block_q, head_dim, stages].
        k, v: dtype [128, head_dim] and [128, head_dim_v].
        do: dtype [block_q, head_dim_v, stages].
        ds: dtype [128, block_q], dS^T.
        factors, lse, delta: extra columns of `LseInMma`.
        tmem: base of tensor memory.
    """

    q: Int32
    k: Int32
    v: Int32
    do: Int32
    ds: Int32
    factors: Int32
    lse: Int32
    delta: Int32
    tmem: Int32


class Mma:
    """Issues the MMAs of a CTA.

    Args:
        config: compile-time configuration.
        group: the CTAs of a work tile: one.
        lse_in_mma: issues the extra k-step for LSE and delta.
        dtype: dtype of the operands.
    """

    def __init__(
        self, config: BackwardConfig, group: Group, lse_in_mma: LseInMma, dtype: Any
    ) -> None:
        self.config = config
        self.group = group
        self.lse_in_mma = lse_in_mma
        self.dtype = dtype

    @cute.jit
    def run(self, operands: Any, bars: Any, info: cute.Tensor):
        """Issue the MMAs of all work tiles.

        Args:
            operands: addresses of the operands, for the methods that issue MMAs.
            bars: mbarriers.
            info: int32 words in shared memory, see `Word`.
        """
        c = self.config
        q_count, kv_count = Int32(0), Int32(0)  # indices of the q block and the work tile
        cute.arch.mbarrier_wait(bars.k_full, 0)
        valid = info[RECORD + WorkTile.VALID]
        while valid != 0:
            count = info[RECORD + WorkTile.NUM_BLOCKS]
            part = self.group.column_part(info, kv_count)
            if const_expr(c.q_stages == 1):
                for i in cutlass.range(count, unroll=1):
                    self.issue_block(operands, q_count, bars, (i, kv_count), part)
                    q_count += 1
                if count > 0:
                    with cute.arch.elect_one():
                        device.commit(bars.acc_full)
            elif count > 0:
                self.issue_s(operands, q_count, bars)
                self.wait_v(bars, kv_count)
                self.issue_dp(operands, q_count, bars)
                self.issue_dv(operands, q_count, bars, Int32(0), part)
                for i in cutlass.range(count - 1, unroll=1):
                    # S first: the compute warps process it during dQ and dK of the previous block
                    self.issue_s(operands, q_count + 1, bars)
                    self.issue_dq(operands, q_count, bars, part)
                    self.issue_dk(operands, q_count, bars, i, part)
                    self.issue_dp(operands, q_count + 1, bars)
                    self.issue_dv(operands, q_count + 1, bars, Int32(1), part)
                    q_count += 1
                self.issue_dq(operands, q_count, bars, part)
                self.issue_dk(operands, q_count, bars, count - 1, part)
                with cute.arch.elect_one():
                    device.commit(bars.acc_full)
                q_count += 1
            common_device.arrive(bars.kv_empty)
            kv_count += 1
            cute.arch.mbarrier_wait(bars.k_full, kv_count & 1)
            valid = info[RECORD + WorkTile.VALID]

    # ---------------------------------------------------- MMAs of a block, inlined while tracing

    def issue_block(
        self, operands: Operands, count: Int32, bars: BackwardBarriers, first: tuple, part: Any
    ) -> None:
        """Issue the MMAs of a block one after another, if Q has one stage.

        Args:
            operands: addresses of the operands.
            count: index of the q block in the CTA.
            bars: mbarriers.
            first: (index of the q block in the work tile, index of the work tile).
            part: see `Group.column_part`.
        """
        i, kv_count = first
        self.issue_s(operands, count, bars)
        self.wait_v(bars, kv_count)  # returns at once after the first block
        self.issue_dp(operands, count, bars)
        self.issue_dv(operands, count, bars, i, part)
        self.issue_dq(operands, count, bars, part)
        self.issue_dk(operands, count, bars, i, part)

    def wait_v(self, bars: BackwardBarriers, kv_count: Int32) -> None:
        """Wait until V of the `kv_count`-th work tile has arrived."""
        cute.arch.mbarrier_wait(bars.v_full, kv_count & 1)

    def issue_s(self, operands: Operands, count: Int32, bars: BackwardBarriers) -> None:
        """Issue S^T = K Q^T, or S^T = K Q^T - LSE / scale with `less_lse`."""
        c, at = self.config, per_block(operands, count)
        cute.arch.mbarrier_wait(bars.block_full + q_stage(c, count), q_phase(c, count))
        form = device.instruction_descriptor(c.rows_kv, c.block_q, self.dtype)
        q = at.q + q_stage(c, count) * (c.block_q * c.head_dim * 2)
        fence_after()
        with cute.arch.elect_one():
            for step in range(c.head_dim // device.STEP):
                device.issue_mma(
                    at.tmem + c.s_column,
                    device.k_major(at.k, c.rows_kv, step),
                    device.k_major(q, c.block_q, step),
                    form,
                    step > 0,
                    a_in_tmem=False,
                )
            if c.less_lse:
                rows = at.lse + q_stage(c, count) * (4 * ROW_WORDS * c.block_q)
                self.lse_in_mma.subtract(at.tmem + c.s_column, at.factors, rows)
            device.commit(bars.s_full)

    def issue_dp(self, operands: Operands, count: Int32, bars: BackwardBarriers) -> None:
        """Issue dP^T = V dO^T, or dP^T = V dO^T - delta with `less_delta`."""
        c, at = self.config, per_block(operands, count)
        form = device.instruction_descriptor(c.rows_kv, c.block_q, self.dtype)
        do = at.do + do_stage(c, count) * (c.block_q * c.head_dim_v * 2)
        cute.arch.mbarrier_wait(bars.do_full + do_stage(c, count), do_phase(c, count))
        if c.dq_over_dp:
            # the columns of dP contain dQ of the previous block until the reduce warps have read it
            cute.arch.mbarrier_wait(bars.dq_empty, (count & 1) ^ 1)
        fence_after()
        with cute.arch.elect_one():
            for step in range(c.head_dim_v // device.STEP):
                device.issue_mma(
                    at.tmem + c.dp_column,
                    device.k_major(at.v, c.rows_kv, step),
                    device.k_major(do, c.block_q, step),
                    form,
                    step > 0,
                    a_in_tmem=False,
                )
            if c.less_delta:
                rows = at.delta + do_stage(c, count) * (4 * ROW_WORDS * c.block_q)
                self.lse_in_mma.subtract(at.tmem + c.dp_column, at.factors + 4 * CORE_WORDS, rows)
            device.commit(bars.dp_full)

    def issue_dv(
        self,
        operands: Operands,
        count: Int32,
        bars: BackwardBarriers,
        accumulate: Int32,
        part: Any,
    ) -> None:
        """Issue dV += P^T dO, or dV = P^T dO if `accumulate` is 0, for a part of its columns."""
        c, at = self.config, per_block(operands, count)
        do = at.do + do_stage(c, count) * (c.block_q * c.head_dim_v * 2)
        do = device.column_part(do, c.block_q, part, c.grad_dims[1])
        cute.arch.mbarrier_wait(bars.p_full, count & 1)
        fence_after()
        p = at.tmem + c.s_column  # P^T overwrites S^T
        released = (bars.do_empty + do_stage(c, count),)
        self.issue_gradient((at.tmem + c.dv_column, p, do), c.grad_dims[1], accumulate, released)

    def issue_dq(
        self, operands: Operands, count: Int32, bars: BackwardBarriers, column_part: Any
    ) -> None:
        """Issue dQ = dS K, in parts of as many columns as fit in tensor memory.

        Args:
            operands: addresses of the operands.
            count: index of the q block in the CTA.
            bars: mbarriers.
            column_part: see `Group.column_part`; these columns are computed.
        """
        c, at = self.config, per_block(operands, count)
        k = device.column_part(at.k, c.rows_kv, column_part, c.grad_dims[0])
        form = device.instruction_descriptor(
            c.block_q, c.dq_width, self.dtype, a_rows=True, b_rows=True
        )
        parts = c.dq_parts
        cute.arch.mbarrier_wait(bars.ds_full, count & 1)
        for part in range(parts):
            if not c.dq_over_dp:  # otherwise `issue_dp` has waited for it
                cute.arch.mbarrier_wait(bars.dq_empty, ((count * parts + part) & 1) ^ 1)
            fence_after()
            with cute.arch.elect_one():
                for step in range(c.rows_kv // device.STEP):
                    device.issue_mma(
                        at.tmem + c.dq_column,
                        device.mn_major(at.ds, c.rows_kv, step),
                        device.mn_major(k, c.rows_kv, step, part * c.dq_width),
                        form,
                        step > 0,
                        a_in_tmem=False,
                    )
                device.commit(bars.dq_full)

    def issue_dk(
        self,
        operands: Operands,
        count: Int32,
        bars: BackwardBarriers,
        accumulate: Int32,
        part: Any,
    ) -> None:
        """Issue dK += dS^T Q, or dK = dS^T Q if `accumulate` is 0, for a part of its columns.

        Call it after `issue_dq`, which waits for dS.
        """
        c, at = self.config, per_block(operands, count)
        q = at.q + q_stage(c, count) * (c.block_q * c.head_dim * 2)
        q = device.column_part(q, c.block_q, part, c.grad_dims[0])
        ds = at.tmem + c.dp_column if c.ds_in_tensor else at.ds
        places, released = (at.tmem + c.dk_column, ds, q), (bars.block_empty + q_stage(c, count),)
        self.issue_gradient(places, c.grad_dims[0], accumulate, released, c.ds_in_tensor)

    def issue_gradient(
        self,
        places: tuple[Int32, Int32, Int32],
        width: int,
        accumulate: Int32,
        released: tuple[cute.Pointer, ...],
        a_in_tmem: bool = True,
    ) -> None:
        """Issue dV += P^T dO, or dK += dS^T Q, for some of their columns.

        Args:
            places: tensor-memory address of the result, address of P^T or dS^T, and shared address
                of the columns of dO or Q.
            width: number of columns.
            accumulate: 0 to overwrite the result.
            released: barriers to commit to.
            a_in_tmem: whether P^T or dS^T is in tensor memory, or else in shared memory.
        """
        c, (out, a, b) = self.config, places
        form = device.instruction_descriptor(c.rows_kv, width, self.dtype, b_rows=True)
        with cute.arch.elect_one():
            for step in range(c.block_q // device.STEP):
                device.issue_mma(
                    out,
                    a + packed_column(c, step) if a_in_tmem else device.k_major(a, c.rows_kv, step),
                    device.mn_major(b, c.block_q, step),
                    form,
                    accumulate if step == 0 else True,
                    a_in_tmem=a_in_tmem,
                )
            for barrier in released:
                device.commit(barrier)


def per_block(operands: Any, count: Int32) -> Any:
    """Return the same addresses, but make the compiler treat them as depending on the q block.

    Otherwise it would compute all descriptors before the loop, and spill them.

    Args:
        operands: a dataclass of addresses.
        count: index of the q block, not negative.
    """
    zero = count >> 31
    places = (getattr(operands, field.name) for field in fields(operands))
    return type(operands)(*(place + zero for place in places))


def packed_column(c: BackwardConfig, step: int, split: bool = False) -> int:
    """Return the column, relative to the first, of a k-step's 16 q rows of P^T or dS^T.

    Each compute warpgroup writes its half over the columns that it has read, two elements per
    column. If the halves are `split`, the second warpgroup writes to the end of its columns.
    """
    half = c.block_q // 2
    warpgroup, row = divmod(step * device.STEP, half)
    return warpgroup * (half + half // 2 * split) + row // 2
