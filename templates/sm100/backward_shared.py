"""Define what the warp roles of the Blackwell backward share: warps, barrier IDs, words of records.

IDs, counts and word offsets are defined only here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from cutlass import Int32, cute
from cutlass._mlir.dialects.nvvm import MemScopeKind

from attnkit.templates.common import device
from attnkit.templates.common.work_tile import RECORD, WorkTile
from attnkit.templates.sm100.backward_config import CHUNK_STAGES, BackwardConfig
from attnkit.templates.sm100.cta_group import CtaGroup

# Roles of the 16 warps: warpgroup 0 adds to sums, 1 and 2 compute, then come the MMA warp and the
# producer; the last two warps have no role.
WARPGROUP = 128  # threads
WARPS = 4  # warps per warpgroup
COMPUTE_WARP, MMA_WARP, PRODUCER_WARP = 4, 12, 13  # the first warps of the roles
REDUCE_WARPS, COMPUTE_WARPS = COMPUTE_WARP, MMA_WARP - COMPUTE_WARP

HALF = 64  # rows of a q block, or columns of a head, per CTA of a pair


class NamedBarrier(IntEnum):
    """IDs of the named barriers (bar.sync); 0 is __syncthreads. Each has `WARPGROUP` threads."""

    DQ_REDUCE = 1
    EPILOGUE = 2  # add the index of the compute warpgroup


class Word:
    """Offsets of regions of int32 words in shared memory.

    The words of the q blocks begin at 0, one per stage, and the records at `RECORD`.
    """

    NEXT_ITEM = RECORD + 16  # CTA pair: four copies of the index of the next work tile
    COUNT = RECORD + 8
    COUNT_2CTA = NEXT_ITEM + 4


RECORD_STRIDE = 8  # words between the two records that a CTA pair alternates


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
        config: its `two_cta` says whether the group is a pair.
    """

    def __init__(self, config: BackwardConfig) -> None:
        self.two_cta = config.two_cta
        self.column_parts = config.column_parts
        self._ctas = CtaGroup(config.two_cta)

    def rank(self) -> Int32:
        """Return the rank of this CTA in the group; rank 0 issues the MMAs."""
        return self._ctas.rank()

    def kv_rows(self, kv_block: Int32) -> Int32:
        """Return the index of this CTA's tile of 128 kv positions in kv block `kv_block`."""
        return 2 * kv_block + self.rank() if self.two_cta else kv_block

    def column_part(self, info: Any, count: Int32) -> Any:
        """Return which part of the gradients' columns the `count`-th work tile computes.

        It is the int 0 if a work tile computes all columns.

        Args:
            info: int32 words in shared memory.
            count: index of the work tile.
        """
        if self.column_parts == 1:
            return 0
        return info[self.record(count) + WorkTile.COLUMN_PART]

    def record(self, count: Int32) -> Any:
        """Return the index of the first record word of the `count`-th work tile.

        A pair alternates between two records, because K of the next work tile is loaded early.
        """
        return RECORD + RECORD_STRIDE * (count & 1) if self.two_cta else RECORD

    def arrive_leader(self, barrier: cute.Pointer) -> None:
        """Arrive once per warp at a barrier of the CTA that issues the MMAs.

        The arrival does not order the accesses of the warp's other lanes.
        """
        if self.two_cta:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barrier, Int32(0), scope=MemScopeKind.CLUSTER)
        else:
            device.arrive(barrier)


def q_stage(c: BackwardConfig, count: Int32) -> Int32:
    """Return the stage of the `count`-th q block in the Q ring."""
    return count & (c.q_stages - 1)


def chunk_phase(c: BackwardConfig, count: Int32, position: int) -> Int32:
    """Return the parity to wait for on the full barrier of a chunk of the `count`-th q block.

    Args:
        c: compile-time configuration, with `streamed`.
        count: index of the q block in the CTA.
        position: index among the chunks of the q block; its stage is `position % CHUNK_STAGES`.
    """
    laps = 2 * c.chunks // CHUNK_STAGES  # of the ring in each q block
    return (count * laps + position // CHUNK_STAGES) & 1


def q_phase(c: BackwardConfig, count: Int32) -> Int32:
    """Return the parity to wait for on the full barrier of the `count`-th q block."""
    return (count >> (c.q_stages.bit_length() - 1)) & 1


def do_stage(c: BackwardConfig, count: Int32) -> Int32:
    """Return the stage of the `count`-th q block in the dO ring."""
    return count & (c.stages - 1)


def do_phase(c: BackwardConfig, count: Int32) -> Int32:
    """Return the parity to wait for on the dO full barrier of the `count`-th q block."""
    return (count >> (c.stages.bit_length() - 1)) & 1
