"""Add dQ, and shared dK and dV, to float32 sums in global memory: the reduce warpgroup.

It copies 32 columns at a time, with a row per thread, from tensor memory to shared memory, from
which one bulk reduction adds them. The layout of a tile of the sums is [slice][group][row][4]: a
slice has 32 columns, and a group in it has 4 columns, so that threads access adjacent 16 bytes.

In deterministic mode one thread waits for the tile's turn before its first slice. Each part of
a tile's columns has a semaphore, in the order of `attnkit.schedule.deterministic_order`. No other role waits for turns, so
that loads run ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, const_expr, cute

from attnkit.templates.common import device as common_device
from attnkit.templates.common.backward_work import Problem
from attnkit.templates.common.semaphore import OrderTable, following_or_lookup, wait_turn
from attnkit.templates.common.work_tile import RECORD, WorkTile
from attnkit.templates.sm100 import backward_device as device
from attnkit.templates.sm100.backward_barriers import CommonBarriers
from attnkit.templates.sm100.backward_config import SLICE, BackwardConfig
from attnkit.templates.sm100.backward_shared import (
    WARPGROUP,
    Group,
    NamedBarrier,
    q_phase,
    q_stage,
)
from attnkit.templates.sm100.device import fence_after, fence_before


@dataclass(frozen=True)
class SumTarget:
    """Describes the source and target of a reduce thread's additions.

    Attributes:
        staging: f32 [slices, 32 * 128] in shared memory.
        sums: float32 sums in global memory.
        order: tensors of the semaphores, see `OrderTable`.
        thread, lane, warp: indices of the thread.
        tmem: tensor-memory address of the warp's first lane.
    """

    staging: cute.Pointer
    sums: cute.Tensor
    order: Any
    thread: Int32
    lane: Int32
    warp: Int32
    tmem: Int32


class DqReduce:
    """Adds dQ of a single CTA, and dK and dV if query heads share them, to their sums.

    Args:
        config: compile-time configuration.
        group: the CTAs of a work tile.
    """

    def __init__(self, config: BackwardConfig, group: Group) -> None:
        self.config = config
        self.group = group

    @cute.jit
    def run(
        self,
        staging: cute.Pointer,
        tmem: Int32,
        bars: CommonBarriers,
        info: cute.Tensor,
        sums: cute.Tensor,
        order: list,
        problem: Problem,
    ):
        """Add dQ, and shared dK and dV, of all work tiles.

        Args:
            staging: f32 [slices, 32 * 128] in shared memory.
            tmem: base of tensor memory.
            bars: mbarriers.
            info: int32 words in shared memory.
            sums, order: see `Backward.__call__`.
            problem: sizes of the launch.
        """
        c, p = self.config, problem
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        target = SumTarget(
            staging, sums, order, thread, lane, warp, tmem + warp * (device.LANES << 16)
        )
        blocks = (p.q_len + c.block_q - 1) // c.block_q
        kv_blocks = (p.kv_len + c.block_kv - 1) // c.block_kv * c.ctas
        q_tiles, kv_tiles = p.batch * p.heads * blocks, p.kv_batch * p.kv_heads * kv_blocks
        q_count, kv_count, acc_count = Int32(0), Int32(0), Int32(0)
        cute.arch.mbarrier_wait(bars.k_full, 0)
        valid = info[RECORD + WorkTile.VALID]
        while valid != 0:
            record = self.group.record(kv_count)
            kv_block, h, b, count = (
                info[record + i]
                for i in (WorkTile.KV_BLOCK, WorkTile.HEAD, WorkTile.BATCH, WorkTile.NUM_BLOCKS)
            )
            part = self.group.column_part(info, kv_count)
            first_tile = (b * p.heads + h) * blocks
            for _ in cutlass.range(count, unroll=1):
                r = q_stage(c, q_count)
                cute.arch.mbarrier_wait(bars.block_full + r, q_phase(c, q_count))
                tile = first_tile + (info[r] >> 2)
                cute.arch.sync_warp()  # all lanes have read the word
                common_device.arrive(bars.block_empty + r)
                self.add_block(target, (tile, part), kv_block, q_count, bars)
                q_count += 1
            if const_expr(c.accumulate):
                if count > 0:
                    cute.arch.mbarrier_wait(bars.acc_full, acc_count & 1)
                    fence_after()
                    acc_count += 1
                    kv_head = cutlass.min(b, p.kv_batch - 1) * p.kv_heads + h // p.group
                    self.add_dk_dv(
                        target, (kv_head, self.group.kv_rows(kv_block), kv_blocks, part),
                        (q_tiles, kv_tiles),
                        (info[record + WorkTile.TURN], info[record + WorkTile.NUM_TURNS]),
                    )  # fmt: skip
                    fence_before()
            self.release_tile(bars)
            kv_count += 1
            cute.arch.mbarrier_wait(bars.k_full, kv_count & 1)
            valid = info[self.group.record(kv_count) + WorkTile.VALID]
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    def release_tile(self, bars: CommonBarriers) -> None:
        """Release the record, K and V of a work tile, with one arrival per warp."""
        cute.arch.sync_warp()
        common_device.arrive(bars.kv_empty)

    def add_block(
        self,
        target: SumTarget,
        place: tuple[Int32, Any],
        turn: Int32,
        count: Int32,
        bars: CommonBarriers,
    ) -> None:
        """Add dQ of a q block to its sums.

        Args:
            target: source and target of the additions.
            place: index of the q block among those of all heads; part of the columns as from
                `Group.column_part`.
            turn: the turn, which is the index of the kv block.
            count: index of the q block in the CTA.
            bars: mbarriers.
        """
        c, (tile, column_part) = self.config, place
        start = Int64(tile) * (c.block_q * c.head_dim)
        start = self.part_of(start, column_part, c.block_q * c.grad_dims[0])
        semaphore = self.semaphore_of(tile, column_part)
        for part in range(c.dq_parts):
            cute.arch.mbarrier_wait(bars.dq_full, (count * c.dq_parts + part) & 1)
            fence_after()
            if part == 0:
                self.wait_turn(target, semaphore, turn)
            to, last = start + part * c.dq_width * c.block_q, c.dq_width // SLICE - 2
            for i in range(last):
                # f32 [32]: 32 columns of the thread's row
                values = device.load(target.tmem + (c.dq_column + i * SLICE), SLICE)
                self.add_slice(target, values, to + i * SLICE * c.block_q, i, c.block_q)
            # load the last two slices at once, to release tensor memory before the slots are free
            values = device.load(target.tmem + (c.dq_column + last * SLICE), 2 * SLICE)  # f32 [64]
            fence_before()
            cute.arch.sync_warp()
            common_device.arrive(bars.dq_empty)
            for i in range(2):
                columns = values[i * SLICE : i * SLICE + SLICE]
                self.add_slice(target, columns, to + (last + i) * SLICE * c.block_q, i, c.block_q)
        self.pass_turn(target, semaphore, 2 * tile, (turn, Int32(-1)))

    def part_of(self, start: Int64, part: Any, floats: int) -> Int64:
        """Return where a part of a tile's columns begins in the sums.

        Args:
            start: where the tile begins.
            part: index of the part, see `Group.column_part`.
            floats: number of sums of a part.
        """
        return start if self.config.column_parts == 1 else start + part * floats

    def semaphore_of(self, tile: Int32, part: Any) -> Int32:
        """Return the index of the semaphore of a part of a tile's columns."""
        parts = self.config.column_parts
        return tile if parts == 1 else tile * parts + part

    @cute.jit
    def add_dk_dv(self, target: SumTarget, place: tuple, tiles: tuple, order: tuple):
        """Add dK and dV of a work tile to their sums.

        Args:
            target: source and target of the additions.
            place: index of the kv head over all batch elements; index of the tile of 128 kv
                positions; number of such tiles per head; part of the columns.
            tiles: number of tiles of dQ, and of dK.
            order: turn of the work tile, and number of turns.
        """
        c = self.config
        kv_head, kv_rows, kv_blocks, part = place
        q_tiles, kv_tiles = tiles
        turn, num_turns = order
        following = cutlass.select_(turn + 1 == num_turns, Int32(0), turn + 1)
        tile = kv_head * kv_blocks + kv_rows
        first = Int64(q_tiles) * (c.block_q * c.head_dim)  # the sums of dQ come first
        for column, width, before in (
            (c.dk_column, c.head_dim, q_tiles * c.ctas),
            (c.dv_column, c.head_dim_v, q_tiles * c.ctas + kv_tiles),
        ):
            semaphore = self.semaphore_of(before + tile, part)
            self.wait_turn(target, semaphore, turn)
            start, columns = first + Int64(tile) * (c.rows_kv * width), width // c.column_parts
            start = self.part_of(start, part, c.rows_kv * columns)
            for i in cutlass.range_constexpr(columns // SLICE):
                # f32 [32]: 32 columns of the thread's row
                values = device.load(target.tmem + (column + i * SLICE), SLICE)
                to = start + i * SLICE * c.rows_kv
                self.add_slice(target, values, to, i, c.rows_kv)
            self.pass_turn(target, semaphore, Int32(0), (turn, following))
            first = first + Int64(kv_tiles) * (c.rows_kv * width)

    def add_slice(self, target: SumTarget, values: Any, to: Int64, number: int, rows: int) -> None:
        """Add one slice of a tile to the sums.

        Args:
            target: source and target of the additions.
            values: f32 [32], the thread's row.
            to: offset of the slice in the sums, in floats.
            number: index of the slice, which selects its slot in shared memory.
            rows: rows of the tile.
        """
        slot = target.staging + (number % self.config.slices) * (SLICE * self.config.rows_kv)
        self.wait_slot(target.thread)
        self.sync()  # all threads wait for the thread that waits for the slot
        self.write(slot, values, target.thread, target.lane, target.warp, rows)
        # bulk reductions read shared memory by the async proxy
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync()
        self.reduce(slot, target.sums.iterator + to, target.thread, rows)

    def sync(self) -> None:
        """Synchronise the threads of the warpgroup."""
        cute.arch.barrier(barrier_id=NamedBarrier.DQ_REDUCE, number_of_threads=WARPGROUP)

    @cute.jit
    def wait_slot(self, thread: Int32):
        """Wait until the bulk reduction that last used the next slot has read it."""
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(self.config.slices - 1, read=True)

    @cute.jit
    def write(
        self, slot: cute.Pointer, values: list, thread: Int32, lane: Int32, warp: Int32, rows: int
    ):
        """Write the thread's row of `values` to a slot."""
        if const_expr(rows == 128):
            self.write_row(slot, values, thread, rows)
        elif lane < 16:  # 64 rows are in the first 16 lanes of each warp
            self.write_row(slot, values, warp * 16 + lane, rows)

    def write_row(self, slot: cute.Pointer, values: Any, row: Int32, rows: int) -> None:
        """Write a row of 32 columns to a slot, 4 columns at a time."""
        start = slot.toint() + row * 16
        for g in range(SLICE // 4):
            device.write_shared(start + g * (16 * rows), values[4 * g : 4 * g + 4])

    @cute.jit
    def reduce(self, slot: cute.Pointer, target: cute.Pointer, thread: Int32, rows: int):
        """Issue the bulk reduction of a slot into the sums from one thread, as one bulk group."""
        if thread == 0:
            self.reduce_slice(slot, target, rows)
            cute.arch.cp_async_bulk_commit_group()

    def reduce_slice(self, slot: cute.Pointer, target: cute.Pointer, rows: int) -> None:
        """Issue the bulk reduction of a slice in shared memory into a sum, from one thread."""
        cute.arch.inline_ptx(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
            read_only_args=[target.toint(), slot.toint(), Int32(4 * SLICE * rows)],
        )

    def wait_turn(self, target: SumTarget, semaphore: Int32, turn: Int32) -> None:
        """Wait for a tile's turn in deterministic mode; otherwise do nothing."""
        if self.config.sum_order:
            at = target.order[OrderTable.SEMAPHORE].iterator + semaphore
            self._wait_turn(at, turn, target.thread)

    @cute.jit
    def _wait_turn(self, semaphore: cute.Pointer, turn: Int32, thread: Int32):
        if thread == 0:
            wait_turn(semaphore, turn)
            # the later bulk reductions are of another proxy than the load of the semaphore
            cute.arch.fence_proxy("async.global")

    def pass_turn(
        self, target: SumTarget, semaphore: Int32, chunk: Int32, turn: tuple[Int32, Int32]
    ) -> None:
        """Pass a tile's turn on once all reductions are complete in memory, in deterministic mode.

        Args:
            target: source and target of the additions.
            semaphore: index of the tile's semaphore.
            chunk: twice the index of the q block, used if the next turn has to be looked up.
            turn: (this turn, next turn); a next turn of -1 means to look it up.
        """
        if self.config.sum_order:
            self._pass_turn(target.order, semaphore, chunk, turn, target.thread)

    @cute.jit
    def _pass_turn(self, order: list, semaphore: Int32, chunk: Int32, turn: tuple, thread: Int32):
        if thread == 0:
            following = following_or_lookup(
                self.config.sum_order == "ascending", turn[0], turn[1], chunk, order
            )
            # the sums are complete in memory, and ordered before the store that passes the turn
            cute.arch.cp_async_bulk_wait_group(0, read=False)
            cute.arch.fence_proxy("async")
            cute.arch.fence_acq_rel_gpu()
            at = order[OrderTable.SEMAPHORE].iterator + semaphore
            cute.arch.store(at, following, sem="release", scope="gpu")
