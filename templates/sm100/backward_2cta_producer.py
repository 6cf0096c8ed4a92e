"""Fetch work tiles and load each CTA's share of their operands: the producer of a CTA pair.

The operands of the next work tile are loaded as soon as their memory is free: Q and dO when they
have been read, K after the last MMA that reads it, V when dV has been stored from the memory of V.

The first CTA claims all work tiles, including the first one, from a counter, and passes them to the
second CTA. Running pairs therefore begin work tiles in the order of the list, and a turn that a
pair waits for belongs to a work tile that has begun. No pair depends on one that is not resident.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.cute.nvgpu import cpasync

from attnkit.templates.common.backward_producer import next_q_block
from attnkit.templates.common.backward_work import Lists, Problem
from attnkit.templates.common.lse_in_mma import ROW_WORDS
from attnkit.templates.common.semaphore import write_turn
from attnkit.templates.common.tma import partition
from attnkit.templates.common.work_tile import WorkItem, WorkTile
from attnkit.templates.sm100 import backward_device as device
from attnkit.templates.sm100.backward_barriers import Backward2CtaBarriers, OperandBarriers
from attnkit.templates.sm100.backward_config import BackwardConfig
from attnkit.templates.sm100.backward_producer import begin_item, write_record
from attnkit.templates.sm100.backward_shared import (
    HALF,
    Group,
    SmemRows,
    Word,
    q_phase,
    q_stage,
)

# The next work tile is claimed this many blocks before the end of the current one, to hide the
# latency of a claim. An earlier claim would make CTAs wait for turns, because work tiles would not
# begin in the order of the list.
CLAIM_AHEAD = 2


class Load(IntEnum):
    """Indices of the TMA loads of a CTA, in the order of the kernel's arguments."""

    Q_ROWS = 0
    Q_COLUMNS = 1
    DO_ROWS = 2
    DO_COLUMNS = 3
    K_ROWS = 4
    K_COLUMNS = 5
    V = 6


@dataclass(frozen=True)
class Loads:
    """Holds the TMA loads of a CTA; tuples are indexed by `Load`.

    Attributes:
        atoms: TMA copies.
        targets: [tile, 1] in shared memory.
        sources: [tile, blocks of rows, blocks of columns, H, B] in global memory.
        bulk: bulk copy of statistics.
        lse_tiles, delta_tiles: f32 [words of the rows, blocks or halves of them].
    """

    atoms: tuple[Any, ...]
    targets: tuple[cute.Tensor, ...]
    sources: tuple[cute.Tensor, ...]
    bulk: Any
    lse_tiles: cute.Tensor
    delta_tiles: cute.Tensor


@dataclass(frozen=True)
class Item:
    """Describes a work tile: its row index in the work list, and the words of its record."""

    index: Int32
    kv_block: Int32
    head: Int32
    batch: Int32
    count: Int32


@dataclass(frozen=True)
class Progress:
    """Holds the counters of the producer.

    Attributes:
        kv_count: number of earlier work tiles.
        acc_count: number of earlier work tiles that have q blocks.
        q_count: number of earlier q blocks.
        last: number of q blocks of the previous work tile.
    """

    kv_count: Int32
    acc_count: Int32
    q_count: Int32
    last: Int32


