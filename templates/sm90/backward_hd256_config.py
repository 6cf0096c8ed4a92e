"""Define the compile-time configuration of the Hopper backward for head dims above 128."""

from __future__ import annotations

from dataclasses import dataclass

from attnkit.templates.sm90.backward_config import ROWS, BackwardConfig
from attnkit.templates.sm90.config import SMEM_BYTES

HEAD_DIMS = (64, 128, 192, 256)


@dataclass(frozen=True)
class Hd256Config(BackwardConfig):
    """Holds the sizes and switches of the Hopper backward kernel for head dims above 128.

    The attributes are those of `BackwardConfig`; head dims may be any of `HEAD_DIMS`.
    """

    head_dim: int = 256
    head_dim_v: int = 256

    block_kv = ROWS
    stages = 2  # stages of the dO ring
    q_stages = p_stages = 2
    k_stages = 1
    joins = False
    delta_share = 1.0  # part of delta that the accumulator of dP is initialised to

    @property
    def producer_registers(self) -> int:  # type: ignore[override]
        """Registers per thread of the producer warpgroup."""
        # Rows of 192 columns are loaded in six TMA boxes, and turns need table lookups.
        return 40 if 192 in (self.head_dim, self.head_dim_v) else 24

    @property
    def consumer_registers(self) -> int:  # type: ignore[override]
        """Registers per thread of a consumer warpgroup."""
        return 232 if self.producer_registers == 40 else 240

    @property
    def dq_parts(self) -> int:
        """Number of parts in which a consumer computes its columns of dQ, to avoid spills."""
        return 2 if self.head_dim > 192 else 1

    @property
    def smem_bytes(self) -> int:
        """Shared memory bytes per CTA: K, V, the rings of Q, dO and P, and dS."""
        tiles = self.block_kv * (self.head_dim + self.head_dim_v)
        tiles += self.block_q * (self.q_stages * self.head_dim + self.stages * self.head_dim_v)
        tiles += self.block_q * self.block_kv * (self.p_stages + 1)
        rows = self.block_q * (self.q_stages + self.stages)
        return 2 * tiles + 4 * rows + 1024

    def problem(self) -> str | None:
        """Return the reason why the config is invalid, or None if it is valid."""
        if self.head_dim not in HEAD_DIMS or self.head_dim_v not in HEAD_DIMS:
            return (
                f"head dims of {self.head_dim} and {self.head_dim_v}: expected some of {HEAD_DIMS}"
            )
        if self.block_q != ROWS:
            return f"block_q={self.block_q}: expected {ROWS}"
        if self.sum_order not in ("", "ascending", "descending"):
            return f"sum_order={self.sum_order!r}: expected '', 'ascending' or 'descending'"
        if self.less_lse:
            return "less_lse=True with a head dim above 128: expected False"
        if self.smem_bytes > SMEM_BYTES:
            return f"{self.smem_bytes} bytes of shared memory: a CTA has {SMEM_BYTES}"
        return None
