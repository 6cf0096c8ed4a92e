"""Claim work tiles of the Hopper backward and load their blocks by TMA, in one producer warp.

The warp merges the PARTIAL and FULL runs of a work tile in ascending order. It writes the block of
each stage to shared memory, so that the consumers need not read the block lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import cpasync

from attnkit.templates.common.backward_producer import partition_operands
from attnkit.templates.common.backward_work import Lists, Problem
from attnkit.templates.common.cache_policy import evict_first
from attnkit.templates.common.semaphore import write_turn
from attnkit.templates.common.work_tile import (
    ITEM_WORDS,
    WorkItem,
    WorkTile,
    begin_runs,
    block_word,
    next_block,
)
from attnkit.templates.sm90.backward_bias_in_smem import BiasBarriers, BiasNotes, tile_word
from attnkit.templates.sm90.backward_config import ROWS, BackwardConfig
from attnkit.templates.sm90.backward_leaders import wait_for_leader
from attnkit.templates.sm90.backward_shared import (
    FIRST_WRITER_BLOCK,
    HEAD_STARTS,
    LAST_WRITER_BLOCK,
    LoadBarriers,
    Word,
    do_phase,
    do_stage,
    heads_before,
    k_phase,
    q_blocks_of,
    q_phase,
    q_stage,
    record_of,
)

# The next work tile is claimed this many blocks before the end of the current one. This is early
# enough to hide the latency of the work list. It is late enough that faster CTAs claim more, and
# that work tiles begin in about the order of the list, because some wait for earlier ones.
CLAIM_AHEAD = 3
# Parts of a split kv block are last in the list and vary in length: claim late to balance the load.
CLAIM_AHEAD_PARTS = 1


@dataclass(frozen=True)
class LoadTargets:
    """Holds the tensors in shared memory that the producer writes.

    Attributes:
        q, do: dtype [block_q, head_dim, stages] and [block_q, head_dim_v, stages].
        k, v: dtype [64, head_dim, halves * k_stages] and [64, head_dim_v, halves]; a half is 64
            rows of the kv block.
        lse, delta: f32 [block_q * words, stages] and [block_q, stages].
        info: int32 words.
    """

    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    lse: cute.Tensor
    delta: cute.Tensor
    info: cute.Tensor


class Producer:
    """Claims work tiles and loads their blocks.

    Args:
        config: compile-time configuration.
    """

    def __init__(self, config: BackwardConfig) -> None:
        self.config = config
        self.bias_notes = BiasNotes(config)

    @cute.jit
    def run(
        self,
        atoms: tuple,
        tiles: tuple,
        smem: LoadTargets,
        bars: LoadBarriers,
        lists: Lists,
        problem: Problem,
        bias_bars: BiasBarriers | None = None,
    ):
        """Run the producer warp.

        Args:
            atoms, tiles: TMA atoms and tensors of Q, K, V and dO.
            smem: targets in shared memory.
            bars: mbarriers.
            lists: tensors of the work list.
            problem: sizes of the launch.
            bias_bars: mbarriers of a copied bias; None without one.
        """
        c, info, p = self.config, smem.info, problem
        tma_q, tma_k, tma_v, tma_do = atoms
        head_dim, head_dim_v, bm = c.head_dim, c.head_dim_v, c.block_q
        (q_to, q_from), (k_to, k_from), (v_to, v_from), (do_to, do_from) = partition_operands(
            c, atoms, tiles, smem, ROWS
        )
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        lse_words = c.words[0]
        lse_tiles = cute.flat_divide(lists.lse, (bm * lse_words,))
        delta_tiles = cute.flat_divide(lists.delta, (bm,))
        blocks = (p.q_len + bm - 1) // bm  # of a head
        own_blocks = q_blocks_of(c, p)  # of a work tile's heads
        # indices of the incomplete blocks, if there are any
        ragged_q, ragged_kv = p.q_len // bm, p.kv_len // c.block_kv
        halves = c.block_kv // ROWS  # halves of K and V: 64 keys for each consumer
        total = lists.items.shape[0]
        q_count, kv_count = Int32(0), Int32(0)
        index = self.claim_first(lists, kv_count, info, bars)
        word = self.look_up(lists.items, index)
        while index < total:
            b, h, kv_block = (
                cute.arch.shuffle_sync(word, i)
                for i in (WorkItem.BATCH, WorkItem.HEAD, WorkItem.KV_BLOCK)
            )
            store_end, run, skip, left, full_run, full_skip, full_left = (
                cute.arch.shuffle_sync(word, i)
                for i in range(WorkItem.STORE_END, WorkItem.NUM_FULL + 1)
            )
            parts = cute.arch.shuffle_sync(word, WorkItem.NUM_PARTS)
            store_begin = goes_on = None
            ahead: Any = Int32(CLAIM_AHEAD)
            if const_expr(c.whole_heads):
                store_begin, goes_on = cute.arch.shuffle_sync(word, WorkItem.STORE_BEGIN), parts
            else:
                ahead = cutlass.select_(parts > 1, Int32(CLAIM_AHEAD_PARTS), ahead)
            h_kv = h if const_expr(c.pack_gqa) else h // p.group
            b_kv = cutlass.min(b, p.kv_batch - 1)
            count = left + full_left
            in_partial = begin_runs(lists.partial, run, skip, left)
            in_full = begin_runs(lists.full, full_run, full_skip, full_left)
            first_block = heads_before(c, p, b, h) * own_blocks
            k_stage = kv_count & (c.k_stages - 1)
            phase = k_phase(c, kv_count)
            claim_at = cutlass.max(count - ahead, Int32(0))
            for j in cutlass.range(count, unroll=1):
                block, is_partial, in_partial, in_full = next_block(
                    lists.partial, lists.full, in_partial, in_full
                )
                if j == 0:
                    split: tuple = ()  # index of the split kv block, and its number of parts
                    if const_expr(c.joins):
                        split = cute.arch.shuffle_sync(word, WorkItem.SPLIT), parts
                    cute.arch.mbarrier_wait(bars.k_empty + k_stage, phase ^ 1)
                    if const_expr(c.bias_bytes):  # as many as q blocks that were not the first
                        self.bias_notes.wait_read(bias_bars, q_count - kv_count)
                    with cute.arch.elect_one():
                        # the lane that writes the record also arrives
                        record = (kv_block, h, b, count, self.valid(kv_count), *split)
                        self.write_record(info, k_stage, record)
                        write_turn(c, info, record_of(c, k_stage), lists.order, index)
                        cute.arch.mbarrier_arrive_and_expect_tx(
                            bars.k_full + k_stage, c.block_kv * head_dim * 2
                        )
                    for w in cutlass.range_constexpr(halves):
                        cute.copy(
                            tma_k,
                            k_from[None, halves * kv_block + w, h_kv, b_kv],
                            k_to[None, halves * k_stage + w],
                            tma_bar_ptr=bars.k_full + k_stage,
                            cache_policy=evict_first(),
                        )
                row_block, q_head = block, h
                if const_expr(c.pack_gqa):  # `block` goes on from head to head
                    row_block, q_head = block % blocks, h * p.group + block // blocks
                q_word = block_word(
                    block, is_partial, (row_block == ragged_q) | (kv_block == ragged_kv)
                )
                if const_expr(c.first_writer):
                    first_writer = Int32(4 * FIRST_WRITER_BLOCK)
                    q_word += cutlass.select_(row_block < store_end, first_writer, Int32(0))
                if const_expr(c.whole_heads):
                    stores, finishes = Int32(4 * FIRST_WRITER_BLOCK), Int32(4 * LAST_WRITER_BLOCK)
                    q_word += cutlass.select_(row_block >= store_begin, stores, Int32(0))
                    q_word += cutlass.select_(row_block < store_end, finishes, Int32(0))
                if const_expr(c.bias_bytes):
                    if j > 0:
                        tile_of_note = tile_word(kv_block, kv_count)
                        note = (row_block * bm, q_head, b, tile_of_note)
                        self.bias_notes.write(info, bias_bars, q_count - kv_count - 1, note)
                if const_expr(c.leaders):
                    wait_for_leader(lists.order[0], kv_block, b, h * own_blocks + block)
                r, s = q_stage(c, q_count), do_stage(c, q_count)
                cute.arch.mbarrier_wait(bars.q_empty + r, q_phase(c, q_count) ^ 1)
                with cute.arch.elect_one():
                    info[r] = q_word
                    if const_expr(c.pack_gqa):
                        info[Word.PACKED_ROW + r] = row_block * bm
                    cute.arch.mbarrier_arrive_and_expect_tx(
                        bars.q_full + r, bm * (2 * head_dim + 4 * lse_words)
                    )
                    cute.copy(
                        bulk, lse_tiles[None, first_block + block], smem.lse[None, r],
                        mbar_ptr=bars.q_full + r,
                    )  # fmt: skip
                cute.copy(
                    tma_q, q_from[None, row_block, q_head, b], q_to[None, r],
                    tma_bar_ptr=bars.q_full + r,
                )  # fmt: skip
                cute.arch.mbarrier_wait(bars.do_empty + s, do_phase(c, q_count) ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(
                        bars.do_full + s, bm * (2 * head_dim_v + 4)
                    )
                    cute.copy(
                        bulk, delta_tiles[None, first_block + block], smem.delta[None, s],
                        mbar_ptr=bars.do_full + s,
                    )  # fmt: skip
                cute.copy(
                    tma_do, do_from[None, row_block, q_head, b], do_to[None, s],
                    tma_bar_ptr=bars.do_full + s,
                )  # fmt: skip
                if j == 0:  # V last, because dP of the previous work tile may still read it
                    for w in cutlass.range_constexpr(halves):
                        cute.arch.mbarrier_wait(bars.v_empty + w, (kv_count & 1) ^ 1)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(
                                bars.v_full + w, ROWS * head_dim_v * 2
                            )
                        cute.copy(
                            tma_v,
                            v_from[None, halves * kv_block + w, h_kv, b_kv],
                            v_to[None, w],
                            tma_bar_ptr=bars.v_full + w,
                            cache_policy=evict_first(),
                        )
                if j == claim_at:
                    index = self.claim_next(lists, index, goes_on, kv_count + 1, info, bars)
                    word = self.look_up(lists.items, index)
                q_count += 1
            if count == 0:
                if const_expr(c.k_stages == 1):  # fully masked: only the record, without a turn
                    cute.arch.mbarrier_wait(bars.k_empty, phase ^ 1)
                    with cute.arch.elect_one():
                        record = (kv_block, h, b, count, self.valid(kv_count))
                        self.write_record(info, 0, record)
                        for w in cutlass.range_constexpr(halves):
                            cute.arch.mbarrier_arrive(bars.v_full + w)
                        cute.arch.mbarrier_arrive(bars.k_full)
                    kv_count += 1
                index = self.claim(lists.counter, total, kv_count, info, bars)
                word = self.look_up(lists.items, index)
            else:
                kv_count += 1
        if const_expr(c.bias_bytes):
            self.bias_notes.write(info, bias_bars, q_count - kv_count, (Int32(-1),))
        k_stage = kv_count & (c.k_stages - 1)
        cute.arch.mbarrier_wait(bars.k_empty + k_stage, k_phase(c, kv_count) ^ 1)
        with cute.arch.elect_one():
            info[record_of(c, k_stage) + WorkTile.VALID] = Int32(0)
            cute.arch.mbarrier_arrive(bars.k_full + k_stage)

    def valid(self, count: Int32) -> Any:
        """Return the word `VALID` for the record of the `count`-th work tile.

        The word is 1, or 1 + the parity of `count` if K has one stage.
        """
        return Int32(1) if self.config.k_stages > 1 else 1 + (count & 1)

    def write_record(self, info: cute.Tensor, stage: Int32, words: tuple) -> None:
        """Write the record of a work tile for the consumers, see `WorkTile`."""
        for i, word in enumerate(words):
            info[record_of(self.config, stage) + i] = word

    @cute.jit
    def look_up(self, items: cute.Tensor, index: Int32):
        """Return row `index` of the work list, one word per lane; beyond the end, the last row."""
        lane = cute.arch.lane_idx()
        row = cutlass.min(index, items.shape[0] - 1)
        return items[row, cutlass.min(lane, Int32(ITEM_WORDS - 1))]

    def claim_first(self, lists: Lists, count: Int32, info: Any, bars: LoadBarriers) -> Any:
        """Claim a work tile, or all those of a head, and return the index of the first one.

        `count`, `info` and `bars` are those of `claim`.
        """
        if self.config.whole_heads:
            return self.claim_head(lists, count, info, bars)
        return self.claim(lists.counter, lists.items.shape[0], count, info, bars)

    def claim_next(
        self, lists: Lists, index: Int32, goes_on: Any, count: Int32, info: Any, bars: LoadBarriers
    ) -> Any:
        """Return the index of the work tile after `index`, which is claimed unless its head is.

        Args:
            lists: tensors of the work list.
            index: row of the current work tile.
            goes_on: word `HEAD_GOES_ON` of that row; None without `whole_heads`.
            count, info, bars: see `claim`.
        """
        if self.config.whole_heads:
            return self.next_of_head(lists, index, goes_on, count, info, bars)
        return self.claim_first(lists, count, info, bars)

    @cute.jit
    def claim_head(self, lists: Lists, count: Int32, info: cute.Tensor, bars: LoadBarriers):
        """Claim a head, and return the row of its first work tile."""
        starts = lists.order[HEAD_STARTS]
        heads = starts.shape[0]
        head = self.claim(lists.counter, heads, count, info, bars)
        index = lists.items.shape[0]
        if head < heads:
            index = starts[head]
        return index

    @cute.jit
    def next_of_head(
        self, lists: Lists, index: Int32, goes_on: Int32, count: Int32, info: cute.Tensor,
        bars: LoadBarriers,
    ):  # fmt: skip
        """Return the next row of the work list if its head goes on, else the first of a new head."""
        index = index + 1
        if goes_on == 0:
            index = self.claim_head(lists, count, info, bars)
        return index

    @cute.jit
    def claim(
        self,
        counter: cute.Tensor,
        total: Int32,
        count: Int32,
        info: cute.Tensor,
        bars: LoadBarriers,
    ):
        """Claim the next work tile with a counter, so that faster CTAs process more work tiles.

        The first work tile is claimed in the same way. A work tile may wait for earlier ones, which
        must therefore belong to CTAs that are running; not all launched CTAs may be running.

        Args:
            counter: counter of the work list.
            total: rows of the work list.
            count, info, bars: number of earlier claims if K has one stage, words and mbarriers in
                shared memory; for producers that share a claim, see `backward_hd512_producer`.
        """
        ctas, _, _ = cute.arch.grid_dim()
        index = Int32(0)
        if cute.arch.lane_idx() == 0:
            index = cute.arch.atomic_add(counter.iterator, Int32(1))
            if index == total + ctas - 1:  # the last claim of the launch resets the counter
                cute.arch.store(counter.iterator, Int32(0), sem="relaxed", scope="gpu")
        return cute.arch.shuffle_sync(index, 0)
