"""The warp that loads for the Hopper backward: pieces of work, their blocks, TMA.

It takes pieces from the work list, walks their PARTIAL and FULL runs merged in ascending order,
and tells the consumers through shared memory what each stage holds, so that they never see lists.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import cpasync

from attnkit.templates.common.semaphore import write_turn
from attnkit.templates.common.tma import partition
from attnkit.templates.common.work_tile import (
    ITEM_WORDS,
    RECORD,
    begin_runs,
    block_word,
    next_block,
)
from attnkit.templates.sm90.backward_config import ROWS
from attnkit.templates.sm90.backward_sums import FIRST_PART

# Blocks before the end of a piece at which the next one is claimed: early enough that nothing waits for
# the list, and late, so that who is ahead takes more, and pieces begin in about the order of the list:
# some may wait for those before them.
AHEAD = 3
# In a block's number: the piece is the first to add to this q tile. The number of a chunk, twice that,
# then has `FIRST_PART`, and those of rows, at least 64 times that, lose it beyond their 32 bits.
FIRST_BLOCK = FIRST_PART // 2


class Loads:
    """The part of a backward kernel that loads."""

    config: Any

    def q_stage(self, count: Any) -> Any:
        """Slot in the ring of Q of the count-th block."""
        return count & (self.config.q_stages - 1)

    def q_lap(self, count: Any) -> Any:
        """Parity of the lap of the count-th block in the ring of Q."""
        return (count >> (self.config.q_stages.bit_length() - 1)) & 1

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
        k_full, v_full, k_free, v_free, q_full, q_free, do_full, do_free = bars[:8]
        width, deep, bm = c.width, c.value_width, c.block_q
        whole = (None, 0, None, None)
        q_to, q_from = partition(tma_q, smem[2], tiles[0], (bm, width), whole)
        k_to, k_from = partition(tma_k, smem[0], tiles[1], (ROWS, width), whole)
        v_to, v_from = partition(tma_v, smem[1], tiles[2], (ROWS, deep), whole)
        do_to, do_from = partition(tma_do, smem[3], tiles[3], (bm, deep), whole)
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        lse_words = c.words[0]
        lse_tiles = cute.flat_divide(lse, (bm * lse_words,))
        delta_tiles = cute.flat_divide(delta, (bm,))
        blocks = (q_len + bm - 1) // bm
        last_q, last_kv = q_len // bm, kv_len // c.block_kv  # ragged tiles, if there are any
        wide = c.block_kv // ROWS
        total = pieces.shape[0]
        index, kc, tc = self.claim(counter, total), Int32(0), Int32(0)
        word = self.look_up(pieces, index)
        while index < total:
            b, h, tile, stop, run, skip, left, run_rest, skip_rest, left_rest, parts = (
                cute.arch.shuffle_sync(word, i) for i in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11)
            )
            h_kv, b_kv = h // group, cutlass.min(b, kv_batch - 1)
            count = left + left_rest
            some = begin_runs(partial, run, skip, left)
            rest = begin_runs(full, run_rest, skip_rest, left_rest)
            first_row = (b * heads + h) * blocks
            t = tc & (c.k_stages - 1)
            lap = self.k_lap(tc)
            # parts come last and are of all lengths: who is free first takes the next
            ahead = cutlass.select_(parts > 1, Int32(1), Int32(AHEAD))
            claim = cutlass.max(count - ahead, Int32(0))
            for j in cutlass.range(count, unroll=1):
                m, masked, some, rest = next_block(partial, full, some, rest)
                if j == 0:
                    part: tuple = ()  # of which split tile, and of how many parts
                    if const_expr(c.joins):
                        part = cute.arch.shuffle_sync(word, 10), parts
                    cute.arch.mbarrier_wait(k_free + t, lap ^ 1)
                    with cute.arch.elect_one():
                        self.leave_record(info, t, (tile, h, b, count, self.valid(tc), *part))
                        write_turn(c, info, self.record(t), turns, index)
                        cute.arch.mbarrier_arrive_and_expect_tx(k_full + t, c.block_kv * width * 2)
                    for w in cutlass.range_constexpr(wide):
                        cute.copy(
                            tma_k,
                            k_from[None, wide * tile + w, h_kv, b_kv],
                            k_to[None, wide * t + w],
                            tma_bar_ptr=k_full + t,
                        )
                mark = block_word(m, masked, (m == last_q) | (tile == last_kv))
                if const_expr(c.firsts):
                    mark += cutlass.select_(m < stop, Int32(4 * FIRST_BLOCK), Int32(0))
                r, s = self.q_stage(kc), kc & 1
                cute.arch.mbarrier_wait(q_free + r, self.q_lap(kc) ^ 1)
                with cute.arch.elect_one():
                    info[r] = mark
                    cute.arch.mbarrier_arrive_and_expect_tx(
                        q_full + r, bm * (2 * width + 4 * lse_words)
                    )
                    cute.copy(
                        bulk, lse_tiles[None, first_row + m], stats[0][None, r], mbar_ptr=q_full + r
                    )
                cute.copy(tma_q, q_from[None, m, h, b], q_to[None, r], tma_bar_ptr=q_full + r)
                cute.arch.mbarrier_wait(do_free + s, ((kc >> 1) & 1) ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(do_full + s, bm * (2 * deep + 4))
                    cute.copy(
                        bulk, delta_tiles[None, first_row + m], stats[1][None, s],
                        mbar_ptr=do_full + s,
                    )  # fmt: skip
                cute.copy(tma_do, do_from[None, m, h, b], do_to[None, s], tma_bar_ptr=do_full + s)
                if j == 0:
                    for w in cutlass.range_constexpr(wide):  # a consumer's rows each
                        cute.arch.mbarrier_wait(v_free + w, (tc & 1) ^ 1)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(v_full + w, ROWS * deep * 2)
                        cute.copy(
                            tma_v,
                            v_from[None, wide * tile + w, h_kv, b_kv],
                            v_to[None, w],
                            tma_bar_ptr=v_full + w,
                        )
                if j == claim:
                    index = self.claim(counter, total)
                    word = self.look_up(pieces, index)
                kc += 1
            if count == 0:
                if const_expr(c.k_stages == 1):  # nothing is kept: the record alone
                    cute.arch.mbarrier_wait(k_free, lap ^ 1)
                    with cute.arch.elect_one():
                        self.leave_record(info, 0, (tile, h, b, count, self.valid(tc)))
                        write_turn(c, info, RECORD, turns, index)
                        cute.arch.mbarrier_arrive(v_full)
                        cute.arch.mbarrier_arrive(k_full)
                    tc += 1
                index = self.claim(counter, total)
                word = self.look_up(pieces, index)
            else:
                tc += 1
        t = tc & (c.k_stages - 1)
        cute.arch.mbarrier_wait(k_free + t, self.k_lap(tc) ^ 1)
        with cute.arch.elect_one():
            info[self.record(t) + 4] = Int32(0)
            cute.arch.mbarrier_arrive(k_full + t)

    def k_lap(self, count: Any) -> Any:
        """Parity of the lap of the count-th piece in the ring of K."""
        return (count >> (self.config.k_stages.bit_length() - 1)) & 1

    def record(self, stage: Any) -> Any:
        """Where the record of the piece in a stage of K begins in `info`."""
        return RECORD + 2 * RECORD * stage

    def valid(self, count: Any) -> Any:
        """What says that the count-th piece is one; without a ring of K, its parity as 1 or 2."""
        return Int32(1) if self.config.k_stages > 1 else 1 + (count & 1)

    def leave_record(self, info: Any, stage: Any, words: tuple) -> None:
        """Tell the consumers what a piece is: kv tile, head, batch element, blocks, `valid`.

        Then, if the config joins, the split tile that it is a part of, -1 for none, and how many
        parts that has.
        """
        for i, word in enumerate(words):
            info[self.record(stage) + i] = word

    @cute.jit
    def look_up(self, pieces: cute.Tensor, index: Int32):
        """The words of a piece, one a lane; of any piece beyond the end of the list."""
        lane = cute.arch.lane_idx()
        row = cutlass.min(index, pieces.shape[0] - 1)
        return pieces[row, cutlass.min(lane, Int32(ITEM_WORDS - 1))]

    @cute.jit
    def claim(self, counter: cute.Tensor, total: Int32):
        """The piece that this CTA takes next, from a counter: who is ahead takes more.

        The first one too: a piece that waits for those before it must find them with CTAs that run,
        of which there may be fewer than were launched.
        """
        ctas, _, _ = cute.arch.grid_dim()
        index = Int32(0)
        if cute.arch.lane_idx() == 0:
            index = cute.arch.atomic_add(counter.iterator, Int32(1))
            if index == total + ctas - 1:  # the last of the launch leaves it at zero
                counter[0] = Int32(0)
        return cute.arch.shuffle_sync(index, 0)
