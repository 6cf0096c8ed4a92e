"""What the warps of the Blackwell forward have in common: places, parities, records, arrivals."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute

from attnkit.templates.sm100 import device

RECORD, RECORDS = 8, 2  # int32 words of a record, and how many there are
# Numbers of blocks on their way to the softmax. When the load of a block of K begins, the softmax
# is done with all but the last `MAX_STAGES // 2` blocks before it: their V has left the ring, or K
# of the block after theirs.
NOTES = 8


class ForwardCommon:
    """The part of a forward kernel that the others build on."""

    config: Any
    dtype: Any

    def buffer(self, t: Any, kc: Any) -> Any:
        """Which of the two places of S, and so of P, the kc-th block of query tile t takes."""
        return t if self.config.q_tiles == 2 else kc & 1

    def turn(self, kc: Any) -> Any:
        """The parity of its use by that block."""
        return kc & 1 if self.config.q_tiles == 2 else (kc >> 1) & 1

    def rank(self) -> Any:
        """Which CTA of a pair this is; 0 without pairs."""
        if not self.config.pair:
            return Int32(0)
        cta, _, _ = cute.arch.block_idx()
        return cta & 1

    def tile_of(self, t: Any) -> Any:
        """Which of the query tiles of a piece of work is this CTA's t-th."""
        return self.config.ctas * t + self.rank()

    def signal(self, barrier: Any) -> None:
        """An arrival a warp where the products are issued."""
        (device.arrive_first if self.config.pair else device.arrive)(barrier)

    def commit(self, barrier: Any) -> None:
        """An arrival, in every CTA of the products, once all that were issued so far are done."""
        (device.commit_pair if self.config.pair else device.commit)(barrier)

    def see_record(self, records: Any, bars: Any, tc: Any) -> list[Any]:
        """Wait for the record of the tc-th piece and read it."""
        r = tc & (RECORDS - 1)
        cute.arch.mbarrier_wait(bars[0] + r, (tc >> 1) & 1)
        return [cute.arch.make_warp_uniform(records[RECORD * r + k]) for k in range(7)]

    def drop_record(self, bars: Any, tc: Any) -> None:
        """Let the record of the tc-th piece go."""
        device.arrive(bars[1] + (tc & (RECORDS - 1)))

    def read_record(self, records: Any, bars: Any, tc: Any) -> list[Any]:
        """Wait for the record of the tc-th piece, read it and let it go."""
        words = self.see_record(records, bars, tc)
        self.drop_record(bars, tc)
        return words

    def next_slot(self, slot: Any, lap: Any) -> tuple[Any, Any]:
        """The ring's slot after this one, and the parity of its lap."""
        last = slot == self.config.stages - 1
        return cutlass.select_(last, Int32(0), slot + 1), cutlass.select_(last, lap ^ 1, lap)

    @cute.jit
    def expect(self, barrier: cute.Pointer, size: cutlass.Constexpr):
        """Announce so many bytes, where the products wait for them."""
        if const_expr(not self.config.pair):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
        elif self.rank() == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
