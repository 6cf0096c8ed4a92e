"""The warp that loads for the Blackwell forward: pieces of work, their blocks, TMA.

It takes pieces from the work list, walks their runs from the last block to the first, and tells the
other warps through shared memory what to do: a record for each piece, and the number of each block.
K and V tiles take turns in one ring.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute
from cutlass.cute.nvgpu import cpasync

from attnkit.templates.sm100.claims import Claims
from attnkit.templates.sm100.forward_common import NOTES, RECORD, RECORDS, ForwardCommon


class ForwardLoads(ForwardCommon, Claims):
    """The part of a forward kernel that loads."""

    hooks: Any

    @cute.jit
    def produce(
        self,
        atoms: tuple,
        mmas: tuple,
        tiles: tuple,
        smem: tuple,
        bars: tuple,
        notes: tuple,
        claim: tuple,
        lists: tuple,
        numbers: tuple,
    ):
        """The load warp."""
        c = self.config
        tma_q, tma_k, tma_v = atoms
        mma_qk, mma_pv = mmas
        q_tiles, k_tiles, v_tiles = tiles
        smem_q, smem_k, smem_v = smem
        q_full, q_free, kv_full, kv_free, told, record_full, record_free = bars
        records, blocks = notes
        pieces, partial, full, counter = lists
        _, group, _, _, kv_batch = numbers
        rank = self.rank()
        thr_qk, thr_pv = mma_qk.get_slice(rank), mma_pv.get_slice(rank)
        q_parts = thr_qk.partition_A(
            cute.local_tile(q_tiles, (c.rows, c.width), (None, 0, None, None))
        )
        k_parts = thr_qk.partition_B(
            cute.local_tile(k_tiles, (c.block_kv, c.width), (None, 0, None, None))
        )
        v_parts = thr_pv.partition_B(
            cute.local_tile(v_tiles, (c.value_width, c.block_kv), (0, None, None, None))
        )
        q_to, q_from = _sides(tma_q, smem_q, q_parts)
        k_to, k_from = _sides(tma_k, smem_k, k_parts)
        v_to, v_from = _sides(tma_v, smem_v, v_parts)
        # of all CTAs that share products, counted by the first
        q_bytes = 2 * c.rows * c.width
        k_bytes, v_bytes = 2 * c.block_kv * c.width, 2 * c.block_kv * c.value_width
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        total = pieces.shape[0]
        cta, ctas = cta // c.ctas, ctas // c.ctas
        index, kc, tc = Int32(cta), Int32(0), Int32(0)
        slot, lap = Int32(0), Int32(0)
        while index < total:
            b, h, tile = pieces[index, 0], pieces[index, 1], pieces[index, 2]
            part, masked = pieces[index, 3], pieces[index, 10]
            count = pieces[index, 6] + pieces[index, 9]
            h_kv, b_kv = h // group, cutlass.min(b, kv_batch - 1)
            r = tc & (RECORDS - 1)
            cute.arch.mbarrier_wait(record_free + r, ((tc >> 1) & 1) ^ 1)
            with cute.arch.elect_one():
                for k, word in enumerate((tile, h, b, masked, count, part, Int32(1))):
                    records[RECORD * r + k] = word
                cute.arch.mbarrier_arrive(record_full + r)
            if const_expr(c.work == "clc"):  # asked early: the answer takes a while
                self.ask(claim, tc)
            first = Int32(1)
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
                        if first != 0:
                            cute.arch.mbarrier_wait(q_free, (tc & 1) ^ 1)
                            self.expect(q_full, q_bytes)
                            cute.copy(
                                tma_q,
                                q_from[None, tile * c.q_tiles, h, b],
                                q_to[None, 0],
                                tma_bar_ptr=q_full,
                            )
                        cute.arch.mbarrier_wait(kv_free + slot, lap ^ 1)
                        with cute.arch.elect_one():
                            blocks[kc & (NOTES - 1)] = mark
                            cute.arch.mbarrier_arrive(told + (kc & (NOTES - 1)))
                        self.expect(kv_full + slot, k_bytes)
                        cute.copy(
                            tma_k,
                            k_from[None, n, h_kv, b_kv],
                            k_to[None, slot],
                            tma_bar_ptr=kv_full + slot,
                        )
                        kc += 1
                        slot, lap = self.next_slot(slot, lap)
                        if const_expr(c.q_tiles == 2):
                            if first != 0:
                                cute.arch.mbarrier_wait(q_free + 1, (tc & 1) ^ 1)
                                self.expect(q_full + 1, q_bytes)
                                cute.copy(
                                    tma_q,
                                    q_from[None, tile * 2 + 1, h, b],
                                    q_to[None, 1],
                                    tma_bar_ptr=q_full + 1,
                                )
                        first = Int32(0)
                        cute.arch.mbarrier_wait(kv_free + slot, lap ^ 1)
                        self.expect(kv_full + slot, v_bytes)
                        cute.copy(
                            tma_v,
                            v_from[None, n, h_kv, b_kv],
                            v_to[None, slot],
                            tma_bar_ptr=kv_full + slot,
                        )
                        slot, lap = self.next_slot(slot, lap)
                    left -= steps
                    run -= 1
                    if left > 0:
                        take = runs[1, run]
            following = index + ctas
            if const_expr(c.work == "clc"):
                following = self.next_piece(claim, tc, total)
            elif const_expr(c.work == "counter"):
                old = Int32(0)
                if lane == 0:
                    old = cute.arch.atomic_add(counter.iterator, Int32(1))
                    if old == total - 1:  # the last of the launch leaves it at zero
                        counter[0] = Int32(0)
                following = cute.arch.shuffle_sync(old, 0) + ctas
            tc += 1
            index = following
        r = tc & (RECORDS - 1)
        cute.arch.mbarrier_wait(record_free + r, ((tc >> 1) & 1) ^ 1)
        with cute.arch.elect_one():  # the end
            for k in cutlass.range_constexpr(7):
                records[RECORD * r + k] = Int32(0)
            cute.arch.mbarrier_arrive(record_full + r)


def _sides(atom: Any, smem: Any, parts: Any) -> tuple[Any, Any]:
    """A TMA copy's two sides: in shared memory by stage, in global memory by tile."""
    return cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(smem, 0, 3),
        cute.group_modes(parts, 0, 3),
    )
