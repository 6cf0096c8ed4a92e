"""The warps behind the softmax of the Blackwell forward: correction of the output, its stores.

The correction keeps rescaling off the path of the softmax (FlashAttention-4): it is told by how
much a row's maximum moved, and mostly has nothing to do.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import cpasync

from attnkit.templates.sm100 import device
from attnkit.templates.sm100.backward_device import times
from attnkit.templates.sm100.config import ROWS
from attnkit.templates.sm100.forward_common import ForwardCommon

STEP = 16  # columns of the output that a thread has in registers at a time


class ForwardStores(ForwardCommon):
    """The part of a forward kernel that rescales, rounds and stores the output."""

    @property
    def places(self) -> int:
        """How many output tiles there is room for."""
        return self.config.q_tiles if self.config.alias else self.config.out_tiles

    def place(self, t: int) -> int:
        """Where the output of query tile t stands in shared memory."""
        return t % self.places

    def store_turn(self, t: int, tc: Any) -> Any:
        """The parity of the use of that place by the tc-th piece."""
        return Int32(t) if self.places < self.config.q_tiles else tc & 1

    @cute.jit
    def correct(
        self,
        smem_o: cute.Tensor,
        scales: cute.Tensor,
        records: cute.Tensor,
        parts: cute.Tensor,
        bars: tuple,
    ):
        """The correction warpgroup: a thread a row."""
        c = self.config
        record_bars, p_full, scale_full, scale_free, o_full, out_full, out_free = bars
        thread, _, _ = cute.arch.thread_idx()
        row = thread % ROWS
        for t in cutlass.range_constexpr(c.q_tiles):  # no output to wait for yet
            self.signal(p_full + t)
        tc, kc = Int32(0), Int32(0)
        _, _, _, _, count, slot, valid = self.read_record(records, record_bars, tc)
        while valid != 0:
            for j in cutlass.range(count, unroll=1):
                for t in cutlass.range_constexpr(c.q_tiles):
                    cute.arch.mbarrier_wait(scale_full + t, (kc + tc) & 1)
                    scale = scales[t * ROWS + row]
                    device.arrive(scale_free + t)
                    if j > 0:  # the first block has no output to rescale
                        if const_expr(c.q_tiles == 1):
                            # the product of the block before, whose end S does not announce
                            cute.arch.mbarrier_wait(o_full, (kc - 1) & 1)
                        self.rescale(scale, t, row)
                        self.signal(p_full + self.buffer(t, kc))
                kc += 1
            for t in cutlass.range_constexpr(c.q_tiles):
                cute.arch.mbarrier_wait(scale_full + t, (kc + tc) & 1)
                scale = scales[t * ROWS + row]
                device.arrive(scale_free + t)
                if const_expr(c.q_tiles == 2):
                    cute.arch.mbarrier_wait(o_full + t, tc & 1)
                else:  # announced after each block
                    cute.arch.mbarrier_wait(o_full, (kc - 1) & 1)
                if const_expr(not c.alias):  # else Q was loaded there since
                    cute.arch.mbarrier_wait(out_free + self.place(t), self.store_turn(t, tc) ^ 1)
                for k in cutlass.range_constexpr(c.value_width // STEP):
                    values = device.load_row(row, self.config.out_column(t) + STEP * k, STEP)
                    cute.arch.fence_view_async_tmem_load()
                    if const_expr(k == c.value_width // STEP - 1):
                        # the next tile may overwrite it
                        self.signal(p_full + self.buffer(t, kc))
                    self.put(values, scale, smem_o, parts, slot, t, device.anew(row, tc), k)
                cute.arch.fence_proxy("async.shared", space="cta")
                device.arrive(out_full + self.place(t))
            tc += 1
            _, _, _, _, count, slot, valid = self.read_record(records, record_bars, tc)

    @cute.jit
    def rescale(
        self,
        scale: Float32,
        t: cutlass.Constexpr,
        row: Int32,
    ):
        """Bring the output accumulated so far to the new maximum, where one of the warp moved."""
        if cute.arch.vote_any_sync(scale != Float32(1.0)):
            for k in cutlass.range_constexpr(self.config.value_width // STEP):
                at = self.config.out_column(t) + STEP * k
                values = device.load_row(row, at, STEP)
                cute.arch.fence_view_async_tmem_load()
                device.store_row(row, at, times(values, [scale] * STEP))
            cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def put(
        self,
        values: list,
        scale: Float32,
        smem_o: cute.Tensor,
        parts: cute.Tensor,
        slot: Int32,
        t: cutlass.Constexpr,
        row: Int32,
        k: cutlass.Constexpr,
    ):
        """Columns of a row of the output: rounded to shared memory, or float32 for a part of a row."""
        values = [x * scale for x in values]
        if slot >= 0:
            for i in cutlass.range_constexpr(STEP):
                parts[slot, self.tile_of(t) * ROWS + row, STEP * k + i] = values[i]
        else:
            packed = cute.make_rmem_tensor(STEP // 2, Int32)
            for i in cutlass.range_constexpr(STEP // 2):
                packed[i] = device.pack(values[2 * i], values[2 * i + 1], self.dtype)
            rounded = cute.recast_tensor(packed, self.dtype)
            for i in cutlass.range_constexpr(STEP // 8):  # 16 bytes at a time
                to = cute.local_tile(
                    smem_o[None, None, self.place(t)], (1, 8), (row, STEP // 8 * k + i)
                )
                source = cute.local_tile(rounded, (8,), (i,))
                cute.autovec_copy(source, cute.group_modes(to, 0, 2))

    @cute.jit
    def store(self, target: tuple, records: cute.Tensor, smem_o: cute.Tensor, bars: tuple):
        """The store warp: output tiles by TMA."""
        c = self.config
        tma_o, o_tiles = target
        record_bars, out_full, out_free = bars
        o_from, o_to = cpasync.tma_partition(
            tma_o,
            0,
            cute.make_layout(1),
            cute.group_modes(smem_o, 0, 2),
            cute.group_modes(
                cute.local_tile(o_tiles, (ROWS, c.value_width), (None, 0, None, None)), 0, 2
            ),
        )
        tc = Int32(0)
        tile, h, b, _, _, slot, valid = self.read_record(records, record_bars, tc)
        while valid != 0:
            for t in cutlass.range_constexpr(c.q_tiles):
                place = self.place(t)
                cute.arch.mbarrier_wait(out_full + place, self.store_turn(t, tc))
                if slot < 0:
                    cute.copy(
                        tma_o,
                        o_from[None, place],
                        o_to[None, tile * (c.block_q // ROWS) + self.tile_of(t), h, b],
                    )
                cute.arch.cp_async_bulk_commit_group()
                if const_expr(place == 0 and t < c.q_tiles - 1 and self.places == 1):
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    device.arrive(out_free)
            for t in cutlass.range_constexpr(c.q_tiles - self.places, c.q_tiles):
                cute.arch.cp_async_bulk_wait_group(c.q_tiles - 1 - t, read=True)
                device.arrive(out_free + self.place(t))
            tc += 1
            tile, h, b, _, _, slot, valid = self.read_record(records, record_bars, tc)
        cute.arch.cp_async_bulk_wait_group(0, read=False)
