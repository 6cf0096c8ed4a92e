"""Cluster launch control: CTAs that run take the places of those that were not launched yet.

The grid has a CTA, or a pair of them, for each work tile. One that works on a tile asks for the next:
the hardware then never launches the CTAs of that tile, and answers with their number, or with a
refusal, after which nothing may be asked (PTX ISA, clusterlaunchcontrol).
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
        group: the CTAs that work on a tile.
        full: the answer is there, in every CTA of a pair.
        ready: the second CTA of a pair has read the answer before, and expects this one.
        response: where the answer comes to.
    """

    group: CtaGroup
    full: cute.Pointer
    ready: cute.Pointer
    response: cute.Pointer

    @cute.jit
    def ask(self, tile_idx: Int32):
        """Ask for the work tile after this CTA's tile_idx-th."""
        two_cta = self.group.two_cta
        if const_expr(two_cta):
            if self.group.rank() == 0:
                # the answer overwrites the one before in both CTAs
                cute.arch.mbarrier_wait(self.ready, tile_idx & 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full, RESPONSE_BYTES)
            if self.group.rank() == 0:
                cute.arch.issue_clc_query(self.full, self.response, multicast=two_cta)
            elif const_expr(two_cta):
                cute.arch.mbarrier_arrive(self.ready, Int32(0), scope=MemScopeKind.CLUSTER)

    def fetch(self, tile_idx: Int32, end: Int32) -> Int32:
        """Wait for the answer: the number of the next work tile, `end` where none is left."""
        cute.arch.mbarrier_wait(self.full, tile_idx & 1)
        first, _, _, valid = cute.arch.clc_response(self.response)
        # order this read before the next answer, which the async proxy writes
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        return cutlass.select_(valid != 0, first // self.group.size, end)
