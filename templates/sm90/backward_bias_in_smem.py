"""Copy a full bias to shared memory, a q block ahead of the consumers of the Hopper backward.

The warp that clears fully masked kv blocks copies it, one tile for each consumer warpgroup: the q
block's 64 rows and the warpgroup's 64 columns. The consumers read the tile of the next q block when
they initialise the accumulator of S, see `backward_bias_first`. See also `bias_tile`.

At head dim 128 no shared memory is left for these tiles. They are where K of the next work tile will
be: it is loaded once the bias of the last q block has been read. K of the previous work tile is
there until its last dQ is computed, during the first q block. So the consumers load the bias of
the first q block themselves. At head dim 64 the tiles have memory of their own.

The producer warp writes a note for each q block but the first: which tile to copy. Notes have two
places. The third note may overwrite the first, because the producer writes it when a q block is
complete that ends after the first note's tile was read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute

from attnkit.templates.common import device
from attnkit.templates.common.backward_work import Problem
from attnkit.templates.common.constants import ONE_ARRIVAL
from attnkit.templates.common.hooks import BackwardHooks
from attnkit.templates.common.site import Site
from attnkit.templates.sm90.backward_config import ROWS, BackwardConfig
from attnkit.templates.sm90.backward_shared import CONSUMERS, WARP, WARPGROUP, Word
from attnkit.templates.sm90.bias_tile import BiasRows, BiasTile, copy_tile

NOTES = 2  # places for notes


class BiasNote(IntEnum):
    """Names the int32 words of a note, which says whose bias to copy: which q and kv block's."""

    ROW = 0  # first row of the q block; below 0: no more tiles follow
    HEAD = 1
    BATCH = 2
    TILE = 3  # see `tile_word`


NOTE_WORDS = len(BiasNote)
TILE_NUMBERS = 4  # the number of a work tile is known modulo this


def tile_word(kv_block: Int32, tile_idx: Int32) -> Int32:
    """Pack the numbers of a kv block and of a work tile into one word of a note.

    Args:
        kv_block: the kv block.
        tile_idx: number of the CTA's work tile.
    """
    return kv_block * TILE_NUMBERS + (tile_idx & (TILE_NUMBERS - 1))


@dataclass(frozen=True)
class BiasBarriers:
    """Holds the mbarriers of the copied bias, as pointers to the first.

    Attributes:
        noted: for each place, whether a note is written.
        full: for each consumer, whether its tile has arrived.
        empty: for each consumer, whether its lanes have read the tile.
    """

    noted: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer

    COUNT = NOTES + 2 * CONSUMERS  # mbarriers

    @classmethod
    def at(cls, base: cute.Pointer) -> BiasBarriers:
        """Return the mbarriers, laid out in shared memory from address `base`."""
        return cls(base, base + NOTES, base + (NOTES + CONSUMERS))

    def init(self) -> None:
        """Initialise the mbarriers with their arrival counts; called by one thread."""
        mbarrier_init = cute.arch.mbarrier_init
        for i in range(NOTES):
            mbarrier_init(self.noted + i, ONE_ARRIVAL)
        for wg in range(CONSUMERS):
            mbarrier_init(self.full + wg, WARP)  # every lane's copies
            mbarrier_init(self.empty + wg, WARPGROUP)


@dataclass(frozen=True)
class CopiedBias:
    """Holds the shared memory address of the copied bias tiles, and their mbarriers.

    Attributes:
        memory: address of the stages of K, or of the tiles if they have memory of their own.
        bars: mbarriers.
    """

    memory: Int32
    bars: BiasBarriers


def tile_of(config: BackwardConfig) -> BiasTile:
    """Return the shared memory layout of the bias tile that one consumer warpgroup reads."""
    # a warp reads every second row; the places repeat after 8 rows for all sizes
    return BiasTile(ROWS, config.bias_bytes, 2 if config.bias_bytes == 4 else 1)


def tile_start(config: BackwardConfig, memory: Int32, tile_idx: Int32, wg: Any) -> Any:
    """Return the shared memory address of the bias tile of one consumer warpgroup.

    Args:
        config: compile-time configuration.
        memory: see `CopiedBias`.
        tile_idx: number of the CTA's work tile.
        wg: index of the consumer.
    """
    if not config.bias_in_k:
        return memory + wg * tile_of(config).bytes
    half = ROWS * config.head_dim * 2  # bytes of K of a consumer
    return memory + (((tile_idx & 1) ^ 1) * CONSUMERS + wg) * half


class BiasNotes:
    """Tells the copying warp which tiles to copy; the producer warp calls it.

    Args:
        config: compile-time configuration.
    """

    def __init__(self, config: BackwardConfig) -> None:
        self.config = config

    @cute.jit
    def write(self, info: cute.Tensor, bars: BiasBarriers, index: Int32, words: tuple):
        """Tell the copying warp which tile to copy: write note number `index`.

        `words` are those of `BiasNote`, in order.
        """
        slot = index & (NOTES - 1)
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(len(words)):
                info[Word.BIAS_NOTES + slot * NOTE_WORDS + i] = words[i]
            cute.arch.mbarrier_arrive(bars.noted + slot)

    @cute.jit
    def wait_read(self, bars: BiasBarriers, count: Int32):
        """Wait until the consumers have read `count` tiles, so that K may be loaded there."""
        if const_expr(self.config.bias_in_k):
            for wg in cutlass.range_constexpr(CONSUMERS):
                cute.arch.mbarrier_wait(bars.empty + wg, (count - 1) & 1)
            # the copies wrote there by the generic proxy, and TMA writes K by the async one
            cute.arch.fence_proxy("async.shared", space="cta")


