"""The warp that loads for the Blackwell backward: pieces of work, their blocks, TMA.

It takes pieces from the work list, walks their PARTIAL and FULL runs merged in ascending order,
and tells the others through shared memory what each stage holds, so that they never see lists.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import cpasync

from attnkit.templates.common.semaphore import write_turn
from attnkit.templates.common.tma import partition
from attnkit.templates.common.work_tile import RECORD, begin_runs, block_word, next_block


class Loads:
    """The part of a backward kernel that loads."""

    config: Any
    q_stage: Any
    q_lap: Any
    do_stage: Any
    do_lap: Any

    @cute.jit
    def produce(
        self,
        atoms: tuple,
        tiles: tuple,
        smem: tuple,
        stats: tuple,
        bars: tuple,
        info: cute.Tensor,
        lists: tuple,
        numbers: tuple,
    ):
        """The producer warp: pieces of work, their blocks, TMA loads."""
        c = self.config
        tma_q, tma_k, tma_v, tma_do = atoms
        lse, delta, pieces, partial, full, counter, turns = lists
        _, group, q_len, kv_len, heads, _, _, kv_batch = numbers
        k_full, v_full, kv_free = bars[:3]
        q_full, q_free, do_full, do_free = bars[-4:]
        width, deep, bm, bn = c.width, c.value_width, c.block_q, c.rows_kv
        whole = (None, 0, None, None)
        q_to, q_from = partition(tma_q, smem[0], tiles[0], (bm, width), whole)
        k_to, k_from = partition(tma_k, smem[1], tiles[1], (bn, width), whole)
        v_to, v_from = partition(tma_v, smem[2], tiles[2], (bn, deep), whole)
        do_to, do_from = partition(tma_do, smem[3], tiles[3], (bm, deep), whole)
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        lse_words, delta_words = c.words
        lse_tiles = cute.flat_divide(lse, (bm * lse_words,))
        delta_tiles = cute.flat_divide(delta, (bm * delta_words,))
        q_bytes, do_bytes = bm * (2 * width + 4 * lse_words), bm * deep * 2
        if const_expr(c.less_delta):  # its product waits for dO
            do_bytes += bm * 4 * delta_words
        else:
            q_bytes += bm * 4
        blocks = (q_len + bm - 1) // bm
        last_q, last_kv = q_len // bm, kv_len // bn  # ragged tiles, if there are any
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        total = pieces.shape[0]
        index, kc, tc = Int32(cta), Int32(0), Int32(0)
        while index < total:
            b, h, tile = pieces[index, 0], pieces[index, 1], pieces[index, 2]
            h_kv, b_kv = h // group, cutlass.min(b, kv_batch - 1)
            count = pieces[index, 6] + pieces[index, 9]
            some, rest = self.cursors(partial, full, pieces, index)
            first_row = (b * heads + h) * blocks
            for j in cutlass.range(count, unroll=1):
                m, masked, some, rest = next_block(partial, full, some, rest)
                mark = block_word(m, masked, (m == last_q) | (tile == last_kv))
                r, s = self.q_stage(kc), self.do_stage(kc)
                cute.arch.mbarrier_wait(q_free + r, self.q_lap(kc) ^ 1)
                with cute.arch.elect_one():
                    info[r] = mark
                    cute.arch.mbarrier_arrive_and_expect_tx(q_full + r, q_bytes)
                    cute.copy(
                        bulk,
                        lse_tiles[None, first_row + m],
                        stats[0][None, r],
                        mbar_ptr=q_full + r,
                    )
                    if const_expr(not c.less_delta):
                        cute.copy(
                            bulk,
                            delta_tiles[None, first_row + m],
                            stats[1][None, r],
                            mbar_ptr=q_full + r,
                        )
                cute.copy(tma_q, q_from[None, m, h, b], q_to[None, r], tma_bar_ptr=q_full + r)
                if j == 0:
                    cute.arch.mbarrier_wait(kv_free, (tc & 1) ^ 1)
                    with cute.arch.elect_one():
                        info[RECORD], info[RECORD + 1], info[RECORD + 2] = tile, h, b
                        info[RECORD + 3], info[RECORD + 4] = count, Int32(1)
                        write_turn(c, info, RECORD, turns, index)
                        cute.arch.mbarrier_arrive_and_expect_tx(k_full, bn * width * 2)
                        cute.arch.mbarrier_arrive_and_expect_tx(v_full, bn * deep * 2)
                    cute.copy(
                        tma_k, k_from[None, tile, h_kv, b_kv], k_to[None, 0], tma_bar_ptr=k_full
                    )
                    cute.copy(
                        tma_v, v_from[None, tile, h_kv, b_kv], v_to[None, 0], tma_bar_ptr=v_full
                    )
                cute.arch.mbarrier_wait(do_free + s, self.do_lap(kc) ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(do_full + s, do_bytes)
                    if const_expr(c.less_delta):
                        cute.copy(
                            bulk,
                            delta_tiles[None, first_row + m],
                            stats[1][None, s],
                            mbar_ptr=do_full + s,
                        )
                cute.copy(tma_do, do_from[None, m, h, b], do_to[None, s], tma_bar_ptr=do_full + s)
                kc += 1
            if count == 0:  # nothing is kept: the record alone
                cute.arch.mbarrier_wait(kv_free, (tc & 1) ^ 1)
                with cute.arch.elect_one():
                    info[RECORD], info[RECORD + 1], info[RECORD + 2] = tile, h, b
                    info[RECORD + 3], info[RECORD + 4] = count, Int32(1)
                    write_turn(c, info, RECORD, turns, index)
                    cute.arch.mbarrier_arrive(v_full)
                    cute.arch.mbarrier_arrive(k_full)
            following = index + ctas
            if const_expr(c.dynamic):  # from a counter: a CTA that is ahead takes more
                old = Int32(0)
                if lane == 0:
                    old = cute.arch.atomic_add(counter.iterator, Int32(1))
                    if old == total - 1:  # the last of the launch leaves it at zero
                        counter[0] = Int32(0)
                following = cute.arch.shuffle_sync(old, 0) + ctas
            tc += 1
            index = following
        cute.arch.mbarrier_wait(kv_free, (tc & 1) ^ 1)
        with cute.arch.elect_one():
            info[RECORD + 4] = Int32(0)
            cute.arch.mbarrier_arrive(k_full)

    def cursors(self, partial: Any, full: Any, pieces: Any, index: Any) -> Any:
        """Begin the cursors of a piece's PARTIAL and FULL blocks."""
        begun = []
        for runs, word in ((partial, 4), (full, 7)):
            begun.append(begin_runs(runs, *(pieces[index, word + i] for i in range(3))))
        return begun
