"""Issue the MMAs of the Blackwell backward of head dims above 256 from one warp.

The order is that of `backward_mma`: S of the next q block before dQ and dK of the current one. S
and dP are sums over chunks of 64 columns, whose stages are released one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from attnkit.templates.common import device as common_device
from attnkit.templates.common.work_tile import RECORD, WorkTile
from attnkit.templates.sm100 import backward_device as device
from attnkit.templates.sm100.backward_barriers import BackwardStreamedBarriers
from attnkit.templates.sm100.backward_config import CHUNK, CHUNK_STAGES, BackwardConfig
from attnkit.templates.sm100.backward_mma import packed_column, per_block
from attnkit.templates.sm100.backward_shared import Group, chunk_phase, q_stage
from attnkit.templates.sm100.device import fence_after


@dataclass(frozen=True)
class OperandsStreamed:
    """Holds the shared memory addresses of the operands, and the tensor memory address.

    Attributes:
        kv: chunks of K or V, dtype [128, 64, CHUNK_STAGES].
        q: chunks of Q or dO, dtype [block_q, 64, CHUNK_STAGES].
        do_part, q_part: dtype [block_q, 128], a part of the columns.
        k_part: dtype [128, 128], a part of the columns.
        ds: dtype [128, block_q], dS^T.
        tmem: base of tensor memory.
    """

    kv: Int32
    q: Int32
    do_part: Int32
    q_part: Int32
    k_part: Int32
    ds: Int32
    tmem: Int32


class MmaStreamed:
    """Issues the MMAs of a CTA.

    Args:
        config: compile-time configuration.
        group: the CTAs of a work tile: one.
        dtype: dtype of the operands.
    """

    def __init__(self, config: BackwardConfig, group: Group, dtype: Any) -> None:
        self.config = config
        self.group = group
        self.dtype = dtype

    @cute.jit
    def run(self, operands: OperandsStreamed, bars: BackwardStreamedBarriers, info: cute.Tensor):
        """Issue the MMAs of all work tiles.

        Args:
            operands: addresses of the operands.
            bars: mbarriers.
            info: int32 words in shared memory, see `Word`.
        """
        q_count, kv_count = Int32(0), Int32(0)  # indices of the q block and the work tile
        cute.arch.mbarrier_wait(bars.k_full, 0)
        valid = info[RECORD + WorkTile.VALID]
        while valid != 0:
            count = info[RECORD + WorkTile.NUM_BLOCKS]
            if count > 0:
                self.issue_s(operands, q_count, bars)
                self.issue_dp(operands, q_count, bars)
                self.issue_dv(operands, q_count, bars, Int32(0))
                for i in cutlass.range(count - 1, unroll=1):
                    # S first: the compute warps process it during dQ and dK of the previous block
                    self.issue_s(operands, q_count + 1, bars)
                    self.issue_dq(operands, q_count, bars)
                    self.issue_dk(operands, q_count, bars, i)
                    self.issue_dp(operands, q_count + 1, bars)
                    self.issue_dv(operands, q_count + 1, bars, Int32(1))
                    q_count += 1
                self.issue_dq(operands, q_count, bars)
                self.issue_dk(operands, q_count, bars, count - 1)
                with cute.arch.elect_one():
                    device.commit(bars.acc_full)
                q_count += 1
            common_device.arrive(bars.kv_empty)
            kv_count += 1
            cute.arch.mbarrier_wait(bars.k_full, kv_count & 1)
            valid = info[RECORD + WorkTile.VALID]

    # ---------------------------------------------------- MMAs of a block, inlined while tracing

    def issue_s(self, operands: OperandsStreamed, count: Int32, bars: Any) -> None:
        """Issue S^T = K Q^T, chunk by chunk."""
        c = self.config
        self._issue_scores(operands, count, bars, (c.s_column, 0, bars.s_full))

    def issue_dp(self, operands: OperandsStreamed, count: Int32, bars: Any) -> None:
        """Issue dP^T = V dO^T, chunk by chunk."""
        c = self.config
        self._issue_scores(operands, count, bars, (c.dp_column, c.chunks, bars.dp_full))

    def _issue_scores(
        self, operands: OperandsStreamed, count: Int32, bars: Any, which: tuple[int, int, Any]
    ) -> None:
        """Issue a sum over chunks of products of rows.

        Args:
            operands: addresses of the operands.
            count: index of the q block in the CTA.
            bars: mbarriers.
            which: column of the result in tensor memory, number of chunks of the q block that come
                before, and the barrier to commit to.
        """
        c, at = self.config, per_block(operands, count)
        column, before, done = which
        form = device.instruction_descriptor(c.rows_kv, c.block_q, self.dtype)
        for chunk in range(c.chunks):
            stage = (before + chunk) % CHUNK_STAGES
            kv = at.kv + stage * (c.rows_kv * CHUNK * 2)
            q = at.q + stage * (c.block_q * CHUNK * 2)
            cute.arch.mbarrier_wait(bars.chunk_full + stage, chunk_phase(c, count, before + chunk))
            fence_after()
            with cute.arch.elect_one():
                for step in range(CHUNK // device.STEP):
                    device.issue_mma(
                        at.tmem + column,
                        device.k_major(kv, c.rows_kv, step),
                        device.k_major(q, c.block_q, step),
                        form,
                        chunk + step > 0,
                        a_in_tmem=False,
                    )
                device.commit(bars.chunk_empty + stage)
                if chunk == c.chunks - 1:
                    device.commit(done)

    def issue_dv(
        self, operands: OperandsStreamed, count: Int32, bars: Any, accumulate: Int32
    ) -> None:
        """Issue dV += P^T dO, or dV = P^T dO if `accumulate` is 0, for a part of its columns."""
        c, at = self.config, per_block(operands, count)
        cute.arch.mbarrier_wait(bars.p_full, count & 1)
        cute.arch.mbarrier_wait(bars.do_part_full, count & 1)
        p = at.tmem + c.s_column  # P^T overwrites S^T
        self._issue_gradient(
            (at.tmem + c.dv_column, p, at.do_part), accumulate, (bars.do_part_empty,)
        )

    def issue_dk(
        self, operands: OperandsStreamed, count: Int32, bars: Any, accumulate: Int32
    ) -> None:
        """Issue dK += dS^T Q, or dK = dS^T Q if `accumulate` is 0, for a part of its columns.

        Call it after `issue_dq`, which waits for dS.
        """
        c, at = self.config, per_block(operands, count)
        cute.arch.mbarrier_wait(bars.q_part_full, count & 1)
        ds = at.tmem + c.dp_column  # dS^T overwrites dP^T
        released = bars.q_part_empty, bars.block_empty + q_stage(c, count)
        self._issue_gradient((at.tmem + c.dk_column, ds, at.q_part), accumulate, released)

    def _issue_gradient(
        self, places: tuple[Int32, Int32, Int32], accumulate: Int32, released: tuple[Any, ...]
    ) -> None:
        """Issue the MMA of dV or dK: P^T or dS^T in tensor memory times a part of dO or Q.

        Args:
            places: tensor-memory addresses of the result and of P^T or dS^T, and the shared address
                of the columns of dO or Q.
            accumulate: 0 to overwrite the result.
            released: barriers to commit to.
        """
        c, (out, a, b) = self.config, places
        form = device.instruction_descriptor(c.rows_kv, c.grad_dims[0], self.dtype, b_rows=True)
        fence_after()
        with cute.arch.elect_one():
            for step in range(c.block_q // device.STEP):
                device.issue_mma(
                    out,
                    a + packed_column(c, step),
                    device.mn_major(b, c.block_q, step),
                    form,
                    accumulate if step == 0 else True,
                    a_in_tmem=True,
                )
            for barrier in released:
                device.commit(barrier)

    def issue_dq(self, operands: OperandsStreamed, count: Int32, bars: Any) -> None:
        """Issue dQ = dS K for a part of its columns."""
        c, at = self.config, per_block(operands, count)
        form = device.instruction_descriptor(
            c.block_q, c.dq_width, self.dtype, a_rows=True, b_rows=True
        )
        cute.arch.mbarrier_wait(bars.ds_full, count & 1)
        cute.arch.mbarrier_wait(bars.dq_empty, (count & 1) ^ 1)
        fence_after()
        with cute.arch.elect_one():
            for step in range(c.rows_kv // device.STEP):
                device.issue_mma(
                    at.tmem + c.dq_column,
                    device.mn_major(at.ds, c.rows_kv, step),
                    device.mn_major(at.k_part, c.rows_kv, step),
                    form,
                    step > 0,
                    a_in_tmem=False,
                )
            device.commit(bars.dq_full)
