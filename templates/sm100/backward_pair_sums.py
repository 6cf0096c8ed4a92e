"""How a pair of CTAs adds its dQ: each half of the rows, in two parts.

In a fixed order of sums a turn is waited for after both parts have left tensor memory, so that the
products run ahead of it; each CTA has turns of its own.
"""

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
    pass_turn: Any
    rank: Any
    reduce_slice: Any
    signal: Any
    take_turn: Any
    write_row: Any

    def add_block(self, place: Any, lanes: Any, which: Any, kc: Any, bars: Any) -> None:
        """Add the CTA's half of a block's dQ."""
        c, (tile, turn), (dq_full, dq_free) = self.config, which, bars
        turns, thread = place[2:4]
        self.await_slots(thread)
        cute.arch.barrier(barrier_id=OWN, number_of_threads=128)
        cute.arch.mbarrier_wait(dq_full, kc & 1)
        device.fence_after()
        own = 2 * tile + self.rank()
        start = Int64(own) * (HALF * c.width)
        parts = c.dq_width // SLICE
        for part in range(parts):
            values = device.load(lanes + (c.dq_column + part * SLICE), SLICE)
            if part == parts - 1:
                device.fence_before()
                cute.arch.sync_warp()
                self.signal(dq_free)
            self.write_part(place, values, part)
            if not c.turns:
                self.send_parts(place, start, range(part, part + 1))
        if c.turns:
            cute.arch.barrier(barrier_id=OWN, number_of_threads=128)
            self.take_turn(turns, own, turn, thread)
            self.send_parts(place, start, range(parts))
            self.pass_turn(turns, own, 2 * tile, (turn, Int32(-1)), thread)

    @cute.jit
    def await_slots(self, thread: Int32):
        """Wait until all slots have been read."""
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def write_part(self, place: Any, values: Any, part: int) -> None:
        """Two slices of 64 rows to shared memory, one of the first and one of the last 64 columns."""
        outgoing, _, _, _, lane, warp = place
        slice_size = SLICE * HALF
        row = (warp % 2) * device.LANES + lane
        slot = outgoing + (2 * part + warp // 2) * slice_size
        self.write_row(slot, values, row, HALF)
        cute.arch.fence_proxy("async.shared", space="cta")
        if not self.config.turns:
            cute.arch.barrier(barrier_id=OWN, number_of_threads=128)

    def send_parts(self, place: Any, start: Any, parts: range) -> None:
        """Add these parts, that are in shared memory, to the sums from float `start` on."""
        outgoing, sums, _, thread, _, _ = place
        self.reduce_parts(outgoing, sums.iterator + start, thread, parts[0], parts[-1])

    @cute.jit
    def reduce_parts(
        self,
        outgoing: cute.Pointer,
        target: cute.Pointer,
        thread: Int32,
        first: cutlass.Constexpr,
        last: cutlass.Constexpr,
    ):
        """Bulk reductions of two slices a part, as one group."""
        size = SLICE * HALF
        if thread == 0:
            for part in cutlass.range_constexpr(first, last + 1):
                for half in cutlass.range_constexpr(2):
                    slot = outgoing + (2 * part + half) * size
                    self.reduce_slice(slot, target + (2 * half + part) * size, HALF)
            cute.arch.cp_async_bulk_commit_group()
