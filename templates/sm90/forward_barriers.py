"""Name the barriers of the Hopper forward kernel: who waits for whom."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from cutlass import Int32, cute

from attnkit.templates.common.constants import ONE_ARRIVAL
from attnkit.templates.sm90.config import WARP_THREADS, WARPGROUP_THREADS, ForwardConfig


class NamedBarrier(IntEnum):
    """Numbers the named barriers (`bar.sync`) of each warpgroup; 0 is that of the whole CTA."""

    PINGPONG_WG0 = 1  # the warpgroup may issue its products
    PINGPONG_WG1 = 2
    PINGPONG_WG2 = 3
    EPILOGUE_WG0 = 5  # the warpgroup's output tile in shared memory
    EPILOGUE_WG1 = 6
    EPILOGUE_WG2 = 7


PINGPONG_THREADS = 2 * WARPGROUP_THREADS  # the warpgroup that waits and the one that lets it go
EPILOGUE_THREADS = WARPGROUP_THREADS


@dataclass(frozen=True)
class Pipeline:
    """Describes a ring of stages in shared memory, with a full and an empty mbarrier for each.

    Positions count all uses of the ring: use i takes stage i % stages.

    Attributes:
        full, empty: the barriers of stage 0; those of the others follow.
        stages: a power of two.
    """

    full: cute.Pointer
    empty: cute.Pointer
    stages: int

    def stage(self, position: Int32) -> Int32:
        """Return the stage of a position."""
        return position & (self.stages - 1)

    def phase(self, position: Int32) -> Int32:
        """Return the parity of a position's lap, for `full`; `empty` is one lap behind."""
        return (position >> (self.stages.bit_length() - 1)) & 1

    def wait_full(self, position: Int32) -> Int32:
        """Wait until a position is loaded; return its stage."""
        stage = self.stage(position)
        cute.arch.mbarrier_wait(self.full + stage, self.phase(position))
        return stage

    def wait_empty(self, position: Int32) -> Int32:
        """Wait until the previous use of a position's stage was released; return the stage."""
        stage = self.stage(position)
        cute.arch.mbarrier_wait(self.empty + stage, self.phase(position) ^ 1)
        return stage


@dataclass(frozen=True)
class ForwardBarriers:
    """Holds the mbarriers of a CTA.

    Attributes:
        work: one stage, the next work tile. Full: its words are in shared memory. Empty: each lane
            of the producer warp has read them.
        q: query tiles. Full: the bytes of Q, and the work tile's record. Empty: every consumer warp
            is done with the last Q K of the tile.
        k: K blocks. Full: the bytes of K, and the number of the block. Empty: consumers have
            read both.
        v: V blocks. Full: the bytes of V. Empty: every consumer warp is done with P V.
    """

    work: Pipeline
    q: Pipeline
    k: Pipeline
    v: Pipeline

    @staticmethod
    def count(config: ForwardConfig) -> int:
        """Return how many mbarriers there are: a full and an empty one for each stage."""
        return 2 * (1 + config.q_stages + 2 * config.stages)

    @classmethod
    def at(cls, base: cute.Pointer, config: ForwardConfig) -> ForwardBarriers:
        """Place the barriers from an address of shared memory on."""
        rings = []
        for stages in (1, config.q_stages, config.stages, config.stages):
            rings.append(Pipeline(base, base + stages, stages))
            base = base + 2 * stages
        return cls(*rings)

    def init(self, config: ForwardConfig) -> None:
        """Initialise the mbarriers with their arrival counts; one thread calls this."""
        # Reports of the emulator name a barrier by the argument of the call with this name.
        mbarrier_init = cute.arch.mbarrier_init
        warps = config.consumer_warps
        mbarrier_init(self.work.full, ONE_ARRIVAL)
        mbarrier_init(self.work.empty, WARP_THREADS)
        for s in range(self.q.stages):
            mbarrier_init(self.q.full + s, ONE_ARRIVAL)
            mbarrier_init(self.q.empty + s, warps)
        for s in range(self.k.stages):
            mbarrier_init(self.k.full + s, ONE_ARRIVAL)
            mbarrier_init(self.v.full + s, ONE_ARRIVAL)
            # see `ForwardMma.release_k`
            mbarrier_init(self.k.empty + s, warps if config.chained else warps * WARP_THREADS)
            mbarrier_init(self.v.empty + s, warps)


def pingpong_wait(warpgroup: Int32) -> None:
    """Wait until the previous warpgroup has issued its products."""
    cute.arch.barrier(
        barrier_id=NamedBarrier.PINGPONG_WG0 + warpgroup, number_of_threads=PINGPONG_THREADS
    )


def pingpong_pass(warpgroup: Any) -> None:
    """Let a warpgroup issue its products."""
    cute.arch.barrier_arrive(
        barrier_id=NamedBarrier.PINGPONG_WG0 + warpgroup, number_of_threads=PINGPONG_THREADS
    )


def epilogue_sync(warpgroup: Int32) -> None:
    """Synchronise all threads of a warpgroup."""
    cute.arch.barrier(
        barrier_id=NamedBarrier.EPILOGUE_WG0 + warpgroup, number_of_threads=EPILOGUE_THREADS
    )
