"""The warpgroup that adds dQ, and shared dK and dV, to float32 sums in memory.

It takes 32 columns at a time from tensor memory, a row a thread, through shared memory to one bulk
reduction. A tile of a sum is kept in slices of 32 columns, a slice in groups of 4 columns, of all
rows: [slice][group][row][4], so that threads read and write neighbouring 16 bytes.

In deterministic mode one thread waits for the tile's turn before its first slice: a semaphore a
tile, in the order of `attnkit.schedule.deterministic_order`. Nothing else waits for turns, so that loads run ahead.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute

from attnkit.templates.common import device as sm90_device
from attnkit.templates.common.semaphore import following_or_lookup, wait_turn
from attnkit.templates.common.work_tile import RECORD
from attnkit.templates.sm100 import backward_device as device
from attnkit.templates.sm100.backward_config import SLICE

OWN = 1  # named barrier of the warpgroup


class Sums:
    """The part of a backward kernel that adds to sums in memory."""

    config: Any
    q_stage: Any
    q_lap: Any
    own_tile: Any
    record: Any
    leave_piece: Any

    @cute.jit
    def add_up(
        self,
        outgoing: cute.Pointer,
        memory: Int32,
        bars: tuple,
        info: cute.Tensor,
        sums: cute.Tensor,
        turns: list,
        numbers: tuple,
    ):
        """The warpgroup that adds up.

        Args:
            outgoing: shared memory of the slices.
            memory: base of tensor memory.
            turns: see `Backward.__call__`.
        """
        c = self.config
        _, group, q_len, kv_len, heads, kv_heads, batch, kv_batch = numbers
        (
            k_full, _, _, _, _, _, _, dq_full, dq_free, acc_full, q_full, q_free,
        ) = bars[:12]  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        lanes = memory + warp * (device.LANES << 16)
        blocks = (q_len + c.block_q - 1) // c.block_q
        kv_blocks = (kv_len + c.block_kv - 1) // c.block_kv * c.ctas
        q_tiles, kv_tiles = batch * heads * blocks, kv_batch * kv_heads * kv_blocks
        place = (outgoing, sums, turns, thread, lane, warp)
        kc, tc, ac = Int32(0), Int32(0), Int32(0)
        cute.arch.mbarrier_wait(k_full, 0)
        valid = info[RECORD + 4]
        while valid != 0:
            record = self.record(tc)
            at, h, b = info[record], info[record + 1], info[record + 2]
            count = info[record + 3]
            row = (b * heads + h) * blocks
            for _ in cutlass.range(count, unroll=1):
                r = self.q_stage(kc)
                cute.arch.mbarrier_wait(q_full + r, self.q_lap(kc))
                tile = row + (info[r] >> 2)
                cute.arch.sync_warp()
                sm90_device.arrive(q_free + r)
                self.add_block(place, lanes, (tile, at), kc, (dq_full, dq_free))
                kc += 1
            if const_expr(c.accumulate):
                if count > 0:
                    cute.arch.mbarrier_wait(acc_full, ac & 1)
                    device.fence_after()
                    ac += 1
                    pair = cutlass.min(b, kv_batch - 1) * kv_heads + h // group
                    mine = self.own_tile(at)
                    self.add_shared(
                        place[:2], turns, (thread, lane, warp), lanes, (pair, mine, kv_blocks),
                        (q_tiles, kv_tiles), (info[record + 5], info[record + 6]),
                    )  # fmt: skip
                    device.fence_before()
            self.leave_piece(bars)
            tc += 1
            cute.arch.mbarrier_wait(k_full, tc & 1)
            valid = info[self.record(tc) + 4]
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    def add_block(self, place: Any, lanes: Any, which: Any, kc: Any, bars: Any) -> None:
        """Add a block's dQ.

        Args:
            which: number of the tile of q, and the kv tile whose turn it is.
        """
        c, (_, _, turns, thread, _, _) = self.config, place
        tile, turn = which
        dq_full, dq_free = bars
        start = Int64(tile) * (c.block_q * c.width)
        for part in range(c.parts):
            cute.arch.mbarrier_wait(dq_full, (kc * c.parts + part) & 1)
            device.fence_after()
            if part == 0:
                self.take_turn(turns, tile, turn, thread)
            to, last = start + part * c.dq_width * c.block_q, c.dq_width // SLICE - 2
            for i in range(last):
                values = device.load(lanes + (c.dq_column + i * SLICE), SLICE)
                self.send(place, values, to + i * SLICE * c.block_q, i, c.block_q)
            # the last two at once: then the columns are free before the slots are
            values = device.load(lanes + (c.dq_column + last * SLICE), 2 * SLICE)
            device.fence_before()
            cute.arch.sync_warp()
            sm90_device.arrive(dq_free)
            for i in range(2):
                some = values[i * SLICE : i * SLICE + SLICE]
                self.send(place, some, to + (last + i) * SLICE * c.block_q, i, c.block_q)
        self.pass_turn(turns, tile, 2 * tile, (turn, Int32(-1)), thread)

    @cute.jit
    def add_shared(
        self,
        memories: tuple,
        turns: list,
        who: tuple,
        lanes: Int32,
        which: tuple,
        tiles: tuple,
        order: tuple,
    ):
        """Add a piece's dK and dV.

        Args:
            which: pair of batch element and kv head, tile of kv, and tiles of a pair.
            tiles: of the sums of dQ; of those of dK.
            order: whose turn this is, and how many there are.
        """
        c = self.config
        pair, mine, kv_blocks = which
        q_tiles, kv_tiles = tiles
        turn, last = order
        thread, lane, warp = who
        place = (*memories, turns, thread, lane, warp)
        following = cutlass.select_(turn + 1 == last, Int32(0), turn + 1)
        tile = pair * kv_blocks + mine
        first = Int64(q_tiles) * (c.block_q * c.width)
        for column, width, before in (
            (c.dk_column, c.width, q_tiles * c.ctas),
            (c.dv_column, c.value_width, q_tiles * c.ctas + kv_tiles),
        ):
            semaphore = before + tile
            self.take_turn(turns, semaphore, turn, thread)
            start = first + Int64(tile) * (c.rows_kv * width)
            for i in cutlass.range_constexpr(width // SLICE):
                values = device.load(lanes + (column + i * SLICE), SLICE)
                to = start + i * SLICE * c.rows_kv
                self.send(place, values, to, i, c.rows_kv)
            self.pass_turn(turns, semaphore, Int32(0), (turn, following), thread)
            first = first + Int64(kv_tiles) * (c.rows_kv * width)

    @cute.jit
    def fetch(self, address: Int32, count: Int32):
        """A slice of an accumulator; zeros if nothing was kept."""
        values = cute.make_rmem_tensor(SLICE, Float32)
        values.fill(0.0)
        if count > 0:
            for i, value in enumerate(device.load(address, SLICE)):
                values[i] = value
        return values

    def send(self, place: Any, values: Any, to: Any, number: int, rows: int) -> None:
        """Add a slice of a tile of so many rows to the sums, from float `to` on."""
        outgoing, sums, _, thread, lane, warp = place
        slot = outgoing + (number % self.config.slices) * (SLICE * self.config.rows_kv)
        self.await_slot(thread)
        cute.arch.barrier(barrier_id=OWN, number_of_threads=128)
        self.write(slot, values, thread, lane, warp, rows)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=OWN, number_of_threads=128)
        self.reduce(slot, sums.iterator + to, thread, rows)

    @cute.jit
    def await_slot(self, thread: Int32):
        """Wait until a slot has been read."""
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(self.config.slices - 1, read=True)

    @cute.jit
    def write(
        self, slot: cute.Pointer, values: list, thread: Int32, lane: Int32, warp: Int32, rows: int
    ):
        """Write the thread's row to a slot."""
        if const_expr(rows == 128):
            self.write_row(slot, values, thread, rows)
        elif lane < 16:  # 64 rows are in the first 16 lanes of each warp
            self.write_row(slot, values, warp * 16 + lane, rows)

    def write_row(self, slot: Any, values: Any, row: Any, rows: int) -> None:
        """Write a row: 4 columns at a time."""
        start = slot.toint() + row * 16
        for g in range(SLICE // 4):
            device.write_shared(start + g * (16 * rows), values[4 * g : 4 * g + 4])

    @cute.jit
    def reduce(self, slot: cute.Pointer, target: cute.Pointer, thread: Int32, rows: int):
        """One bulk reduction."""
        if thread == 0:
            self.reduce_slice(slot, target, rows)
            cute.arch.cp_async_bulk_commit_group()

    def reduce_slice(self, slot: Any, target: Any, rows: int) -> None:
        """Add a slice in shared memory to a sum, by one thread; asynchronous."""
        cute.arch.inline_ptx(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
            read_only_args=[target.toint(), slot.toint(), Int32(4 * SLICE * rows)],
        )

    def take_turn(self, turns: Any, semaphore: Any, turn: Any, thread: Any) -> None:
        """Wait for a tile's turn, in deterministic mode."""
        if self.config.turns:
            self.take_turn_at(turns[0].iterator + semaphore, turn, thread)

    @cute.jit
    def take_turn_at(self, semaphore: cute.Pointer, turn: Int32, thread: Int32):
        if thread == 0:
            wait_turn(semaphore, turn)
            cute.arch.fence_proxy("async.global")

    def pass_turn(self, turns: Any, tile: Any, chunk: Any, turn: Any, thread: Any) -> None:
        """Hand over a tile when all that was sent is in memory, in deterministic mode.

        Args:
            tile: number of the semaphore.
            chunk: twice the row of q, where the turn that follows has to be looked up.
            turn: whose it is, and who follows; -1: look it up.
        """
        if self.config.turns:
            self.pass_turn_at(turns, tile, chunk, turn, thread)

    @cute.jit
    def pass_turn_at(self, turns: list, tile: Int32, chunk: Int32, turn: tuple, thread: Int32):
        if thread == 0:
            following = following_or_lookup(
                self.config.turns == "ascending", turn[0], turn[1], chunk, turns
            )
            cute.arch.cp_async_bulk_wait_group(0, read=False)
            cute.arch.fence_proxy("async")
            cute.arch.fence_acq_rel_gpu()
            cute.arch.store(turns[0].iterator + tile, following, sem="release", scope="gpu")
