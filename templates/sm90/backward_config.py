"""What is fixed when the Hopper backward is compiled."""

from __future__ import annotations

from dataclasses import dataclass

from attnkit.templates.sm90.config import SMEM_BYTES

UNIT = 64 * 64  # floats of a unit of a float32 sum
ROWS = 64  # rows of a warpgroup's products


@dataclass(frozen=True)
class BackwardConfig:
    """Sizes and switches of the backward kernel for head dims up to 128.

    Attributes:
        dtype: "bfloat16" or "float16", of all inputs and gradients.
        head_dim, head_dim_v: head_dim and head_dim_v as computed, the tensors' own padded with zeros:
            64 or 128.
        block_q: rows of a q block, 64, or 128 with a head_dim of 64.
        accumulate: dK and dV are added to float32 sums, for query heads that share a kv head;
            otherwise they are stored in the dtype.
        sum_order: "ascending" or "descending": sums are formed in this order of kv blocks, that of the
            schedule; "" for any order.
        first_writer: first-writer dQ: of the kv blocks that add to a q block, the first in the list
            stores its part instead, and the others wait for its flag, or for their turn; see
            `attnkit.schedule.first_writer`.
        less_lse: the tensor cores subtract LSE / scale from S, see `backward_lse_in_mma`; for mods
            that add to the score what does not depend on it.
    """

    dtype: str = "bfloat16"
    head_dim: int = 128
    head_dim_v: int = 128
    block_q: int = 64
    accumulate: bool = False
    sum_order: str = ""
    first_writer: bool = False
    less_lse: bool = False

    block_kv = 2 * ROWS  # 64 keys of each consumer
    stages = q_stages = 2  # of the rings of dO and dS, and of Q
    k_stages = 2  # K of a work tile is read when the next one's has begun
    less_delta = False  # costs 7 % at head dim 128, see docs/hopper.md
    # Registers a thread. 2 * 128 * 240 + 128 * 24 = 64512 of 65536: what the consumers get more
    # than the 168 of the launch, the producer warpgroup gives back.
    consumer_registers, producer_registers = 240, 24

    @property
    def joins(self) -> bool:
        """Whether the work tiles of a split kv block add up their dK and dV in the kernel."""
        return not (self.accumulate or self.sum_order or self.first_writer)

    @property
    def chunk(self) -> int:
        """Floats that a warpgroup adds to a sum at a time: its half of a block of dQ."""
        return self.block_q * self.head_dim // 2

    @property
    def flags(self) -> int | None:
        """Flags of 64 rows of dQ, cleared instead of its sums; None to clear these."""
        if not self.first_writer:
            return None
        return 0 if self.sum_order else 2 * ROWS // self.block_q  # who has a turn needs no flag

    @property
    def words(self) -> tuple[int, int]:
        """Float32 words of a row's LSE, and of its delta."""
        return 4 if self.less_lse else 1, 1

    @property
    def rounded(self) -> bool:
        """dS is computed from P in the dtype: of a block of 128 rows the registers hold no more."""
        return self.block_q > ROWS

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA: K twice, V, the rings of Q, dO and dS, dQ, and what is small."""
        rings = self.stages * (self.head_dim + self.head_dim_v + self.block_kv)
        tiles = self.block_kv * (self.k_stages * self.head_dim + self.head_dim_v)
        tiles += self.block_q * rings
        rows = 4 * self.block_q * self.stages * sum(self.words)
        # barriers, words and the factors of LSE are below 512 bytes
        return 2 * tiles + 8 * self.chunk + -(-(512 + rows) // 1024) * 1024

    def problem(self) -> str | None:
        """Return why these sizes do not work, or None."""
        if self.head_dim not in (64, 128) or self.head_dim_v not in (64, 128):
            return f"head dims of {self.head_dim} and {self.head_dim_v}: expected 64 or 128"
        if self.block_q not in (64, 128) or self.block_q * self.head_dim > 2 * UNIT:
            return (
                f"block_q={self.block_q} with head_dim={self.head_dim}: expected 64, or 128 with 64"
            )
        if self.sum_order not in ("", "ascending", "descending"):
            return f"sum_order={self.sum_order!r}: expected '', 'ascending' or 'descending'"
        if self.smem_bytes > SMEM_BYTES:
            return f"{self.smem_bytes} bytes of shared memory: a CTA has {SMEM_BYTES}"
        return None
