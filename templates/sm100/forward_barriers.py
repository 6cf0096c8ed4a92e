"""Name the mbarriers of the Blackwell forward kernel and say who waits for whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import cute

from attnkit.templates.common.constants import ONE_ARRIVAL
from attnkit.templates.sm100.config import S_STAGES, WARPGROUP_WARPS, ForwardConfig
from attnkit.templates.sm100.cta_group import CtaGroup

RECORDS = 2  # records of work tiles in shared memory
# Slots for indices of kv blocks, from the load warp to the softmax. They need no empty barrier:
# when the load of a block of K begins, the softmax is done with all but the last
# `MAX_STAGES // 2` blocks before it, as their V, or K of the block after them, has left the ring.
BLOCK_NUMBERS = 8


@dataclass(frozen=True)
class ForwardBarriers:
    """Holds the mbarriers of a CTA; each field is the first of as many as `sizes` says.

    Attributes:
        s_half: the lower half of the columns of S is computed; only with `halves`.
        s_full: S is computed.
        s_empty: the softmax has read S, so that its upper half may be computed; only with `halves`.
        p_full: for each part of P: the softmax has stored it; for the first part also: the
            correction has rescaled O.
        q_full: the bytes of Q have arrived.
        q_empty: the MMAs that read Q are complete; with `alias`, the output that overwrote it is
            stored.
        o_full: O is computed: at the end of a work tile, or with one query tile after each block.
        scale_full: the softmax has written a scale for each row.
        scale_empty: the correction has read these scales.
        out_full: the correction has written the output tile to shared memory.
        out_empty: the output tile was stored; with `alias`, the same as `q_empty`.
        kv_full: the bytes of K or V have arrived.
        kv_empty: the MMAs that read them are complete.
        work_full: the record of a work tile is written.
        work_empty: all roles have read it.
        block_full: the index of a kv block is written.
        clc_full: the response of cluster launch control has arrived.
        clc_ready: the second CTA of a pair expects the next response.
    """

    s_half: cute.Pointer
    s_full: cute.Pointer
    s_empty: cute.Pointer
    p_full: tuple[cute.Pointer, ...]
    q_full: cute.Pointer
    q_empty: cute.Pointer
    o_full: cute.Pointer
    scale_full: cute.Pointer
    scale_empty: cute.Pointer
    out_full: cute.Pointer
    out_empty: cute.Pointer
    kv_full: cute.Pointer
    kv_empty: cute.Pointer
    work_full: cute.Pointer
    work_empty: cute.Pointer
    block_full: cute.Pointer
    clc_full: cute.Pointer
    clc_ready: cute.Pointer

    @staticmethod
    def sizes(config: ForwardConfig) -> dict[str, int]:
        """Return the number of barriers of each field, in their order in shared memory."""
        s_names = "s_half", "s_full", "s_empty"
        q_names = (
            "q_full",
            "q_empty",
            "o_full",
            "scale_full",
            "scale_empty",
            "out_full",
            "out_empty",
        )
        return {
            **dict.fromkeys(s_names, S_STAGES),
            "p_full": S_STAGES * len(config.p_parts),
            **dict.fromkeys(q_names, config.q_tiles),
            **dict.fromkeys(("kv_full", "kv_empty"), config.stages),
            **dict.fromkeys(("work_full", "work_empty"), RECORDS),
            "block_full": BLOCK_NUMBERS,
            **dict.fromkeys(("clc_full", "clc_ready"), 1),
        }

    @classmethod
    def count(cls, config: ForwardConfig) -> int:
        """Return the number of mbarriers."""
        return sum(cls.sizes(config).values())

    @classmethod
    def at(cls, base: cute.Pointer, config: ForwardConfig) -> ForwardBarriers:
        """Return the barriers that begin at an address of shared memory."""
        fields: dict[str, Any] = {}
        offset = 0
        for name, size in cls.sizes(config).items():
            if name == "p_full":
                parts = range(0, size, S_STAGES)
                fields[name] = tuple(base + (offset + part) for part in parts)
            else:
                fields[name] = base + offset
            offset += size
        if config.alias:
            fields["out_empty"] = fields["q_empty"]
        return cls(**fields)

    def init(self, config: ForwardConfig, group: CtaGroup) -> None:
        """Initialise the barriers, by one thread, with the arrivals that complete a phase."""
        # Reports of the emulator name a barrier by the argument of the call with this name.
        mbarrier_init = cute.arch.mbarrier_init
        warps = WARPGROUP_WARPS
        for u in range(S_STAGES):
            mbarrier_init(self.s_half + u, ONE_ARRIVAL)
            mbarrier_init(self.s_full + u, ONE_ARRIVAL)
            mbarrier_init(self.s_empty + u, warps * config.ctas)
            for part in range(len(self.p_full)):
                # the first part waits for the warps of the correction as well
                mbarrier_init(self.p_full[part] + u, (warps if part else 2 * warps) * config.ctas)
        for t in range(config.q_tiles):
            mbarrier_init(self.q_full + t, ONE_ARRIVAL)
            mbarrier_init(self.q_empty + t, ONE_ARRIVAL)
            mbarrier_init(self.o_full + t, ONE_ARRIVAL)
            mbarrier_init(self.scale_full + t, warps)
            mbarrier_init(self.scale_empty + t, warps)
            mbarrier_init(self.out_full + t, warps)
            if not config.alias:
                mbarrier_init(self.out_empty + t, ONE_ARRIVAL)
        for s in range(config.stages):
            mbarrier_init(self.kv_full + s, ONE_ARRIVAL)
            mbarrier_init(self.kv_empty + s, ONE_ARRIVAL)
        for r in range(RECORDS):
            mbarrier_init(self.work_full + r, ONE_ARRIVAL)
            # softmax and correction, the store warp, and the MMA warp, which only the leader has
            mbarrier_init(self.work_empty + r, warps * (config.q_tiles + 1) + 2 - group.rank())
        for s in range(BLOCK_NUMBERS):
            mbarrier_init(self.block_full + s, ONE_ARRIVAL)
        mbarrier_init(self.clc_full, ONE_ARRIVAL)
        mbarrier_init(self.clc_ready, ONE_ARRIVAL)
