"""Define what the roles of the Hopper backward share: barriers, words in shared memory, sizes.

Barrier ids, arrival counts and word offsets are defined here only. The counts say who arrives.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from cutlass import Float32, Int32, cute

from attnkit.templates.common.constants import ONE_ARRIVAL
from attnkit.templates.common.work_tile import RECORD

if TYPE_CHECKING:
    from attnkit.templates.sm90.backward_config import BackwardConfig
    from attnkit.templates.sm90.backward_hd256_config import Hd256Config

# Roles of the 12 warps: warpgroup 0 loads, adds dQ and clears; warpgroups 1 and 2 compute.
WARP, WARPGROUP = 32, 128  # threads
WARPS = 4  # of a warpgroup
CONSUMERS = 2  # warpgroups
CONSUMER_THREADS = CONSUMERS * WARPGROUP
CONSUMER_WARPS = CONSUMERS * WARPS
THREADS = WARPGROUP + CONSUMER_THREADS
LOAD_WARP = 0
DQ_WARP = 1  # and the next: one for each consumer
CLEAR_WARP = 3


class NamedBarrier(IntEnum):
    """Numbers the named barriers (bar.sync); add the number of the consumer warpgroup.

    0 is __syncthreads.
    """

    DQ_FULL = 1  # a chunk is in shared memory; threads: `DQ_THREADS`
    DQ_EMPTY = 3  # the chunk before has been read; threads: `DQ_THREADS`
    EPILOGUE = 5  # threads: those of the consumer


DQ_THREADS = WARPGROUP + WARP  # a consumer and the warp that adds its dQ


class Hd256Barrier(IntEnum):
    """Numbers the named barriers (bar.sync) of the kernel for head dims above 128."""

    CONSUMER = 1  # add the number of the consumer warpgroup
    BOTH_CONSUMERS = 3


class ChunkNote(IntEnum):
    """Numbers the int32 words that a consumer writes with a chunk of dQ, dK or dV."""

    CHUNK = 0  # where it goes in the sums; -1: no more come
    TURN = 1  # deterministic: whose turn it is to add
    FOLLOWING = 2  # deterministic: whose turn is next; -1: look it up
    NEXT_CHUNK = 3  # the chunk that comes next; -1: not known


class Word:
    """Gives the offsets of regions of int32 words in shared memory; 0: block words of Q stages."""

    NOTE = 16  # a `ChunkNote` for each consumer
    # Deterministic: chunk, turn and following turn of a chunk that has landed, for each consumer;
    # 16 bytes apart, as the assembler reads four at once.
    LANDED = 32
    COUNT = 40
    HD256_COUNT = 32


NOTE_WORDS = 4
TURN_WARPS = 2  # above head dim 128: one waits for turns, one passes them on
RECORD_STRIDE = 2 * RECORD  # of the records of two K stages: the notes lie between them

# Flag in the number of a chunk: no kv block has added to the chunk, so this one stores. In the word
# of a Q stage the flag of the q block's number is half of that, as a chunk's number is twice as
# large. A row's number, at least 64 times the block's, loses the flag beyond its 32 bits.
FIRST_WRITER = 1 << 27
FIRST_WRITER_BLOCK = FIRST_WRITER // 2


@dataclass(frozen=True)
class LoadBarriers:
    """Holds the mbarriers between producer and consumers: pointers to their first stage.

    `full` completes with the TMA bytes, `empty` once the consumers have read.
    """

    k_full: cute.Pointer
    k_empty: cute.Pointer
    v_full: cute.Pointer
    v_empty: cute.Pointer
    q_full: cute.Pointer
    q_empty: cute.Pointer
    do_full: cute.Pointer
    do_empty: cute.Pointer


@dataclass(frozen=True)
class ChunkBarriers:
    """Holds the mbarriers of chunks that are added in a fixed order, one for each consumer."""

    ready: cute.Pointer  # the consumer has written a chunk and its note
    landed: cute.Pointer  # the sum in memory contains the chunk
    landed_ack: cute.Pointer  # the warp that passes turns has read the report


@dataclass(frozen=True)
class Barriers:
    """Holds all mbarriers of the kernel for head dims up to 128."""

    load: LoadBarriers
    ds_full: cute.Pointer  # both consumers have written their half of dS
    ds_empty: cute.Pointer  # both have read it for dQ
    chunk: ChunkBarriers


def barrier_count(c: BackwardConfig) -> int:
    """Return how many mbarriers `place_barriers` places."""
    return 2 * CONSUMERS + 2 * c.k_stages + 6 * c.stages + 3 * CONSUMERS


def place_barriers(c: BackwardConfig, base: cute.Pointer) -> Barriers:
    """Place the mbarriers one after another from `base` on."""
    v_full = base
    v_empty = v_full + CONSUMERS
    k_full = base + 2 * CONSUMERS
    k_empty = k_full + c.k_stages
    rings = k_full + 2 * c.k_stages
    q_full, q_empty, do_full, do_empty, ds_full, ds_empty = (rings + c.stages * i for i in range(6))
    return Barriers(
        LoadBarriers(k_full, k_empty, v_full, v_empty, q_full, q_empty, do_full, do_empty),
        ds_full,
        ds_empty,
        ChunkBarriers(*(rings + (6 * c.stages + CONSUMERS * i) for i in range(3))),
    )


def init_barriers(c: BackwardConfig, bars: Barriers) -> None:
    """Initialise the mbarriers with their numbers of arrivals, by one thread."""
    # Reports of the emulator name a barrier by the argument of the call with this name.
    mbarrier_init = cute.arch.mbarrier_init
    load, chunk = bars.load, bars.chunk
    for wg in range(CONSUMERS):  # each has its half of V
        mbarrier_init(load.v_full + wg, ONE_ARRIVAL)  # of the producer, with the bytes to come
        mbarrier_init(load.v_empty + wg, WARPS)
        mbarrier_init(chunk.ready + wg, WARPS)
        mbarrier_init(chunk.landed + wg, ONE_ARRIVAL)
        mbarrier_init(chunk.landed_ack + wg, WARP)  # every lane, as each reads the note
    for s in range(c.k_stages):
        mbarrier_init(load.k_full + s, ONE_ARRIVAL)
        mbarrier_init(load.k_empty + s, CONSUMER_THREADS)  # every lane, as each reads the record
    for s in range(c.stages):
        mbarrier_init(load.q_full + s, ONE_ARRIVAL)
        mbarrier_init(load.q_empty + s, CONSUMER_THREADS)  # every lane, as each reads LSE and delta
        mbarrier_init(load.do_full + s, ONE_ARRIVAL)
        mbarrier_init(load.do_empty + s, CONSUMER_THREADS)
        mbarrier_init(bars.ds_full + s, CONSUMER_WARPS)
        mbarrier_init(bars.ds_empty + s, CONSUMER_WARPS)


@dataclass(frozen=True)
class TurnBarriers:
    """Holds the mbarriers of turns above head dim 128, see `backward_hd256_deterministic`."""

    announced: cute.Pointer
    may_add: cute.Pointer
    added: cute.Pointer


@dataclass(frozen=True)
class Hd256Barriers:
    """Holds all mbarriers of the kernel for head dims above 128."""

    load: LoadBarriers
    turns: TurnBarriers


KV_BARRIERS = 4  # k_full, v_full, one `empty` of both, and one that is not used


def hd256_barrier_count(c: Hd256Config) -> int:
    """Return how many mbarriers `place_hd256_barriers` places, the unused one included."""
    return KV_BARRIERS + 2 * c.q_stages + 2 * c.stages + len(fields(TurnBarriers))


def place_hd256_barriers(c: Hd256Config, base: cute.Pointer) -> Hd256Barriers:
    """Place the mbarriers one after another from `base` on."""
    k_full, v_full, kv_empty = base, base + 1, base + 2  # the fourth is not used
    q_full, q_empty = base + KV_BARRIERS, base + KV_BARRIERS + c.q_stages
    do_full = base + KV_BARRIERS + 2 * c.q_stages
    do_empty = do_full + c.stages
    turns = TurnBarriers(*(do_empty + c.stages + i for i in range(len(fields(TurnBarriers)))))
    # K and V are released together
    load = LoadBarriers(k_full, kv_empty, v_full, kv_empty, q_full, q_empty, do_full, do_empty)
    return Hd256Barriers(load, turns)


def init_hd256_barriers(c: Hd256Config, bars: Hd256Barriers) -> None:
    """Initialise the mbarriers with their numbers of arrivals, by one thread."""
    # Reports of the emulator name a barrier by the argument of the call with this name.
    mbarrier_init = cute.arch.mbarrier_init
    load, turns = bars.load, bars.turns
    mbarrier_init(load.k_full, ONE_ARRIVAL)  # of the producer, with the bytes to come
    mbarrier_init(load.v_full, ONE_ARRIVAL)
    mbarrier_init(load.k_empty, CONSUMER_THREADS)  # every lane, as each reads the record; also of V
    for s in range(c.q_stages):
        mbarrier_init(load.q_full + s, ONE_ARRIVAL)
        mbarrier_init(load.q_empty + s, CONSUMER_THREADS)  # every lane, as each reads LSE and delta
    for s in range(c.stages):
        mbarrier_init(load.do_full + s, ONE_ARRIVAL)
        mbarrier_init(load.do_empty + s, CONSUMER_THREADS)
    if c.sum_order:
        mbarrier_init(turns.announced, ONE_ARRIVAL)
        mbarrier_init(turns.may_add, TURN_WARPS)  # those that wait for turns and that pass them
        mbarrier_init(turns.added, CONSUMER_WARPS)


def record_of(c: BackwardConfig, stage: Int32) -> Int32:
    """Return the word at which the record of the work tile in a K stage begins."""
    return RECORD + RECORD_STRIDE * stage


def q_stage(c: BackwardConfig, count: Int32) -> Int32:
    """Return the stage of the count-th q block."""
    return count & (c.q_stages - 1)


def q_phase(c: BackwardConfig, count: Int32) -> Int32:
    """Return the parity of the count-th q block's lap of the ring."""
    return (count >> (c.q_stages.bit_length() - 1)) & 1


def k_phase(c: BackwardConfig, count: Int32) -> Int32:
    """Return the parity of the count-th work tile's lap of the K ring."""
    return (count >> (c.k_stages.bit_length() - 1)) & 1


def load_pair(rows: Any, g: int) -> Any:
    """Load LSE or delta of two rows, of group g, where they are used: all take 32 registers."""
    if rows is None:
        return None
    pair = cute.make_rmem_tensor(2, Float32)  # f32 [2]
    cute.autovec_copy(rows[None, g], pair)
    return pair


def row_pairs(
    values: cute.Tensor, stage: Int32, row0: Int32, block_q: int, rows: int
) -> cute.Tensor:
    """Return a view of the thread's rows of LSE or delta, f32 [2, pairs].

    Args:
        values: LSE or delta in shared memory, f32 [block_q, stages].
        row0: the thread's first row; it has rows 8 g and 8 g + 1 from there.
        rows: how many rows the warpgroup's accumulator has.
    """
    start = values.iterator + (stage * block_q + row0)
    layout = cute.make_layout((2, rows // 8), stride=(1, 8))
    return cute.make_tensor(start.align(8), layout)
