"""What is fixed when a Hopper kernel is compiled."""

from __future__ import annotations

from dataclasses import dataclass

SMEM_BYTES = 227 * 1024  # what one CTA may use


@dataclass(frozen=True)
class ForwardConfig:
    """Sizes and switches of the forward kernel.

    Attributes:
        dtype: "bfloat16" or "float16", of query, key, value and output.
        width, value_width: head dims as computed, the tensors' own rounded up by zeros.
        block_kv: columns of a tile, a multiple of 16; its rows are 64 per consumer warpgroup.
        warpgroups: consumer warpgroups, 1 to 3.
        stages: depth of the K ring and of the V ring, a power of two.
        softmax: "stale" takes exponentials against the maximum of the blocks before, "online"
            against the block's own, "bounded" against none (the scores are bounded).
        early: P is packed beside the exponentials, while P V still reads the last one from a second
            set of registers; else once P V is done. "stale" needs it.
        pingpong: warpgroups take turns on the tensor cores.
        overlap: Q K of a block is issued before P V of the block before.
        hold: keep the exponentials before the wait for P V.
        poly: every how many exponentials one is computed on the FMA units; 0 for none.
        direct: the output is written from registers, where shared memory has no room for its tile.
        skip_masks: full tiles are computed without mask instructions.
        dynamic: CTAs take their next tile from a counter, not by turns.
        need_max: also write the row maxima.
        chain: Q K of a tile's first block is issued before the last P V of the tile before, where
            there is shared memory for two query tiles.
    """

    dtype: str = "bfloat16"
    width: int = 128
    value_width: int = 128
    block_kv: int = 128
    warpgroups: int = 2
    stages: int = 2
    softmax: str = "stale"
    early: bool = True
    pingpong: bool = True
    overlap: bool = True
    hold: bool = False
    poly: int = 0
    direct: bool = False
    skip_masks: bool = True
    dynamic: bool = True
    need_max: bool = False
    chain: bool = True

    @property
    def block_q(self) -> int:
        """Rows of a tile."""
        return 64 * self.warpgroups

    @property
    def chained(self) -> bool:
        """Whether products run on from tile to tile."""
        return self.chain and not self.direct

    @property
    def query_stages(self) -> int:
        """Query tiles in shared memory."""
        return 2 if self.chained else 1

    @property
    def registers(self) -> tuple[int, int]:
        """Registers a thread of a consumer and of the producer warpgroup."""
        if self.warpgroups == 2 and not {self.width, self.value_width} <= {64, 128}:
            return 232, 40  # other rows take more boxes a load
        return {1: (256, 56), 2: (240, 24), 3: (160, 32)}[self.warpgroups]

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA: Q, K and V rings, O."""
        query = self.query_stages * self.block_q * self.width
        ring = self.stages * self.block_kv * (self.width + self.value_width)
        out = 0 if self.direct else self.block_q * self.value_width
        return 2 * (query + ring + out) + 1024
