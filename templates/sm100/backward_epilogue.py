"""Round dK and dV of a work tile and store them by TMA: the epilogue of the Blackwell backward.

They pass from tensor memory through the shared memory of operands, 64 columns at a time. The two
compute warpgroups alternate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from attnkit.templates.common import device as common_device
from attnkit.templates.common.tma import partition
from attnkit.templates.sm100 import backward_device as device
from attnkit.templates.sm100.backward_barriers import CommonBarriers
from attnkit.templates.sm100.backward_config import SLICE, BackwardConfig
from attnkit.templates.sm100.backward_shared import WARPGROUP, WARPS, Group, NamedBarrier


@dataclass(frozen=True)
class GradTarget:
    """Describes where a thread stores dK and dV of a work tile.

    Attributes:
        atoms, tiles, views: TMA stores, coordinate tensors and shared memory of dK and of dV, dtype
            [128, 64, grad_dim / 64] each.
        smem: shared address of dV. dK follows dV; at head dim 256 it begins where K begins.
        tmem: tensor-memory address of the warp's first lane.
        place: (index of the tile of 128 kv positions, head, batch element, part of the columns as
            from `Group.column_part`).
        wg, row: compute warpgroup, and the thread's kv position in the tile.
        count: number of q blocks of the work tile.
        scale: softmax scale, a factor of dK.
    """

    atoms: tuple[Any, ...]
    tiles: tuple[Any, ...]
    views: tuple[Any, ...]
    smem: Int32
    tmem: Int32
    place: tuple[Any, ...]
    wg: Int32
    row: Int32
    count: Int32
    scale: Float32


class Epilogue:
    """Stores dK and dV of a single CTA, and releases the memory of a work tile.

    Args:
        config: compile-time configuration.
        group: the CTAs of a work tile.
        dtype: dtype of dK and dV.
    """

    def __init__(self, config: BackwardConfig, group: Group, dtype: Any) -> None:
        self.config = config
        self.group = group
        self.dtype = dtype

    def gradient_blocks(self, bars: Any) -> tuple[tuple[Any, range], ...]:
        """Return (barrier, blocks of 64 columns to store after it) pairs.

        The blocks of dV precede those of dK.
        """
        blocks = sum(self.config.grad_dims) // 64
        return ((bars.acc_full, range(blocks)),)

    def release_v(self, bars: CommonBarriers, blocks: range) -> None:
        """Do nothing: with one CTA, no role waits for the memory of V."""

    def release_tile(self, bars: CommonBarriers) -> None:
        """Release the record, K and V of a work tile, with one arrival per warp."""
        cute.arch.sync_warp()
        common_device.arrive(bars.kv_empty)

    def release_block(self, bars: Any, stage: Int32) -> None:
        """Do nothing: with one CTA, the MMA warp releases q blocks."""

    def wait_last_tile(self, bars: CommonBarriers, count: Int32, empty: bool) -> None:
        """Do nothing: with one CTA, `store` waits until TMA has read everything."""

    def wait_blocks(self, blocks: range) -> None:
        """Wait until TMA has read the shared memory of these blocks."""
        self.wait_stores()

    def store(self, target: GradTarget, blocks: range) -> None:
        """Round `blocks` of dV and dK and store them by TMA."""
        c = self.config
        for first in blocks[::2]:
            block = first + target.wg  # first dV's, then dK's, as in tensor memory
            factor = cutlass.select_(block < c.grad_dims[1] // 64, Float32(1.0), target.scale)
            self.round(
                target.smem, target.tmem + c.dv_column + block * 64,
                (block, target.row, target.count), factor,
            )  # fmt: skip
            # TMA reads shared memory by the async proxy
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(
                barrier_id=NamedBarrier.EPILOGUE + target.wg, number_of_threads=WARPGROUP
            )
            self.store_block(target.views, (target.atoms, target.tiles), target.place, block)
        self.wait_blocks(blocks)

    @cute.jit
    def fetch(self, address: Int32, count: Int32):
        """Load a slice of an accumulator, f32 [32].

        The result is zero if `count`, the number of q blocks, is zero.
        """
        values = cute.make_rmem_tensor(SLICE, Float32)  # f32 [32]: columns of the thread's row
        values.fill(0.0)
        if count > 0:
            for i, value in enumerate(device.load(address, SLICE)):
                values[i] = value
        return values

    @cute.jit
    def round(self, start: Int32, address: Int32, which: tuple, factor: Float32):
        """Round a row of 64 columns from tensor memory and write it to shared memory.

        Args:
            start: shared address of dV.
            address: tensor-memory address of the columns.
            which: (block of 64 columns, row, number of q blocks).
            factor: multiplies the values.
        """
        c = self.config
        block, row, count = which
        if block * 64 < sum(c.grad_dims):
            place = block
            if const_expr(c.column_parts > 1 and not c.streamed):  # dV takes a part of V's memory
                unused = (c.head_dim_v - c.grad_dims[1]) // 64
                of_dk = block * 64 >= c.grad_dims[1]
                place = block + cutlass.select_(of_dk, Int32(unused), Int32(0))
            for part in cutlass.range_constexpr(2):
                values = self.fetch(address + part * SLICE, count)  # f32 [32]
                for v in cutlass.range_constexpr(SLICE // 8):
                    packed = [
                        common_device.pack(
                            values[8 * v + k] * factor, values[8 * v + k + 1] * factor, self.dtype
                        )
                        for k in range(0, 8, 2)
                    ]
                    vector = Int32(part * (SLICE // 8) + v)
                    device.write_shared(
                        device.swizzled_address(start, c.rows_kv, row, vector, place), packed
                    )

    @cute.jit
    def store_block(self, views: tuple, target: tuple, place: tuple, block: Int32):
        """Issue the TMA store of a block of 64 columns from shared memory."""
        atoms, tiles = target
        at, h, b, part = place
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shape, whole = (self.config.rows_kv, 64), (None, None, None, None)
        # [tile, blocks] in shared, [tile, row blocks, column blocks, H, B] in global memory
        dk_from, dk_to = partition(atoms[0], views[0], tiles[0], shape, whole)
        dv_from, dv_to = partition(atoms[1], views[1], tiles[1], shape, whole)
        dk_blocks, before = (width // 64 for width in self.config.grad_dims)
        # at a block outside of the tensor, a mode of size 1 would give the coordinate of block 0
        dk_width, dv_width = (-(-tile.shape[1] // 64) for tile in tiles)
        if warp % WARPS == 0:
            if block < before:
                to = block + part * before
                if to < dv_width:
                    cute.copy(atoms[1], dv_from[None, block], dv_to[None, at, to, h, b])
            elif block < before + dk_blocks:
                of_dk = block - before
                to = of_dk + part * dk_blocks
                if to < dk_width:
                    cute.copy(atoms[0], dk_from[None, of_dk], dk_to[None, at, to, h, b])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def wait_stores(self):
        """Wait until TMA has read the shared memory of the warpgroup's stores."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp % WARPS == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


