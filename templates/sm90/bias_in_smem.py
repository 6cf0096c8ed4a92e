"""Copy a full bias to shared memory, ahead of the consumers of the Hopper forward.

A consumer thread that loads a bias such as table[h, q, kv] from global memory reads two neighbouring
columns at once, so that a load of its warp touches eight cache lines. The first-level cache takes
one line in a cycle, which limits the kernel. Therefore warps that are idle otherwise copy the bias by
whole rows with `cp.async`, one warp for each consumer warpgroup. The consumers read it from shared
memory when they initialise the accumulator of S.

Each consumer warpgroup has its own ring of tiles, because the warpgroups take turns. A tile has the
warpgroup's 64 rows and the columns of a kv block. Rows and columns beyond the tensors are filled with
zeros, so that no unknown bits get into the products.

Copies of 16 bytes need rows that begin at multiples of 16 bytes. `splice.copied_bias` chooses this
kernel for tensors whose strides are such. The address of the tensor may still be any: other rows are
copied number by number, which is slower.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute

from attnkit.templates.common import device
from attnkit.templates.common.forward_work import CURSORS, Scalars, WorkItem
from attnkit.templates.common.hooks import ForwardHooks
from attnkit.templates.common.site import Site
from attnkit.templates.sm90.config import WARP_THREADS, WARPGROUP_ROWS, ForwardConfig
from attnkit.templates.sm90.forward_barriers import ForwardBarriers, Pipeline

VECTOR_BYTES = 16  # bytes of a copy
UNIT = 8  # columns of a unit: those that the four lanes of a row read at once
ROWS_AT_ONCE = 4  # rows that are copied number by number at the same time
BANK_BYTES = 128  # bytes that shared memory delivers in a cycle


@dataclass(frozen=True)
class BiasTile:
    """Describes the layout of a tile of the bias in shared memory.

    A load of a warp reads the same unit of 8 columns in eight rows. The units of a row change places
    with the row (exclusive or), so that those eight are in different banks.

    Attributes:
        columns: columns of a kv block.
        size: bytes of a number.
    """

    columns: int
    size: int

    @property
    def row_bytes(self) -> int:
        """Bytes from a row of the tile to the next."""
        return self.columns * self.size

    @property
    def bytes(self) -> int:
        """Bytes of the tile."""
        return WARPGROUP_ROWS * self.row_bytes

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit, which keeps its order within a row."""
        return UNIT * self.size

    @property
    def period(self) -> int:
        """Number of rows, a power of two, after which the swizzle repeats."""
        return BANK_BYTES // self.unit_bytes

    def turn(self, row: Any) -> Any:
        """Return the XOR mask that swizzles the byte offsets of `row`."""
        return (row & (self.period - 1)) * self.unit_bytes


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
        cute.arch.sync_warp()
        device.arrive(self.pipeline.empty + stage)
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


