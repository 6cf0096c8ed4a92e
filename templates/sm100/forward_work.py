"""What the warps of the Blackwell forward tell each other through shared memory.

The load warp writes a record for each work tile and the number of each kv block; the softmax gives the
correction one number for each row.
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
    """int32 words of a work tile's record in shared memory."""

    Q_BLOCK = 0
    HEAD = 1
    BATCH = 2
    NUM_MASKED = 3  # kv blocks that need the mask; they come first
    NUM_BLOCKS = 4
    SPLIT_SLOT = 5  # >= 0: part of a split row
    VALID = 6  # 0 after the last work tile


@dataclass(frozen=True)
class Work:
    """A work tile's record in registers; fields as the words of `WorkTile`."""

    q_block: Int32
    head: Int32
    batch: Int32
    num_masked: Int32
    num_blocks: Int32
    split_slot: Int32
    valid: Int32


@dataclass(frozen=True)
class WorkRing:
    """The records of the last work tiles.

    Attributes:
        words: i32 [8 * RECORDS].
        full: the load warp has written a record.
        empty: all other roles have read it.
    """

    words: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer

    def write(self, tile_idx: Int32, record: dict[WorkTile, Int32]) -> None:
        """Write the record of the tile_idx-th work tile of this CTA, once its place is empty."""
        r = tile_idx & (RECORDS - 1)
        cute.arch.mbarrier_wait(self.empty + r, ((tile_idx >> 1) & 1) ^ 1)
        with cute.arch.elect_one():
            for word, value in record.items():
                self.words[RECORD_WORDS * r + word] = value
            cute.arch.mbarrier_arrive(self.full + r)

    def wait(self, tile_idx: Int32) -> Work:
        """Wait for a record and read it."""
        r = tile_idx & (RECORDS - 1)
        cute.arch.mbarrier_wait(self.full + r, (tile_idx >> 1) & 1)
        first = RECORD_WORDS * r
        return Work(*(cute.arch.make_warp_uniform(self.words[first + word]) for word in WorkTile))

    def release(self, tile_idx: Int32) -> None:
        """Release a record; one arrival a warp."""
        device.arrive(self.empty + (tile_idx & (RECORDS - 1)))

    def read(self, tile_idx: Int32) -> Work:
        """Wait for a record, read it and release it."""
        work = self.wait(tile_idx)
        self.release(tile_idx)
        return work


@dataclass(frozen=True)
class BlockRing:
    """The numbers of the last kv blocks.

    Attributes:
        numbers: i32 [BLOCK_NUMBERS]; ~n for a FULL block n, where block lists overrule the mask.
        full: a number is written.
    """

    numbers: cute.Tensor
    full: cute.Pointer

    def write(self, kv_idx: Int32, number: Int32) -> None:
        """Write the number of the kv_idx-th block, by one thread; see `BLOCK_NUMBERS`."""
        self.numbers[kv_idx & (BLOCK_NUMBERS - 1)] = number
        cute.arch.mbarrier_arrive(self.full + (kv_idx & (BLOCK_NUMBERS - 1)))

    def read(self, kv_idx: Int32) -> Int32:
        """Wait for the number of the kv_idx-th block."""
        slot, shift = kv_idx & (BLOCK_NUMBERS - 1), BLOCK_NUMBERS.bit_length() - 1
        cute.arch.mbarrier_wait(self.full + slot, (kv_idx >> shift) & 1)
        return self.numbers[slot]


@dataclass(frozen=True)
class RowNumbers:
    """A number for each row, from the softmax to the correction: by how much to rescale O.

    There is one a block, and one a work tile: what the output is to be multiplied by.

    Attributes:
        values: f32 [128 * q_tiles].
        full, empty: barriers, one for each query tile.
    """

    values: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer

    def of_tile(self, t: Int32) -> RowNumbers:
        """The same with the barriers of query tile t alone."""
        return RowNumbers(self.values, self.full + t, self.empty + t)

    def wait_empty(self, count: Int32) -> None:
        """Wait until the correction has read the number before the count-th one; see `of_tile`."""
        cute.arch.mbarrier_wait(self.empty, (count & 1) ^ 1)

    def write(self, place: Int32, value: Float32) -> None:
        """Give the number of row `place` (of all query tiles) to the correction; see `of_tile`."""
        self.values[place] = value
        device.arrive(self.full)

    def read(self, t: int, row: Int32, count: Int32) -> Float32:
        """Wait for the count-th number of a row of query tile t."""
        cute.arch.mbarrier_wait(self.full + t, count & 1)
        value = self.values[t * ROWS + row]
        device.arrive(self.empty + t)
        return value


@dataclass(frozen=True)
class RingPosition:
    """A stage of the ring that K and V blocks share, and the parity of its lap."""

    stage: Int32
    lap: Int32

    @staticmethod
    def first() -> RingPosition:
        """The first use of the first stage."""
        return RingPosition(Int32(0), Int32(0))

    def next(self, stages: int) -> RingPosition:
        """The position after this one; the number of stages need not be a power of two."""
        last = self.stage == stages - 1
        stage = cutlass.select_(last, Int32(0), self.stage + 1)
        return RingPosition(stage, cutlass.select_(last, self.lap ^ 1, self.lap))
