"""Cluster launch control: CTAs that run take the places of those that were not launched yet.

The grid has a CTA, or a pair of them, for each piece of work. One that works on a piece asks for the
next: the hardware then never launches the CTAs of that piece, and answers with their number, or with
a refusal, after which nothing may be asked (PTX ISA, clusterlaunchcontrol).
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute
from cutlass._mlir.dialects.nvvm import MemScopeKind


class Claims:
    """What the warp that loads does in a kernel with work="clc"."""

    config: Any
    rank: Any

    @cute.jit
    def ask(self, claim: tuple, tc: Int32):
        """Ask for the piece after the tc-th; the answer comes to every CTA of a pair.

        Args:
            claim: barrier of the answer; barrier where the second CTA of a pair says that it has
                read the answer before and expects this one; place of the answer.
            tc: pieces of this CTA so far.
        """
        granted, expected, answer = claim
        pair = self.config.pair
        if const_expr(pair):
            if self.rank() == 0:
                cute.arch.mbarrier_wait(expected, tc & 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(granted, 16)
            if self.rank() == 0:
                cute.arch.issue_clc_query(granted, answer, multicast=pair)
            elif const_expr(pair):
                cute.arch.mbarrier_arrive(expected, Int32(0), scope=MemScopeKind.CLUSTER)

    def next_piece(self, claim: tuple, tc: Any, total: Any) -> Any:
        """The number of the piece that was given, `total` where none was left."""
        granted, _, answer = claim
        cute.arch.mbarrier_wait(granted, tc & 1)
        first, _, _, given = cute.arch.clc_response(answer)
        cute.arch.fence_proxy("async.shared", space="cta")  # before the next answer
        cute.arch.sync_warp()
        return cutlass.select_(given != 0, first // (2 if self.config.pair else 1), total)
