"""Define what the warp roles of the Hopper backward share: barriers, words in shared memory, sizes.

Barrier IDs, arrival counts and word offsets are defined only here.
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
    from attnkit.templates.sm90.backward_hd256_roles_config import Hd256RolesConfig

# Roles of the 12 warps: warpgroup 0 loads, adds dQ and clears; warpgroups 1 and 2 are consumers.
WARP, WARPGROUP = 32, 128  # threads
WARPS = 4  # warps per warpgroup
CONSUMERS = 2  # consumer warpgroups
CONSUMER_THREADS = CONSUMERS * WARPGROUP
CONSUMER_WARPS = CONSUMERS * WARPS
THREADS = WARPGROUP + CONSUMER_THREADS
LOAD_WARP = 0
DQ_WARP = 1  # first of two warps: one for each consumer
CLEAR_WARP = 3


class NamedBarrier(IntEnum):
    """IDs of the first consumer warpgroup's named barriers (bar.sync); add the consumer's index.

    ID 0 is __syncthreads.
    """

    DQ_FULL = 1  # a chunk is in shared memory; threads: `DQ_THREADS`
    DQ_EMPTY = 3  # the previous chunk has been read; threads: `DQ_THREADS`
    EPILOGUE = 5  # threads: `WARPGROUP`
    BOTH_CONSUMERS = 7  # of `backward_hd256_roles` alone; the same ID in both consumers
    BOTH_ARRIVALS = 8  # the warps of `backward_arrivals` of both consumers; the same ID in both


DQ_THREADS = WARPGROUP + WARP  # a consumer and the warp that adds its dQ


class Hd256Barrier(IntEnum):
    """IDs of the named barriers (bar.sync) of the kernel for head dims above 128."""

    CONSUMER = 1  # add the index of the consumer warpgroup
    BOTH_CONSUMERS = 3


class ChunkNote(IntEnum):
    """Indices of the int32 words that a consumer writes with a chunk of dQ, dK or dV."""

    CHUNK = 0  # index of the chunk in the sums; -1: no more chunks follow
    TURN = 1  # deterministic: the turn at which to add the chunk
    FOLLOWING = 2  # deterministic: the turn after it; -1: look it up
    NEXT_CHUNK = 3  # any order: index of the consumer's next chunk; -1: not known
    NEXT_KV_BLOCK = 2  # leaders: the kv block of that chunk
    # whole heads and arrivals: of the chunk
    HEAD = 1
    BATCH = 2


class Partial(IntEnum):
    """Names the scores of which two CTAs compute half of the terms each, see `backward_hd512`."""

    S = 0
    DP = 1


class Word:
    """Offsets of regions of int32 words in shared memory; the block words of Q stages are at 0."""

    PACKED_ROW = 4  # packed heads: the query position of each Q stage's first row
    NOTE = 16  # a `ChunkNote` for each consumer
    # Deterministic: a `backward_deterministic.Report` for each consumer, as far apart as the notes.
    LANDED = 32
    ROLE = 32  # sums in the order of arrival: flags of each consumer's next chunk, as far apart
    NEXT_ITEM = 24  # in the second CTA of a pair: the index of the next work tile
    BIAS_NOTES = 32  # with a copied bias: two notes, see `backward_bias_in_smem`
    COUNT = 40
    HD256_COUNT = 32


NOTE_WORDS = 4
TURN_WARPS = 2  # above head dim 128: one warp waits for turns, one passes them on
RECORD_STRIDE = 2 * RECORD  # words between the records of two K stages; the notes are in between

# Flag in the index of a chunk: this kv block is the first writer, and stores instead of adding. In
# the word of a Q stage, the flag in the q block's number is half of it, because a chunk's index is
# twice the block's. A row's number is at least 64 times the block's, so that the flag overflows out
# of its 32 bits.
FIRST_WRITER = 1 << 27
FIRST_WRITER_BLOCK = FIRST_WRITER // 2
# The same for whole heads and arrivals: this part is the last one of the chunk.
LAST_WRITER = 2 * FIRST_WRITER
LAST_WRITER_BLOCK = LAST_WRITER // 2
CHUNK_MASK = FIRST_WRITER - 1  # the index without flags
NO_CHUNK = CHUNK_MASK  # nothing to add: the note only announces the next chunk

# Indices of the tensors in the kernel argument `order` with whole heads.
HEAD_STARTS = 0  # int32 [heads], row of the work list with the first work tile of each head
GRAD_QUERY = 1  # [B, H, S, D] of the dtype


@dataclass(frozen=True)
class LoadBarriers:
    """Holds the mbarriers between producer and consumers, as pointers to their first stage.

    `full` completes when the TMA bytes have arrived, `empty` when the consumers have read them.
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
    """Holds the mbarriers between consumers and the warps that add chunks, one for each consumer.

    They order sums. With a copied bias, `ready` and `landed_ack` are None, because sums have no fixed
    order then and the bias needs their memory.
    """

    ready: cute.Pointer | None  # the consumer has written a chunk and its note
    # The chunk is complete in global memory, and reported. Whole heads and arrivals, which
    # have no order of CTAs: the sum of the next chunk's other parts is complete in shared memory.
    landed: cute.Pointer
    landed_ack: cute.Pointer | None  # the warp that passes turns has read the report


