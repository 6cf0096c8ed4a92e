"""Define the compile-time configuration of `backward_hd256_roles`."""

from __future__ import annotations

from dataclasses import dataclass

from attnkit.templates.sm90.backward_hd256_config import Hd256Config


@dataclass(frozen=True)
class Hd256RolesConfig(Hd256Config):
    """Holds the sizes and switches of the Hopper backward kernel `backward_hd256_roles`.

    The attributes are those of `Hd256Config`, and `roles`, which is True and selects the kernel. The
    kernel supports no entropies, dropout, or weights without a softmax, and no fixed order of sums
    of dK and dV that query heads share.
    """

    roles: bool = True

    # One stage of dO: dV and dP are the only MMAs that read it, and dV comes early in a q block.
    # The memory of another stage holds dQ on its way out.
    stages = 1
    # Registers per thread: with 24, the producer would spill. The consumers need no more than 232.
    producer_registers, consumer_registers = 40, 232

    @property
    def rounded(self) -> bool:
        """Whether P is rounded to `dtype` before dS is computed from it."""
        return True

    @property
    def chunk(self) -> int:
        """Floats that a warpgroup adds to a sum at once: one part of its columns of dQ."""
        return self.block_q * self.head_dim // 2 // self.dq_parts

    @property
    def chunks(self) -> int:
        """Number of chunks of a q block's dQ: the parts of each warpgroup."""
        return 2 * self.dq_parts

    @property
    def smem_bytes(self) -> int:
        """Shared memory bytes per CTA: K, V, the rings of Q and dO, P, dS and a chunk of dQ each."""
        tiles = self.block_kv * (self.head_dim + self.head_dim_v + 2 * self.block_q)
        tiles += self.block_q * (self.q_stages * self.head_dim + self.stages * self.head_dim_v)
        rows = self.block_q * (self.q_stages + self.stages)
        return 2 * tiles + 8 * self.chunk + 4 * rows + 1024

    def problem(self) -> str | None:
        """Return the reason why the config is invalid, or None if it is valid."""
        problem = super().problem()
        if problem:
            return problem
        if (self.head_dim, self.head_dim_v) != (256, 256):
            return f"head dims of {self.head_dim} and {self.head_dim_v}: expected 256 and 256"
        if self.first_writer or (self.sum_order and self.accumulate):
            return "first writers or an order of shared sums: expected neither"
        if self.with_entropy or self.weights or self.with_dropout or not self.roles:
            return "entropies, weights without a softmax, dropout or roles=False: expected none"
        return None
