"""Issue the MMAs of the Blackwell backward of head dims above 256 from one warp.

The order is that of `backward_mma`: S of the next q block before dQ and dK of the current one. S
and dP are sums over chunks of 64 columns, whose stages are released one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute

from attnkit.templates.sm100 import backward_device as device
from attnkit.templates.sm100.backward_config import CHUNK, CHUNK_STAGES
from attnkit.templates.sm100.backward_mma import Mma, per_block
from attnkit.templates.sm100.backward_shared import chunk_phase, q_stage
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


class MmaStreamed(Mma):
    """Issues the MMAs of a CTA in the order of `Mma`, with operands in chunks and parts.

    A part of the columns of Q, K or dO is in a place of its own, so that the methods do not read
    which part it is.
    """

    def wait_v(self, bars: Any, kv_count: Int32) -> None:
        """Do nothing: each chunk of V has a barrier."""

    # ---------------------------------------------------- MMAs of a block, inlined while tracing

    def issue_s(self, operands: Any, count: Int32, bars: Any) -> None:
        """Issue S^T = K Q^T, chunk by chunk."""
        c = self.config
        self._issue_scores(operands, count, bars, (c.s_column, 0, bars.s_full))

    def issue_dp(self, operands: Any, count: Int32, bars: Any) -> None:
        """Issue dP^T = V dO^T, chunk by chunk."""
        c = self.config
        self._issue_scores(operands, count, bars, (c.dp_column, c.chunks, bars.dp_full))

    def _issue_scores(
        self, operands: Any, count: Int32, bars: Any, which: tuple[int, int, Any]
    ) -> None:
        """Issue a sum over chunks of products of rows.

        Args:
            operands: addresses of the operands, `OperandsStreamed`.
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
        self, operands: Any, count: Int32, bars: Any, accumulate: Int32, part: Any
    ) -> None:
        """Issue dV += P^T dO, or dV = P^T dO if `accumulate` is 0, for a part of its columns."""
        c, at = self.config, per_block(operands, count)
        cute.arch.mbarrier_wait(bars.p_full, count & 1)
        cute.arch.mbarrier_wait(bars.do_part_full, count & 1)
        p = at.tmem + c.s_column  # P^T overwrites S^T
        fence_after()
        places = at.tmem + c.dv_column, p, at.do_part
        self.issue_gradient(places, c.grad_dims[1], accumulate, (bars.do_part_empty,))

    def issue_dk(
        self, operands: Any, count: Int32, bars: Any, accumulate: Int32, part: Any
    ) -> None:
        """Issue dK += dS^T Q, or dK = dS^T Q if `accumulate` is 0, for a part of its columns.

        Call it after `issue_dq`, which waits for dS.
        """
        c, at = self.config, per_block(operands, count)
        cute.arch.mbarrier_wait(bars.q_part_full, count & 1)
        ds = at.tmem + c.dp_column  # dS^T overwrites dP^T
        released = bars.q_part_empty, bars.block_empty + q_stage(c, count)
        fence_after()
        places = at.tmem + c.dk_column, ds, at.q_part
        self.issue_gradient(places, c.grad_dims[0], accumulate, released)

    def issue_dq(self, operands: Any, count: Int32, bars: Any, column_part: Any) -> None:
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