@dataclass(frozen=True)
class Source:
    """Describes the rows of the bias that a warp copies for a work tile.

    Attributes:
        start: address of the element in the first row and column 0.
        step: bytes from a row to the next.
        rows: rows that the tensors have from the first one on; may be above 64, or below 0.
        columns: columns of the tensors.
        aligned: whether all rows begin at multiples of 16 bytes.
    """

    start: Int64
    step: Int64
    rows: Int32
    columns: Int32
    aligned: Boolean


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
            source = self._source(captured, scalars, batch, head, row)
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
        self, captured: list, scalars: Scalars, batch: Int32, head: Int32, row: Int32
    ) -> Source:
        """Return the rows from `row` on of the bias of a head."""
        q_len, kv_len, scale = scalars.q_len, scalars.kv_len, scalars.scale
        site = Site(captured, batch, head, q_len, kv_len, scale, row)

        def address(q: Int32) -> Int64:
            return Int64(self.hooks.bias_place(site, q, Int32(0)).toint())

        start, step = address(row), address(Int32(1)) - address(Int32(0))
        aligned = ((start | step) & (VECTOR_BYTES - 1)) == 0
        return Source(start, step, q_len - row, kv_len, aligned)

    @cute.jit
    def _copy_block(self, source: Source, kv_block: Int32, position: Int32, ring: BiasRing):
        """Copy the tile of a kv block to the stage of a position, once the stage is empty."""
        tile = ring.tile
        stage = ring.pipeline.wait_empty(position)
        to, full = ring.start + stage * tile.bytes, ring.pipeline.full + stage
        first = kv_block * tile.columns
        left = source.columns - first
        whole = (left >= tile.columns) | (left & (VECTOR_BYTES // tile.size - 1) == 0)
        if source.aligned & whole:
            self._copy_vectors(source, first, left, to, tile)
            cute.arch.cp_async_mbarrier_arrive_noinc(full)
        else:
            self._copy_numbers(source, first, left, to, tile)
            if const_expr(tile.size == 4):
                cute.arch.cp_async_mbarrier_arrive_noinc(full)
            else:
                cute.arch.mbarrier_arrive(full)

    def _copy_vectors(
        self, source: Source, first: Int32, left: Int32, to: Int32, tile: BiasTile
    ) -> None:
        """Copy a tile by 16-byte copies, one per lane at a time.

        Args:
            source: rows of the bias.
            first: first column.
            left: columns from the first one to the end of the tensors.
            to: address of the tile.
            tile: layout of the tile.
        """
        lane, vectors = cute.arch.lane_idx(), tile.row_bytes // VECTOR_BYTES
        rows = WARP_THREADS // vectors  # that a warp copies at once
        row, byte = lane // vectors, lane % vectors * VECTOR_BYTES
        inside = byte < left * tile.size
        count = cutlass.select_(inside, source.rows - row, Int32(0))
        at = source.start + (first * tile.size + byte) + source.step * row
        step = source.step * rows
        turns = range(max(1, tile.period // rows))
        # a byte's place in the first rows, by rows of the period
        places = [to + row * tile.row_bytes + (byte ^ tile.turn(row + i * rows)) for i in turns]
        for i in range(WARPGROUP_ROWS // rows):
            target = places[i % len(places)] + i * rows * tile.row_bytes
            _copy(target, at, VECTOR_BYTES, i * rows < count)
            at = at + step

    @cute.jit
    def _copy_numbers(self, source: Source, first: Int32, left: Int32, to: Int32, tile: BiasTile):
        """Copy a tile element by element; `_copy_vectors` explains the arguments."""
        for i in cutlass.range(WARPGROUP_ROWS // ROWS_AT_ONCE, unroll=1):
            self._copy_rows(source, first, left, to, tile, i * ROWS_AT_ONCE)

    def _copy_rows(
        self, source: Source, first: Int32, left: Int32, to: Int32, tile: BiasTile, start: Int32
    ) -> None:
        """Copy a few rows element by element, from row `start` of the tile on."""
        places = []
        rows, columns = range(ROWS_AT_ONCE), range(0, tile.columns, WARP_THREADS)
        for row, column in itertools.product(rows, columns):
            row, column = start + row, column + cute.arch.lane_idx()
            target = to + row * tile.row_bytes + ((column * tile.size) ^ tile.turn(row))
            at = source.start + source.step * row + (first + column) * tile.size
            places.append((target, at, (column < left) & (row < source.rows)))
        if tile.size == 4:
            for target, at, inside in places:
                _copy(target, at, tile.size, inside)
        else:  # all loads before the first store, so that they run at the same time
            numbers = [_load(at, inside) for _, at, inside in places]
            for (target, _, _), number in zip(places, numbers, strict=True):
                _store(target, number)


def _copy(to: Int32, at: Int64, size: int, inside: Boolean) -> None:
    """Copy `size` bytes from global to shared memory asynchronously, or zeros if not `inside`."""
    cached = "cg" if size == VECTOR_BYTES else "ca"
    cute.arch.inline_ptx(
        f"cp.async.{cached}.shared.global [{{$r0}}], [{{$r1}}], {size}, {{$r2}};",
        read_only_args=[to, at, cutlass.select_(inside, Int32(size), Int32(0))],
    )


def _load(at: Int64, inside: Boolean) -> Int32:
    """Load 2 bytes from global memory, or zeros if not `inside`."""
    number: Int32 = cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .b16 x; setp.ne.s32 p, {$r1}, 0; mov.b16 x, 0;"
        " @p ld.global.b16 x, [{$r0}]; cvt.u32.u16 {$w0}, x; }",
        write_only_types=[Int32],
        read_only_args=[at, cutlass.select_(inside, Int32(1), Int32(0))],
    )
    return number


def _store(to: Int32, number: Int32) -> None:
    """Store the lower 2 bytes of a number to shared memory."""
    cute.arch.inline_ptx(
        "{ .reg .b16 x; cvt.u16.u32 x, {$r1}; st.shared.b16 [{$r0}], x; }",
        read_only_args=[to, number],
    )
