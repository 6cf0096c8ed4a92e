"""Define the compile-time configuration of the Hopper backward for head dims (192, 128)."""

from __future__ import annotations

from dataclasses import dataclass

from attnkit.templates.sm90.backward_config import ROWS, BackwardConfig
from attnkit.templates.sm90.config import SMEM_BYTES


@dataclass(frozen=True)
class Hd192Config(BackwardConfig):
    """Holds the sizes and switches of the Hopper backward kernel for head dims (192, 128).

    The attributes are those of `BackwardConfig`, and the columns of a kv block, `block_kv`. The
    kernel supports no entropies, dropout, or weights without a softmax.
    """

    head_dim: int = 192
    head_dim_v: int = 128
    block_kv: int = 2 * ROWS  # 64 keys for each consumer warpgroup

    # The producer spills seven registers at 24. The consumers would spill many more with fewer than
    # 240, and products would be serialised.
    k_stages = 1  # K, V, both rings and dS take all shared memory
    joins = False

    @property
    def rounded(self) -> bool:
        """Whether dS is computed from P rounded to `dtype`: dK and dV leave no registers for P."""
        return True

    @property
    def smem_bytes(self) -> int:
        """Shared memory bytes per CTA: K, V, and the rings of Q, dO and dS."""
        tiles = self.block_kv * (self.head_dim + self.head_dim_v)
        rings = self.head_dim + self.head_dim_v + self.block_kv
        tiles += self.stages * self.block_q * rings
        return 2 * tiles + 8 * self.stages * self.block_q + 1024

    def problem(self) -> str | None:
        """Return the reason why the config is invalid, or None if it is valid."""
        if (self.head_dim, self.head_dim_v) != (192, 128):
            return f"head dims of {self.head_dim} and {self.head_dim_v}: expected 192 and 128"
        if self.block_q != ROWS or self.block_kv != 2 * ROWS:
            return f"blocks of {self.block_q} x {self.block_kv}: expected {ROWS} x {2 * ROWS}"
        if self.sum_order not in ("", "ascending", "descending"):
            return f"sum_order={self.sum_order!r}: expected '', 'ascending' or 'descending'"
        if self.first_writer or self.less_lse:
            return "first writers or less_lse: expected neither"
        if self.with_entropy or self.weights or self.with_dropout:
            return "entropies, weights without a softmax or dropout: expected none of them"
        if self.smem_bytes > SMEM_BYTES:
            return f"{self.smem_bytes} bytes of shared memory: a CTA has {SMEM_BYTES}"
        return None