class Epilogue2Cta(Epilogue):
    """Stores dV of a CTA of a pair during the last MMAs, and dK during the next work tile."""

    def gradient_blocks(self, bars: Any) -> tuple[tuple[Any, range], ...]:
        """Return one barrier with dV's blocks and one with dK's blocks.

        Before dQ and dK of the last block, dV is complete and the memory of V, which dV uses, is
        free.
        """
        blocks = self.config.head_dim_v // 64
        return ((bars.dv_full, range(blocks)), (bars.acc_full, range(blocks, 2 * blocks)))

    def release_v(self, bars: Any, blocks: range) -> None:
        """Release the memory of V if these blocks are dV's, with one arrival per warp."""
        if blocks[0] == 0:
            cute.arch.sync_warp()
            common_device.arrive(bars.v_empty)

    def release_block(self, bars: Any, stage: Int32) -> None:
        """Release the word and the statistics of a q block, with one arrival per warp."""
        cute.arch.sync_warp()
        common_device.arrive(bars.block_empty + stage)

    def wait_blocks(self, blocks: range) -> None:
        """Wait until TMA has read dV; `wait_last_tile` waits for dK."""
        if blocks[0] == 0:
            self.wait_stores()

    @cute.jit
    def wait_last_tile(self, bars: Any, count: Int32, empty: cutlass.Constexpr):
        """Wait until TMA has read the previous work tile's dK from the memory that dS uses.

        Args:
            bars: mbarriers.
            count: index of the work tile.
            empty: whether the work tile has no q blocks, so that its dK is written next.
        """
        if count > 0:
            self.wait_stores()
            if const_expr(empty):
                warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
                cute.arch.barrier(
                    barrier_id=NamedBarrier.EPILOGUE + warp // WARPS - 1,
                    number_of_threads=WARPGROUP,
                )
            cute.arch.sync_warp()
            self.group.arrive_leader(bars.epilogue_done)
