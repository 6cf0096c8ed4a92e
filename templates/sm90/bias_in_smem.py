"""Copy a full bias to shared memory, ahead of the consumers of the Hopper forward.

Two warps that are idle otherwise copy it, one for each consumer warpgroup, see `bias_tile`. The
consumers read it from shared memory when they initialise the accumulator of S.

Each consumer warpgroup has its own ring of tiles, because the warpgroups take turns. A tile has the
warpgroup's 64 rows and the columns of a kv block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from attnkit.templates.common import device
from attnkit.templates.common.forward_work import CURSORS, Scalars, WorkItem
from attnkit.templates.common.hooks import ForwardHooks
from attnkit.templates.common.site import Site
from attnkit.templates.sm90.bias_tile import BANK_BYTES, UNIT, BiasRows, BiasTile, copy_tile
from attnkit.templates.sm90.config import WARPGROUP_ROWS, ForwardConfig
from attnkit.templates.sm90.forward_barriers import ForwardBarriers, Pipeline


@dataclass(frozen=True)
class BiasRing:
    """Holds the ring of bias tiles that one consumer warpgroup reads.

    Attributes:
        tile: layout of a tile.
        start: address of the first stage in shared memory.
        pipeline: the mbarriers.
    """

    tile: BiasTile
    start: Int32
    pipeline: Pipeline

    @classmethod
    def of(
        cls, config: ForwardConfig, memory: cute.Pointer, bars: ForwardBarriers, warpgroup: Int32
    ) -> BiasRing:
        """Return the ring of consumer warpgroup `warpgroup` in the memory of all rings."""
        tile = BiasTile(config.block_kv, config.bias_bytes)
        start = memory.toint() + warpgroup * (config.bias_stages * tile.bytes)
        return cls(tile, start, bars.bias(warpgroup))

    def read(self, position: Int32, row: Int32, lane: Int32, dtype: Any) -> list[Float32]:
        """Read a thread's elements of the tile at a position of the ring, and release the tile.

        Args:
            position: position in the ring.
            row: the thread's first row.
            lane: index of the thread in its warp.
            dtype: type of the bias.

        Returns:
            The biases in the order of the accumulator of S.
        """
        tile = self.tile
        stage = self.pipeline.wait_full(position)
        left = self.start + stage * tile.bytes + row * tile.row_bytes + lane % 4 * (2 * tile.size)
        places = [left + (tile.turn(row) ^ (u * tile.unit_bytes)) for u in range(tile.period)]
        values: list[Float32] = []
        for unit in range(tile.columns // UNIT):
            turn, place = unit // tile.period, places[unit % tile.period]
            for below in (0, 8):  # rows; a multiple of the period
                at = place + (turn * BANK_BYTES + below * tile.row_bytes)
                values += _pair(at, dtype)
        cute.arch.mbarrier_arrive(self.pipeline.empty + stage)  # every lane has read the tile
        return values


def _pair(at: Int32, dtype: Any) -> tuple[Float32, Float32]:
    """Read two neighbouring numbers from shared memory, as Float32."""
    if dtype is Float32:
        text, types = "ld.shared.v2.f32 { {$w0}, {$w1} }, [{$r0}];", [Float32, Float32]
        first, second = cute.arch.inline_ptx(text, write_only_types=types, read_only_args=[at])
        return first, second
    pair = cute.arch.inline_ptx(
        "ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[at]
    )
    return device.unpack(pair, dtype)


class BiasCopier:
    """Copies the bias to shared memory for one consumer warpgroup, in one warp.

    Args:
        config: compile-time configuration.
        hooks: hooks of the variant.
    """

    def __init__(self, config: ForwardConfig, hooks: ForwardHooks) -> None:
        self.config = config
        self.hooks = hooks

    @cute.jit
    def run(
        self,
        warpgroup: Int32,
        memory: cute.Pointer,
        next_tile: cute.Tensor,
        bars: ForwardBarriers,
        runs: tuple,
        captured: list,
        scalars: Scalars,
        batch_size: Int32,
    ):
        """Copy the bias of the work tiles that the scheduler warp fetches, block by block.

        The order of the blocks is that of `Producer.run`.

        Args:
            warpgroup: the consumer warpgroup.
            memory: memory of the rings of all warpgroups.
            next_tile: words of the fetched work tile.
            bars: mbarriers.
            runs: int32 [2, runs] of PARTIAL and of FULL kv blocks.
            captured: captured tensors.
            scalars: scalar arguments of the call.
            batch_size: batch size of the query.
        """
        ring = BiasRing.of(self.config, memory, bars, warpgroup)
        position, tile_idx = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(bars.work.full, 0)
        batch = next_tile[WorkItem.BATCH]
        while batch >= 0:
            head, q_block = next_tile[WorkItem.HEAD], next_tile[WorkItem.Q_BLOCK]
            cursors = [tuple(next_tile[first + i] for i in range(3)) for first in CURSORS]
            # release the words to the scheduler; every lane has read them
            cute.arch.mbarrier_arrive(bars.work.empty)
            row = q_block * self.config.block_q + warpgroup * WARPGROUP_ROWS
            where = batch, head, row
            source = self._source(captured, scalars, where, batch_size)
            for kind in cutlass.range_constexpr(2):
                run, take, left = cursors[kind]
                while left > 0:
                    last, steps = runs[kind][0, run] + take - 1, cutlass.min(take, left)
                    for j in cutlass.range(steps, unroll=1):
                        self._copy_block(source, last - j, position, ring)
                        position += 1
                    left -= steps
                    run -= 1
                    if left > 0:
                        take = runs[kind][1, run]
            tile_idx += 1
            cute.arch.mbarrier_wait(bars.work.full, tile_idx & 1)
            batch = next_tile[WorkItem.BATCH]

    def _source(
        self, captured: list, scalars: Scalars, where: tuple[Int32, Int32, Int32], batch_size: Int32
    ) -> BiasRows:
        """Return rows of the bias of a head; `where` is (batch element, head, first row)."""
        q_len, kv_len, scale = scalars.q_len, scalars.kv_len, scalars.scale
        site = Site(captured, *where[:2], q_len, kv_len, scale, where[2])
        return BiasRows.of(self.hooks, site, where[2], batch_size)

    @cute.jit
    def _copy_block(self, source: BiasRows, kv_block: Int32, position: Int32, ring: BiasRing):
        """Copy the tile of a kv block to the stage of a position, once the stage is empty."""
        tile = ring.tile
        stage = ring.pipeline.wait_empty(position)
        to, full = ring.start + stage * tile.bytes, ring.pipeline.full + stage
        copy_tile(source, kv_block * tile.columns, to, tile, full)
