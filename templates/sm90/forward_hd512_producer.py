"""Load Q, K and V for the Hopper forward for head dims above 256, in chunks of blocks."""

from __future__ import annotations

import cutlass
from cutlass import Int32, const_expr, cute

from attnkit.templates.common.forward_work import CURSORS, ITEM_WORDS, Scalars, WorkItem
from attnkit.templates.common.hooks import ForwardHooks
from attnkit.templates.common.tma import partition
from attnkit.templates.sm90.config import WARPGROUP_ROWS
from attnkit.templates.sm90.forward_barriers import ForwardBarriers
from attnkit.templates.sm90.forward_hd512_barriers import Hd512Barriers, chunk_place
from attnkit.templates.sm90.forward_hd512_config import Hd512Config
from attnkit.templates.sm90.forward_producer import (
    FETCH_AHEAD,
    Producer,
    SharedMemory,
    TmaLoad,
    WorkTile,
    record_of,
)

BLOCK_SLOTS = 4  # words for block numbers: more blocks than that never have chunks in the K ring


class Hd512Producer(Producer):
    """Runs the producer warp, which loads Q, K and V.

    Args:
        config: compile-time configuration.
        hooks: hooks of the variant.
    """

    config: Hd512Config

    def __init__(self, config: Hd512Config, hooks: ForwardHooks) -> None:
        super().__init__(config, hooks)

    @cute.jit
    def run(
        self,
        atoms: tuple,
        tiles: tuple,
        smem: SharedMemory,
        bars: Hd512Barriers,
        runs: tuple,
        scalars: Scalars,
    ):
        """Load the blocks of the work tiles that the scheduler warp fetches.

        V is loaded one block behind K, because P V of a block is issued after Q K of the next
        block.

        Args:
            atoms, tiles: TMA atoms and tensors of Q, K and V.
            smem: shared memory; a stage of K or V holds a chunk.
            bars: mbarriers.
            runs: int32 [2, runs] of PARTIAL and of FULL kv blocks.
            scalars: scalar arguments of the call.
        """
        q, k, v = self._loads(atoms, tiles, smem)
        next_tile = smem.next_tile
        # kv_pos: position of the block whose K is loaded next
        kv_pos, tile_idx = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(bars.work.full, 0)
        batch = next_tile[WorkItem.BATCH]
        while batch >= 0:
            head, q_block = next_tile[WorkItem.HEAD], next_tile[WorkItem.Q_BLOCK]
            split_slot, part = next_tile[WorkItem.SPLIT_SLOT], Int32(0)
            if const_expr(self.config.value_parts > 1):
                part = next_tile[ITEM_WORDS]
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
                WorkTile.VALUE_PART: part,
            }
            self._load_q(q, tile_idx, kv_pos, record, smem.info, bars)
            pending = Int32(-1)  # the block whose V is loaded next; -1 for none
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
                        place = kv_head, kv_batch
                        self._load_k(k, kv_pos, (number, kv_block, *place), smem.info, bars)
                        if pending >= 0:
                            self._load_v_block(v, kv_pos - 1, (pending, part, *place), bars)
                        kv_pos += 1
                        pending = kv_block
                        left_of_tile -= 1
                    left -= steps
                    run -= 1
                    if left > 0:
                        take = runs[kind][1, run]
            self._load_v_block(v, kv_pos - 1, (pending, part, kv_head, kv_batch), bars)
            tile_idx += 1
            cute.arch.mbarrier_wait(bars.work.full, tile_idx & 1)
            batch = next_tile[WorkItem.BATCH]
        # a record with VALID = 0 ends the consumers' loop
        stage = bars.q.stage(tile_idx)
        self._wait_q_empty(tile_idx, kv_pos, bars)
        with cute.arch.elect_one():
            smem.info[record_of(tile_idx) + WorkTile.VALID] = Int32(0)
            cute.arch.mbarrier_arrive(bars.q.full + stage)

    def _loads(
        self, atoms: tuple, tiles: tuple, smem: SharedMemory
    ) -> tuple[TmaLoad, TmaLoad, TmaLoad]:
        """Return the TMA loads of Q, of chunks of K and of chunks of V.

        Their sources are (elements, block, head, batch), (elements, block, chunk, head, batch) and
        (elements, part, chunk of keys, head, batch).
        """
        c = self.config
        shape_q, shape_k = (WARPGROUP_ROWS, c.head_dim), (c.block_kv, c.k_chunk)
        shape_v = c.head_dim_v, c.v_chunk
        by_row, by_chunk = (None, 0, None, None), (None, None, None, None)
        q = TmaLoad(atoms[0], *partition(atoms[0], smem.q, tiles[0], shape_q, by_row))
        k = TmaLoad(atoms[1], *partition(atoms[1], smem.k, tiles[1], shape_k, by_chunk))
        v = TmaLoad(atoms[2], *partition(atoms[2], smem.v, tiles[2], shape_v, by_chunk))
        return q, k, v

    def _wait_q_empty(self, tile_idx: Int32, kv_pos: Int32, bars: ForwardBarriers) -> None:
        """Wait until the consumers have released the last K chunk, after which they do not read Q.

        Before the first block, the wait passes at once.
        """
        stage, phase = chunk_place(
            bars.k, kv_pos - 1, self.config.k_chunks, self.config.k_chunks - 1
        )
        cute.arch.mbarrier_wait(bars.k.empty + stage, phase)

    def _load_k(
        self, k: TmaLoad, kv_pos: Int32, block: tuple, info: cute.Tensor, bars: Hd512Barriers
    ) -> None:
        """Load a block of K, chunk by chunk, and write its number for the consumers.

        Args:
            k: TMA load of K.
            kv_pos: position of the block.
            block: (number as in `SharedMemory.info`, kv block, head, batch element).
            info: words in shared memory.
            bars: mbarriers.
        """
        number, kv_block, head, batch = block
        for j in range(self.config.k_chunks):
            stage, phase = chunk_place(bars.k, kv_pos, self.config.k_chunks, j)
            cute.arch.mbarrier_wait(bars.k.empty + stage, phase ^ 1)
            with cute.arch.elect_one():
                if j == 0:
                    info[kv_pos & (BLOCK_SLOTS - 1)] = number
                cute.arch.mbarrier_arrive_and_expect_tx(bars.k.full + stage, self.config.k_bytes)
            cute.copy(
                k.atom,
                k.source[None, kv_block, j, head, batch],
                k.target[None, stage],
                tma_bar_ptr=bars.k.full + stage,
            )

    def _load_v_block(self, v: TmaLoad, kv_pos: Int32, block: tuple, bars: Hd512Barriers) -> None:
        """Load a part of the columns of a block of V, chunk by chunk.

        Args:
            v: TMA load of V.
            kv_pos: position of the block.
            block: (kv block, part, head, batch element).
            bars: mbarriers.
        """
        kv_block, part, head, batch = block
        chunks = self.config.v_chunks
        for j in range(chunks):
            stage, phase = chunk_place(bars.v, kv_pos, chunks, j)
            cute.arch.mbarrier_wait(bars.v.empty + stage, phase ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bars.v.full + stage, self.config.v_bytes)
            cute.copy(
                v.atom,
                v.source[None, part, kv_block * chunks + j, head, batch],
                v.target[None, stage],
                tma_bar_ptr=bars.v.full + stage,
            )