class Producer2Cta:
    """Fetches work tiles and loads a CTA's share of their blocks.

    Both CTAs iterate over all blocks.

    Args:
        config: compile-time configuration.
        group: the pair.
    """

    def __init__(self, config: BackwardConfig, group: Group) -> None:
        self.config = config
        self.group = group

    @cute.jit
    def run(
        self,
        atoms: tuple,
        tiles: tuple,
        smem: tuple,
        rows: SmemRows,
        bars: Backward2CtaBarriers,
        lists: Lists,
        problem: Problem,
    ):
        """Fetch all work tiles of the pair and load this CTA's share of their blocks.

        Args:
            atoms, tiles, smem: TMA copies in the order of `Load`, their coordinate tensors, and
                their targets in shared memory.
            rows: statistics and words of q blocks in shared memory.
            bars: mbarriers.
            lists: tensors of the work list.
            problem: sizes of the launch.
        """
        c, p, info, items = self.config, problem, rows.info, lists.items
        rank = self.group.rank()
        head_dim, head_dim_v, bm, bn = c.head_dim, c.head_dim_v, c.block_q, c.rows_kv
        whole = (None, None, None, None)
        shapes = (
            (HALF, head_dim), (bm, HALF), (HALF, head_dim_v), (bm, HALF), (bn, head_dim),
            (2 * bn, HALF), (bn, head_dim_v),
        )  # fmt: skip
        sides = [
            partition(atom, smem[i], tiles[i], shapes[i], whole) for i, atom in enumerate(atoms)
        ]
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        half_words = HALF * ROW_WORDS  # words of extra columns, for a CTA's half of the rows
        lse_tiles = cute.flat_divide(lists.lse, (half_words if const_expr(c.less_lse) else bm,))
        delta_tiles = cute.flat_divide(
            lists.delta, (half_words if const_expr(c.less_delta) else bm,)
        )
        plain = self.plain_statistics(lse_tiles, delta_tiles, rows)
        loads = Loads(
            atoms,
            tuple(to for to, _ in sides),
            tuple(source for _, source in sides),
            bulk,
            lse_tiles,
            delta_tiles,
        )
        blocks = (p.q_len + bm - 1) // bm
        ragged = p.q_len // bm, p.kv_len // c.block_kv  # the ragged blocks, if any
        total = items.shape[0]
        q_count, kv_count = Int32(0), Int32(0)
        self.claim(lists.counter, total, kv_count, info, bars)
        index = self.claimed(kv_count, info, bars)
        acc_count, last = Int32(0), Int32(0)
        while index < total:
            b, h, kv_block = (
                items[index, i] for i in (WorkItem.BATCH, WorkItem.HEAD, WorkItem.KV_BLOCK)
            )
            h_kv, b_kv = h // p.group, cutlass.min(b, p.kv_batch - 1)
            count = items[index, WorkItem.NUM_PARTIAL] + items[index, WorkItem.NUM_FULL]
            in_partial, in_full = begin_item(lists, index)
            first_row = (b * p.heads + h) * blocks
            before = Int32(0)
            for j in cutlass.range(count, unroll=1):
                block, q_word, in_partial, in_full = next_q_block(
                    lists, (in_partial, in_full), kv_block, ragged
                )
                r = q_stage(c, q_count)
                cute.arch.mbarrier_wait(bars.block_empty + r, q_phase(c, q_count) ^ 1)
                with cute.arch.elect_one():
                    # the lane that writes the word also arrives
                    info[r] = q_word
                    if const_expr(len(plain) == 0):
                        cute.arch.mbarrier_arrive(bars.block_full + r)
                    else:
                        cute.arch.mbarrier_arrive_and_expect_tx(
                            bars.block_full + r, 4 * bm * len(plain)
                        )
                    for statistic, target in plain:
                        cute.copy(
                            bulk, statistic[None, first_row + block], target[None, r],
                            mbar_ptr=bars.block_full + r,
                        )  # fmt: skip
                at = (block, h, b, first_row)
                item = Item(index, kv_block, h, b, count)
                progress = Progress(kv_count, acc_count, q_count, last)
                if j == 0:
                    self.load_k_rows(loads, bars, info, lists.order, item, progress, (h_kv, b_kv))
                self.load_q_do(loads, Load.Q_ROWS, bars.q_rows, rows, q_count, at)
                if j > 0:
                    # dK is one block behind: load its columns of Q after the next block's rows
                    self.load_q_do(
                        loads, Load.Q_COLUMNS, bars.q_columns, rows, q_count - 1,
                        (before, h, b, first_row),
                    )  # fmt: skip
                self.load_q_do(loads, Load.DO_ROWS, bars.do_rows, rows, q_count, at)
                if j == 0:
                    # dV of the previous work tile is stored from this memory
                    cute.arch.mbarrier_wait(bars.v_empty, (kv_count & 1) ^ 1)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(bars.v_full, bn * head_dim_v * 2)
                    to, source = sides[Load.V]
                    source = source[None, 2 * kv_block + rank, 0, h_kv, b_kv]
                    cute.copy(atoms[Load.V], source, to[None, 0], tma_bar_ptr=bars.v_full)
                self.load_q_do(loads, Load.DO_COLUMNS, bars.do_columns, rows, q_count, at)
                if j == 0:
                    self.load_k_columns(loads, bars, item, progress, (h_kv, b_kv))
                if j == cutlass.max(count - CLAIM_AHEAD, 0):
                    self.claim(lists.counter, total, kv_count + 1, info, bars)
                before = block
                q_count += 1
            if count > 0:
                self.load_q_do(
                    loads, Load.Q_COLUMNS, bars.q_columns, rows, q_count - 1,
                    (before, h, b, first_row),
                )  # fmt: skip
                acc_count += 1
            else:  # fully masked: only the record
                cute.arch.mbarrier_wait(bars.kv_empty, (kv_count & 1) ^ 1)
                with cute.arch.elect_one():
                    masked_item = Item(index, kv_block, h, b, count)
                    self.write_record(info, kv_count, masked_item, lists.order)
                    for barrier in (bars.v_full, bars.k_columns_full, bars.k_full):
                        cute.arch.mbarrier_arrive(barrier)
                self.claim(lists.counter, total, kv_count + 1, info, bars)
            last = count
            kv_count += 1
            index = self.claimed(kv_count, info, bars)
        cute.arch.mbarrier_wait(bars.kv_empty, (kv_count & 1) ^ 1)
        with cute.arch.elect_one():
            info[self.group.record(kv_count) + WorkTile.VALID] = Int32(0)
            cute.arch.mbarrier_arrive(bars.k_full)

    def plain_statistics(
        self, lse_tiles: cute.Tensor, delta_tiles: cute.Tensor, rows: SmemRows
    ) -> list[tuple[cute.Tensor, cute.Tensor]]:
        """Return (tiles, target) of LSE and delta, without those that an MMA subtracts.

        They come with the word of a q block, the others with the rows of Q or dO.
        """
        c = self.config
        found = [] if c.less_lse else [(lse_tiles, rows.lse)]
        return found if c.less_delta else [*found, (delta_tiles, rows.delta)]

    @cute.jit
    def load_k_rows(
        self,
        loads: Loads,
        bars: Backward2CtaBarriers,
        info: cute.Tensor,
        order: list,
        item: Item,
        progress: Progress,
        of_kv: tuple,
    ):
        """Write a work tile's record and load the rows of its K, for S.

        The memory of these rows is free after the last S of the previous work tile.

        Args:
            loads: TMA loads.
            bars: mbarriers.
            info: int32 words in shared memory.
            order: tensors of the semaphores.
            item: the work tile.
            progress: counters of the producer.
            of_kv: head and batch element of K.
        """
        c = self.config
        at = 2 * item.kv_block + self.group.rank()
        if progress.last == 0:
            cute.arch.mbarrier_wait(bars.kv_empty, (progress.kv_count & 1) ^ 1)
        elif progress.last > 2:
            cute.arch.mbarrier_wait(bars.s_full, (progress.q_count & 1) ^ 1)
        else:  # wait longer, because some warp might not have read the earlier record yet
            cute.arch.mbarrier_wait(bars.acc_full, (progress.acc_count & 1) ^ 1)
            # nor the warps that add dQ, for which MMAs of two q blocks do not wait
            before = progress.q_count - 1
            cute.arch.mbarrier_wait(bars.block_empty + q_stage(c, before), q_phase(c, before))
        with cute.arch.elect_one():
            self.write_record(info, progress.kv_count, item, order)
            cute.arch.mbarrier_arrive_and_expect_tx(bars.k_full, c.rows_kv * c.head_dim * 2)
        self._load_k(loads, Load.K_ROWS, bars.k_full, at, 0, of_kv)

    @cute.jit
    def load_k_columns(
        self,
        loads: Loads,
        bars: Backward2CtaBarriers,
        item: Item,
        progress: Progress,
        of_kv: tuple,
    ):
        """Load columns of K, for dQ, after the last dQ of the previous work tile."""
        c = self.config
        rank = self.group.rank()
        # wait for every phase in order, and let the store of dK, which dS waits for, go first
        cute.arch.mbarrier_wait(bars.kv_empty, (progress.kv_count & 1) ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bars.k_columns_full, c.rows_kv * c.head_dim * 2)
        self._load_k(loads, Load.K_COLUMNS, bars.k_columns_full, item.kv_block, rank, of_kv)

    def _load_k(
        self,
        loads: Loads,
        load: Load,
        full: cute.Pointer,
        row: Int32,
        column: Any,
        of_kv: tuple[Any, ...],
    ) -> None:
        source = loads.sources[load][None, row, column, *of_kv]
        cute.copy(loads.atoms[load], source, loads.targets[load][None, 0], tma_bar_ptr=full)

    def write_record(self, info: cute.Tensor, count: Int32, item: Item, order: Any) -> None:
        """Write the record of the `count`-th work tile, for the other roles."""
        record = self.group.record(count)
        write_record(info, record, (item.kv_block, item.head, item.batch, item.count))
        write_turn(self.config, info, record, order, item.index)

    @cute.jit
    def claim(
        self,
        counter: cute.Tensor,
        total: Int32,
        count: Int32,
        info: cute.Tensor,
        bars: Backward2CtaBarriers,
    ):
        """Claim the pair's `count`-th work tile from the counter in the first CTA, for both CTAs.

        Args:
            counter: counter of the work list.
            total: rows of the work list.
            count: number of the pair's earlier work tiles.
            info: int32 words in shared memory.
            bars: mbarriers.
        """
        ctas, _, _ = cute.arch.grid_dim()
        if self.group.rank() == 0:
            cute.arch.mbarrier_wait(bars.item_empty, (count & 1) ^ 1)
            if cute.arch.lane_idx() == 0:
                index = cute.arch.atomic_add(counter.iterator, Int32(1))
                if index == total + ctas // 2 - 1:  # the last claim resets the counter
                    cute.arch.store(counter.iterator, Int32(0), sem="relaxed", scope="gpu")
                info[Word.NEXT_ITEM] = index
                place = device.remote_address((info.iterator + Word.NEXT_ITEM).toint(), Int32(1))
                device.write_remote(place, [index] * 4)
                cute.arch.mbarrier_arrive(bars.item_full, Int32(1), scope=MemScopeKind.CLUSTER)

    @cute.jit
    def claimed(self, count: Int32, info: cute.Tensor, bars: Backward2CtaBarriers):
        """Wait for the work tile that `claim` took, and return its row index in the work list.

        Args:
            count: number of the pair's earlier work tiles.
            info: int32 words in shared memory.
            bars: mbarriers.
        """
        if self.group.rank() == 1:
            cute.arch.mbarrier_wait(bars.item_full, count & 1)
            cute.arch.fence_acq_rel_cluster()
        cute.arch.sync_warp()
        index = cute.arch.make_warp_uniform(info[Word.NEXT_ITEM])
        cute.arch.sync_warp()  # all lanes have read the index before the next one is written
        if self.group.rank() == 1:
            self.group.arrive_leader(bars.item_empty)
        return index

    @cute.jit
    def load_q_do(
        self,
        loads: Loads,
        load: cutlass.Constexpr,
        barriers: OperandBarriers,
        rows: SmemRows,
        count: Int32,
        at: tuple,
    ):
        """Load half of Q or dO: rows with the statistics that their MMAs subtract, or columns.

        Args:
            loads: TMA loads.
            load: the operand and its half.
            barriers: barriers of this operand.
            rows: statistics of q blocks in shared memory.
            count: index of the q block.
            at: q block, head, batch element, and index of the head's first block among all heads'.
        """
        c = self.config
        block, h, b, first_row = at
        cute.arch.mbarrier_wait(barriers.empty, (count & 1) ^ 1)
        rank = self.group.rank()
        of_q, of_rows = load == Load.Q_ROWS, load in (Load.Q_ROWS, Load.DO_ROWS)
        with_rows = (load == Load.DO_ROWS and c.less_delta) or (of_q and c.less_lse)
        statistic = loads.lse_tiles if const_expr(of_q) else loads.delta_tiles
        target = rows.lse if const_expr(of_q) else rows.delta
        with cute.arch.elect_one():
            size = HALF * c.head_dim * 2 + (4 * HALF * ROW_WORDS if const_expr(with_rows) else 0)
            cute.arch.mbarrier_arrive_and_expect_tx(barriers.full, size)
            if const_expr(with_rows):
                cute.copy(
                    loads.bulk, statistic[None, 2 * (first_row + block) + rank], target[None, 0],
                    mbar_ptr=barriers.full,
                )  # fmt: skip
        row, column = (2 * block + rank, 0) if const_expr(of_rows) else (block, rank)
        cute.copy(
            loads.atoms[load], loads.sources[load][None, row, column, h, b],
            loads.targets[load][None, 0], tma_bar_ptr=barriers.full,
        )  # fmt: skip
