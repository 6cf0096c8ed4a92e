"""Define what the roles of the Blackwell backward share: warps, barrier ids, words of records.

Every id, count and word is defined here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from cutlass import Int32, cute
from cutlass._mlir.dialects.nvvm import MemScopeKind

from attnkit.templates.common import device
from attnkit.templates.common.work_tile import RECORD
from attnkit.templates.sm100.backward_config import BackwardConfig
from attnkit.templates.sm100.cta_group import CtaGroup

# Roles of the 16 warps: warpgroup 0 adds to sums, 1 and 2 compute, then the MMA warp and the
# producer; the last two warps have none.
WARPGROUP = 128  # threads
WARPS = 4  # of a warpgroup
COMPUTE_WARP, MMA_WARP, PRODUCER_WARP = 4, 12, 13  # the first warps of the roles
REDUCE_WARPS, COMPUTE_WARPS = COMPUTE_WARP, MMA_WARP - COMPUTE_WARP

HALF = 64  # rows of a q block, or columns of a head, of a CTA of a pair


class NamedBarrier(IntEnum):
    """Numbers the barriers of bar.sync; 0 is __syncthreads. Each has `WARPGROUP` threads."""

    DQ_REDUCE = 1
    EPILOGUE = 2  # add the number of the compute warpgroup


class Word:
    """Numbers the int32 words in shared memory at which each kind of word begins.

    The words of the q blocks begin at 0, one per stage, and the records at `RECORD`.
    """

    NEXT_ITEM = RECORD + 16  # 2 CTAs: four copies of the next row of the work list
    COUNT = RECORD + 8
    COUNT_2CTA = NEXT_ITEM + 4


RECORD_STRIDE = 8  # words from one record of a pair to the other


@dataclass(frozen=True)
class SmemRows:
    """Holds the statistics and words of q blocks in shared memory.

    Attributes:
        lse, delta: f32 [words of the rows, stages], see `LseInMma.layouts`.
        info: int32 words, see `Word`.
    """

    lse: cute.Tensor
    delta: cute.Tensor
    info: cute.Tensor


class Group:
    """Describes the CTAs of a work tile: one, or a pair whose first CTA issues all MMAs.

    Args:
        config: its `two_cta` says whether it is a pair.
    """

    def __init__(self, config: BackwardConfig) -> None:
        self.two_cta = config.two_cta
        self._ctas = CtaGroup(config.two_cta)

    def rank(self) -> Int32:
        """Return the rank of this CTA in the group; 0 issues the MMAs."""
        return self._ctas.rank()

    def kv_rows(self, kv_block: Int32) -> Int32:
        """Return the index of this CTA's 128 kv positions, given a kv block of the work list."""
        return 2 * kv_block + self.rank() if self.two_cta else kv_block

    def record(self, count: Int32) -> Any:
        """Return the word at which the record of the count-th work tile begins.

        A pair alternates between two records, as K of the next work tile is loaded early.
        """
        return RECORD + RECORD_STRIDE * (count & 1) if self.two_cta else RECORD

    def arrive_leader(self, barrier: cute.Pointer) -> None:
        """Arrive once per warp at a barrier of the CTA that issues the MMAs; orders nothing."""
        if self.two_cta:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barrier, Int32(0), scope=MemScopeKind.CLUSTER)
        else:
            device.arrive(barrier)


def q_stage(c: BackwardConfig, count: Int32) -> Int32:
    """Return the stage of the count-th q block in the ring of Q."""
    return count & (c.q_stages - 1)


def q_phase(c: BackwardConfig, count: Int32) -> Int32:
    """Return the parity of the count-th q block's lap of the ring of Q."""
    return (count >> (c.q_stages.bit_length() - 1)) & 1


def do_stage(c: BackwardConfig, count: Int32) -> Int32:
    """Return the stage of the count-th q block in the ring of dO."""
    return count & (c.stages - 1)


def do_phase(c: BackwardConfig, count: Int32) -> Int32:
    """Return the parity of the count-th q block's lap of the ring of dO."""
    return (count >> (c.stages.bit_length() - 1)) & 1
