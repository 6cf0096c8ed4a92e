"""Run the compute warpgroups of the Blackwell backward.

They compute P and dS of every q block, and store dK and dV at the end of a work tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from attnkit.templates.common.backward_work import Problem
from attnkit.templates.common.site import Site
from attnkit.templates.common.work_tile import RECORD, WorkTile
from attnkit.templates.sm100 import backward_device as device
from attnkit.templates.sm100.backward_barriers import CommonBarriers
from attnkit.templates.sm100.backward_config import BackwardConfig
from attnkit.templates.sm100.backward_epilogue import Epilogue, GradTarget
from attnkit.templates.sm100.backward_lse_in_mma import LseInMma
from attnkit.templates.sm100.backward_score_grads import ScoreGrads
from attnkit.templates.sm100.backward_shared import (
    HALF,
    WARPGROUP,
    WARPS,
    Group,
    SmemRows,
    q_phase,
    q_stage,
)
from attnkit.templates.sm100.backward_softmax import QBlock, Scratch, SoftmaxBackward
from attnkit.templates.sm100.device import fence_after, fence_before


@dataclass(frozen=True)
class Parts:
    """Holds the components that a compute warpgroup uses."""

    group: Group
    lse_in_mma: LseInMma
    softmax: SoftmaxBackward
    score_grads: ScoreGrads
    epilogue: Epilogue


class ComputeWarpgroup:
    """Computes P from S and dS from dP, and stores dK and dV.

    Args:
        config: compile-time configuration.
        parts: components of the warpgroup.
    """

    def __init__(self, config: BackwardConfig, parts: Parts) -> None:
        self.config = config
        self.group = parts.group
        self.lse_in_mma = parts.lse_in_mma
        self.softmax = parts.softmax
        self.score_grads = parts.score_grads
        self.epilogue = parts.epilogue

    @cute.jit
    def run(
        self,
        stores: tuple,
        smem: tuple,
        rows: SmemRows,
        tmem: Int32,
        bars: CommonBarriers,
        captured: list,
        totals: list,
        problem: Problem,
    ):
        """Compute P and dS of all work tiles, and store their dK and dV.

        Args:
            stores: TMA stores of dK and dV, their coordinate tensors, and the shared memory that
                they read.
            smem: shared addresses of dV, see `GradTarget.smem`, and of dS.
            rows: statistics and words of q blocks in shared memory.
            tmem: base of tensor memory.
            bars: mbarriers.
            captured, totals: see `Backward.__call__`.
            problem: sizes of the launch.
        """
        c, p, info = self.config, problem, rows.info
        own = len(captured) - c.extras
        captured, extras = captured[:own], captured[own:]
        atoms, tiles, views = stores
        smem_dv, smem_ds = smem
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg, row = warp // WARPS - 1, thread % WARPGROUP
        half = c.block_q // 2
        row0 = wg * half  # the thread's first row in a q block; its column in a kv block is `row`
        tmem_warp = tmem + (warp % WARPS) * (device.LANES << 16)
        tmem_s, tmem_dp = tmem_warp + c.s_column + row0, tmem_warp + c.dp_column + row0
        scratch = Scratch(
            cute.make_rmem_tensor(half, Float32),  # f32 [block_q / 2]
            cute.make_rmem_tensor(2, Int32),  # int32 [2], one bit per row
        )
        sums = self.score_grads.begin(totals)
        q_count, kv_count, acc_count = Int32(0), Int32(0), Int32(0)

        def write(at: int, packed: Any) -> None:
            self.write_ds(smem_ds, row, row0, at, packed)

        cute.arch.mbarrier_wait(bars.k_full, 0)
        valid = info[RECORD + WorkTile.VALID]
        while valid != 0:
            record = self.group.record(kv_count)
            kv_block, h, b, count = (
                info[record + i]
                for i in (WorkTile.KV_BLOCK, WorkTile.HEAD, WorkTile.BATCH, WorkTile.NUM_BLOCKS)
            )
            kv_rows = self.group.kv_rows(kv_block)
            scaled = self.lse_in_mma.scale(p.scale)
            site = Site(captured, b, h, p.q_len, p.kv_len, scaled, kv_rows * c.rows_kv)
            part = self.group.column_part(info, kv_count)
            tile = self.softmax.begin(site, row, extras, p.heads, part)
            self.score_grads.reset(sums)
            for i in cutlass.range(count, unroll=1):
                r = q_stage(c, q_count)
                cute.arch.mbarrier_wait(bars.block_full + r, q_phase(c, q_count))
                word = info[r]
                lse, delta = self.lse_in_mma.statistics(rows.lse, rows.delta, r, row0)
                # drawn while the tensor cores compute S
                dropout = self.softmax.draw(word, row0, tile)
                block = QBlock(word, row0, lse, delta, dropout)
                cute.arch.mbarrier_wait(bars.s_full, q_count & 1)
                fence_after()
                self.softmax.compute_p(block, tile, tmem_s, scratch)
                self.hand_over(bars.p_full)
                if i == 0:
                    # in a CTA pair, dS and the previous work tile's dK share memory
                    self.epilogue.wait_last_tile(bars, kv_count, False)
                cute.arch.mbarrier_wait(bars.dp_full, q_count & 1)
                # the MMAs of the previous block's dQ have read dS from shared memory
                cute.arch.mbarrier_wait(bars.dq_full, ((q_count * c.dq_parts) & 1) ^ 1)
                fence_after()
                self.softmax.compute_ds(
                    block, tile, scratch, tmem_dp, write, self.score_grads, sums
                )
                # the tensor cores read dS from shared memory by the async proxy
                space = "cluster" if c.two_cta else "cta"
                cute.arch.fence_proxy("async.shared", space=space)
                self.hand_over(bars.ds_full)
                self.epilogue.release_block(bars, r)
                q_count += 1
            if count > 0:
                self.score_grads.flush(tile, sums)
            else:
                self.epilogue.wait_last_tile(bars, kv_count, True)
            if const_expr(not c.accumulate):
                target = GradTarget(
                    atoms, tiles, views, smem_dv, tmem_warp, (kv_rows, h, b, part), wg, row,
                    count, p.scale,
                )  # fmt: skip
                for ready, blocks in self.epilogue.gradient_blocks(bars):
                    if count > 0:
                        cute.arch.mbarrier_wait(ready, acc_count & 1)
                        fence_after()
                    self.epilogue.store(target, blocks)
                    fence_before()
                    self.epilogue.release_v(bars, blocks)
                if count > 0:
                    acc_count += 1
            else:  # the reduce warpgroup adds dK and dV
                self.epilogue.release_v(bars, range(1))
            self.epilogue.release_tile(bars)
            kv_count += 1
            cute.arch.mbarrier_wait(bars.k_full, kv_count & 1)
            valid = info[self.group.record(kv_count) + WorkTile.VALID]
        if warp % WARPS == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    def write_ds(self, start: Int32, row: Int32, row0: Int32, at: int, packed: Any) -> None:
        """Write eight elements of dS^T to shared memory; in a pair, of the CTA that has their rows.

        Args:
            start: shared address of dS^T.
            row: kv position within the CTA's 128.
            row0: the thread's first row of the q block.
            at: first of the eight rows, counted from `row0`.
            packed: four pairs of the dtype.
        """
        c = self.config
        if c.two_cta:
            vector, column = Int32(at // 8), self.group.rank() * c.rows_kv + row
            place = device.swizzled_address(start, c.ctas * c.rows_kv, column, vector, Int32(0))
            # the rows of each compute warpgroup belong to one CTA
            device.write_remote(device.remote_address(place, row0 // HALF), packed)
        else:
            vector = row0 + at  # rows of a q block are columns of the tile in shared memory
            place = device.swizzled_address(start, c.rows_kv, row, (vector >> 3) & 7, vector >> 6)
            device.write_shared(place, packed)

    def hand_over(self, barrier: cute.Pointer) -> None:
        """Arrive at `barrier` once per warp, after the writes that the MMAs read."""
        device.wait_stores()
        fence_before()
        cute.arch.sync_warp()
        self.group.arrive_leader(barrier)
