"""The warp that issues the products of the Blackwell forward: S = Q K^T and O += P V.

In a pair of CTAs it is that of the first one, and works for both.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute
from cutlass.cute.nvgpu import tcgen05

from attnkit.templates.sm100 import device
from attnkit.templates.sm100.forward_common import ForwardCommon


class ForwardProducts(ForwardCommon):
    """The part of a forward kernel that multiplies."""

    @cute.jit
    def multiply(self, mmas: tuple, smem: tuple, records: cute.Tensor, bars: tuple):
        """The warp that issues the products."""
        c = self.config
        mma_first, mma_qk, mma_start, mma_pv = mmas
        smem_q, smem_k, smem_v = smem
        record_bars, q_full, q_free, kv_full, kv_free, s_bars, p_full, o_full = bars
        frag_q, frag_k = mma_qk.make_fragment_A(smem_q), mma_qk.make_fragment_B(smem_k)
        frag_v = mma_pv.make_fragment_B(smem_v)
        shape_s = mma_qk.partition_shape_C((c.rows, c.block_kv))
        shape_o = mma_pv.partition_shape_C((c.rows, c.value_width))
        shape_p = mma_pv.partition_shape_A((c.rows, c.block_kv))
        s_layout = mma_qk.make_fragment_C(shape_s).layout
        o_layout = mma_pv.make_fragment_C(shape_o).layout
        p_layout = mma_pv.make_fragment_A(shape_p).layout
        outs = [
            cute.make_tensor(device.column(c.out_column(t)), o_layout) for t in range(c.q_tiles)
        ]
        layouts = s_layout, p_layout
        frags = frag_q, frag_k, frag_v
        both = mma_first, mma_qk
        mma_first.set(tcgen05.Field.ACCUMULATE, False)
        mma_qk.set(tcgen05.Field.ACCUMULATE, True)
        mma_pv.set(tcgen05.Field.ACCUMULATE, True)
        kc, tc = Int32(0), Int32(0)
        slot, lap = Int32(0), Int32(0)
        _, _, _, _, count, _, valid = self.read_record(records, record_bars, tc)
        while valid != 0:
            cute.arch.mbarrier_wait(kv_full + slot, lap)
            for t in cutlass.range_constexpr(c.q_tiles):
                cute.arch.mbarrier_wait(q_full + t, tc & 1)
                self.issue_qk(both, frags, layouts, t, kc, slot, s_bars, (0, 1))
            self.commit(kv_free + slot)
            slot, lap = self.next_slot(slot, lap)
            for j in cutlass.range(count, unroll=1):
                v_slot, v_lap = slot, lap
                slot, lap = self.next_slot(slot, lap)
                v_bar = kv_full + v_slot, v_lap
                mma_start.set(tcgen05.Field.ACCUMULATE, j > 0)
                values = (mma_start, mma_pv), outs, frags, layouts
                more = j + 1 < count
                if const_expr(c.q_tiles == 1):
                    if more:
                        cute.arch.mbarrier_wait(kv_full + slot, lap)
                        self.issue_qk(both, frags, layouts, 0, kc + 1, slot, s_bars, (0, 1))
                        self.commit(kv_free + slot)
                    self.issue_pv(*values, 0, kc, v_slot, p_full, v_bar)
                    self.commit(kv_free + v_slot)
                    if j + 1 == count:
                        if const_expr(not c.alias):
                            self.commit(q_free)
                    self.commit(o_full)
                else:
                    for t in cutlass.range_constexpr(2):
                        if const_expr(c.halves):
                            if more:
                                if const_expr(t == 0):
                                    cute.arch.mbarrier_wait(kv_full + slot, lap)
                                cute.arch.mbarrier_wait(s_bars[2] + t, kc & 1)
                                self.issue_qk(both, frags, layouts, t, kc + 1, slot, s_bars, (0,))
                        self.issue_pv(*values, t, kc, v_slot, p_full, v_bar)
                        if const_expr(t == 1):
                            self.commit(kv_free + v_slot)
                        if more:
                            if const_expr(t == 0 and not c.halves):
                                cute.arch.mbarrier_wait(kv_full + slot, lap)
                            rest = (1,) if const_expr(c.halves) else (0, 1)
                            self.issue_qk(both, frags, layouts, t, kc + 1, slot, s_bars, rest)
                        else:
                            if const_expr(not c.alias):
                                self.commit(q_free + t)
                            self.commit(o_full + t)
                    if more:
                        self.commit(kv_free + slot)
                if more:
                    slot, lap = self.next_slot(slot, lap)
                kc += 1
            tc += 1
            _, _, _, _, count, _, valid = self.read_record(records, record_bars, tc)

    def issue_qk(
        self,
        mmas: Any,
        frags: Any,
        layouts: Any,
        t: int,
        kc: Any,
        slot: Any,
        s_bars: Any,
        halves: tuple[int, ...],
    ) -> None:
        """S of the kc-th block of query tile t, or the lower or upper half of its columns."""
        first, rest = mmas
        query, key, _ = frags
        u = self.buffer(t, kc)
        scores = cute.make_tensor(device.column(u * self.config.block_kv), layouts[0])
        for half in halves if self.config.halves else (0,):
            for k in range(cute.size(query, mode=[2])):
                cute.gemm(
                    first if k == 0 else rest,
                    scores[None, 0, half],
                    query[None, 0, k, t],
                    key[None, half, k, slot],
                    scores[None, 0, half],
                )
            whole = half == 1 or not self.config.halves
            self.commit((s_bars[1] if whole else s_bars[0]) + u)

    def issue_pv(
        self,
        mmas: Any,
        outs: Any,
        frags: Any,
        layouts: Any,
        t: int,
        kc: Any,
        slot: Any,
        p_full: Any,
        v_bar: Any,
    ) -> None:
        """O of query tile t, with P of its kc-th block."""
        start, rest = mmas
        c, u = self.config, self.buffer(t, kc)
        place = device.column(u * c.block_kv + c.block_kv // 2)
        p = cute.make_tensor(cute.recast_ptr(place, dtype=self.dtype), layouts[1])
        if t == 0:
            cute.arch.mbarrier_wait(*v_bar)
        starts = [end // 16 for end in (0, *c.parts[:-1])]
        for k in range(c.block_kv // 16):
            if k in starts:
                cute.arch.mbarrier_wait(p_full[starts.index(k)] + u, self.turn(kc))
                if c.pair:
                    device.fence_after()
            cute.gemm(
                start if k == 0 else rest,
                outs[t],
                p[None, None, k],
                frags[2][None, None, k, slot],
                outs[t],
            )
