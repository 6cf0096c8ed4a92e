"""Fetch work tiles by cluster launch control: running CTAs take over those not launched yet.

The grid has a CTA, or a CTA pair, for each work tile. While it processes a tile it requests the
next one. The hardware cancels the launch of CTAs that have not started and responds with their
index, or it refuses. After a refusal, no request is allowed (PTX ISA, clusterlaunchcontrol).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, const_expr, cute
from cutlass._mlir.dialects.nvvm import MemScopeKind

from attnkit.templates.sm100.cta_group import CtaGroup

RESPONSE_BYTES = 16


@dataclass(frozen=True)
class ClcScheduler:
    """Fetches work tiles for the load warp, in a kernel with work="clc".

    Attributes:
        group: the CTAs that process a work tile.
        full: the response has arrived, in every CTA of a pair.
        ready: the second CTA of a pair has read the last response, and expects the next one.
        response: shared memory of the response, 16 bytes.
    """

    group: CtaGroup
    full: cute.Pointer
    ready: cute.Pointer
    response: cute.Pointer

    @cute.jit
    def ask(self, tile_idx: Int32):
        """Request the work tile that follows this CTA's `tile_idx`-th work tile."""
        two_cta = self.group.two_cta
        if const_expr(two_cta):
            if self.group.rank() == 0:
                # the response overwrites the previous one in both CTAs
                cute.arch.mbarrier_wait(self.ready, tile_idx & 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full, RESPONSE_BYTES)
            if self.group.rank() == 0:
                cute.arch.issue_clc_query(self.full, self.response, multicast=two_cta)
            elif const_expr(two_cta):
                cute.arch.mbarrier_arrive(self.ready, Int32(0), scope=MemScopeKind.CLUSTER)

    def fetch(self, tile_idx: Int32, end: Int32) -> Int32:
        """Wait for the response and return the next work tile's index, `end` if none is left."""
        cute.arch.mbarrier_wait(self.full, tile_idx & 1)
        first, _, _, valid = cute.arch.clc_response(self.response)
        # order this read before the next response, which the async proxy writes
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        return cutlass.select_(valid != 0, first // self.group.size, end)
