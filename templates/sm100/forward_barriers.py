"""Define the mbarriers of the Blackwell forward kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import cute

from attnkit.templates.common.constants import ONE_ARRIVAL
from attnkit.templates.sm100.config import S_STAGES, WARPGROUP_WARPS, ForwardConfig
from attnkit.templates.sm100.cta_group import CtaGroup

RECORDS = 2  # records of work tiles in shared memory
# Slots for indices of kv blocks, from the load warp to the softmax. They need no empty barrier:
# when the load of a K block begins, the softmax has finished all but the last `MAX_STAGES // 2`
# blocks before it, because their V, or K of the block after them, has left the ring.
BLOCK_NUMBERS = 8


@dataclass(frozen=True)
class ForwardBarriers:
    """Holds the mbarriers of a CTA; a field points to the first of `sizes[field]` mbarriers.

    Attributes:
        s_half: the lower half of the columns of S is computed; only with `halves`.
        s_full: S is computed.
        s_empty: the softmax has read S, so that its upper half may be computed; only with `halves`.
        p_full: for each part of P: the softmax has stored it. For the first part also: the
            correction has rescaled O.
        q_full: Q has arrived.
        q_empty: the MMAs that read Q are complete; with `alias`, the output that overwrote Q is
            stored.
        o_full: O is computed: at the end of a work tile, or with one query tile after each block.
        scale_full: the softmax has written a scale for each row.
        scale_empty: the correction has read these scales.
        out_full: the correction has written the output tile to shared memory.
        out_empty: the output tile is stored; with `alias`, the same as `q_empty`.
        kv_full: K or V has arrived.
        kv_empty: the MMAs that read K or V are complete.
        work_full: the record of a work tile is written.
        work_empty: all roles have read the record.
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
        """Return the mbarriers, laid out in shared memory from address `base`."""
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
        """Initialise the mbarriers with their arrival counts; called by one thread."""
        # The emulator's reports name a barrier by the argument of the call named `mbarrier_init`.
        mbarrier_init = cute.arch.mbarrier_init
        warps = WARPGROUP_WARPS
        for u in range(S_STAGES):
            mbarrier_init(self.s_half + u, ONE_ARRIVAL)
            mbarrier_init(self.s_full + u, ONE_ARRIVAL)
            mbarrier_init(self.s_empty + u, warps * config.ctas)
            for part in range(len(self.p_full)):
                # the first part also waits for the warps of the correction
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
            # softmax, correction, store warp, and MMA warp, which only the leader has
            mbarrier_init(self.work_empty + r, warps * (config.q_tiles + 1) + 2 - group.rank())
        for s in range(BLOCK_NUMBERS):
            mbarrier_init(self.block_full + s, ONE_ARRIVAL)
        mbarrier_init(self.clc_full, ONE_ARRIVAL)
        mbarrier_init(self.clc_ready, ONE_ARRIVAL)
