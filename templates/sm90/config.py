"""Define the compile-time configuration of the Hopper forward kernel."""

from __future__ import annotations

from dataclasses import dataclass

SMEM_BYTES = 227 * 1024  # what one CTA may use
WARP_THREADS = 32
WARPGROUP_WARPS = 4
WARPGROUP_THREADS = WARP_THREADS * WARPGROUP_WARPS
WARPGROUP_ROWS = 64  # M of one wgmma: the query rows of a consumer warpgroup
SMEM_ALIGNMENT = 1024  # of a tile in shared memory: the period of the widest swizzle


@dataclass(frozen=True)
class ForwardConfig:
    """Holds the sizes and switches of the forward kernel.

    Attributes:
        dtype: "bfloat16" or "float16", of query, key, value and output.
        head_dim, head_dim_v: head dims as the kernel computes them: those of the tensors, padded to
            64, 96, 128, 192 or 256; TMA fills the padding with zeros.
        block_kv: kv columns of a block, a multiple of 16.
        warpgroups: consumer warpgroups, 1 to 3, with 64 query rows each.
        stages: stages of the K ring and of the V ring, a power of two.
        softmax: what P is computed against. "delayed-max": the row maximum of the blocks before,
            with an exact recomputation where it grew too far. "online": the maximum of the block
            itself. "no-max": nothing, for scores that are bounded.
        double_buffer_p: P has a second set of registers, so that it is packed while P V still reads
            the first; otherwise it is packed after P V. "delayed-max" needs it.
        exp_before_wait: the exponentials are computed before the wait for P V.
        poly: one of every `poly` exponentials is computed on the FMA units; 0 for none.
        store_from_registers: the output is stored from registers, as shared memory has no room
            for its tile.
        need_max: the row maxima are written too.
    """

    dtype: str = "bfloat16"
    head_dim: int = 128
    head_dim_v: int = 128
    block_kv: int = 128
    warpgroups: int = 2
    stages: int = 2
    softmax: str = "delayed-max"
    double_buffer_p: bool = True
    exp_before_wait: bool = False
    poly: int = 0
    store_from_registers: bool = False
    need_max: bool = False

    @property
    def block_q(self) -> int:
        """Query rows of a work tile."""
        return WARPGROUP_ROWS * self.warpgroups

    @property
    def chained(self) -> bool:
        """Whether Q K of the next work tile is issued before the last P V of this one.

        It takes a second Q stage, which has no room in shared memory at head dims above 128.
        """
        return not self.store_from_registers

    @property
    def q_stages(self) -> int:
        """Query tiles in shared memory."""
        return 2 if self.chained else 1

    @property
    def threads(self) -> int:
        """Threads of a CTA: the producer warpgroup and the consumers."""
        return WARPGROUP_THREADS * (self.warpgroups + 1)

    @property
    def consumer_warps(self) -> int:
        """Warps of all consumer warpgroups."""
        return WARPGROUP_WARPS * self.warpgroups

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of a consumer warpgroup and of the producer warpgroup."""
        if self.warpgroups == 2 and not {self.head_dim, self.head_dim_v} <= {64, 128}:
            # such rows take more TMA boxes a load, and so more registers of the producer
            return 232, 40
        return {1: (256, 56), 2: (240, 24), 3: (160, 32)}[self.warpgroups]

    @property
    def q_bytes(self) -> int:
        """Bytes of a query tile."""
        return 2 * self.block_q * self.head_dim

    @property
    def k_bytes(self) -> int:
        """Bytes of a K block."""
        return 2 * self.block_kv * self.head_dim

    @property
    def v_bytes(self) -> int:
        """Bytes of a V block."""
        return 2 * self.block_kv * self.head_dim_v

    @property
    def o_bytes(self) -> int:
        """Bytes of the output tile in shared memory."""
        return 0 if self.store_from_registers else 2 * self.block_q * self.head_dim_v

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA: Q, the K and V rings, O, and barriers and records."""
        ring = self.stages * (self.k_bytes + self.v_bytes)
        return self.q_stages * self.q_bytes + ring + self.o_bytes + SMEM_ALIGNMENT
