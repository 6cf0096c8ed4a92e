"""Define the mbarriers of the Blackwell backward kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from cutlass import cute

from attnkit.templates.common.constants import ONE_ARRIVAL
from attnkit.templates.sm100.backward_config import CHUNK_STAGES, BackwardConfig
from attnkit.templates.sm100.backward_shared import COMPUTE_WARPS, REDUCE_WARPS

PER_TILE = (
    "k_full", "kv_empty", "s_full", "p_full", "dp_full", "ds_full", "dq_full", "dq_empty",
    "acc_full",
)  # fmt: skip
OVERLAP = "dv_full", "v_empty", "epilogue_done", "k_columns_full", "item_full", "item_empty"
PARTS = "q_part_full", "q_part_empty", "do_part_full", "do_part_empty"
SINGLE = (*PER_TILE, "v_full", *OVERLAP, *PARTS)  # one mbarrier each
OPERANDS = "q_rows", "q_columns", "do_rows", "do_columns"


@dataclass(frozen=True)
class CommonBarriers:
    """Holds the mbarriers of all kernels; a field points to the first of `sizes[field]` mbarriers.

    Attributes:
        k_full: the record of a work tile is written, and K has arrived (CTA pair: its rows; with
            chunks: its part of the columns).
        kv_empty: all roles have read the record, K and V.
        s_full: S^T is computed.
        p_full: P^T is in tensor memory, where it overwrites S^T.
        dp_full: dP^T is computed.
        ds_full: dS^T is in tensor memory, where it overwrites dP^T, and in shared memory.
        dq_full: a part of dQ is computed, and its MMAs have read dS^T in shared memory.
        dq_empty: the part of dQ has been read from tensor memory.
        acc_full: dK of a work tile is computed, and with one CTA its dV.
        block_full: the word of a q block and its LSE have arrived; with one CTA, Q and its
            statistics.
        block_empty: all roles have read what `block_full` announces.
    """

    k_full: cute.Pointer
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

    def init_of_one_cta(self, c: BackwardConfig) -> None:
        """Initialise the mbarriers of this class, for a single CTA; called by one thread."""
        # The emulator's reports name a barrier by the argument of the call named `mbarrier_init`.
        mbarrier_init = cute.arch.mbarrier_init
        # one arrival: by the producer with expect_tx, or by `commit`
        mbarrier_init(self.k_full, ONE_ARRIVAL)
        mbarrier_init(self.s_full, ONE_ARRIVAL)
        mbarrier_init(self.dp_full, ONE_ARRIVAL)
        mbarrier_init(self.dq_full, ONE_ARRIVAL)
        mbarrier_init(self.acc_full, ONE_ARRIVAL)
        # + 1 for the MMA warp
        mbarrier_init(self.kv_empty, REDUCE_WARPS + COMPUTE_WARPS + 1)
        mbarrier_init(self.p_full, COMPUTE_WARPS)
        mbarrier_init(self.ds_full, COMPUTE_WARPS)
        mbarrier_init(self.dq_empty, REDUCE_WARPS)
        for s in range(c.q_stages):
            mbarrier_init(self.block_full + s, ONE_ARRIVAL)
            # the MMA warp also arrives for the compute warps, because it waits for their P and dS
            mbarrier_init(self.block_empty + s, 1 + REDUCE_WARPS)

    @classmethod
    def at(cls, base: cute.Pointer, c: BackwardConfig) -> Self:
        """Return the mbarriers, laid out in shared memory from address `base`."""
        offsets: dict[str, int] = {}
        offset = 0
        for name, size in cls.sizes(c).items():
            offsets[name] = offset
            offset += size
        fields: dict[str, Any] = {}
        # rings last: the compiler keeps the order of these additions, which affects registers
        for name in sorted(offsets, key=lambda name: name not in SINGLE):
            fields[name] = base + offsets[name]
            if name in OPERANDS:
                fields[name] = OperandBarriers(fields[name], base + (offsets[name] + 1))
        return cls(**fields)


@dataclass(frozen=True)
class BackwardBarriers(CommonBarriers):
    """Holds the mbarriers of the kernel for single CTAs.

    Attributes:
        v_full: V has arrived.
        do_full: dO has arrived, and delta if the MMAs subtract it.
        do_empty: the MMAs that read dO are complete.
    """

    v_full: cute.Pointer
    do_full: cute.Pointer
    do_empty: cute.Pointer

    @classmethod
    def sizes(cls, c: BackwardConfig) -> dict[str, int]:
        """Return the number of barriers of each field, including those of `CommonBarriers`."""
        return super().sizes(c) | {"v_full": 1} | dict.fromkeys(("do_full", "do_empty"), c.stages)

    def init(self, c: BackwardConfig) -> None:
        """Initialise the mbarriers with their arrival counts; called by one thread."""
        # The emulator's reports name a barrier by the argument of the call named `mbarrier_init`.
        mbarrier_init = cute.arch.mbarrier_init
        self.init_of_one_cta(c)
        mbarrier_init(self.v_full, ONE_ARRIVAL)
        for s in range(c.stages):
            mbarrier_init(self.do_full + s, ONE_ARRIVAL)
            mbarrier_init(self.do_empty + s, ONE_ARRIVAL)


@dataclass(frozen=True)
class BackwardStreamedBarriers(CommonBarriers):
    """Holds the mbarriers of the kernel whose operands are loaded in chunks.

    Attributes:
        chunk_full: a chunk of K and Q, or of V and dO, has arrived.
        chunk_empty: the MMAs that read the chunk are complete.
        q_part_full, do_part_full: the part of Q's or dO's columns has arrived.
        q_part_empty, do_part_empty: the MMAs that read the part are complete.
    """

    chunk_full: cute.Pointer
    chunk_empty: cute.Pointer
    q_part_full: cute.Pointer
    q_part_empty: cute.Pointer
    do_part_full: cute.Pointer
    do_part_empty: cute.Pointer

    @classmethod
    def sizes(cls, c: BackwardConfig) -> dict[str, int]:
        """Return the number of barriers of each field, including those of `CommonBarriers`."""
        rings = dict.fromkeys(("chunk_full", "chunk_empty"), CHUNK_STAGES)
        return super().sizes(c) | rings | dict.fromkeys(PARTS, 1)

    def init(self, c: BackwardConfig) -> None:
        """Initialise the mbarriers with their arrival counts; called by one thread."""
        # The emulator's reports name a barrier by the argument of the call named `mbarrier_init`.
        mbarrier_init = cute.arch.mbarrier_init
        self.init_of_one_cta(c)
        for s in range(CHUNK_STAGES):
            mbarrier_init(self.chunk_full + s, ONE_ARRIVAL)
            mbarrier_init(self.chunk_empty + s, ONE_ARRIVAL)
        mbarrier_init(self.q_part_full, ONE_ARRIVAL)
        mbarrier_init(self.q_part_empty, ONE_ARRIVAL)
        mbarrier_init(self.do_part_full, ONE_ARRIVAL)
        mbarrier_init(self.do_part_empty, ONE_ARRIVAL)


@dataclass(frozen=True)
class OperandBarriers:
    """Holds the full and the empty mbarrier of a CTA's half of Q or dO.

    Attributes:
        full: the half has arrived; in the first CTA, the halves of both CTAs.
        empty: the MMAs that read the half are complete.
    """

    full: cute.Pointer
    empty: cute.Pointer


@dataclass(frozen=True)
class Backward2CtaBarriers(CommonBarriers):
    """Holds the mbarriers of a CTA of a pair.

    Attributes:
        v_full: V has arrived.
        q_rows, q_columns: half of Q's rows, for S; half of its columns, for dK.
        do_rows, do_columns: half of dO's rows, for dP; half of its columns, for dV.
        dv_full: dV of a work tile is computed.
        v_empty: TMA has read dV from the memory that it shares with V.
        epilogue_done: in the first CTA: dK and dV of both CTAs have been read from tensor memory,
            and dK from the memory that it shares with dS.
        k_columns_full: K's columns, for dQ, have arrived.
        item_full: in the second CTA: the first CTA has written the index of the next work tile.
        item_empty: in the first CTA: the second CTA has read that index.
    """

    v_full: cute.Pointer
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
        """Return the number of barriers of each field, including those of `CommonBarriers`."""
        pairs, single = dict.fromkeys(OPERANDS, 2), dict.fromkeys(OVERLAP, 1)
        return super().sizes(c) | {"v_full": 1} | pairs | single

    def init(self, c: BackwardConfig, rank: Any) -> None:
        """Initialise the mbarriers with their arrival counts; called by one thread.

        Args:
            c: compile-time configuration.
            rank: rank of the CTA in the pair.
        """
        # The emulator's reports name a barrier by the argument of the call named `mbarrier_init`.
        mbarrier_init = cute.arch.mbarrier_init
        loads = 2 - rank  # the first CTA's barriers also count the second CTA's loads
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
        # + 1 for the MMA warp
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