@dataclass(frozen=True)
class Barriers:
    """Holds all mbarriers of the kernel for head dims up to 128."""

    load: LoadBarriers
    ds_full: cute.Pointer  # both consumers have written their half of dS
    ds_empty: cute.Pointer  # both have read it for dQ
    chunk: ChunkBarriers


def barrier_count(c: BackwardConfig) -> int:
    """Return the number of mbarriers that `place_barriers` places."""
    chunk = 1 if c.bias_bytes else len(fields(ChunkBarriers))
    return 2 * CONSUMERS + 2 * c.k_stages + 6 * c.stages + chunk * CONSUMERS


def place_barriers(c: BackwardConfig, base: cute.Pointer) -> Barriers:
    """Return the mbarriers, laid out in shared memory from address `base`."""
    v_full = base
    v_empty = v_full + CONSUMERS
    k_full = base + 2 * CONSUMERS
    k_empty = k_full + c.k_stages
    rings = k_full + 2 * c.k_stages
    q_full, q_empty, do_full, do_empty, ds_full, ds_empty = (rings + c.stages * i for i in range(6))
    ready, landed, landed_ack = (rings + (6 * c.stages + CONSUMERS * i) for i in range(3))
    chunk = ChunkBarriers(ready, landed, landed_ack)
    if c.bias_bytes:
        chunk = ChunkBarriers(None, ready, None)
    return Barriers(
        LoadBarriers(k_full, k_empty, v_full, v_empty, q_full, q_empty, do_full, do_empty),
        ds_full,
        ds_empty,
        chunk,
    )


def init_barriers(c: BackwardConfig, bars: Barriers) -> None:
    """Initialise the mbarriers with their arrival counts; called by one thread."""
    # The emulator's reports name a barrier by the argument of the call named `mbarrier_init`.
    mbarrier_init = cute.arch.mbarrier_init
    load, chunk = bars.load, bars.chunk
    for wg in range(CONSUMERS):  # each consumer has its half of V
        mbarrier_init(load.v_full + wg, ONE_ARRIVAL)  # by the producer, with expect_tx
        mbarrier_init(load.v_empty + wg, WARPS)
    init_chunk_barriers(chunk)
    for s in range(c.k_stages):
        mbarrier_init(load.k_full + s, ONE_ARRIVAL)
        mbarrier_init(load.k_empty + s, CONSUMER_THREADS)  # every lane reads the record
    for s in range(c.stages):
        mbarrier_init(load.q_full + s, ONE_ARRIVAL)
        mbarrier_init(load.q_empty + s, CONSUMER_THREADS)  # every lane reads LSE and delta
        mbarrier_init(load.do_full + s, ONE_ARRIVAL)
        mbarrier_init(load.do_empty + s, CONSUMER_THREADS)
        mbarrier_init(bars.ds_full + s, CONSUMER_WARPS)
        mbarrier_init(bars.ds_empty + s, CONSUMER_WARPS)


def init_chunk_barriers(chunk: ChunkBarriers) -> None:
    """Initialise the mbarriers of chunks; called by one thread."""
    # The emulator's reports name a barrier by the argument of the call named `mbarrier_init`.
    mbarrier_init = cute.arch.mbarrier_init
    for wg in range(CONSUMERS):
        if chunk.ready is not None:
            mbarrier_init(chunk.ready + wg, WARPS)
        mbarrier_init(chunk.landed + wg, ONE_ARRIVAL)
        if chunk.landed_ack is not None:
            mbarrier_init(chunk.landed_ack + wg, WARP)  # every lane reads the note


@dataclass(frozen=True)
class TurnBarriers:
    """Holds the mbarriers for turns above head dim 128, see `backward_hd256_deterministic`."""

    announced: cute.Pointer
    may_add: cute.Pointer
    added: cute.Pointer


