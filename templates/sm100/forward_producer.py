"""Fetch work tiles and load their blocks by TMA: the producer of the Blackwell forward.

One warp fetches work tiles from the work list and iterates over their runs from the last block to
the first. For the other warps it writes a record for each work tile and the index of each block to
shared memory. K and V blocks alternate in one ring. Above head dim 256, K comes in parts of its
columns, and V after K of the next block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute
from cutlass.cute.nvgpu import cpasync

from attnkit.templates.common.forward_work import CURSORS, Scalars, WorkItem
from attnkit.templates.common.hooks import ForwardHooks
from attnkit.templates.sm100.clc_scheduler import ClcScheduler
from attnkit.templates.sm100.config import ForwardConfig
from attnkit.templates.sm100.cta_group import CtaGroup
from attnkit.templates.sm100.forward_barriers import ForwardBarriers
from attnkit.templates.sm100.forward_work import BlockRing, RingPosition, WorkRing, WorkTile


@dataclass(frozen=True)
class WorkList:
    """Holds the tables that the host has written.

    Attributes:
        tiles: i32 [work tiles, 12], see `WorkItem`.
        partial_runs, full_runs: i32 [2, runs], starts and lengths of runs of kv blocks.
        counter: i32 [1], zero at launch; the kernel resets it to zero.
    """

    tiles: cute.Tensor
    partial_runs: cute.Tensor
    full_runs: cute.Tensor
    counter: cute.Tensor


@dataclass(frozen=True)
class TmaLoad:
    """Holds the TMA copy of one operand with its source and target.

    Attributes:
        atom: the TMA copy.
        target: shared memory, (elements, stage).
        source: global memory, (elements, block, head, batch); with parts of the columns of K,
            (elements, block, part, head, batch), and of V, (elements, part, block, head, batch).
        bytes: bytes of a block, or of its part, over all CTAs of the group, as the leader's barrier
            counts them.
    """

    atom: cute.CopyAtom
    target: cute.Tensor
    source: cute.Tensor
    bytes: int

    def start(self, place: tuple[Any, ...], stage: Any, full: cute.Pointer) -> None:
        """Issue the TMA load of a block into stage `stage`, which arrives at `full`.

        `place` is the index in `source`, without the elements.
        """
        cute.copy(
            self.atom,
            self.source[(None, *place)],
            self.target[None, stage],
            tma_bar_ptr=full,
        )


class Producer:
    """Runs the load warp.

    Args:
        config: compile-time configuration.
        hooks: hooks of the variant.
        group: the CTAs that compute MMAs together.
    """

    def __init__(self, config: ForwardConfig, hooks: ForwardHooks, group: CtaGroup) -> None:
        self.config = config
        self.hooks = hooks
        self.group = group

    @cute.jit
    def run(
        self,
        atoms: tuple,
        mmas: tuple,
        tiles: tuple,
        smem: Any,
        bars: ForwardBarriers,
        work_ring: WorkRing,
        block_ring: BlockRing,
        clc: ClcScheduler,
        work_list: WorkList,
        scalars: Scalars,
    ):
        """Fetch all work tiles of this CTA and load their blocks.

        Args:
            atoms, tiles: TMA atoms and tensors of Q, K and V.
            mmas: (Q K^T, P V), the MMAs whose operands are loaded.
            smem: shared memory.
            bars: mbarriers.
            work_ring, block_ring: rings of work tile records and of block indices.
            clc: scheduler for work="clc".
            work_list: tables of the work list.
            scalars: scalar arguments of the call.
        """
        c = self.config
        q, k, v = self._loads(atoms, mmas, tiles, smem)
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        work_tiles, counter = work_list.tiles, work_list.counter
        total = work_tiles.shape[0] * c.value_parts
        cta, ctas = cta // c.ctas, ctas // c.ctas
        index, kv_idx, tile_idx = Int32(cta), Int32(0), Int32(0)
        position = RingPosition.first()
        while index < total:
            item, part = index, 0
            if const_expr(c.value_parts > 1):
                item, part = index // c.value_parts, index % c.value_parts
            batch, head = work_tiles[item, WorkItem.BATCH], work_tiles[item, WorkItem.HEAD]
            q_block = work_tiles[item, WorkItem.Q_BLOCK]
            split_slot = work_tiles[item, WorkItem.SPLIT_SLOT]
            num_masked = work_tiles[item, WorkItem.NUM_MASKED]
            num_blocks = (
                work_tiles[item, WorkItem.PARTIAL_BLOCKS] + work_tiles[item, WorkItem.FULL_BLOCKS]
            )
            kv_head, kv_batch = head // scalars.group, cutlass.min(batch, scalars.kv_batch - 1)
            record = {
                WorkTile.Q_BLOCK: q_block,
                WorkTile.HEAD: head,
                WorkTile.BATCH: batch,
                WorkTile.NUM_MASKED: num_masked,
                WorkTile.NUM_BLOCKS: num_blocks,
                WorkTile.SPLIT_SLOT: split_slot,
                WorkTile.VALID: Int32(1),
            }
            if const_expr(c.value_parts > 1):
                record[WorkTile.VALUE_PART] = part
            work_ring.write(tile_idx, record)
            if const_expr(c.work == "clc"):  # request early, to hide the latency of the response
                clc.ask(tile_idx)
            first, previous = Int32(1), Int32(0)
            for kind in cutlass.range_constexpr(2):
                runs = work_list.partial_runs if const_expr(kind == 0) else work_list.full_runs
                run, take, left = (work_tiles[item, CURSORS[kind] + i] for i in range(3))
                while left > 0:
                    last, steps = runs[0, run] + take - 1, cutlass.min(take, left)
                    for j in cutlass.range(steps, unroll=1):
                        kv_block = last - j
                        number = kv_block
                        if const_expr(kind == 1 and self.hooks.lists_override_mask):
                            number = ~kv_block
                        # in the order of use: Q and K for the first S, Q of the other tile, V (with
                        # `v_late`, after K of the next block)
                        if first != 0:
                            self._load_q(q, 0, tile_idx, q_block, head, batch, bars)
                        cute.arch.mbarrier_wait(bars.kv_empty + position.stage, position.lap ^ 1)
                        with cute.arch.elect_one():
                            block_ring.write(kv_idx, number)
                        for k_part in cutlass.range_constexpr(c.k_parts):
                            if const_expr(k_part > 0):
                                cute.arch.mbarrier_wait(
                                    bars.kv_empty + position.stage, position.lap ^ 1
                                )
                            self._load_kv(
                                k, self._k_place(kv_block, k_part, kv_head, kv_batch),
                                position.stage, bars,
                            )  # fmt: skip
                            position = position.next(c.stages)
                        kv_idx += 1
                        if const_expr(c.q_tiles == 2):
                            if first != 0:
                                self._load_q(q, 1, tile_idx, q_block, head, batch, bars)
                        if const_expr(c.v_late):
                            if first == 0:
                                place = self._v_place(part, previous, kv_head, kv_batch)
                                position = self._load_v(v, place, position, bars)
                            previous = kv_block
                        else:
                            place = self._v_place(part, kv_block, kv_head, kv_batch)
                            position = self._load_v(v, place, position, bars)
                        first = Int32(0)
                    left -= steps
                    run -= 1
                    if left > 0:
                        take = runs[1, run]
            if const_expr(c.v_late):
                place = self._v_place(part, previous, kv_head, kv_batch)
                position = self._load_v(v, place, position, bars)
            following = index + ctas
            if const_expr(c.work == "clc"):
                following = clc.fetch(tile_idx, total)
            else:
                old = Int32(0)
                if lane == 0:
                    old = cute.arch.atomic_add(counter.iterator, Int32(1))
                    if old == total - 1:  # the last fetch of the launch resets the counter
                        cute.arch.store(counter.iterator, Int32(0), sem="relaxed", scope="gpu")
                following = cute.arch.shuffle_sync(old, 0) + ctas
            tile_idx += 1
            index = following
        work_ring.write(tile_idx, dict.fromkeys(work_ring.used, Int32(0)))  # not VALID: the end

    def _loads(
        self, atoms: tuple, mmas: tuple, tiles: tuple, smem: Any
    ) -> tuple[TmaLoad, TmaLoad, TmaLoad]:
        """Return the partitioned TMA loads of this CTA's part of Q, K and V."""
        c = self.config
        rank = self.group.rank()
        thr_qk, thr_pv = (mma.get_slice(rank) for mma in mmas)
        by_row, by_column = (None, 0, None, None), (0, None, None, None)
        in_parts = (None,) * 4
        of_k = by_row if c.k_parts == 1 else in_parts
        of_v = by_column if c.value_parts == 1 else in_parts
        q_parts = thr_qk.partition_A(cute.local_tile(tiles[0], (c.mma_rows, c.head_dim), by_row))
        k_parts = thr_qk.partition_B(cute.local_tile(tiles[1], (c.block_kv, c.k_columns), of_k))
        v_parts = thr_pv.partition_B(cute.local_tile(tiles[2], (c.head_dim_v, c.block_kv), of_v))
        k_bytes, v_bytes = 2 * c.block_kv * c.k_columns, 2 * c.block_kv * c.head_dim_v
        q = TmaLoad(atoms[0], *_sides(atoms[0], smem.q, q_parts), 2 * c.mma_rows * c.head_dim)
        k = TmaLoad(atoms[1], *_sides(atoms[1], smem.k, k_parts), k_bytes)
        v = TmaLoad(atoms[2], *_sides(atoms[2], smem.v, v_parts), v_bytes)
        return q, k, v

    def _load_q(
        self,
        q: TmaLoad,
        t: int,
        tile_idx: Int32,
        q_block: Int32,
        head: Int32,
        batch: Int32,
        bars: ForwardBarriers,
    ) -> None:
        """Load query tile `t` of a work tile, once its buffer is empty."""
        cute.arch.mbarrier_wait(bars.q_empty + t, (tile_idx & 1) ^ 1)
        self.group.expect_bytes(bars.q_full + t, q.bytes)
        q.start((q_block * self.config.q_tiles + t, head, batch), t, bars.q_full + t)

    def _k_place(self, block: Int32, part: int, head: Int32, batch: Int32) -> tuple[Any, ...]:
        """Return the index of a part of a K block, see `TmaLoad`."""
        return (block, head, batch) if self.config.k_parts == 1 else (block, part, head, batch)

    def _v_place(self, part: Any, block: Int32, head: Int32, batch: Int32) -> tuple[Any, ...]:
        """Return the index of a part of a V block, see `TmaLoad`."""
        return (block, head, batch) if self.config.value_parts == 1 else (part, block, head, batch)

    def _load_v(
        self, v: TmaLoad, place: tuple[Any, ...], position: RingPosition, bars: ForwardBarriers
    ) -> RingPosition:
        """Load a block of V once its stage is empty; return the next position in the ring."""
        cute.arch.mbarrier_wait(bars.kv_empty + position.stage, position.lap ^ 1)
        self._load_kv(v, place, position.stage, bars)
        return position.next(self.config.stages)

    def _load_kv(
        self,
        operand: TmaLoad,
        place: tuple[Any, ...],
        stage: Int32,
        bars: ForwardBarriers,
    ) -> None:
        """Load a block of K or V, or a part of it, into an empty stage of the ring."""
        self.group.expect_bytes(bars.kv_full + stage, operand.bytes)
        operand.start(place, stage, bars.kv_full + stage)


def _sides(atom: Any, smem: Any, parts: Any) -> tuple[Any, Any]:
    """Return the two sides of a TMA copy: shared memory by stage, global memory by tile."""
    return cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(smem, 0, 3),
        cute.group_modes(parts, 0, 3),
    )
