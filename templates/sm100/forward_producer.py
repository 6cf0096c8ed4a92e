"""Fetch work tiles and load their blocks by TMA: the producer of the Blackwell forward.

One warp fetches work tiles from the work list and iterates over their runs from the last block to
the first. For the other warps it writes a record for each work tile and the index of each block to
shared memory. K and V blocks alternate in one ring.
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
        source: global memory, (elements, block, head, batch).
        bytes: bytes of a block over all CTAs of the group, as the leader's barrier counts them.
    """

    atom: cute.CopyAtom
    target: cute.Tensor
    source: cute.Tensor
    bytes: int

    def start(self, block: Any, head: Any, batch: Any, stage: Any, full: cute.Pointer) -> None:
        """Issue the TMA load of a block into stage `stage`, which arrives at `full`."""
        cute.copy(
            self.atom,
            self.source[None, block, head, batch],
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
        total = work_tiles.shape[0]
        cta, ctas = cta // c.ctas, ctas // c.ctas
        index, kv_idx, tile_idx = Int32(cta), Int32(0), Int32(0)
        position = RingPosition.first()
        while index < total:
            batch, head = work_tiles[index, WorkItem.BATCH], work_tiles[index, WorkItem.HEAD]
            q_block = work_tiles[index, WorkItem.Q_BLOCK]
            split_slot = work_tiles[index, WorkItem.SPLIT_SLOT]
            num_masked = work_tiles[index, WorkItem.NUM_MASKED]
            num_blocks = (
                work_tiles[index, WorkItem.PARTIAL_BLOCKS] + work_tiles[index, WorkItem.FULL_BLOCKS]
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
            work_ring.write(tile_idx, record)
            if const_expr(c.work == "clc"):  # request early, to hide the latency of the response
                clc.ask(tile_idx)
            first = Int32(1)
            for kind in cutlass.range_constexpr(2):
                runs = work_list.partial_runs if const_expr(kind == 0) else work_list.full_runs
                run, take, left = (work_tiles[index, CURSORS[kind] + i] for i in range(3))
                while left > 0:
                    last, steps = runs[0, run] + take - 1, cutlass.min(take, left)
                    for j in cutlass.range(steps, unroll=1):
                        kv_block = last - j
                        number = kv_block
                        if const_expr(kind == 1 and self.hooks.lists_override_mask):
                            number = ~kv_block
                        # in the order of use: Q and K for the first S, Q of the other tile, V
                        if first != 0:
                            self._load_q(q, 0, tile_idx, q_block, head, batch, bars)
                        cute.arch.mbarrier_wait(bars.kv_empty + position.stage, position.lap ^ 1)
                        with cute.arch.elect_one():
                            block_ring.write(kv_idx, number)
                        self._load_kv(k, kv_block, kv_head, kv_batch, position.stage, bars)
                        kv_idx += 1
                        position = position.next(c.stages)
                        if const_expr(c.q_tiles == 2):
                            if first != 0:
                                self._load_q(q, 1, tile_idx, q_block, head, batch, bars)
                        first = Int32(0)
                        cute.arch.mbarrier_wait(bars.kv_empty + position.stage, position.lap ^ 1)
                        self._load_kv(v, kv_block, kv_head, kv_batch, position.stage, bars)
                        position = position.next(c.stages)
                    left -= steps
                    run -= 1
                    if left > 0:
                        take = runs[1, run]
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
        work_ring.write(tile_idx, dict.fromkeys(WorkTile, Int32(0)))  # not VALID: the end

    def _loads(
        self, atoms: tuple, mmas: tuple, tiles: tuple, smem: Any
    ) -> tuple[TmaLoad, TmaLoad, TmaLoad]:
        """Return the partitioned TMA loads of this CTA's part of Q, K and V."""
        c = self.config
        rank = self.group.rank()
        thr_qk, thr_pv = (mma.get_slice(rank) for mma in mmas)
        by_row, by_column = (None, 0, None, None), (0, None, None, None)
        q_parts = thr_qk.partition_A(cute.local_tile(tiles[0], (c.mma_rows, c.head_dim), by_row))
        k_parts = thr_qk.partition_B(cute.local_tile(tiles[1], (c.block_kv, c.head_dim), by_row))
        v_parts = thr_pv.partition_B(
            cute.local_tile(tiles[2], (c.head_dim_v, c.block_kv), by_column)
        )
        k_bytes, v_bytes = 2 * c.block_kv * c.head_dim, 2 * c.block_kv * c.head_dim_v
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
        q.start(q_block * self.config.q_tiles + t, head, batch, t, bars.q_full + t)

    def _load_kv(
        self,
        operand: TmaLoad,
        kv_block: Int32,
        kv_head: Int32,
        kv_batch: Int32,
        stage: Int32,
        bars: ForwardBarriers,
    ) -> None:
        """Load a block of K or V into an empty stage of the ring."""
        self.group.expect_bytes(bars.kv_full + stage, operand.bytes)
        operand.start(kv_block, kv_head, kv_batch, stage, bars.kv_full + stage)


def _sides(atom: Any, smem: Any, parts: Any) -> tuple[Any, Any]:
    """Return the two sides of a TMA copy: shared memory by stage, global memory by tile."""
    return cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(smem, 0, 3),
        cute.group_modes(parts, 0, 3),
    )
