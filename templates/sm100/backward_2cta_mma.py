"""Issue the MMAs of the Blackwell backward on a CTA pair.

The MMA warp of the first CTA issues all MMAs. The MMA warp of the second CTA forwards the arrival
of its loads to the first CTA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from attnkit.templates.common import device as common_device
from attnkit.templates.common.lse_in_mma import CORE_WORDS
from attnkit.templates.common.work_tile import RECORD, WorkTile
from attnkit.templates.sm100 import backward_device as device
from attnkit.templates.sm100.backward_barriers import Backward2CtaBarriers, OperandBarriers
from attnkit.templates.sm100.backward_config import BackwardConfig
from attnkit.templates.sm100.backward_lse_in_mma import LseInMma
from attnkit.templates.sm100.backward_mma import packed_column, per_block
from attnkit.templates.sm100.backward_shared import HALF, Group
from attnkit.templates.sm100.device import fence_after


@dataclass(frozen=True)
class Operands2Cta:
    """Holds the shared memory addresses of a CTA's operands, and the tensor memory address.

    Attributes:
        q, do: half of the rows, dtype [64, 128].
        k, v: dtype [128, 128].
        ds: dS^T of both CTAs' kv positions, dtype [256, 64].
        q_columns, do_columns: half of the columns, dtype [128, 64].
        k_columns: half of the columns of both CTAs' kv positions, dtype [256, 64].
        factors, lse, delta: extra columns of `LseInMma`.
        tmem: base of tensor memory.
    """

    q: Int32
    k: Int32
    v: Int32
    do: Int32
    ds: Int32
    q_columns: Int32
    do_columns: Int32
    k_columns: Int32
    factors: Int32
    lse: Int32
    delta: Int32
    tmem: Int32


class Mma2Cta:
    """Issues the MMAs of a CTA pair.

    Args:
        config: compile-time configuration.
        lse_in_mma: issues the extra k-step for LSE and delta.
        group: the pair.
        dtype: dtype of the operands.
    """

    def __init__(
        self, config: BackwardConfig, lse_in_mma: LseInMma, group: Group, dtype: Any
    ) -> None:
        self.config = config
        self.lse_in_mma = lse_in_mma
        self.group = group
        self.dtype = dtype

    @cute.jit
    def relay(self, bars: Backward2CtaBarriers, info: cute.Tensor):
        """Forward the arrival of the second CTA's loads to the first, in the order of the MMAs."""
        q_count, kv_count = Int32(0), Int32(0)  # indices of the q block and the work tile
        cute.arch.mbarrier_wait(bars.k_full, 0)
        valid = info[RECORD + WorkTile.VALID]
        while valid != 0:
            count = info[self.group.record(kv_count) + WorkTile.NUM_BLOCKS]
            if count == 0:
                self.pass_on(bars.v_full, kv_count)
                self.pass_on(bars.k_columns_full, kv_count)
            for i in cutlass.range(count, unroll=1):
                self.pass_on(bars.q_rows.full, q_count)  # also stands for K
                if i == 0:
                    self.pass_on(bars.v_full, kv_count)
                else:
                    self.pass_on(bars.q_columns.full, q_count - 1)
                self.pass_on(bars.do_rows.full, q_count)
                self.pass_on(bars.do_columns.full, q_count)
                if i == 0:
                    self.pass_on(bars.k_columns_full, kv_count)
                q_count += 1
            if count > 0:
                self.pass_on(bars.q_columns.full, q_count - 1)
            common_device.arrive(bars.kv_empty)
            kv_count += 1
            cute.arch.mbarrier_wait(bars.k_full, kv_count & 1)
            valid = info[self.group.record(kv_count) + WorkTile.VALID]

    @cute.jit
    def pass_on(self, barrier: cute.Pointer, count: Int32):
        """Wait for a load of this CTA, and arrive at the same barrier in the first CTA."""
        cute.arch.mbarrier_wait(barrier, count & 1)
        self.group.arrive_leader(barrier)

    @cute.jit
    def run(self, operands: Operands2Cta, bars: Backward2CtaBarriers, info: cute.Tensor):
        """Issue the MMAs of all work tiles, in the first CTA for both CTAs.

        Args:
            operands: addresses of the operands.
            bars: mbarriers.
            info: int32 words in shared memory, see `Word`.
        """
        q_count, kv_count = Int32(0), Int32(0)  # indices of the q block and the work tile
        cute.arch.mbarrier_wait(bars.k_full, 0)
        valid = info[RECORD + WorkTile.VALID]
        while valid != 0:
            count = info[self.group.record(kv_count) + WorkTile.NUM_BLOCKS]
            if count == 0:
                cute.arch.mbarrier_wait(bars.v_full, kv_count & 1)
                cute.arch.mbarrier_wait(bars.k_columns_full, kv_count & 1)
            if count > 0:
                self.issue_s(operands, q_count, bars)
                cute.arch.mbarrier_wait(bars.v_full, kv_count & 1)
                # the following MMAs write dV and dK; dS overwrites a dK that TMA may still read
                cute.arch.mbarrier_wait(bars.epilogue_done, (kv_count & 1) ^ 1)
                self.issue_dp(operands, q_count, bars)
                self.issue_dv(operands, q_count, bars, Int32(0))
                for i in cutlass.range(count - 1, unroll=1):
                    self.issue_s(operands, q_count + 1, bars)
                    if i == 0:
                        cute.arch.mbarrier_wait(bars.k_columns_full, kv_count & 1)
                    self.issue_dq(operands, q_count, bars)
                    self.issue_dk(operands, q_count, bars, i)
                    self.issue_dp(operands, q_count + 1, bars)
                    self.issue_dv(operands, q_count + 1, bars, Int32(1))
                    q_count += 1
                # before dQ and dK of the last block, so that dV is stored during them
                with cute.arch.elect_one():
                    device.commit_pair(bars.dv_full)
                if count == 1:
                    cute.arch.mbarrier_wait(bars.k_columns_full, kv_count & 1)
                self.issue_dq(operands, q_count, bars)
                self.issue_dk(operands, q_count, bars, count - 1)
                with cute.arch.elect_one():
                    device.commit_pair(bars.acc_full)
                q_count += 1
            common_device.arrive(bars.kv_empty)
            kv_count += 1
            cute.arch.mbarrier_wait(bars.k_full, kv_count & 1)
            valid = info[self.group.record(kv_count) + WorkTile.VALID]

    # ---------------------------------------------------- MMAs of a block, inlined while tracing

    def issue_s(self, operands: Operands2Cta, count: Int32, bars: Backward2CtaBarriers) -> None:
        """Issue S^T = K Q^T, or S^T = K Q^T - LSE / scale with `less_lse`."""
        c, at = self.config, per_block(operands, count)
        cute.arch.mbarrier_wait(bars.q_rows.full, count & 1)
        fence_after()
        rows = (at.factors, at.lse) if c.less_lse else None
        self._issue_scores(
            at.tmem + c.s_column, (at.k, at.q), rows, (bars.s_full, bars.q_rows.empty)
        )

    def issue_dp(self, operands: Operands2Cta, count: Int32, bars: Backward2CtaBarriers) -> None:
        """Issue dP^T = V dO^T, or dP^T = V dO^T - delta with `less_delta`."""
        c, at = self.config, per_block(operands, count)
        cute.arch.mbarrier_wait(bars.do_rows.full, count & 1)
        # dQ of the previous block is between the halves of dS, in the columns of dP
        cute.arch.mbarrier_wait(bars.dq_empty, (count & 1) ^ 1)
        fence_after()
        rows = (at.factors + 4 * CORE_WORDS, at.delta) if c.less_delta else None
        self._issue_scores(
            at.tmem + c.dp_column, (at.v, at.do), rows, (bars.dp_full, bars.do_rows.empty)
        )

    def _issue_scores(
        self,
        out: Int32,
        operands: tuple[Int32, Int32],
        rows: tuple[Int32, Int32] | None,
        done: tuple[cute.Pointer, cute.Pointer],
    ) -> None:
        """Issue the MMA of S^T or dP^T: rows of K or V times rows of Q or dO.

        Args:
            out: tensor-memory address of the result.
            operands: shared addresses of K or V, and of Q or dO.
            rows: shared addresses of the extra columns of `LseInMma`, None for no extra k-step.
            done: barriers to commit to.
        """
        c, (a, b) = self.config, operands
        form = device.instruction_descriptor(2 * c.rows_kv, c.block_q, self.dtype)
        with cute.arch.elect_one():
            for step in range(c.head_dim // device.STEP):
                device.issue_mma(
                    out,
                    device.k_major(a, c.rows_kv, step),
                    device.k_major(b, HALF, step),
                    form,
                    step > 0,
                    a_in_tmem=False,
                    ctas=2,
                )
            if rows is not None:
                self.lse_in_mma.subtract(out, *rows)
            for barrier in done:
                device.commit_pair(barrier)

    def issue_dv(
        self, operands: Operands2Cta, count: Int32, bars: Backward2CtaBarriers, accumulate: Int32
    ) -> None:
        """Issue dV += P^T dO, or dV = P^T dO if `accumulate` is 0."""
        c, at = self.config, per_block(operands, count)
        cute.arch.mbarrier_wait(bars.p_full, count & 1)
        cute.arch.mbarrier_wait(bars.do_columns.full, count & 1)
        fence_after()
        out = at.tmem + c.dv_column
        p = (at.tmem + c.s_column, False)  # P^T overwrites S^T
        self._issue_gradient(out, p, at.do_columns, accumulate, bars.do_columns)

    def issue_dk(
        self, operands: Operands2Cta, count: Int32, bars: Backward2CtaBarriers, accumulate: Int32
    ) -> None:
        """Issue dK += dS^T Q, or dK = dS^T Q if `accumulate` is 0.

        Call it after `issue_dq`, which waits for dS.
        """
        c, at = self.config, per_block(operands, count)
        cute.arch.mbarrier_wait(bars.q_columns.full, count & 1)
        fence_after()
        out = at.tmem + c.dk_column
        ds = (at.tmem + c.dp_column, True)  # dS^T overwrites dP^T, with dQ between its halves
        self._issue_gradient(out, ds, at.q_columns, accumulate, bars.q_columns)

    def _issue_gradient(
        self,
        out: Int32,
        a: tuple[Int32, bool],
        b: Int32,
        accumulate: Int32,
        operand: OperandBarriers,
    ) -> None:
        """Issue the MMA of dV or dK: P^T or dS^T in tensor memory times columns of dO or Q.

        Args:
            out: tensor-memory address of the result.
            a: first column of P^T or dS^T; whether its halves are split, see `packed_column`.
            b: shared address of the columns of dO or Q.
            accumulate: 0 to overwrite the result.
            operand: barriers of b.
        """
        c, (start, split) = self.config, a
        form = device.instruction_descriptor(2 * c.rows_kv, c.head_dim, self.dtype, b_rows=True)
        with cute.arch.elect_one():
            for step in range(c.block_q // device.STEP):
                device.issue_mma(
                    out,
                    start + packed_column(c, step, split),
                    device.mn_major(b, c.block_q, step),
                    form,
                    accumulate if step == 0 else True,
                    a_in_tmem=True,
                    ctas=2,
                )
            device.commit_pair(operand.empty)

    def issue_dq(self, operands: Operands2Cta, count: Int32, bars: Backward2CtaBarriers) -> None:
        """Issue dQ = dS K: 64 rows in each CTA, in the columns that dS leaves free.

        The first 64 lanes have columns 0 to 63 of dQ, the others columns 64 to 127.
        """
        c, at = self.config, per_block(operands, count)
        form = device.instruction_descriptor(
            c.block_q, c.head_dim, self.dtype, a_rows=True, b_rows=True
        )
        cute.arch.mbarrier_wait(bars.ds_full, count & 1)
        cute.arch.fence_acq_rel_cluster()  # the other CTA has written half of dS
        fence_after()
        with cute.arch.elect_one():
            for step in range(2 * c.rows_kv // device.STEP):
                device.issue_mma(
                    at.tmem + c.dq_column,
                    device.mn_major(at.ds, 2 * c.rows_kv, step),
                    device.mn_major(at.k_columns, 2 * c.rows_kv, step),
                    form,
                    step > 0,
                    a_in_tmem=False,
                    ctas=2,
                )
            device.commit_pair(bars.dq_full)
