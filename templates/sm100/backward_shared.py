"""What the roles of the Blackwell backward share: warps, ids, words in shared memory, the problem's sizes.

Ids, counts and words have their one definition here.
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

# Roles of the 16 warps: warpgroup 0 adds to sums, 1 and 2 compute, then the warp of the products
# and the producer; the last two warps have none.
WARPGROUP = 128  # threads
WARPS = 4  # of a warpgroup
COMPUTE_WARP, MMA_WARP, PRODUCER_WARP = 4, 12, 13  # the first warps of the roles
REDUCE_WARPS, COMPUTE_WARPS = COMPUTE_WARP, MMA_WARP - COMPUTE_WARP

HALF = 64  # rows of a q block, or columns of a head, of a CTA of a pair


class NamedBarrier(IntEnum):
    """Ids of bar.sync; 0 is __syncthreads. Threads: `WARPGROUP`."""

    DQ_REDUCE = 1
    EPILOGUE = 2  # add the number of the compute warpgroup


class Word:
    """Where things begin among the int32 words in shared memory.

    The words of the q blocks are at 0, one a stage, and the records at `RECORD`.
    """

    NEXT_ITEM = RECORD + 16  # 2 CTAs: row of the work list that comes next, four times
    COUNT = RECORD + 8
    COUNT_2CTA = NEXT_ITEM + 4


RECORD_STRIDE = 8  # of the two records of a pair


@dataclass(frozen=True)
class SmemRows:
    """What shared memory has of q blocks, besides operands.

    Attributes:
        lse, delta: f32 [words of the rows, stages], see `LseInMma.layouts`.
        info: int32 words, see `Word`.
    """

    lse: cute.Tensor
    delta: cute.Tensor
    info: cute.Tensor


class Group:
    """The CTAs of a work tile: one, or a pair whose first CTA issues the products of both.

    Args:
        config: its `two_cta` says which.
    """

    def __init__(self, config: BackwardConfig) -> None:
        self.two_cta = config.two_cta
        self._ctas = CtaGroup(config.two_cta)

    def rank(self) -> Any:
        """Return which CTA of the group this is."""
        return self._ctas.rank()

    def kv_rows(self, kv_block: Any) -> Any:
        """Return which 128 kv positions of a kv block of the work list are this CTA's."""
        return 2 * kv_block + self.rank() if self.two_cta else kv_block

    def record(self, count: Any) -> Any:
        """Return the word at which the record of the count-th work tile begins.

        A pair has two records in turns, as K of the next work tile comes early.
        """
        return RECORD + RECORD_STRIDE * (count & 1) if self.two_cta else RECORD

    def arrive_leader(self, barrier: cute.Pointer) -> None:
        """Arrive once a warp at a barrier of the CTA that issues the products; orders nothing."""
        if self.two_cta:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barrier, Int32(0), scope=MemScopeKind.CLUSTER)
        else:
            device.arrive(barrier)


def q_stage(c: BackwardConfig, count: Any) -> Any:
    """Return the stage of the count-th q block in the ring of Q."""
    return count & (c.q_stages - 1)


def q_phase(c: BackwardConfig, count: Any) -> Any:
    """Return the parity of the count-th q block's round of the ring of Q."""
    return (count >> (c.q_stages.bit_length() - 1)) & 1


def do_stage(c: BackwardConfig, count: Any) -> Any:
    """Return the stage of the count-th q block in the ring of dO."""
    return count & (c.stages - 1)


def do_phase(c: BackwardConfig, count: Any) -> Any:
    """Return the parity of the count-th q block's round of the ring of dO."""
    return (count >> (c.stages.bit_length() - 1)) & 1
