"""Define the mbarriers of the Hopper forward for head dims above 256."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute

from attnkit.templates.common.constants import ONE_ARRIVAL
from attnkit.templates.sm90.config import WARP_THREADS
from attnkit.templates.sm90.forward_barriers import ForwardBarriers, Pipeline
from attnkit.templates.sm90.forward_hd512_config import Hd512Config


class Hd512Barriers(ForwardBarriers):
    """Holds the mbarriers of a CTA as pipelines; a stage of `k` and of `v` is a chunk of a block.

    One lane of each consumer warp releases a chunk, after the lanes have met at a warp barrier.
    """

    @staticmethod
    def count_of(config: Hd512Config) -> int:
        """Return the number of mbarriers: a full and an empty one for each stage."""
        return 2 * (1 + config.q_stages + config.k_stages + config.v_stages)

    @classmethod
    def of(cls, base: cute.Pointer, config: Hd512Config) -> Hd512Barriers:
        """Return the mbarriers, laid out in shared memory from address `base`."""
        rings = []
        for stages in (1, config.q_stages, config.k_stages, config.v_stages):
            rings.append(Pipeline(base, base + stages, stages))
            base = base + 2 * stages
        work, q, k, v = rings
        return cls(work, q, k, v)

    def init_all(self, config: Hd512Config) -> None:
        """Initialise the mbarriers with their arrival counts; called by one thread."""
        # The emulator's reports name a barrier by the argument of the call named `mbarrier_init`.
        mbarrier_init = cute.arch.mbarrier_init
        warps = config.consumer_warps
        mbarrier_init(self.work.full, ONE_ARRIVAL)
        mbarrier_init(self.work.empty, WARP_THREADS)
        for s in range(self.q.stages):
            mbarrier_init(self.q.full + s, ONE_ARRIVAL)
            mbarrier_init(self.q.empty + s, warps)
        for s in range(self.k.stages):
            mbarrier_init(self.k.full + s, ONE_ARRIVAL)
            mbarrier_init(self.k.empty + s, warps)
        for s in range(self.v.stages):
            mbarrier_init(self.v.full + s, ONE_ARRIVAL)
            mbarrier_init(self.v.empty + s, warps)


def chunk_place(ring: Pipeline, kv_pos: Int32, chunks: int, j: int) -> tuple[Any, Any]:
    """Return the stage and the phase of a chunk.

    Args:
        ring: the ring, with a stage for each chunk. The number of stages divides `chunks` or is a
            power of two.
        kv_pos: position of the block among all blocks of the CTA.
        chunks: chunks of a block.
        j: number of the chunk in its block.
    """
    if chunks % ring.stages == 0:  # the stage is then known at compile time
        return j % ring.stages, (kv_pos * (chunks // ring.stages) + j // ring.stages) & 1
    position = kv_pos * chunks + j
    return ring.stage(position), ring.phase(position)
