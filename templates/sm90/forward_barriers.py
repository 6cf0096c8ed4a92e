"""Define the named barriers and mbarriers of the Hopper forward kernel."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from cutlass import Int32, cute

from attnkit.templates.common.constants import ONE_ARRIVAL
from attnkit.templates.sm90.config import (
    WARP_THREADS,
    WARPGROUP_THREADS,
    ForwardConfig,
)


class NamedBarrier(IntEnum):
    """IDs of the warpgroups' named barriers (`bar.sync`); 0 is the barrier of the whole CTA."""

    PINGPONG_WG0 = 1  # the warpgroup may issue its MMAs
    PINGPONG_WG1 = 2
    PINGPONG_WG2 = 3
    EPILOGUE_WG0 = 5  # for the warpgroup's output tile in shared memory
    EPILOGUE_WG1 = 6
    EPILOGUE_WG2 = 7


PINGPONG_THREADS = 2 * WARPGROUP_THREADS  # the waiting warpgroup and the arriving one
EPILOGUE_THREADS = WARPGROUP_THREADS


@dataclass(frozen=True)
class Pipeline:
    """Describes a ring of stages in shared memory, with a full and an empty mbarrier per stage.

    A position counts all uses of the ring: position i uses stage i % stages.

    Attributes:
        full, empty: the barriers of stage 0; those of the other stages follow.
        stages: a power of two.
    """

    full: cute.Pointer
    empty: cute.Pointer
    stages: int

    def stage(self, position: Int32) -> Int32:
        """Return the stage that a position uses."""
        return position & (self.stages - 1)

    def phase(self, position: Int32) -> Int32:
        """Return the parity to wait for on `full` at a position; `empty` uses the opposite one."""
        return (position >> (self.stages.bit_length() - 1)) & 1

    def wait_full(self, position: Int32) -> Int32:
        """Wait until the stage of a position is full, and return the stage."""
        stage = self.stage(position)
        cute.arch.mbarrier_wait(self.full + stage, self.phase(position))
        return stage

    def wait_empty(self, position: Int32) -> Int32:
        """Wait until the previous use of a position's stage was released, and return the stage."""
        stage = self.stage(position)
        cute.arch.mbarrier_wait(self.empty + stage, self.phase(position) ^ 1)
        return stage


@dataclass(frozen=True)
class ForwardBarriers:
    """Holds the mbarriers of a CTA as pipelines.

    Attributes:
        work: one stage, the next work tile. Full: its words are in shared memory. Empty: every lane
            of the producer warp, and of the warps that copy the bias, has read them.
        q: query tiles. Full: Q has arrived, and the work tile's record is written. Empty: every
            consumer warp has finished the last Q K of the tile.
        k: K blocks. Full: K has arrived, and the block's number is written. Empty: the consumers
            have read both.
        v: V blocks. Full: V has arrived. Empty: every consumer warp has finished P V.
        biases: for each consumer warpgroup, its tiles of the bias; none without them. Full: every
            lane's copies have arrived. Empty: every lane of the warpgroup has read the tile.
        posted: for each K stage, whether the block's number is written; None without
            `columns_in_mma`. The terms of the block's columns are then written, too, when K is full.
    """

    work: Pipeline
    q: Pipeline
    k: Pipeline
    v: Pipeline
    biases: tuple[Pipeline, ...] = ()
    posted: cute.Pointer | None = None

    @staticmethod
    def count(config: ForwardConfig) -> int:
        """Return the number of mbarriers: a full and an empty one for each stage, and `posted`."""
        biases = config.warpgroups * config.bias_stages
        posted = config.stages if config.columns_in_mma else 0
        return 2 * (1 + config.q_stages + 2 * config.stages + biases) + posted

    @classmethod
    def at(cls, base: cute.Pointer, config: ForwardConfig) -> ForwardBarriers:
        """Return the mbarriers, laid out in shared memory from address `base`."""
        rings = []
        biases = (config.bias_stages,) * (config.warpgroups if config.bias_stages else 0)
        for stages in (1, config.q_stages, config.stages, config.stages, *biases):
            rings.append(Pipeline(base, base + stages, stages))
            base = base + 2 * stages
        work, q, k, v, *tiles = rings
        posted = base if config.columns_in_mma else None
        return cls(work, q, k, v, tuple(tiles), posted)

    def bias(self, warpgroup: Int32) -> Pipeline:
        """Return the ring of the bias of consumer warpgroup `warpgroup`."""
        first = self.biases[0]
        step = 2 * first.stages * warpgroup
        return Pipeline(first.full + step, first.empty + step, first.stages)

    def init(self, config: ForwardConfig) -> None:
        """Initialise the mbarriers with their arrival counts; called by one thread."""
        # The emulator's reports name a barrier by the argument of the call named `mbarrier_init`.
        mbarrier_init = cute.arch.mbarrier_init
        warps = config.consumer_warps
        mbarrier_init(self.work.full, ONE_ARRIVAL)
        readers = 1 + len(self.biases)  # warps that read the work tile: producer, bias copiers
        mbarrier_init(self.work.empty, readers * WARP_THREADS)
        for s in range(self.q.stages):
            mbarrier_init(self.q.full + s, ONE_ARRIVAL)
            mbarrier_init(self.q.empty + s, warps)
        for s in range(self.k.stages):
            mbarrier_init(self.k.full + s, ONE_ARRIVAL + (self.posted is not None))
            mbarrier_init(self.v.full + s, ONE_ARRIVAL)
            # see `ForwardMma.release_k`
            mbarrier_init(self.k.empty + s, warps if config.chained else warps * WARP_THREADS)
            mbarrier_init(self.v.empty + s, warps)
            if self.posted is not None:
                mbarrier_init(self.posted + s, ONE_ARRIVAL)
        for ring in self.biases:
            for s in range(ring.stages):
                mbarrier_init(ring.full + s, WARP_THREADS)
                mbarrier_init(ring.empty + s, WARPGROUP_THREADS)


def pingpong_wait(warpgroup: Int32) -> None:
    """Wait until the previous warpgroup has issued its MMAs."""
    cute.arch.barrier(
        barrier_id=NamedBarrier.PINGPONG_WG0 + warpgroup, number_of_threads=PINGPONG_THREADS
    )


def pingpong_pass(warpgroup: Any) -> None:
    """Signal `warpgroup` that it may issue its MMAs."""
    cute.arch.barrier_arrive(
        barrier_id=NamedBarrier.PINGPONG_WG0 + warpgroup, number_of_threads=PINGPONG_THREADS
    )


def epilogue_sync(warpgroup: Int32) -> None:
    """Synchronise all threads of `warpgroup` on its epilogue barrier."""
    cute.arch.barrier(
        barrier_id=NamedBarrier.EPILOGUE_WG0 + warpgroup, number_of_threads=EPILOGUE_THREADS
    )
