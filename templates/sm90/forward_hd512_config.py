"""Define the compile-time configuration of the Hopper forward for head dims above 256."""

from __future__ import annotations

from dataclasses import dataclass

from attnkit.templates.sm90.config import SMEM_ALIGNMENT, ForwardConfig

WIDEST = 576  # head dim of absorbed MLA; its query tile leaves less room for K


@dataclass(frozen=True)
class Hd512Config(ForwardConfig):
    """Holds the sizes and switches of the Hopper forward for head dims above 256.

    A CTA computes all of S and a part of the value columns. K and V of a block are loaded in
    chunks: those of K are `k_chunk` columns of all its keys, those of V are `v_chunk` of its keys.

    Attributes:
        head_dim: head dim of query and key as the kernel computes it: 128, 256, 384, 512 or 576.
        block_kv: kv columns of a block, 32 or 64.
        head_dim_v: value columns of a part, padded to 64, 96, 128, 192 or 256.
        stages: blocks of K and of V in shared memory: one of each, in chunks.
        value_parts: parts of the value columns, 1 or 2. Another CTA computes each part.
    """

    stages: int = 1
    store_from_registers: bool = True
    value_parts: int = 1

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of a consumer warpgroup and of the producer warpgroup."""
        return (232, 40) if self.head_dim_v > 192 else (208, 88)

    @property
    def k_chunk(self) -> int:
        """Columns of a K chunk."""
        return 96 if self.head_dim == WIDEST else 128

    @property
    def k_chunks(self) -> int:
        """Chunks of a K block."""
        return self.head_dim // self.k_chunk

    @property
    def k_stages(self) -> int:
        """Stages of the K ring, each for one chunk: as many as fit in shared memory.

        From 384 columns on the stages divide the chunks, so that the stage of a chunk is known at
        compile time. Otherwise they are a power of two.
        """
        return 3 if self.head_dim in (384, WIDEST) else 4

    @property
    def v_chunk(self) -> int:
        """Keys of a V chunk."""
        return 32

    @property
    def v_chunks(self) -> int:
        """Chunks of a V block."""
        return self.block_kv // self.v_chunk

    @property
    def v_stages(self) -> int:
        """Stages of the V ring, each for one chunk; a power of two."""
        return 2

    @property
    def k_bytes(self) -> int:
        """Bytes of a K chunk."""
        return 2 * self.block_kv * self.k_chunk

    @property
    def v_bytes(self) -> int:
        """Bytes of a V chunk."""
        return 2 * self.v_chunk * self.head_dim_v

    @property
    def smem_bytes(self) -> int:
        """Shared memory bytes per CTA: Q, the K and V rings, barriers and records."""
        rings = self.k_stages * self.k_bytes + self.v_stages * self.v_bytes
        return self.q_bytes + rings + SMEM_ALIGNMENT
