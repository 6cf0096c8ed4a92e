"""Fetch the work tiles of the Hopper forward, and load their Q, K and V by TMA.

The scheduler warp fetches the next work tile while the current one is loaded. The producer warp
iterates over the runs of a work tile from the last block to the first, and loads Q, K and V. It
writes the block number of each K stage to shared memory, so that the consumers need not read the
block lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import cutlass
from cutlass import Int32, const_expr, cute

from attnkit.templates.common.cache_policy import evict_first
from attnkit.templates.common.forward_work import CURSORS, ITEM_WORDS, Scalars, WorkItem
from attnkit.templates.common.hooks import ForwardHooks
from attnkit.templates.common.tma import partition
from attnkit.templates.sm90.config import WARPGROUP_ROWS, ForwardConfig
from attnkit.templates.sm90.forward_barriers import ForwardBarriers, Pipeline

# int32 words in shared memory for the consumers: block numbers of the K stages, then records. One
# tensor holds both, so that their addresses differ by constants, which saves a register.
FIRST_BLOCK_NUMBER = 0  # index of the block number of K stage 0
FIRST_SHIFT = 4  # index of the shift of the terms in K stage 0, see `columns_in_mma`
BLOCK_NUMBERS = 8  # words of block numbers and shifts, at least twice the number of stages
RECORD_WORDS, RECORDS = 8, 4  # a record is kept until its tile is written, two tiles later
INFO_WORDS = BLOCK_NUMBERS + RECORD_WORDS * RECORDS
NEXT_WORDS = 16  # words of the fetched work tile, which begin with those of `WorkItem`
END = -1  # value of the word BATCH of the fetched work tile if no work tile is left
FETCH_AHEAD = 1  # the next work tile is fetched this many kv blocks before the end of the current


class WorkTile(IntEnum):
    """Indices of the int32 words in a work tile's record in shared memory, for the consumers."""

    Q_BLOCK = 0
    HEAD = 1
    BATCH = 2
    NUM_MASKED = 3  # kv blocks that need the mask; they come first
    NUM_UNMASKED = 4
    VALID = 5  # 0 after the last work tile; the other words are then 0 or undefined
    SPLIT_SLOT = 6  # >= 0: part of a split row
    VALUE_PART = 7  # part of the value columns, only for head dims above 256


@dataclass(frozen=True)
class SharedMemory:
    """Holds the tensor views of a CTA's shared memory.

    Attributes:
        q: 16 bits [64, head_dim, warpgroup and stage].
        k: 16 bits [block_kv, head_dim, stage].
        v: 16 bits [head_dim_v, block_kv, stage].
        o: 16 bits [64, head_dim_v, warpgroup].
        info: i32 [8 + 4 * 8], the number of the kv block in each K stage (~n for a FULL block n if
            block lists take precedence over the mask), with `columns_in_mma` the shift of the terms
            in each K stage, then the records of the last work tiles.
        next_tile: i32 [16], words of the fetched work tile.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    info: cute.Tensor
    next_tile: cute.Tensor


def record_of(tile_idx: Int32) -> Int32:
    """Return the index in `info` of the first word of the `tile_idx`-th work tile's record."""
    return BLOCK_NUMBERS + RECORD_WORDS * (tile_idx & (RECORDS - 1))


@dataclass(frozen=True)
class Work:
    """Describes a work tile as a consumer reads it from shared memory.

    Attributes:
        q_block, head, batch: position of its query block.
        split_slot: slot of a part of a split row, negative for whole rows.
    """

    q_block: Int32
    head: Int32
    batch: Int32
    split_slot: Int32

    @staticmethod
    def read(info: cute.Tensor, record: Int32) -> Work:
        """Return the work tile whose record begins at word `record` of `info`."""
        words = WorkTile.Q_BLOCK, WorkTile.HEAD, WorkTile.BATCH, WorkTile.SPLIT_SLOT
        return Work(*(info[record + word] for word in words))


@dataclass(frozen=True)
class TmaLoad:
    """Holds the TMA copy of one operand with its source and target.

    Attributes:
        atom: the TMA copy.
        target: shared memory, (elements, stage).
        source: global memory, (elements, block, head, batch).
    """

    atom: cute.CopyAtom
    target: cute.Tensor
    source: cute.Tensor


