"""Name the mbarriers of the Blackwell backward kernels and say who waits for whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from cutlass import cute

from attnkit.templates.common.constants import ONE_ARRIVAL
from attnkit.templates.sm100.backward_config import BackwardConfig
from attnkit.templates.sm100.backward_shared import COMPUTE_WARPS, REDUCE_WARPS

PER_TILE = (
    "k_full", "v_full", "kv_empty", "s_full", "p_full", "dp_full", "ds_full", "dq_full", "dq_empty",
    "acc_full",
)  # fmt: skip
OVERLAP = "dv_full", "v_empty", "epilogue_done", "k_columns_full", "item_full", "item_empty"
SINGLE = (*PER_TILE, *OVERLAP)  # one mbarrier each; all other fields are rings or pairs
OPERANDS = "q_rows", "q_columns", "do_rows", "do_columns"


@dataclass(frozen=True)
class CommonBarriers:
    """Holds the mbarriers of both kernels; each field is the first of as many as `sizes` says.

    Attributes:
        k_full: the record of a work tile is written, and K has arrived (2 CTAs: its rows).
        v_full: V has arrived.
        kv_empty: all roles have read the record, K and V.
        s_full: S^T is computed.
        p_full: P^T is in tensor memory, where S^T was.
        dp_full: dP^T is computed.
        ds_full: dS^T is in tensor memory, where dP^T was, and in shared memory.
        dq_full: a part of dQ is computed, and its MMAs have read dS^T in shared memory.
        dq_empty: that part has been read from tensor memory.
        acc_full: dK of a work tile is computed, and with one CTA its dV.
        block_full: the word of a q block and its LSE have arrived; with one CTA, Q and its
            statistics.
        block_empty: all roles have read these.
    """

    k_full: cute.Pointer
    v_full: cute.Pointer
    kv_empty: cute.Pointer
    s_full: cute.Pointer
    p_full: cute.Pointer
    dp_full: cute.Pointer
    ds_full: cute.Pointer
    dq_full: cute.Pointer
    dq_empty: cute.Pointer
    acc_full: cute.Pointer
    block_full: cute.Pointer
    block_empty: cute.Pointer

    @classmethod
    def sizes(cls, c: BackwardConfig) -> dict[str, int]:
        """Return the number of barriers of each field, in their order in shared memory."""
        return dict.fromkeys(PER_TILE, 1) | dict.fromkeys(("block_full", "block_empty"), c.q_stages)

    @classmethod
    def count(cls, c: BackwardConfig) -> int:
        """Return the number of mbarriers."""
        return sum(cls.sizes(c).values())

    @classmethod
    def at(cls, base: cute.Pointer, c: BackwardConfig) -> Self:
        """Place the barriers one after another from an address of shared memory on."""
        offsets: dict[str, int] = {}
        offset = 0
        for name, size in cls.sizes(c).items():
            offsets[name] = offset
            offset += size
        fields: dict[str, Any] = {}
        # rings last: the compiler keeps the order of these additions, and registers depend on it
        for name in sorted(offsets, key=lambda name: name not in SINGLE):
            fields[name] = base + offsets[name]
            if name in OPERANDS:
                fields[name] = OperandBarriers(fields[name], base + (offsets[name] + 1))
        return cls(**fields)


@dataclass(frozen=True)
class BackwardBarriers(CommonBarriers):
    """Holds the mbarriers of the kernel for one CTA.

    Attributes:
        do_full: dO has arrived, and delta where the MMAs subtract it.
        do_empty: the MMAs that read them are complete.
    """

    do_full: cute.Pointer
    do_empty: cute.Pointer

    @classmethod
    def sizes(cls, c: BackwardConfig) -> dict[str, int]:
        """Return `CommonBarriers.sizes`, and those of the fields of this class."""
        return super().sizes(c) | dict.fromkeys(("do_full", "do_empty"), c.stages)

    def init(self, c: BackwardConfig) -> None:
        """Initialise the barriers, by one thread, with the arrivals that complete a phase."""
        # Reports of the emulator name a barrier by the argument of the call with this name.
        mbarrier_init = cute.arch.mbarrier_init
        # one arrival: of the producer, with the bytes to come, or of `commit`
        mbarrier_init(self.k_full, ONE_ARRIVAL)
        mbarrier_init(self.v_full, ONE_ARRIVAL)
        mbarrier_init(self.s_full, ONE_ARRIVAL)
        mbarrier_init(self.dp_full, ONE_ARRIVAL)
        mbarrier_init(self.dq_full, ONE_ARRIVAL)
        mbarrier_init(self.acc_full, ONE_ARRIVAL)
        # and the MMA warp
        mbarrier_init(self.kv_empty, REDUCE_WARPS + COMPUTE_WARPS + 1)
        mbarrier_init(self.p_full, COMPUTE_WARPS)
        mbarrier_init(self.ds_full, COMPUTE_WARPS)
        mbarrier_init(self.dq_empty, REDUCE_WARPS)
        for s in range(c.q_stages):
            mbarrier_init(self.block_full + s, ONE_ARRIVAL)
            # the MMA warp arrives for the compute warps too, whose P and dS it waits for
            mbarrier_init(self.block_empty + s, 1 + REDUCE_WARPS)
        for s in range(c.stages):
            mbarrier_init(self.do_full + s, ONE_ARRIVAL)
            mbarrier_init(self.do_empty + s, ONE_ARRIVAL)


@dataclass(frozen=True)
class OperandBarriers:
    """Holds the full and the empty mbarrier of a CTA's half of Q or dO.

    Attributes:
        full: the half has arrived; in the first CTA, the halves of both.
        empty: the MMAs that read it are complete.
    """

    full: cute.Pointer
    empty: cute.Pointer


@dataclass(frozen=True)
class Backward2CtaBarriers(CommonBarriers):
    """Holds the mbarriers of a CTA of a pair.

    Attributes:
        q_rows, q_columns: half of Q's rows, for S; half of its columns, for dK.
        do_rows, do_columns: half of dO's rows, for dP; half of its columns, for dV.
        dv_full: dV of a work tile is computed.
        v_empty: TMA has read dV from the memory that it shares with V.
        epilogue_done: in the first CTA: dK and dV of both CTAs have been read from tensor memory,
            and dK from the memory that it shares with dS.
        k_columns_full: K's columns, for dQ, have arrived.
        item_full: in the second CTA: the first has written the index of the next work tile.
        item_empty: in the first CTA: the second has read that index.
    """

    q_rows: OperandBarriers
    q_columns: OperandBarriers
    do_rows: OperandBarriers
    do_columns: OperandBarriers
    dv_full: cute.Pointer
    v_empty: cute.Pointer
    epilogue_done: cute.Pointer
    k_columns_full: cute.Pointer
    item_full: cute.Pointer
    item_empty: cute.Pointer

    @classmethod
    def sizes(cls, c: BackwardConfig) -> dict[str, int]:
        """Return `CommonBarriers.sizes`, and those of the fields of this class."""
        return super().sizes(c) | dict.fromkeys(OPERANDS, 2) | dict.fromkeys(OVERLAP, 1)

    def init(self, c: BackwardConfig, rank: Any) -> None:
        """Initialise the barriers, by one thread, with the arrivals that complete a phase.

        Args:
            rank: rank of the CTA in the pair.
        """
        # Reports of the emulator name a barrier by the argument of the call with this name.
        mbarrier_init = cute.arch.mbarrier_init
        loads = 2 - rank  # the first CTA's barriers count the second's loads too
        mbarrier_init(self.k_full, ONE_ARRIVAL)
        mbarrier_init(self.s_full, ONE_ARRIVAL)
        mbarrier_init(self.dp_full, ONE_ARRIVAL)
        mbarrier_init(self.dq_full, ONE_ARRIVAL)
        mbarrier_init(self.acc_full, ONE_ARRIVAL)
        mbarrier_init(self.dv_full, ONE_ARRIVAL)
        mbarrier_init(self.item_full, ONE_ARRIVAL)
        mbarrier_init(self.item_empty, ONE_ARRIVAL)
        mbarrier_init(self.v_full, loads)
        mbarrier_init(self.k_columns_full, loads)
        # and the MMA warp
        mbarrier_init(self.kv_empty, REDUCE_WARPS + COMPUTE_WARPS + 1)
        # where the MMA warp waits, the warps of both CTAs arrive
        mbarrier_init(self.p_full, c.ctas * COMPUTE_WARPS)
        mbarrier_init(self.ds_full, c.ctas * COMPUTE_WARPS)
        mbarrier_init(self.dq_empty, c.ctas * REDUCE_WARPS)
        mbarrier_init(self.v_empty, COMPUTE_WARPS)
        mbarrier_init(self.epilogue_done, c.ctas * (REDUCE_WARPS + COMPUTE_WARPS))
        for s in range(c.q_stages):
            mbarrier_init(self.block_full + s, ONE_ARRIVAL)
            mbarrier_init(self.block_empty + s, REDUCE_WARPS + COMPUTE_WARPS)
        for operand in (self.q_rows, self.q_columns, self.do_rows, self.do_columns):
            mbarrier_init(operand.full, loads)
            mbarrier_init(operand.empty, ONE_ARRIVAL)
