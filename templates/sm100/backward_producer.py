"""Fetch work tiles and load their blocks by TMA: the producer of the Blackwell backward.

One warp merges the PARTIAL and FULL runs of a work tile in ascending order. For the other roles it
writes the block of each stage to shared memory, so that they need not read the block lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import cpasync

from attnkit.templates.common.backward_producer import next_q_block, partition_operands
from attnkit.templates.common.backward_work import Lists, Problem
from attnkit.templates.common.semaphore import write_turn
from attnkit.templates.common.work_tile import (
    RECORD,
    WorkItem,
    WorkTile,
    begin_runs,
)
from attnkit.templates.sm100.backward_barriers import BackwardBarriers, CommonBarriers
from attnkit.templates.sm100.backward_config import BackwardConfig
from attnkit.templates.sm100.backward_shared import (
    SmemRows,
    do_phase,
    do_stage,
    q_phase,
    q_stage,
)


@dataclass(frozen=True)
class LoadTargets:
    """Holds the tensors in shared memory that the producer writes.

    Attributes:
        q, do: dtype [block_q, head_dim, stages] and [block_q, head_dim_v, stages].
        k, v: dtype [128, head_dim, 1] and [128, head_dim_v, 1].
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor


class Producer:
    """Fetches work tiles and loads their blocks.

    Args:
        config: compile-time configuration.
    """

    def __init__(self, config: BackwardConfig) -> None:
        self.config = config

    @cute.jit
    def run(
        self,
        atoms: tuple,
        tiles: tuple,
        smem: LoadTargets,
        rows: SmemRows,
        bars: BackwardBarriers,
        lists: Lists,
        problem: Problem,
    ):
        """Fetch all work tiles of this CTA and load their blocks.

        Args:
            atoms, tiles: TMA copies of Q, K, V and dO, and their coordinate tensors.
            smem: targets in shared memory.
            rows: statistics and words of q blocks in shared memory.
            bars: mbarriers.
            lists: tensors of the work list.
            problem: sizes of the launch.
        """
        c, p, info, items = self.config, problem, rows.info, lists.items
        tma_q, tma_k, tma_v, tma_do = atoms
        head_dim, head_dim_v, bm, bn = c.head_dim, c.head_dim_v, c.block_q, c.rows_kv
        # [tile, stages] in shared memory, [tile, blocks, H, B] in global memory
        (q_to, q_from), (k_to, k_from), (v_to, v_from), (do_to, do_from) = partition_operands(
            c, atoms, tiles, smem, bn
        )
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        lse_words, delta_words = c.words
        lse_tiles = cute.flat_divide(lists.lse, (bm * lse_words,))  # f32 [block_q words, blocks]
        delta_tiles = cute.flat_divide(lists.delta, (bm * delta_words,))
        q_bytes, do_bytes = bm * (2 * head_dim + 4 * lse_words), bm * head_dim_v * 2
        if const_expr(c.less_delta):  # the MMA that subtracts delta waits for dO
            do_bytes += bm * 4 * delta_words
        else:
            q_bytes += bm * 4
        blocks = (p.q_len + bm - 1) // bm
        ragged = p.q_len // bm, p.kv_len // bn  # the ragged blocks, if any
        cta, _, _ = cute.arch.block_idx()
        total = items.shape[0] * c.column_parts
        index, q_count, kv_count = Int32(cta), Int32(0), Int32(0)
        while index < total:
            item, part = index, 0
            if const_expr(c.column_parts > 1):
                item, part = index // c.column_parts, index % c.column_parts
            b, h, kv_block = (
                items[item, i] for i in (WorkItem.BATCH, WorkItem.HEAD, WorkItem.KV_BLOCK)
            )
            h_kv, b_kv = h // p.group, cutlass.min(b, p.kv_batch - 1)
            count = items[item, WorkItem.NUM_PARTIAL] + items[item, WorkItem.NUM_FULL]
            in_partial, in_full = begin_item(lists, item)
            first_row = (b * p.heads + h) * blocks
            for j in cutlass.range(count, unroll=1):
                block, q_word, in_partial, in_full = next_q_block(
                    lists, (in_partial, in_full), kv_block, ragged
                )
                r, s = q_stage(c, q_count), do_stage(c, q_count)
                cute.arch.mbarrier_wait(bars.block_empty + r, q_phase(c, q_count) ^ 1)
                with cute.arch.elect_one():
                    # the lane that writes the word also arrives
                    info[r] = q_word
                    cute.arch.mbarrier_arrive_and_expect_tx(bars.block_full + r, q_bytes)
                    cute.copy(
                        bulk, lse_tiles[None, first_row + block], rows.lse[None, r],
                        mbar_ptr=bars.block_full + r,
                    )  # fmt: skip
                    if const_expr(not c.less_delta):
                        cute.copy(
                            bulk, delta_tiles[None, first_row + block], rows.delta[None, r],
                            mbar_ptr=bars.block_full + r,
                        )  # fmt: skip
                cute.copy(
                    tma_q, q_from[None, block, h, b], q_to[None, r],
                    tma_bar_ptr=bars.block_full + r,
                )  # fmt: skip
                if j == 0:
                    # after Q, whose load does not depend on the previous work tile
                    cute.arch.mbarrier_wait(bars.kv_empty, (kv_count & 1) ^ 1)
                    with cute.arch.elect_one():
                        write_part_record(c, info, lists, item, (kv_block, h, b, count), part)
                        cute.arch.mbarrier_arrive_and_expect_tx(bars.k_full, bn * head_dim * 2)
                        cute.arch.mbarrier_arrive_and_expect_tx(bars.v_full, bn * head_dim_v * 2)
                    cute.copy(
                        tma_k, k_from[None, kv_block, h_kv, b_kv], k_to[None, 0],
                        tma_bar_ptr=bars.k_full,
                    )  # fmt: skip
                    cute.copy(
                        tma_v, v_from[None, kv_block, h_kv, b_kv], v_to[None, 0],
                        tma_bar_ptr=bars.v_full,
                    )  # fmt: skip
                cute.arch.mbarrier_wait(bars.do_empty + s, do_phase(c, q_count) ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(bars.do_full + s, do_bytes)
                    if const_expr(c.less_delta):
                        cute.copy(
                            bulk, delta_tiles[None, first_row + block], rows.delta[None, s],
                            mbar_ptr=bars.do_full + s,
                        )  # fmt: skip
                cute.copy(
                    tma_do, do_from[None, block, h, b], do_to[None, s],
                    tma_bar_ptr=bars.do_full + s,
                )  # fmt: skip
                q_count += 1
            if count == 0:  # fully masked: only the record
                cute.arch.mbarrier_wait(bars.kv_empty, (kv_count & 1) ^ 1)
                with cute.arch.elect_one():
                    write_part_record(c, info, lists, item, (kv_block, h, b, count), part)
                    cute.arch.mbarrier_arrive(bars.v_full)
                    cute.arch.mbarrier_arrive(bars.k_full)
            index = fetch(lists, total)
            kv_count += 1
        write_end(info, bars, kv_count)


@cute.jit
def fetch(lists: Lists, total: Int32):
    """Return the index of the CTA's next work tile, at least `total` after the last.

    Work tiles come from a counter, so that faster CTAs process more of them. The first work tile of
    a CTA has the CTA's index.

    Args:
        lists: tensors of the work list.
        total: number of work tiles of the launch.
    """
    ctas, _, _ = cute.arch.grid_dim()
    old = Int32(0)
    if cute.arch.lane_idx() == 0:
        old = cute.arch.atomic_add(lists.counter.iterator, Int32(1))
        if old == total - 1:  # the last fetch of the launch resets the counter
            cute.arch.store(lists.counter.iterator, Int32(0), sem="relaxed", scope="gpu")
    return cute.arch.shuffle_sync(old, 0) + ctas


def write_end(info: cute.Tensor, bars: CommonBarriers, kv_count: Int32) -> None:
    """Tell the other roles of a single CTA that there is no work tile after the `kv_count`-th."""
    cute.arch.mbarrier_wait(bars.kv_empty, (kv_count & 1) ^ 1)
    with cute.arch.elect_one():
        info[RECORD + WorkTile.VALID] = Int32(0)
        cute.arch.mbarrier_arrive(bars.k_full)


def begin_item(lists: Lists, index: Any) -> list[Any]:
    """Return cursors to the PARTIAL and to the FULL blocks of row `index` of the work list."""
    return [
        begin_runs(runs, *(lists.items[index, word + i] for i in range(3)))
        for runs, word in ((lists.partial, WorkItem.PARTIAL), (lists.full, WorkItem.FULL))
    ]


def write_record(info: cute.Tensor, record: Any, words: tuple[Any, ...]) -> None:
    """Write the record of a work tile to shared memory, for the other roles.

    Args:
        info: int32 words in shared memory.
        record: index of the record's first word.
        words: kv block, head, batch element and number of q blocks, in the order of `WorkTile`.
    """
    for i, word in enumerate((*words, Int32(1))):  # VALID last
        info[record + i] = word


def write_part_record(
    config: BackwardConfig,
    info: cute.Tensor,
    lists: Lists,
    item: Int32,
    words: tuple[Any, ...],
    part: Any,
) -> None:
    """Write the record of a work tile of a single CTA to shared memory, with its part of columns.

    Args:
        config: compile-time configuration.
        info: int32 words in shared memory.
        lists: tensors of the work list.
        item: row of the work list.
        words: kv block, head, batch element and number of q blocks.
        part: which part of the gradients' columns the work tile computes.
    """
    write_record(info, RECORD, words)
    write_turn(config, info, RECORD, lists.order, item)
    if config.column_parts > 1:
        info[RECORD + WorkTile.COLUMN_PART] = part
