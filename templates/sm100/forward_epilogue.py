"""Rescale, normalise and store the output of the Blackwell forward.

The correction warpgroup takes rescaling off the critical path of the softmax (FlashAttention-4). It
receives a scale per row, and has nothing to do if all scales of a warp are 1, the common case.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from attnkit.templates.common.device import DTYPES
from attnkit.templates.common.tma import partition
from attnkit.templates.sm100 import device
from attnkit.templates.sm100.backward_device import times
from attnkit.templates.sm100.config import ROWS, ForwardConfig
from attnkit.templates.sm100.cta_group import CtaGroup
from attnkit.templates.sm100.forward_barriers import ForwardBarriers
from attnkit.templates.sm100.forward_work import RowNumbers, WorkRing

STEP = 16  # columns of the output that a thread holds in registers at a time
VECTOR = 8  # 16-bit elements in 16 bytes


def out_phase(config: ForwardConfig, t: int, tile_idx: Int32) -> Int32:
    """Return the parity of the output buffer's barriers for query tile `t`."""
    # with one buffer for two tiles, each work tile uses it twice
    return Int32(t) if config.o_places < config.q_tiles else tile_idx & 1


class Correction:
    """Rescales O, rounds it and writes it to shared memory, with one row per thread.

    Args:
        config: compile-time configuration.
        group: the CTAs that compute MMAs together.
    """

    def __init__(self, config: ForwardConfig, group: CtaGroup) -> None:
        self.config = config
        self.group = group
        self.dtype = DTYPES[config.dtype]

    @cute.jit
    def run(
        self,
        smem_o: cute.Tensor,
        row_numbers: RowNumbers,
        work_ring: WorkRing,
        split_out: cute.Tensor,
        bars: ForwardBarriers,
    ):
        """Rescale O in the mainloop and write the outputs of all work tiles."""
        c = self.config
        p_full = bars.p_full[0]
        thread, _, _ = cute.arch.thread_idx()
        row = thread % ROWS
        for t in cutlass.range_constexpr(c.q_tiles):  # the first P V has no earlier O to wait for
            self.group.arrive_leader(p_full + t)
        tile_idx, kv_idx = Int32(0), Int32(0)
        work = work_ring.read(tile_idx)
        while work.valid != 0:
            for j in cutlass.range(work.num_blocks, unroll=1):
                for t in cutlass.range_constexpr(c.q_tiles):
                    scale = row_numbers.read(t, row, kv_idx + tile_idx)
                    if j > 0:  # the first block has no output to rescale
                        if const_expr(c.q_tiles == 1):
                            # wait for P V of the previous block, which `s_full` does not imply here
                            cute.arch.mbarrier_wait(bars.o_full, (kv_idx - 1) & 1)
                        self._rescale(scale, t, row)
                        self.group.arrive_leader(p_full + c.s_stage(t, kv_idx))
                kv_idx += 1
            for t in cutlass.range_constexpr(c.q_tiles):
                scale = row_numbers.read(t, row, kv_idx + tile_idx)
                if const_expr(c.q_tiles == 2):
                    cute.arch.mbarrier_wait(bars.o_full + t, tile_idx & 1)
                else:  # one phase per block
                    cute.arch.mbarrier_wait(bars.o_full, (kv_idx - 1) & 1)
                # with alias the buffer is that of Q, whose load has waited for the previous store
                if const_expr(not c.alias):
                    phase = out_phase(c, t, tile_idx)
                    cute.arch.mbarrier_wait(bars.out_empty + t % c.o_places, phase ^ 1)
                for k in cutlass.range_constexpr(c.head_dim_v // STEP):
                    values = device.load_row(row, c.out_column(t) + STEP * k, STEP)
                    cute.arch.fence_view_async_tmem_load()
                    if const_expr(k == c.head_dim_v // STEP - 1):
                        # all of O is read: P V of the next work tile may overwrite it
                        self.group.arrive_leader(p_full + c.s_stage(t, kv_idx))
                    # recompute the row, which saves registers in the mainloop
                    own_row = device.opaque_copy(row, tile_idx)
                    slot = (work.split_slot, work.value_part)
                    self._put(values, scale, smem_o, split_out, slot, t, own_row, k)
                # TMA reads these generic stores by the async proxy
                cute.arch.fence_proxy("async.shared", space="cta")
                device.arrive(bars.out_full + t % c.o_places)
            tile_idx += 1
            work = work_ring.read(tile_idx)

    @cute.jit
    def _rescale(self, scale: Float32, t: cutlass.Constexpr, row: Int32):
        """Multiply O by `scale`, unless the scales of all rows in the warp are 1."""
        if cute.arch.vote_any_sync(scale != Float32(1.0)):
            for k in cutlass.range_constexpr(self.config.head_dim_v // STEP):
                column = self.config.out_column(t) + STEP * k
                values = device.load_row(row, column, STEP)
                cute.arch.fence_view_async_tmem_load()
                device.store_row(row, column, times(values, [scale] * STEP))
            cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def _put(
        self,
        values: list,
        scale: Float32,
        smem_o: cute.Tensor,
        split_out: cute.Tensor,
        slot: tuple,
        t: cutlass.Constexpr,
        row: Int32,
        k: cutlass.Constexpr,
    ):
        """Write the `k`-th group of columns of a row.

        Rounded values are written to shared memory. For a split row, float32 values are written to
        `split_out`. `slot` is the slot of a split row, and the part of the value columns.
        """
        split_slot, part = slot
        values = [x * scale for x in values]
        if split_slot >= 0:
            tile_row = self.group.query_tile(t) * ROWS + row
            for i in cutlass.range_constexpr(STEP):
                column = STEP * k + i
                if const_expr(self.config.value_parts > 1):
                    column = column + part * self.config.head_dim_v
                split_out[split_slot, tile_row, column] = values[i]
        else:
            packed = cute.make_rmem_tensor(STEP // 2, Int32)  # i32 [8], pairs of columns
            for i in cutlass.range_constexpr(STEP // 2):
                packed[i] = device.pack(values[2 * i], values[2 * i + 1], self.dtype)
            rounded = cute.recast_tensor(packed, self.dtype)  # 16 bits [16]
            for i in cutlass.range_constexpr(STEP // VECTOR):
                target = cute.local_tile(  # 16 bits [1, 8]
                    smem_o[None, None, t % self.config.o_places],
                    (1, VECTOR),
                    (row, STEP // VECTOR * k + i),
                )
                source = cute.local_tile(rounded, (VECTOR,), (i,))  # 16 bits [8]
                cute.autovec_copy(source, cute.group_modes(target, 0, 2))


class StoreWarp:
    """Runs the warp that stores output tiles by TMA.

    Args:
        config: compile-time configuration.
        group: the CTAs that compute MMAs together.
    """

    def __init__(self, config: ForwardConfig, group: CtaGroup) -> None:
        self.config = config
        self.group = group

    @cute.jit
    def run(self, tma: tuple, smem_o: cute.Tensor, work_ring: WorkRing, bars: ForwardBarriers):
        """Store the output tiles of all work tiles.

        Args:
            tma: the TMA atom and tensor of the output.
            smem_o: output buffers in shared memory.
            work_ring: records of the work tiles.
            bars: mbarriers.
        """
        c = self.config
        tma_o, o_tiles = tma
        source, target = self._sides(tma_o, smem_o, o_tiles)
        tile_idx = Int32(0)
        work = work_ring.read(tile_idx)
        while work.valid != 0:
            for t in cutlass.range_constexpr(c.q_tiles):
                place = t % c.o_places
                cute.arch.mbarrier_wait(bars.out_full + place, out_phase(c, t, tile_idx))
                if work.split_slot < 0:  # the correction warpgroup writes parts of split rows
                    tile, q_tiles = self.group.query_tile(t), c.block_q // ROWS
                    at = work.q_block * q_tiles + tile, work.head, work.batch
                    if const_expr(c.value_parts == 1):
                        cute.copy(tma_o, source[None, place], target[(None, *at)])
                    else:
                        to = target[(None, at[0], work.value_part, *at[1:])]
                        cute.copy(tma_o, source[None, place], to)
                cute.arch.cp_async_bulk_commit_group()
                if const_expr(place == 0 and t < c.q_tiles - 1 and c.o_places == 1):
                    # the second tile uses the same buffer
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    device.arrive(bars.out_empty)
            for t in cutlass.range_constexpr(c.q_tiles - c.o_places, c.q_tiles):
                cute.arch.cp_async_bulk_wait_group(c.q_tiles - 1 - t, read=True)
                device.arrive(bars.out_empty + t % c.o_places)
            tile_idx += 1
            work = work_ring.read(tile_idx)
        # the CTA must not exit before its last TMA store is complete
        cute.arch.cp_async_bulk_wait_group(0, read=False)

    def _sides(self, tma_o: Any, smem_o: cute.Tensor, o_tiles: cute.Tensor) -> tuple[Any, Any]:
        """Return the two sides of the TMA store: shared memory by buffer, global by query tile.

        With several value parts the latter is by query tile and part.
        """
        c = self.config
        coordinates = (None, 0 if c.value_parts == 1 else None, None, None)
        return partition(tma_o, smem_o, o_tiles, (ROWS, c.head_dim_v), coordinates)
