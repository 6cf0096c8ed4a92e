"""The warp that loads for the Hopper forward: pieces of work, their blocks, TMA.

It takes pieces from the work list, walks their runs from the last block to the first, and tells the
consumers through shared memory what each stage holds, so that they never see lists.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute

from attnkit.templates.sm90.copies import partition

RECORD = 8  # where the record of a tile begins in `info`, after the blocks of the K stages


class ForwardLoads:
    """The part of a forward kernel that loads."""

    config: Any
    hooks: Any

    def stage(self, count: Any) -> Any:
        """Ring slot of the count-th block."""
        return count & (self.config.stages - 1)

    def phase(self, count: Any) -> Any:
        """Parity of the lap of the count-th block."""
        return (count >> (self.config.stages.bit_length() - 1)) & 1

    @cute.jit
    def produce(
        self,
        atoms: tuple,
        tiles: tuple,
        smem: tuple,
        bars: tuple,
        info: cute.Tensor,
        pieces: cute.Tensor,
        partial: cute.Tensor,
        full: cute.Tensor,
        counter: cute.Tensor,
        numbers: tuple,
    ):
        """The producer warp: pieces of work, their blocks, TMA loads."""
        c = self.config
        tma_q, tma_k, tma_v = atoms
        _, group, _, _, kv_batch = numbers
        q_full, q_free, k_full, k_free, v_full, v_free = bars
        width, deep, bn = c.width, c.value_width, c.block_kv
        q_to, q_from = partition(tma_q, smem[0], tiles[0], (64, width), (None, 0, None, None))
        k_to, k_from = partition(tma_k, smem[1], tiles[1], (bn, width), (None, 0, None, None))
        v_to, v_from = partition(tma_v, smem[2], tiles[2], (deep, bn), (0, None, None, None))
        q_bytes, k_bytes, v_bytes = 2 * c.block_q * width, 2 * bn * width, 2 * bn * deep
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        total = pieces.shape[0]
        index, kc, vc, tc = Int32(cta), Int32(0), Int32(0), Int32(0)
        while index < total:
            b, h, tile = pieces[index, 0], pieces[index, 1], pieces[index, 2]
            slot = pieces[index, 3]
            masked = pieces[index, 10]
            whole = pieces[index, 6] + pieces[index, 9] - masked
            h_kv, b_kv = h // group, cutlass.min(b, kv_batch - 1)
            before = Int32(-1)
            for kind in cutlass.range_constexpr(2):
                runs = partial if const_expr(kind == 0) else full
                run, take, left = (pieces[index, 4 + 3 * kind + k] for k in range(3))
                while left > 0:
                    final, steps = runs[0, run] + take - 1, cutlass.min(take, left)
                    for j in cutlass.range(steps, unroll=1):
                        n = final - j
                        mark = n
                        if const_expr(kind == 1 and self.hooks.listed):
                            mark = ~n
                        s = self.stage(kc)
                        cute.arch.mbarrier_wait(k_free + s, self.phase(kc) ^ 1)
                        with cute.arch.elect_one():
                            info[s] = mark
                            cute.arch.mbarrier_arrive_and_expect_tx(k_full + s, k_bytes)
                        cute.copy(
                            tma_k,
                            k_from[None, n, h_kv, b_kv],
                            k_to[None, s],
                            tma_bar_ptr=k_full + s,
                        )
                        kc += 1
                        if before < 0:  # Q, once the last tile is done with its own
                            cute.arch.mbarrier_wait(q_free, (tc & 1) ^ 1)
                            with cute.arch.elect_one():
                                info[RECORD], info[RECORD + 1], info[RECORD + 2] = tile, h, b
                                info[RECORD + 3], info[RECORD + 4] = masked, whole
                                info[RECORD + 5], info[RECORD + 6] = Int32(1), slot
                                cute.arch.mbarrier_arrive_and_expect_tx(q_full, q_bytes)
                            for w in cutlass.range_constexpr(c.warpgroups):
                                cute.copy(
                                    tma_q,
                                    q_from[None, tile * c.warpgroups + w, h, b],
                                    q_to[None, w],
                                    tma_bar_ptr=q_full,
                                )
                        else:  # V follows one block behind K
                            sv = self.stage(vc)
                            cute.arch.mbarrier_wait(v_free + sv, self.phase(vc) ^ 1)
                            with cute.arch.elect_one():
                                cute.arch.mbarrier_arrive_and_expect_tx(v_full + sv, v_bytes)
                            cute.copy(
                                tma_v,
                                v_from[None, before, h_kv, b_kv],
                                v_to[None, sv],
                                tma_bar_ptr=v_full + sv,
                            )
                            vc += 1
                        before = n
                    left -= steps
                    run -= 1
                    if left > 0:
                        take = runs[1, run]
            following = index + ctas
            if const_expr(c.dynamic):  # from a counter: a CTA that is ahead takes more
                old = Int32(0)
                if lane == 0:
                    old = cute.arch.atomic_add(counter.iterator, Int32(1))
                    if old == total - 1:  # the last of the launch leaves it at zero
                        counter[0] = Int32(0)
                following = cute.arch.shuffle_sync(old, 0) + ctas
            sv = self.stage(vc)
            cute.arch.mbarrier_wait(v_free + sv, self.phase(vc) ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(v_full + sv, v_bytes)
            cute.copy(
                tma_v, v_from[None, before, h_kv, b_kv], v_to[None, sv], tma_bar_ptr=v_full + sv
            )
            vc += 1
            tc += 1
            index = following
        cute.arch.mbarrier_wait(q_free, (tc & 1) ^ 1)
        with cute.arch.elect_one():
            info[RECORD + 5] = Int32(0)
            cute.arch.mbarrier_arrive(q_full)
