"""Describe the CTAs that compute MMAs together: a single CTA, or a pair with a leader."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, const_expr, cute

from attnkit.templates.sm100 import device


@dataclass(frozen=True)
class CtaGroup:
    """Describes one CTA, or a pair with joint MMAs (`tcgen05` with `cta_group::2`).

    The first CTA of a pair is the leader: it issues the MMAs of both CTAs and waits for their
    operands.

    Attributes:
        two_cta: whether the group is a pair.
    """

    two_cta: bool

    @property
    def size(self) -> int:
        """Return the number of CTAs in the group."""
        return 2 if self.two_cta else 1

    def rank(self) -> Int32:
        """Return the rank of this CTA in the group; 0 is the leader."""
        if not self.two_cta:
            return Int32(0)
        cta, _, _ = cute.arch.block_idx()
        return cta & 1

    def query_tile(self, t: int | Int32) -> Int32:
        """Return the index in the work tile of this CTA's `t`-th query tile."""
        return self.size * t + self.rank()

    def arrive_leader(self, barrier: cute.Pointer) -> None:
        """Arrive, once per warp, at the leader's barrier."""
        (device.arrive_first if self.two_cta else device.arrive)(barrier)

    def commit(self, barrier: cute.Pointer) -> None:
        """Arrive in every CTA of the group once all MMAs issued so far are complete."""
        (device.commit_pair if self.two_cta else device.commit)(barrier)

    @cute.jit
    def expect_bytes(self, barrier: cute.Pointer, size: cutlass.Constexpr):
        """Arrive at the leader's barrier and expect the bytes that the whole group loads."""
        if const_expr(not self.two_cta):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
        elif self.rank() == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)

    def sync(self) -> None:
        """Synchronise all threads of all CTAs in the group."""
        if self.two_cta:
            # the cluster barrier does not order tensor memory by itself
            device.fence_before()
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            device.fence_after()
        else:
            cute.arch.sync_threads()
