"""The warp that issues the five products of the Blackwell backward.

S of the next q tile is issued before dK and dQ of the last, its dP after them: while P is computed,
the tensor cores have those to do. dK and dQ are in this order, as dQ may take the columns of dS.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from attnkit.templates.common import device as sm90_device
from attnkit.templates.common.lse_in_mma import CORE_WORDS, ROW_WORDS
from attnkit.templates.common.work_tile import RECORD
from attnkit.templates.sm100 import backward_device as device


class Products:
    """The part of a backward kernel that multiplies."""

    config: Any
    dtype: Any
    subtract: Any

    def do_stage(self, count: Any) -> Any:
        """Slot in the ring of dO of the count-th block."""
        return count & (self.config.stages - 1)

    def do_lap(self, count: Any) -> Any:
        """Parity of the lap of the count-th block in the ring of dO."""
        return (count >> (self.config.stages.bit_length() - 1)) & 1

    def q_stage(self, count: Any) -> Any:
        """Slot in the ring of Q of the count-th block."""
        return count & (self.config.q_stages - 1)

    def q_lap(self, count: Any) -> Any:
        """Parity of the lap of the count-th block in the ring of Q."""
        return (count >> (self.config.q_stages.bit_length() - 1)) & 1

    @cute.jit
    def multiply(self, starts: tuple, memory: Int32, bars: tuple, info: cute.Tensor):
        """The warp of products.

        Args:
            starts: shared addresses of Q, K, V, dO and dS^T, and of what `backward_rows` has.
            memory: base of tensor memory.
        """
        (
            k_full, v_full, kv_free, s_full, p_ready, dp_full, ds_ready, dq_full, dq_free, acc_full,
            q_full, q_free, do_full, do_free,
        ) = bars  # fmt: skip
        places = (*starts, memory)
        kc, tc = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(k_full, 0)
        valid = info[RECORD + 4]
        while valid != 0:
            count = info[RECORD + 3]
            if count > 0:
                cute.arch.mbarrier_wait(q_full + self.q_stage(kc), self.q_lap(kc))
                self.issue_s(places, kc, s_full)
                cute.arch.mbarrier_wait(v_full, tc & 1)
                self.issue_dp(places, kc, do_full, dq_free, dp_full)
                self.issue_dv(places, kc, p_ready, do_free, Int32(0))
                for i in cutlass.range(count - 1, unroll=1):
                    cute.arch.mbarrier_wait(q_full + self.q_stage(kc + 1), self.q_lap(kc + 1))
                    self.issue_s(places, kc + 1, s_full)
                    self.issue_dq(places, kc, ds_ready, dq_free, dq_full)
                    self.issue_dk(places, kc, q_free, i)
                    self.issue_dp(places, kc + 1, do_full, dq_free, dp_full)
                    self.issue_dv(places, kc + 1, p_ready, do_free, Int32(1))
                    kc += 1
                self.issue_dq(places, kc, ds_ready, dq_free, dq_full)
                self.issue_dk(places, kc, q_free, count - 1)
                with cute.arch.elect_one():
                    device.commit(acc_full)
                kc += 1
            sm90_device.arrive(kv_free)
            tc += 1
            cute.arch.mbarrier_wait(k_full, tc & 1)
            valid = info[RECORD + 4]

    # ------------------------------------------------ products of a block, inlined while tracing

    def issue_s(self, places: Any, kc: Any, full: Any) -> None:
        """S^T = K Q^T, less LSE / scale with `less_lse`."""
        c = self.config
        q, k, _, _, _, factors, lse, _, memory = self.fresh(places, kc)
        form = device.shape(c.rows_kv, c.block_q, self.dtype)
        q = q + self.q_stage(kc) * (c.block_q * c.width * 2)
        device.fence_after()
        with cute.arch.elect_one():
            for step in range(c.width // device.STEP):
                device.multiply(
                    memory + c.s_column,
                    device.along_columns(k, c.rows_kv, step),
                    device.along_columns(q, c.block_q, step),
                    form,
                    step > 0,
                    in_tensor=False,
                )
            if c.less_lse:
                rows = lse + self.q_stage(kc) * (4 * ROW_WORDS * c.block_q)
                self.subtract(memory + c.s_column, factors, rows)
            device.commit(full)

    def issue_dp(self, places: Any, kc: Any, do_full: Any, dq_free: Any, full: Any) -> None:
        """dP^T = V dO^T, less delta with `less_delta`, where dQ of the last block may still be."""
        c = self.config
        _, _, v, do, _, factors, _, delta, memory = self.fresh(places, kc)
        form = device.shape(c.rows_kv, c.block_q, self.dtype)
        do = do + self.do_stage(kc) * (c.block_q * c.value_width * 2)
        cute.arch.mbarrier_wait(do_full + self.do_stage(kc), self.do_lap(kc))
        if c.dq_shares:
            cute.arch.mbarrier_wait(dq_free, (kc & 1) ^ 1)
        device.fence_after()
        with cute.arch.elect_one():
            for step in range(c.value_width // device.STEP):
                device.multiply(
                    memory + c.dp_column,
                    device.along_columns(v, c.rows_kv, step),
                    device.along_columns(do, c.block_q, step),
                    form,
                    step > 0,
                    in_tensor=False,
                )
            if c.less_delta:
                rows = delta + self.do_stage(kc) * (4 * ROW_WORDS * c.block_q)
                self.subtract(memory + c.dp_column, factors + 4 * CORE_WORDS, rows)
            device.commit(full)

    def issue_dv(self, places: Any, kc: Any, p_ready: Any, do_free: Any, more: Any) -> None:
        """dV += P^T dO, or dV = P^T dO unless `more`."""
        c = self.config
        _, _, _, do, *_, memory = self.fresh(places, kc)
        form = device.shape(c.rows_kv, c.value_width, self.dtype, b_rows=True)
        do = do + self.do_stage(kc) * (c.block_q * c.value_width * 2)
        cute.arch.mbarrier_wait(p_ready, kc & 1)
        device.fence_after()
        with cute.arch.elect_one():
            for step in range(c.block_q // device.STEP):
                device.multiply(
                    memory + c.dv_column,
                    memory + c.s_column + self.half_column(step),
                    device.along_rows(do, c.block_q, step),
                    form,
                    more if step == 0 else True,
                    in_tensor=True,
                )
            device.commit(do_free + self.do_stage(kc))

    def issue_dq(self, places: Any, kc: Any, ds_ready: Any, dq_free: Any, full: Any) -> None:
        """dQ = dS K, as many columns at a time as there is room for."""
        c = self.config
        _, k, _, _, ds, *_, memory = self.fresh(places, kc)
        form = device.shape(c.block_q, c.dq_width, self.dtype, a_rows=True, b_rows=True)
        parts = c.parts
        cute.arch.mbarrier_wait(ds_ready, kc & 1)
        for part in range(parts):
            if not c.dq_shares:
                cute.arch.mbarrier_wait(dq_free, ((kc * parts + part) & 1) ^ 1)
            device.fence_after()
            with cute.arch.elect_one():
                for step in range(c.rows_kv // device.STEP):
                    device.multiply(
                        memory + c.dq_column,
                        device.along_rows(ds, c.rows_kv, step),
                        device.along_rows(k, c.rows_kv, step, part * c.dq_width),
                        form,
                        step > 0,
                        in_tensor=False,
                    )
                device.commit(full)

    def issue_dk(self, places: Any, kc: Any, q_free: Any, more: Any) -> None:
        """dK += dS^T Q, or dK = dS^T Q unless `more`."""
        c = self.config
        q, _, _, _, ds, *_, memory = self.fresh(places, kc)
        form = device.shape(c.rows_kv, c.width, self.dtype, b_rows=True)
        q = q + self.q_stage(kc) * (c.block_q * c.width * 2)
        with cute.arch.elect_one():
            for step in range(c.block_q // device.STEP):
                a = (
                    device.along_columns(ds, c.rows_kv, step)
                    if not c.ds_in_tensor
                    else memory + c.dp_column + self.half_column(step)
                )
                device.multiply(
                    memory + c.dk_column,
                    a,
                    device.along_rows(q, c.block_q, step),
                    form,
                    more if step == 0 else True,
                    in_tensor=c.ds_in_tensor,
                )
            device.commit(q_free + self.q_stage(kc))

    def fresh(self, places: Any, kc: Any) -> tuple[Any, ...]:
        """The same addresses, that the compiler takes to depend on the block.

        It would compute every descriptor before the loop otherwise, and spill them.
        """
        zero = kc >> 31
        return tuple(place + zero for place in places)

    def half_column(self, step: int, apart: bool = False) -> int:
        """Column of P^T or dS^T, from its first, where 16 q begin.

        Each computing warpgroup writes its half where it has read scores, two elements a column;
        the second one to the end of its columns if they are `apart`.
        """
        half = self.config.block_q // 2
        which, inside = divmod(step * device.STEP, half)
        return which * (half + half // 2 * apart) + inside // 2
