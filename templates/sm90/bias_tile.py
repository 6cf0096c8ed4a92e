"""Copy tiles of a full bias to shared memory by `cp.async`, in the Hopper forward and backward.

A consumer thread that loads a bias such as table[h, q, kv] from global memory reads few neighbouring
columns at once, so that a load of its warp touches several cache lines. The first-level cache takes
one line in a cycle, which limits the kernels. Therefore warps that are idle otherwise copy the bias by
whole rows. Rows and columns beyond the tensors are filled with zeros, so that no unknown bits get
into the products.

Copies of 16 bytes need rows that begin at multiples of 16 bytes. `splice.copied_bias` finds tensors
whose strides are such. The address of the tensor may still be any: other rows are copied number by
number, which is slower.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, const_expr, cute

from attnkit.templates.common.cache_policy import evict_first, evict_normal
from attnkit.templates.common.hooks import ForwardHooks
from attnkit.templates.common.site import Site
from attnkit.templates.sm90.config import WARP_THREADS, WARPGROUP_ROWS

VECTOR_BYTES = 16  # bytes of a copy
UNIT = 8  # columns of a unit
ROWS_AT_ONCE = 4  # rows that are copied number by number at the same time
BANK_BYTES = 128  # bytes that shared memory delivers in a cycle


@dataclass(frozen=True)
class BiasTile:
    """Describes how a tile of the bias is laid out and swizzled in shared memory.

    The units of a row, 8 columns each, change places with the row (exclusive or), so that units
    that a warp reads at once are in different banks. In the forward it reads one unit in each of
    eight rows. In the backward it reads one in each of four, every second row.

    Attributes:
        columns: columns of a tile.
        size: bytes of a number.
        same: number of neighbouring rows, a power of two, whose units have the same places.
    """

    columns: int
    size: int
    same: int = 1

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
        """Bytes of a unit, 8 neighbouring columns, which the swizzle moves as a whole."""
        return UNIT * self.size

    @property
    def period(self) -> int:
        """Number of units, a power of two, that together fill the banks of shared memory once."""
        return BANK_BYTES // self.unit_bytes

    @property
    def repeat(self) -> int:
        """Number of rows, a power of two, after which the swizzle repeats."""
        return self.period * self.same

    def turn(self, row: Any) -> Any:
        """Return the XOR mask that swizzles the byte offsets of `row`."""
        if self.same > 1:
            row = row >> (self.same.bit_length() - 1)
        return (row & (self.period - 1)) * self.unit_bytes


@dataclass(frozen=True)
class BiasRows:
    """Describes the rows of the bias from which a warp copies tiles.

    Attributes:
        start: address of the element in the first row and column 0.
        step: bytes from a row to the next.
        rows: rows that the tensors have from the first one on; may be above 64, or below 0.
        columns: columns of the tensors.
        aligned: whether all rows begin at multiples of 16 bytes.
        policy: L2 cache policy of the copies, a `CachePolicy`.
    """

    start: Int64
    step: Int64
    rows: Int32
    columns: Int32
    aligned: Boolean
    policy: Int64

    @classmethod
    def of(cls, hooks: ForwardHooks, site: Site, row: Int32, batch: Int32) -> BiasRows:
        """Return the rows from `row` on of the bias of a head.

        Args:
            hooks: hooks of the variant.
            site: the head, the batch element and the sizes.
            row: the first row.
            batch: batch size.
        """

        def address(q: Int32) -> Int64:
            return Int64(hooks.bias_place(site, q, Int32(0)).toint())

        start, step = address(row), address(Int32(1)) - address(Int32(0))
        aligned = ((start | step) & (VECTOR_BYTES - 1)) == 0
        # A bias may be larger than L2. Once the last batch element reads it, its lines should leave L2
        # before those of Q, K, V and dQ.
        policy = evict_first()
        if not hooks.bias_is_by_batch():
            policy = cutlass.select_(site.b == batch - 1, policy, evict_normal())
        return cls(start, step, site.q_len - row, site.kv_len, aligned, policy)


@cute.jit
def copy_tile(source: BiasRows, first: Int32, to: Int32, tile: BiasTile, full: cute.Pointer):
    """Copy a tile of the bias from global to shared memory, by all lanes of one warp.

    Args:
        source: rows of the bias.
        first: first column.
        to: address of the tile.
        tile: layout of the tile.
        full: mbarrier at which the copies of a lane arrive when they are complete.
    """
    left = source.columns - first
    whole = (left >= tile.columns) | (left & (VECTOR_BYTES // tile.size - 1) == 0)
    if source.aligned & whole:
        _copy_vectors(source, first, left, to, tile)
        cute.arch.cp_async_mbarrier_arrive_noinc(full)
    else:
        _copy_numbers(source, first, left, to, tile)
        if const_expr(tile.size == 4):
            cute.arch.cp_async_mbarrier_arrive_noinc(full)
        else:
            cute.arch.mbarrier_arrive(full)


def _copy_vectors(source: BiasRows, first: Int32, left: Int32, to: Int32, tile: BiasTile) -> None:
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
    turns = range(max(1, tile.repeat // rows))
    # a byte's place in the first rows, by rows of the period
    places = [to + row * tile.row_bytes + (byte ^ tile.turn(row + i * rows)) for i in turns]
    for i in range(WARPGROUP_ROWS // rows):
        target = places[i % len(places)] + i * rows * tile.row_bytes
        _copy(target, at, VECTOR_BYTES, i * rows < count, source.policy)
        at = at + step


@cute.jit
def _copy_numbers(source: BiasRows, first: Int32, left: Int32, to: Int32, tile: BiasTile):
    """Copy a tile element by element; `_copy_vectors` explains the arguments."""
    for i in cutlass.range(WARPGROUP_ROWS // ROWS_AT_ONCE, unroll=1):
        _copy_rows(source, first, left, to, tile, i * ROWS_AT_ONCE)


def _copy_rows(
    source: BiasRows, first: Int32, left: Int32, to: Int32, tile: BiasTile, start: Int32
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
            _copy(target, at, tile.size, inside, source.policy)
    else:  # all loads before the first store, so that they run at the same time
        numbers = [_load(at, inside) for _, at, inside in places]
        for (target, _, _), number in zip(places, numbers, strict=True):
            _store(target, number)


def _copy(to: Int32, at: Int64, size: int, inside: Boolean, policy: Int64) -> None:
    """Copy `size` bytes from global to shared memory asynchronously, or zeros if not `inside`."""
    cached = "cg" if size == VECTOR_BYTES else "ca"
    cute.arch.inline_ptx(
        f"cp.async.{cached}.shared.global.L2::cache_hint"
        f" [{{$r0}}], [{{$r1}}], {size}, {{$r2}}, {{$r3}};",
        read_only_args=[to, at, cutlass.select_(inside, Int32(size), Int32(0)), policy],
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
