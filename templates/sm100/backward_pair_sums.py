"""How a pair of CTAs adds its dQ: each half of the rows, in two parts."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from attnkit.templates.sm100 import backward_device as device
from attnkit.templates.sm100.backward_config import SLICE
from attnkit.templates.sm100.backward_sums import OWN

HALF = 64  # rows of a q tile, or columns of a head, of a CTA


class PairSums:
    """The part of `PairBackward` that differs from `Sums`, which the class has as well."""

    config: Any
    rank: Any
    reduce_slice: Any
    signal: Any
    write_row: Any

    def add_block(self, place: Any, lanes: Any, which: Any, kc: Any, bars: Any) -> None:
        """Add the CTA's half of a block's dQ."""
        c, (tile, _), (dq_full, dq_free) = self.config, which, bars
        thread = place[3]
        self.await_slots(thread)
        cute.arch.barrier(barrier_id=OWN, number_of_threads=128)
        cute.arch.mbarrier_wait(dq_full, kc & 1)
        device.fence_after()
        start = Int64(2 * tile + self.rank()) * (HALF * c.width)
        parts = c.dq_width // SLICE
        for part in range(parts):
            values = device.load(lanes + (c.dq_column + part * SLICE), SLICE)
            if part == parts - 1:
                device.fence_before()
                cute.arch.sync_warp()
                self.signal(dq_free)
            self.send_part(place, values, start, part)

    @cute.jit
    def await_slots(self, thread: Int32):
        """Wait until all slots have been read."""
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def send_part(self, place: Any, values: Any, start: Any, part: int) -> None:
        """Add two slices of 64 rows, one of the first and one of the last 64 columns."""
        outgoing, sums, _, thread, lane, warp = place
        slice_size = SLICE * HALF
        slot = outgoing + 2 * part * slice_size
        row = (warp % 2) * device.LANES + lane
        self.write_row(slot + (warp // 2) * slice_size, values, row, HALF)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=OWN, number_of_threads=128)
        self.reduce_two(slot, sums.iterator + start, thread, part)

    @cute.jit
    def reduce_two(self, slot: cute.Pointer, target: cute.Pointer, thread: Int32, part: int):
        """Bulk reductions of two slices, as one group."""
        if thread == 0:
            for half in cutlass.range_constexpr(2):
                at = (2 * half + part) * SLICE * HALF
                self.reduce_slice(slot + half * SLICE * HALF, target + at, HALF)
            cute.arch.cp_async_bulk_commit_group()