class BackwardBiasCopier:
    """Copies bias tiles from global to shared memory, in one warp.

    Args:
        config: compile-time configuration.
        hooks: hooks of the variant.
    """

    def __init__(self, config: BackwardConfig, hooks: BackwardHooks) -> None:
        self.config = config
        self.hooks = hooks

    @cute.jit
    def run(
        self,
        bias: CopiedBias,
        info: cute.Tensor,
        k_empty: cute.Pointer,
        captured: list,
        problem: Problem,
    ):
        """Copy the tile of each note, until a note says that no more tiles follow.

        Args:
            bias: where the tiles are.
            info: words in shared memory.
            k_empty: mbarriers of K.
            captured: captured tensors.
            problem: sizes of the launch.
        """
        count, bars = Int32(0), bias.bars
        row = self.wait_note(info, bars, count)
        while row >= 0:
            head, batch, tile = (
                self.word(info, count, i) for i in (BiasNote.HEAD, BiasNote.BATCH, BiasNote.TILE)
            )
            kv_block, tile_idx = tile // TILE_NUMBERS, tile & (TILE_NUMBERS - 1)
            if const_expr(self.config.bias_in_k):
                # until dQ of the previous work tile's last q block is computed from its K
                stage = (tile_idx & 1) ^ 1
                cute.arch.mbarrier_wait(k_empty + stage, ((tile_idx - 1) >> 1) & 1)
            p = problem
            site = Site(captured, batch, head, p.q_len, p.kv_len, p.scale, row)
            rows = BiasRows.of(self.hooks, site, row, p.batch)
            for wg in cutlass.range_constexpr(CONSUMERS):
                first = kv_block * self.config.block_kv + wg * ROWS
                cute.arch.mbarrier_wait(bars.empty + wg, (count & 1) ^ 1)
                to = tile_start(self.config, bias.memory, tile_idx, wg)
                copy_tile(rows, first, to, tile_of(self.config), bars.full + wg)
            count += 1
            row = self.wait_note(info, bars, count)

    @cute.jit
    def wait_note(self, info: cute.Tensor, bars: BiasBarriers, index: Int32):
        """Wait for note number `index`, and return its row."""
        cute.arch.mbarrier_wait(bars.noted + (index & (NOTES - 1)), (index // NOTES) & 1)
        return self.word(info, index, BiasNote.ROW)

    def word(self, info: cute.Tensor, index: Int32, word: BiasNote) -> Any:
        """Read a word of note number `index` from shared memory."""
        return info[Word.BIAS_NOTES + (index & (NOTES - 1)) * NOTE_WORDS + word]


@dataclass(frozen=True)
class ReadTile:
    """Describes where a consumer thread finds the bias of its next q block in shared memory.

    Attributes:
        start: address of the tile.
        index: number of the tile, counted through the work tiles.
        some: whether there is a tile; otherwise zeros are read, and no barrier is used.
        dtype: type of the bias.
    """

    start: Int32
    index: Int32
    some: Boolean
    dtype: Any


class BiasReader:
    """Reads a thread's biases from a tile in shared memory.

    Args:
        config: compile-time configuration.
    """

    def __init__(self, config: BackwardConfig) -> None:
        self.config = config

    @cute.jit
    def wait(self, tile: ReadTile, full: cute.Pointer):
        """Wait until the tile is in shared memory."""
        if tile.some:
            cute.arch.mbarrier_wait(full, tile.index & 1)

    @cute.jit
    def release(self, tile: ReadTile, empty: cute.Pointer):
        """Release the tile to the copying warp: every lane arrives at `empty`."""
        if tile.some:
            cute.arch.mbarrier_arrive(empty)

    def read(self, tile: ReadTile, thread: Int32) -> list[Float32]:
        """Read the thread's biases from shared memory, in the order of its registers of S^T.

        Args:
            tile: the tile, which has arrived.
            thread: index of the thread in its warpgroup.
        """
        layout, size = tile_of(self.config), self.config.bias_bytes
        lane = thread % WARP
        column = thread // WARP * 16 + lane // 4
        some = cutlass.select_(tile.some, Int32(1), Int32(0))
        places = {}  # of both rows and both columns of the first 8 rows
        for row, right in ((0, 0), (1, 0), (0, 1), (1, 1)):
            q = lane % 4 * 2 + row
            byte = (column + 8 * right) * size
            places[row, right] = tile.start + q * layout.row_bytes + (byte ^ layout.turn(q))
        values: list[Float32] = []
        for g in range(ROWS // 8):
            below = 8 * g * layout.row_bytes
            values += [_load_if(some, place, below, tile.dtype) for place in places.values()]
        return values


def _load_if(some: Int32, at: Int32, offset: int, dtype: Any) -> Float32:
    """Read a number from shared memory as Float32, or 0 if `some` is 0."""
    test = ".reg .pred p; setp.ne.s32 p, {$r0}, 0;"
    number: Float32
    if dtype is Float32:
        number = cute.arch.inline_ptx(
            f"{{ {test} mov.f32 {{$w0}}, 0f00000000; @p ld.shared.f32 {{$w0}}, [{{$r1}}+{offset}]; }}",
            write_only_types=[Float32],
            read_only_args=[some, at],
        )
        return number
    word = cute.arch.inline_ptx(
        f"{{ {test} mov.b32 {{$w0}}, 0; @p ld.shared.u16 {{$w0}}, [{{$r1}}+{offset}]; }}",
        write_only_types=[Int32],
        read_only_args=[some, at],
    )
    number, _ = device.unpack(word, dtype)
    return number