@dataclass(frozen=True)
class Hd192Barriers:
    """Holds all mbarriers of `backward_hd192`: those of the tiles, and those for turns."""

    tiles: Barriers
    turns: TurnBarriers

    @property
    def load(self) -> LoadBarriers:
        """Return the mbarriers between producer and consumers."""
        return self.tiles.load


def hd192_barrier_count(c: BackwardConfig) -> int:
    """Return the number of mbarriers of `place_hd192_barriers`."""
    return barrier_count(c) + (len(fields(TurnBarriers)) if c.sum_order else 0)


def place_hd192_barriers(c: BackwardConfig, base: cute.Pointer) -> Hd192Barriers:
    """Return the mbarriers, laid out in shared memory from address `base`."""
    first = base + barrier_count(c)  # unused without an order of sums
    turns = TurnBarriers(*(first + i for i in range(len(fields(TurnBarriers)))))
    return Hd192Barriers(place_barriers(c, base), turns)


def init_hd192_barriers(c: BackwardConfig, bars: Hd192Barriers) -> None:
    """Initialise the mbarriers with their arrival counts; called by one thread."""
    init_barriers(c, bars.tiles)
    if c.sum_order:
        init_turn_barriers(bars.turns)


def init_turn_barriers(turns: TurnBarriers) -> None:
    """Initialise the mbarriers for turns; called by one thread."""
    # The emulator's reports name a barrier by the argument of the call named `mbarrier_init`.
    mbarrier_init = cute.arch.mbarrier_init
    mbarrier_init(turns.announced, ONE_ARRIVAL)
    mbarrier_init(turns.may_add, TURN_WARPS)  # the warp that waits and the one that passes
    mbarrier_init(turns.added, CONSUMER_WARPS)


@dataclass(frozen=True)
class Hd256Barriers:
    """Holds all mbarriers of the kernel for head dims above 128."""

    load: LoadBarriers
    turns: TurnBarriers


KV_BARRIERS = 4  # k_full, v_full, one `empty` for both, and an unused one


def hd256_barrier_count(c: Hd256Config) -> int:
    """Return the number of mbarriers of `place_hd256_barriers`, including the unused one."""
    return KV_BARRIERS + 2 * c.q_stages + 2 * c.stages + len(fields(TurnBarriers))


def place_hd256_barriers(c: Hd256Config, base: cute.Pointer) -> Hd256Barriers:
    """Return the mbarriers, laid out in shared memory from address `base`."""
    k_full, v_full, kv_empty = base, base + 1, base + 2  # the fourth is not used
    q_full, q_empty = base + KV_BARRIERS, base + KV_BARRIERS + c.q_stages
    do_full = base + KV_BARRIERS + 2 * c.q_stages
    do_empty = do_full + c.stages
    turns = TurnBarriers(*(do_empty + c.stages + i for i in range(len(fields(TurnBarriers)))))
    # K and V are released together
    load = LoadBarriers(k_full, kv_empty, v_full, kv_empty, q_full, q_empty, do_full, do_empty)
    return Hd256Barriers(load, turns)


def init_hd256_barriers(c: Hd256Config, bars: Hd256Barriers) -> None:
    """Initialise the mbarriers with their arrival counts; called by one thread."""
    init_hd256_load_barriers(c, bars.load)
    if c.sum_order:
        init_turn_barriers(bars.turns)


def init_hd256_load_barriers(c: Hd256Config, load: LoadBarriers) -> None:
    """Initialise the mbarriers between producer and consumers; called by one thread."""
    # The emulator's reports name a barrier by the argument of the call named `mbarrier_init`.
    mbarrier_init = cute.arch.mbarrier_init
    mbarrier_init(load.k_full, ONE_ARRIVAL)  # by the producer, with expect_tx
    mbarrier_init(load.v_full, ONE_ARRIVAL)
    mbarrier_init(load.k_empty, CONSUMER_THREADS)  # every lane reads the record; also for V
    for s in range(c.q_stages):
        mbarrier_init(load.q_full + s, ONE_ARRIVAL)
        mbarrier_init(load.q_empty + s, CONSUMER_THREADS)  # every lane reads LSE and delta
    for s in range(c.stages):
        mbarrier_init(load.do_full + s, ONE_ARRIVAL)
        mbarrier_init(load.do_empty + s, CONSUMER_THREADS)


@dataclass(frozen=True)
class RolesBarriers:
    """Holds all mbarriers of `backward_hd256_roles`."""

    load: LoadBarriers
    p_full: cute.Pointer  # consumer 0 has written P for consumer 1
    p_empty: cute.Pointer  # consumer 1 has read it
    ds_full: cute.Pointer  # consumer 1 has written dS
    ds_empty: cute.Pointer  # both consumers have read it
    chunk: ChunkBarriers  # only with an order of sums


