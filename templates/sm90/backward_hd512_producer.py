"""Claim work tiles for a pair of CTAs and load each CTA's columns of their blocks."""

from __future__ import annotations

from cutlass import Int32, cute
from cutlass._mlir.dialects.nvvm import MemScopeKind

from attnkit.templates.sm90.backward_hd512_config import CTAS
from attnkit.templates.sm90.backward_hd512_shared import PairLoadBarriers, wait_for_other_cta
from attnkit.templates.sm90.backward_producer import Producer
from attnkit.templates.sm90.backward_shared import Word

FIRST, SECOND = 0, 1  # ranks of the CTAs in their cluster


class PairProducer(Producer):
    """Runs the producer warp of a CTA; both CTAs iterate over the same blocks."""

    @cute.jit
    def claim(
        self,
        counter: cute.Tensor,
        total: Int32,
        count: Int32,
        info: cute.Tensor,
        bars: PairLoadBarriers,
    ):
        """Claim the pair's next work tile in the first CTA, and pass it to the second.

        Args:
            counter: counter of the work list.
            total: rows of the work list.
            count: number of the pair's earlier claims.
            info: int32 words in shared memory.
            bars: mbarriers.
        """
        ctas, _, _ = cute.arch.grid_dim()
        lane, index = cute.arch.lane_idx(), Int32(0)
        if cute.arch.block_idx_in_cluster() == FIRST:
            wait_for_other_cta(bars.item_empty, (count & 1) ^ 1)
            if lane == 0:
                index = cute.arch.atomic_add(counter.iterator, Int32(1))
                if index == total + ctas // CTAS - 1:  # the last claim resets the counter
                    cute.arch.store(counter.iterator, Int32(0), sem="relaxed", scope="gpu")
                place = info.iterator + Word.NEXT_ITEM
                cute.arch.store_async_dsmem(place, index, bars.item_full, SECOND)
            index = cute.arch.shuffle_sync(index, 0)
        else:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bars.item_full, 4)
            wait_for_other_cta(bars.item_full, count & 1)
            index = info[Word.NEXT_ITEM]
            cute.arch.sync_warp()  # all lanes have read the index before the next one is written
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars.item_empty, FIRST, scope=MemScopeKind.CLUSTER)
        return index
