"""The warps that issue the products of a pair of CTAs.

Warp 12 of the first CTA issues all of them; that of the second passes on when its loads are there.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from attnkit.templates.common import device as sm90_device
from attnkit.templates.common.lse_in_mma import CORE_WORDS
from attnkit.templates.common.work_tile import RECORD
from attnkit.templates.sm100 import backward_device as device
from attnkit.templates.sm100.backward_pair_sums import HALF


class PairProducts:
    """The part of `PairBackward` that multiplies; it has `Products` as well."""

    config: Any
    dtype: Any
    fresh: Any
    half_column: Any
    operand_bars: Any
    record: Any
    signal: Any
    subtract: Any

    @cute.jit
    def relay(self, bars: tuple, info: cute.Tensor):
        """The second CTA tells the first when its loads are there, in the order of the products."""
        k_full, v_full, kv_free, columns_full = *bars[:3], bars[23]
        q_full, q_columns_full, do_full, do_columns_full = (
            full for full, _ in self.operand_bars(bars)
        )
        kc, tc = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(k_full, 0)
        valid = info[RECORD + 4]
        while valid != 0:
            count = info[self.record(tc) + 3]
            if count == 0:
                self.pass_on(v_full, tc)
                self.pass_on(columns_full, tc)
            for i in cutlass.range(count, unroll=1):
                self.pass_on(q_full, kc)  # the first says that K's rows are there as well
                if i == 0:
                    self.pass_on(v_full, tc)
                else:
                    self.pass_on(q_columns_full, kc - 1)
                self.pass_on(do_full, kc)
                self.pass_on(do_columns_full, kc)
                if i == 0:
                    self.pass_on(columns_full, tc)
                kc += 1
            if count > 0:
                self.pass_on(q_columns_full, kc - 1)
            sm90_device.arrive(kv_free)
            tc += 1
            cute.arch.mbarrier_wait(k_full, tc & 1)
            valid = info[self.record(tc) + 4]

    @cute.jit
    def pass_on(self, barrier: cute.Pointer, count: Int32):
        """Wait for a load, and arrive for it in the first CTA."""
        cute.arch.mbarrier_wait(barrier, count & 1)
        self.signal(barrier)

    @cute.jit
    def multiply(self, starts: tuple, memory: Int32, bars: tuple, info: cute.Tensor):
        """The warp of products, in the first CTA, for both."""
        (
            k_full, v_full, kv_free, s_full, p_ready, dp_full, ds_ready, dq_full, dq_free, acc_full,
        ) = bars[:10]  # fmt: skip
        q, q_columns, do, do_columns = self.operand_bars(bars)
        dv_full, _, left, columns_full = bars[20:]
        places = (*starts, memory)
        kc, tc = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(k_full, 0)
        valid = info[RECORD + 4]
        while valid != 0:
            count = info[self.record(tc) + 3]
            if count == 0:
                cute.arch.mbarrier_wait(v_full, tc & 1)
                cute.arch.mbarrier_wait(columns_full, tc & 1)
            if count > 0:
                self.scores(places, kc, q, s_full)
                cute.arch.mbarrier_wait(v_full, tc & 1)
                # what follows writes dS, dV and dK, which may be on their way to memory
                cute.arch.mbarrier_wait(left, (tc & 1) ^ 1)
                self.slopes(places, kc, do, dq_free, dp_full)
                self.values_gradient(places, kc, p_ready, do_columns, Int32(0))
                for i in cutlass.range(count - 1, unroll=1):
                    self.scores(places, kc + 1, q, s_full)
                    if i == 0:
                        cute.arch.mbarrier_wait(columns_full, tc & 1)
                    self.query_gradient(places, kc, ds_ready, dq_full)
                    self.keys_gradient(places, kc, q_columns, i)
                    self.slopes(places, kc + 1, do, dq_free, dp_full)
                    self.values_gradient(places, kc + 1, p_ready, do_columns, Int32(1))
                    kc += 1
                with cute.arch.elect_one():
                    device.commit_pair(dv_full)
                if count == 1:
                    cute.arch.mbarrier_wait(columns_full, tc & 1)
                self.query_gradient(places, kc, ds_ready, dq_full)
                self.keys_gradient(places, kc, q_columns, count - 1)
                with cute.arch.elect_one():
                    device.commit_pair(acc_full)
                kc += 1
            sm90_device.arrive(kv_free)
            tc += 1
            cute.arch.mbarrier_wait(k_full, tc & 1)
            valid = info[self.record(tc) + 4]

    def scores(self, places: Any, kc: Any, q: Any, full: Any) -> None:
        """S^T = K Q^T, less LSE / scale with `less_lse`."""
        at = self.fresh(places, kc)
        cute.arch.mbarrier_wait(q[0], kc & 1)
        device.fence_after()
        rows = (at[-4], at[-3]) if self.config.less_lse else None
        self.square(at[-1] + self.config.s_column, (at[1], at[0]), rows, (full, q[1]))

    def slopes(self, places: Any, kc: Any, do: Any, dq_free: Any, full: Any) -> None:
        """dP^T - delta = V dO^T - delta, where dQ of the last block may still be."""
        at = self.fresh(places, kc)
        cute.arch.mbarrier_wait(do[0], kc & 1)
        cute.arch.mbarrier_wait(dq_free, (kc & 1) ^ 1)
        device.fence_after()
        rows = (at[-4] + 4 * CORE_WORDS, at[-2])
        self.square(at[-1] + self.config.dp_column, (at[2], at[3]), rows, (full, do[1]))

    def square(self, out: Any, operands: Any, rows: Any, done: Any) -> None:
        """A product of rows of K or V with those of Q or dO.

        Args:
            rows: shared addresses of the columns of `backward_rows`, None for no such step.
        """
        c, (a, b) = self.config, operands
        form = device.shape(2 * c.rows_kv, c.block_q, self.dtype)
        with cute.arch.elect_one():
            for step in range(c.width // device.STEP):
                device.multiply(
                    out,
                    device.along_columns(a, c.rows_kv, step),
                    device.along_columns(b, HALF, step),
                    form,
                    step > 0,
                    in_tensor=False,
                    ctas=2,
                )
            if rows is not None:
                self.subtract(out, *rows)
            for bar in done:
                device.commit_pair(bar)

    def values_gradient(self, places: Any, kc: Any, p_ready: Any, do: Any, more: Any) -> None:
        """dV += P^T dO, or dV = P^T dO unless `more`."""
        c, at = self.config, self.fresh(places, kc)
        cute.arch.mbarrier_wait(p_ready, kc & 1)
        cute.arch.mbarrier_wait(do[0], kc & 1)
        device.fence_after()
        self.tall(at[-1] + c.dv_column, (at[-1] + c.s_column, False), at[6], more, do[1])

    def keys_gradient(self, places: Any, kc: Any, q: Any, more: Any) -> None:
        """dK += dS^T Q, or dK = dS^T Q unless `more`."""
        c, at = self.config, self.fresh(places, kc)
        cute.arch.mbarrier_wait(q[0], kc & 1)
        device.fence_after()
        self.tall(at[-1] + c.dk_column, (at[-1] + c.dp_column, True), at[5], more, q[1])

    def tall(self, out: Any, a: Any, b: Any, more: Any, done: Any) -> None:
        """A product of P^T or dS^T in tensor memory with columns of dO or Q."""
        c, (start, apart) = self.config, a
        form = device.shape(2 * c.rows_kv, c.width, self.dtype, b_rows=True)
        with cute.arch.elect_one():
            for step in range(c.block_q // device.STEP):
                device.multiply(
                    out,
                    start + self.half_column(step, apart),
                    device.along_rows(b, c.block_q, step),
                    form,
                    more if step == 0 else True,
                    in_tensor=True,
                    ctas=2,
                )
            device.commit_pair(done)

    def query_gradient(self, places: Any, kc: Any, ds_ready: Any, full: Any) -> None:
        """dQ = dS K, 64 rows in each CTA, in the columns that dS leaves free.

        The first 64 lanes hold columns 0 to 63 of dQ, the others 64 to 127.
        """
        c, at = self.config, self.fresh(places, kc)
        form = device.shape(c.block_q, c.width, self.dtype, a_rows=True, b_rows=True)
        cute.arch.mbarrier_wait(ds_ready, kc & 1)
        cute.arch.fence_acq_rel_cluster()
        device.fence_after()
        with cute.arch.elect_one():
            for step in range(2 * c.rows_kv // device.STEP):
                device.multiply(
                    at[-1] + c.dq_column,
                    device.along_rows(at[4], 2 * c.rows_kv, step),
                    device.along_rows(at[7], 2 * c.rows_kv, step),
                    form,
                    step > 0,
                    in_tensor=False,
                    ctas=2,
                )
            device.commit_pair(full)
