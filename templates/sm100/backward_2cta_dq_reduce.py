"""Add dQ of a CTA pair to its sums: each CTA adds half of the rows, in two parts.

In deterministic mode a CTA waits for its turn after it has read both parts from tensor memory, so
that MMAs do not wait for turns. Each CTA has its own turns.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from attnkit.templates.sm100 import backward_device as device
from attnkit.templates.sm100.backward_config import SLICE
from attnkit.templates.sm100.backward_dq_reduce import DqReduce, SumTarget
from attnkit.templates.sm100.backward_shared import HALF
from attnkit.templates.sm100.device import fence_after, fence_before


class DqReduce2Cta(DqReduce):
    """Adds dQ, and shared dK and dV, of a CTA of a pair to their sums."""

    def release_tile(self, bars: Any) -> None:
        """Release a work tile, and its accumulators in the first CTA, with one arrival per warp."""
        super().release_tile(bars)
        self.group.arrive_leader(bars.epilogue_done)

    def add_block(
        self,
        target: SumTarget,
        place: tuple[Int32, Any],
        turn: Int32,
        count: Int32,
        bars: Any,
    ) -> None:
        """Add this CTA's half of the rows of a q block's dQ to the sums."""
        c, (tile, _) = self.config, place
        self.wait_slots(target.thread)
        self.sync()
        cute.arch.mbarrier_wait(bars.dq_full, count & 1)
        fence_after()
        half_tile = 2 * tile + self.group.rank()
        start = Int64(half_tile) * (HALF * c.head_dim)
        parts = c.dq_width // SLICE
        for part in range(parts):
            # f32 [32]: 32 columns of the thread's row
            values = device.load(target.tmem + (c.dq_column + part * SLICE), SLICE)
            if part == parts - 1:
                # dQ has been read from tensor memory: MMAs may overwrite it
                fence_before()
                cute.arch.sync_warp()
                self.group.arrive_leader(bars.dq_empty)
            self.write_part(target, values, part)
            if not c.sum_order:
                self.add_parts(target, start, range(part, part + 1))
        if c.sum_order:
            self.sync()
            self.wait_turn(target, half_tile, turn)
            self.add_parts(target, start, range(parts))
            self.pass_turn(target, half_tile, 2 * tile, (turn, Int32(-1)))

    @cute.jit
    def wait_slots(self, thread: Int32):
        """Wait until the bulk reductions have read all slots."""
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def write_part(self, target: SumTarget, values: Any, part: int) -> None:
        """Write two slices of 64 rows to shared memory, of the first and the last 64 columns."""
        slice_size = SLICE * HALF
        row = (target.warp % 2) * device.LANES + target.lane
        slot = target.staging + (2 * part + target.warp // 2) * slice_size
        self.write_row(slot, values, row, HALF)
        # bulk reductions read shared memory by the async proxy
        cute.arch.fence_proxy("async.shared", space="cta")
        if not self.config.sum_order:
            self.sync()

    def add_parts(self, target: SumTarget, start: Int64, parts: range) -> None:
        """Add `parts` in shared memory to the sums, by bulk reductions.

        `start` is the float offset of the tile in the sums.
        """
        to = target.sums.iterator + start
        self.reduce_parts(target.staging, to, target.thread, parts[0], parts[-1])

    @cute.jit
    def reduce_parts(
        self,
        staging: cute.Pointer,
        target: cute.Pointer,
        thread: Int32,
        first: cutlass.Constexpr,
        last: cutlass.Constexpr,
    ):
        """Issue the bulk reductions of parts `first` to `last`, two slices each, as one group."""
        size = SLICE * HALF
        if thread == 0:
            for part in cutlass.range_constexpr(first, last + 1):
                for half in cutlass.range_constexpr(2):
                    slot = staging + (2 * part + half) * size
                    self.reduce_slice(slot, target + (2 * half + part) * size, HALF)
            cute.arch.cp_async_bulk_commit_group()