class TileScheduler:
    """Runs the scheduler warp: a dynamic persistent tile scheduler, longest work tiles first.

    A CTA begins with the work tile of its own index. It takes the next ones from a counter in
    global memory, so that a faster CTA processes more work tiles.

    Args:
        parts: CTAs that each take one part of a work tile, a power of two. The number of the part
            then follows the words of the work tile.
    """

    def __init__(self, parts: int = 1) -> None:
        self.parts = parts

    @cute.jit
    def run(
        self,
        work_tiles: cute.Tensor,
        counter: cute.Tensor,
        next_tile: cute.Tensor,
        work: Pipeline,
    ):
        """Write the CTA's work tiles to shared memory, one tile ahead of the producer."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        live = work_tiles[0, WorkItem.NUM_LIVE]
        if const_expr(self.parts > 1):
            live = live * self.parts
        index, position = Int32(cta), Int32(0)
        while index < live:
            words = self._words(work_tiles, index)
            work.wait_empty(position)
            with cute.arch.elect_one():  # the lane that stores the words also arrives
                for i in cutlass.range_constexpr(len(words)):
                    next_tile[i] = words[i]
                cute.arch.mbarrier_arrive(work.full)
            position += 1
            # Take the next tile only when the producer is near the end of its tile. A tile that is
            # taken earlier is not available to faster CTAs.
            work.wait_empty(position)
            old = Int32(0)
            if cute.arch.lane_idx() == 0:
                old = cute.arch.atomic_add(counter.iterator, Int32(1))
                if old == live - 1:  # the last fetch of the launch leaves the counter at zero
                    cute.arch.store(counter.iterator, Int32(0), sem="relaxed", scope="gpu")
            index = cute.arch.shuffle_sync(old, 0) + ctas
        with cute.arch.elect_one():
            next_tile[WorkItem.BATCH] = Int32(END)
            cute.arch.mbarrier_arrive(work.full)

    def _words(self, work_tiles: cute.Tensor, index: Int32) -> list[Int32]:
        """Return the words of a work tile, then the number of the part if there are parts."""
        if self.parts == 1:
            return [work_tiles[index, i] for i in range(ITEM_WORDS)]
        row, part = index >> (self.parts.bit_length() - 1), index & (self.parts - 1)
        return [*(work_tiles[row, i] for i in range(ITEM_WORDS)), part]


class Producer:
    """Runs the producer warp, which loads Q, K and V.

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
        atoms: tuple,
        tiles: tuple,
        smem: SharedMemory,
        bars: ForwardBarriers,
        runs: tuple,
        scalars: Scalars,
    ):
        """Load the blocks of the work tiles that the scheduler warp fetches.

        V is loaded one block behind K, because P V of a block is issued after Q K of the next
        block. With chained work tiles this order continues across work tiles.

        Args:
            atoms, tiles: TMA atoms and tensors of Q, K and V.
            smem: shared memory.
            bars: mbarriers.
            runs: int32 [2, runs] of PARTIAL and of FULL kv blocks.
            scalars: scalar arguments of the call.
        """
        c = self.config
        q, k, v = self._loads(atoms, tiles, smem)
        next_tile = smem.next_tile
        k_pos, v_pos, tile_idx = Int32(0), Int32(0), Int32(0)
        # the block whose V is loaded next; -1 for none
        pending, pending_head, pending_batch = Int32(-1), Int32(0), Int32(0)
        cute.arch.mbarrier_wait(bars.work.full, 0)
        batch = next_tile[WorkItem.BATCH]
        while batch >= 0:
            head, q_block = next_tile[WorkItem.HEAD], next_tile[WorkItem.Q_BLOCK]
            split_slot = next_tile[WorkItem.SPLIT_SLOT]
            cursors = [tuple(next_tile[first + i] for i in range(3)) for first in CURSORS]
            num_masked = next_tile[WorkItem.NUM_MASKED]
            left_of_tile = cursors[0][2] + cursors[1][2]
            fetch_at = cutlass.min(left_of_tile, FETCH_AHEAD)
            kv_head, kv_batch = head // scalars.group, cutlass.min(batch, scalars.kv_batch - 1)
            record = {
                WorkTile.Q_BLOCK: q_block,
                WorkTile.HEAD: head,
                WorkTile.BATCH: batch,
                WorkTile.NUM_MASKED: num_masked,
                WorkTile.NUM_UNMASKED: left_of_tile - num_masked,
                WorkTile.VALID: Int32(1),
                WorkTile.SPLIT_SLOT: split_slot,
            }
            self._load_q(q, tile_idx, k_pos, record, smem.info, bars)
            for kind in cutlass.range_constexpr(2):
                run, take, left = cursors[kind]
                while left > 0:
                    last, steps = runs[kind][0, run] + take - 1, cutlass.min(take, left)
                    for j in cutlass.range(steps, unroll=1):
                        if left_of_tile == fetch_at:
                            # release the words to the scheduler; every lane has read them
                            cute.arch.mbarrier_arrive(bars.work.empty)
                        kv_block = last - j
                        number = kv_block
                        if const_expr(kind == 1 and self.hooks.lists_override_mask):
                            number = ~kv_block
                        stage = bars.k.wait_empty(k_pos)
                        with cute.arch.elect_one():
                            smem.info[stage] = number
                            if const_expr(c.columns_in_mma):
                                cute.arch.mbarrier_arrive(bars.posted + stage)
                            cute.arch.mbarrier_arrive_and_expect_tx(bars.k.full + stage, c.k_bytes)
                        cute.copy(
                            k.atom,
                            k.source[None, kv_block, kv_head, kv_batch],
                            k.target[None, stage],
                            tma_bar_ptr=bars.k.full + stage,
                        )
                        k_pos += 1
                        if pending >= 0:
                            block = pending, pending_head, pending_batch
                            self._load_v(v, v_pos, block, bars.v)
                            v_pos += 1
                        pending, pending_head, pending_batch = kv_block, kv_head, kv_batch
                        left_of_tile -= 1
                    left -= steps
                    run -= 1
                    if left > 0:
                        take = runs[kind][1, run]
            if const_expr(not c.chained):
                self._load_v(v, v_pos, (pending, pending_head, pending_batch), bars.v)
                v_pos += 1
                pending = Int32(-1)
            tile_idx += 1
            cute.arch.mbarrier_wait(bars.work.full, tile_idx & 1)
            batch = next_tile[WorkItem.BATCH]
        # no work tiles are left, so the next kernel may use the SMs that become free
        cute.arch.griddepcontrol_launch_dependents()
        # A record with VALID = 0 ends the consumers' loop. Chained ones read the other words before.
        stage = bars.q.stage(tile_idx)
        self._wait_q_empty(tile_idx, k_pos, bars)
        with cute.arch.elect_one():
            for word in WorkTile if c.chained else (WorkTile.VALID,):
                smem.info[record_of(tile_idx) + word] = Int32(0)
            cute.arch.mbarrier_arrive(bars.q.full + stage)
        if pending >= 0:
            self._load_v(v, v_pos, (pending, pending_head, pending_batch), bars.v)

    def _loads(
        self, atoms: tuple, tiles: tuple, smem: SharedMemory
    ) -> tuple[TmaLoad, TmaLoad, TmaLoad]:
        """Return the partitioned TMA loads of Q, K and V."""
        c = self.config
        shape_q, shape_k = (WARPGROUP_ROWS, c.head_dim), (c.block_kv, c.head_dim)
        shape_v = c.head_dim_v, c.block_kv
        by_row, by_column = (None, 0, None, None), (0, None, None, None)
        q = TmaLoad(atoms[0], *partition(atoms[0], smem.q, tiles[0], shape_q, by_row))
        k = TmaLoad(atoms[1], *partition(atoms[1], smem.k, tiles[1], shape_k, by_row))
        v = TmaLoad(atoms[2], *partition(atoms[2], smem.v, tiles[2], shape_v, by_column))
        return q, k, v

    def _wait_q_empty(self, tile_idx: Int32, k_pos: Int32, bars: ForwardBarriers) -> None:
        """Wait until the consumers have released the Q stage of work tile `tile_idx`."""
        if self.config.chained:
            bars.q.wait_empty(tile_idx)
        else:  # one Q stage: consumers that released the last K block no longer read Q
            last = k_pos - 1
            cute.arch.mbarrier_wait(bars.k.empty + bars.k.stage(last), bars.k.phase(last))

    @cute.jit
    def _load_q(
        self,
        q: TmaLoad,
        tile_idx: Int32,
        k_pos: Int32,
        record: dict,
        info: cute.Tensor,
        bars: ForwardBarriers,
    ):
        """Load a query tile once its stage is empty, and write the work tile's record."""
        c = self.config
        stage = bars.q.stage(tile_idx)
        full = bars.q.full + stage
        self._wait_q_empty(tile_idx, k_pos, bars)
        with cute.arch.elect_one():
            for word, value in record.items():
                info[record_of(tile_idx) + word] = value
            cute.arch.mbarrier_arrive_and_expect_tx(full, c.q_bytes)
        q_block, head, batch = (
            record[WorkTile.Q_BLOCK],
            record[WorkTile.HEAD],
            record[WorkTile.BATCH],
        )
        for w in cutlass.range_constexpr(c.warpgroups):
            cute.copy(
                q.atom,
                q.source[None, q_block * c.warpgroups + w, head, batch],
                q.target[None, w + c.warpgroups * stage],
                tma_bar_ptr=full,
                cache_policy=evict_first(),
            )

    @cute.jit
    def _load_v(self, v: TmaLoad, v_pos: Int32, block: tuple, pipeline: Pipeline):
        """Load one block of V once its stage is empty.

        Args:
            v: TMA load of V.
            v_pos: position of the block in the V ring.
            block: (number, head, batch element).
            pipeline: the V pipeline.
        """
        stage = pipeline.wait_empty(v_pos)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(pipeline.full + stage, self.config.v_bytes)
        cute.copy(
            v.atom,
            v.source[None, *block],
            v.target[None, stage],
            tma_bar_ptr=pipeline.full + stage,
        )