ROLES_BARRIERS = 4  # those of P and dS


def roles_barrier_count(c: Hd256RolesConfig) -> int:
    """Return the number of mbarriers of `place_roles_barriers`."""
    chunk = CONSUMERS * len(fields(ChunkBarriers)) if c.sum_order else 0
    return hd256_barrier_count(c) + ROLES_BARRIERS + chunk


def place_roles_barriers(c: Hd256RolesConfig, base: cute.Pointer) -> RolesBarriers:
    """Return the mbarriers, laid out in shared memory from address `base`."""
    load, own = place_hd256_barriers(c, base).load, base + hd256_barrier_count(c)
    p_full, p_empty, ds_full, ds_empty = (own + i for i in range(ROLES_BARRIERS))
    first = own + ROLES_BARRIERS  # unused without an order of sums
    chunk = ChunkBarriers(*(first + CONSUMERS * i for i in range(len(fields(ChunkBarriers)))))
    return RolesBarriers(load, p_full, p_empty, ds_full, ds_empty, chunk)


def init_roles_barriers(c: Hd256RolesConfig, bars: RolesBarriers) -> None:
    """Initialise the mbarriers with their arrival counts; called by one thread."""
    mbarrier_init = cute.arch.mbarrier_init
    init_hd256_load_barriers(c, bars.load)
    mbarrier_init(bars.p_full, WARPS)
    mbarrier_init(bars.p_empty, WARPS)
    mbarrier_init(bars.ds_full, WARPS)
    mbarrier_init(bars.ds_empty, CONSUMER_WARPS)
    if c.sum_order:
        init_chunk_barriers(bars.chunk)


def record_of(c: BackwardConfig, stage: Int32) -> Int32:
    """Return the index of the first record word of the work tile in K stage `stage`."""
    return RECORD + RECORD_STRIDE * stage


def q_blocks_of(c: BackwardConfig, problem: Any) -> Int32:
    """Return how many q blocks a head has; with packed heads, all query heads of a kv head."""
    blocks = (problem.q_len + c.block_q - 1) // c.block_q
    return blocks * problem.group if c.pack_gqa else blocks


def heads_before(c: BackwardConfig, problem: Any, b: Int32, h: Int32) -> Int32:
    """Return the flat index b * heads + h of a work tile's head; of a kv head if they are packed."""
    return b * (problem.kv_heads if c.pack_gqa else problem.heads) + h


def q_stage(c: BackwardConfig, count: Int32) -> Int32:
    """Return the stage of the `count`-th q block in the Q ring."""
    return count & (c.q_stages - 1)


def q_phase(c: BackwardConfig, count: Int32) -> Int32:
    """Return the parity to wait for on the full barrier of the `count`-th q block."""
    return (count >> (c.q_stages.bit_length() - 1)) & 1


def do_stage(c: BackwardConfig, count: Int32) -> Int32:
    """Return the stage of the `count`-th q block in the dO ring."""
    return count & (c.stages - 1)


def do_phase(c: BackwardConfig, count: Int32) -> Int32:
    """Return the parity to wait for on the dO full barrier of the `count`-th q block."""
    return (count >> (c.stages.bit_length() - 1)) & 1


def k_phase(c: BackwardConfig, count: Int32) -> Int32:
    """Return the parity to wait for on the K full barrier of the `count`-th work tile."""
    return (count >> (c.k_stages.bit_length() - 1)) & 1


def load_pair(rows: Any, g: int) -> Any:
    """Load LSE or delta of the two rows of group `g` from shared memory.

    Loading at the point of use saves registers: the values of all rows would take 32. Returns None
    if `rows` is None.
    """
    if rows is None:
        return None
    pair = cute.make_rmem_tensor(2, Float32)  # f32 [2]
    cute.autovec_copy(rows[None, g], pair)
    return pair


def row_pairs(
    values: cute.Tensor, stage: Int32, row0: Int32, block_q: int, rows: int
) -> cute.Tensor:
    """Return a view of the thread's rows of LSE or delta in shared memory, f32 [2, pairs].

    Args:
        values: LSE or delta in shared memory, f32 [block_q, stages].
        stage: stage of the q block.
        row0: the thread's first row; the thread has rows 8 g and 8 g + 1, counted from it.
        block_q: rows of a q block.
        rows: rows of the warpgroup's accumulator.
    """
    start = values.iterator + (stage * block_q + row0)
    layout = cute.make_layout((2, rows // 8), stride=(1, 8))
    return cute.make_tensor(start.align(8), layout)
