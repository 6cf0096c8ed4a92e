"""Pass work tiles, kv blocks and row scales between the warps of the Blackwell forward.

All pass through shared memory. The load warp writes a record for each work tile and the index of
each kv block. The softmax writes one scale per row for the correction.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import cutlass
from cutlass import Float32, Int32, cute

from attnkit.templates.sm100 import device
from attnkit.templates.sm100.config import ROWS
from attnkit.templates.sm100.forward_barriers import BLOCK_NUMBERS, RECORDS

RECORD_WORDS = 8


class WorkTile(IntEnum):
    """Indices of the int32 words in a work tile's record in shared memory."""

    Q_BLOCK = 0
    HEAD = 1
    BATCH = 2
    NUM_MASKED = 3  # kv blocks that need the mask; they come first
    NUM_BLOCKS = 4
    SPLIT_SLOT = 5  # >= 0: part of a split row
    VALID = 6  # 0 after the last work tile
    VALUE_PART = 7  # part of the columns of the value; only in records of rings with `has_parts`


@dataclass(frozen=True)
class Work:
    """Holds a work tile's record in registers; the fields are the words of `WorkTile`."""

    q_block: Int32
    head: Int32
    batch: Int32
    num_masked: Int32
    num_blocks: Int32
    split_slot: Int32
    valid: Int32
    value_part: Int32 | int = 0


@dataclass(frozen=True)
class WorkRing:
    """Passes records of work tiles from the load warp to all other roles.

    Attributes:
        words: i32 [8 * RECORDS].
        full: the load warp has written a record.
        empty: all other roles have read the record.
        has_parts: whether several work tiles share a query tile, so that records have a value part.
    """

    words: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer
    has_parts: bool = False

    @property
    def used(self) -> tuple[WorkTile, ...]:
        """Return the words of a record."""
        return tuple(w for w in WorkTile if self.has_parts or w != WorkTile.VALUE_PART)

    def write(self, tile_idx: Int32, record: dict[WorkTile, Int32]) -> None:
        """Write the record of the CTA's `tile_idx`-th work tile, once its slot is empty."""
        r = tile_idx & (RECORDS - 1)
        cute.arch.mbarrier_wait(self.empty + r, ((tile_idx >> 1) & 1) ^ 1)
        with cute.arch.elect_one():
            for word, value in record.items():
                self.words[RECORD_WORDS * r + word] = value
            cute.arch.mbarrier_arrive(self.full + r)

    def wait(self, tile_idx: Int32) -> Work:
        """Wait for the record of a work tile and return it without releasing its slot."""
        r = tile_idx & (RECORDS - 1)
        cute.arch.mbarrier_wait(self.full + r, (tile_idx >> 1) & 1)
        first = RECORD_WORDS * r
        return Work(*(cute.arch.make_warp_uniform(self.words[first + w]) for w in self.used))

    def release(self, tile_idx: Int32) -> None:
        """Release the record of a work tile, with one arrival per warp."""
        device.arrive(self.empty + (tile_idx & (RECORDS - 1)))

    def read(self, tile_idx: Int32) -> Work:
        """Wait for the record of a work tile, return it, and release its slot."""
        work = self.wait(tile_idx)
        self.release(tile_idx)
        return work


@dataclass(frozen=True)
class BlockRing:
    """Passes indices of kv blocks from the load warp to the softmax.

    Attributes:
        numbers: i32 [BLOCK_NUMBERS]; ~n for a FULL block n if block lists take precedence over the
            mask.
        full: an index is written.
    """

    numbers: cute.Tensor
    full: cute.Pointer

    def write(self, kv_idx: Int32, number: Int32) -> None:
        """Write the index of the `kv_idx`-th block, by one thread; see `BLOCK_NUMBERS`."""
        self.numbers[kv_idx & (BLOCK_NUMBERS - 1)] = number
        cute.arch.mbarrier_arrive(self.full + (kv_idx & (BLOCK_NUMBERS - 1)))

    def read(self, kv_idx: Int32) -> Int32:
        """Wait for the index of the `kv_idx`-th block and return it."""
        slot, shift = kv_idx & (BLOCK_NUMBERS - 1), BLOCK_NUMBERS.bit_length() - 1
        cute.arch.mbarrier_wait(self.full + slot, (kv_idx >> shift) & 1)
        return self.numbers[slot]


@dataclass(frozen=True)
class RowNumbers:
    """Passes one scale per row from the softmax to the correction.

    After each block it is the factor that rescales O; at the end of a work tile, the factor that
    normalises the output.

    Attributes:
        values: f32 [128 * q_tiles].
        full, empty: barriers, one for each query tile.
    """

    values: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer

    def of_tile(self, t: Int32) -> RowNumbers:
        """Return a copy whose barriers are those of query tile `t`."""
        return RowNumbers(self.values, self.full + t, self.empty + t)

    def wait_empty(self, count: Int32) -> None:
        """Wait until the correction has read the scale before the `count`-th; see `of_tile`."""
        cute.arch.mbarrier_wait(self.empty, (count & 1) ^ 1)

    def write(self, place: Int32, value: Float32) -> None:
        """Write the scale of row `place`, counted over all query tiles; see `of_tile`."""
        self.values[place] = value
        device.arrive(self.full)

    def read(self, t: int, row: Int32, count: Int32) -> Float32:
        """Wait for the `count`-th scale of a row of query tile `t`, return it and release it."""
        cute.arch.mbarrier_wait(self.full + t, count & 1)
        value = self.values[t * ROWS + row]
        device.arrive(self.empty + t)
        return value


@dataclass(frozen=True)
class RingPosition:
    """Describes a position in the ring of K and V blocks: a stage and the parity of its lap."""

    stage: Int32
    lap: Int32

    @staticmethod
    def first() -> RingPosition:
        """Return the position of the first use of the ring."""
        return RingPosition(Int32(0), Int32(0))

    def next(self, stages: int) -> RingPosition:
        """Return the next position in a ring of `stages` stages.

        The number of stages need not be a power of two.
        """
        last = self.stage == stages - 1
        stage = cutlass.select_(last, Int32(0), self.stage + 1)
        return RingPosition(stage, cutlass.select_(last, self.lap ^ 1, self.lap))
