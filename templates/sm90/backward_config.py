"""Define the compile-time configuration of the Hopper backward."""

from __future__ import annotations

from dataclasses import dataclass

from attnkit.templates.sm90.config import SMEM_BYTES

UNIT = 64 * 64  # floats in a unit of a float32 sum
ROWS = 64  # M of one wgmma
CLASSES = 64  # of columns, at most, whose sums `one_hot` computes


@dataclass(frozen=True)
class BackwardConfig:
    """Holds the sizes and switches of the Hopper backward kernel for head dims up to 128.

    Attributes:
        dtype: dtype of all inputs and gradients, "bfloat16" or "float16".
        head_dim, head_dim_v: head_dim and head_dim_v as the kernel computes them: those of the
            tensors, padded with zeros to 64 or 128.
        block_q: rows of a q block, 64, or 128 with a head_dim of 64.
        accumulate: add dK and dV to float32 sums, because query heads share a kv head; otherwise
            store them in `dtype`.
        pack_gqa: a work tile computes all query heads of a kv head, one by one, as if they were one
            long query, so that dK and dV need no float32 sums. For mods and masks that do not read
            the head, without dropout and entropies.
        sum_order: order in which kv blocks add to the sums, "ascending" or "descending", as in the
            schedule; "" for any order.
        first_writer: first-writer dQ: the first kv block in the list that adds to a q block stores
            its part instead. The others wait for its flag, or for their turn. See
            `attnkit.schedule.first_writer`.
        whole_heads: a CTA computes all kv blocks of a head, in ascending order. The first one of a
            q block stores its part of dQ, and the last one rounds and writes dQ, see
            `backward_whole_heads`.
        arrivals: CTAs count the parts of dQ at each q block, in global memory. The first part is
            stored. The last one is added to the sum of the others, which is rounded and written to
            dQ, see `backward_arrivals`.
        less_lse: subtract LSE / scale from S in the MMA, see `backward_lse_in_mma`; for mods that
            only add terms to the score that do not depend on the score.
        with_entropy: add the gradient of the rows' entropies, for q blocks of 64 rows.
        weights: there is no softmax, P is the modified score, for q blocks of 64 rows.
        with_dropout: drop elements of the softmax, see `sm90.dropout`.
        one_hot: sum the gradient of a captured table over columns of the same class in an MMA, see
            `backward_one_hot`, for q blocks of 64 rows.
        bias_first: initialise the accumulator of S to the bias, see `backward_bias_first`, for mods
            that only add terms to the score that do not depend on it, and q blocks of 64 rows.
        leaders: batch element 0 stores the gradient of a bias that the batch shares, and the
            others wait for it, see `backward_leaders`.
        bias_bytes: bytes of a number of the full bias that an idle warp copies to shared memory,
            see `backward_bias_in_smem`. If it is 0, the consumers load the bias themselves. Needs
            `bias_first`, and sums in any order.
    """

    dtype: str = "bfloat16"
    head_dim: int = 128
    head_dim_v: int = 128
    block_q: int = 64
    accumulate: bool = False
    pack_gqa: bool = False
    sum_order: str = ""
    first_writer: bool = False
    whole_heads: bool = False
    arrivals: bool = False
    less_lse: bool = False
    with_entropy: bool = False
    weights: bool = False
    with_dropout: bool = False
    one_hot: bool = False
    bias_first: bool = False
    leaders: bool = False
    bias_bytes: int = 0

    block_kv = 2 * ROWS  # 64 keys for each consumer warpgroup
    stages = q_stages = 2  # stages of the dO and dS rings, and of the Q ring
    k_stages = 2  # the next work tile's K is loaded while this one's is still read
    less_delta = False  # costs 7 % at head dim 128, see docs/hopper.md
    # Registers per thread. 2 * 128 * 240 + 128 * 24 = 64512 of 65536: the producer warpgroup gives
    # up what the consumers get beyond the launch's 168.
    consumer_registers, producer_registers = 240, 24

    @property
    def joins(self) -> bool:
        """Whether the work tiles of a split kv block add up their dK and dV in the kernel."""
        return not (self.accumulate or self.sum_order or self.first_writer or self.whole_heads)

    @property
    def writes_dq(self) -> bool:
        """Return whether the main kernel writes dQ in its dtype, so that no postprocess has to."""
        return self.whole_heads or self.arrivals

    @property
    def chunk(self) -> int:
        """Floats that a warpgroup adds to a sum at once: its half of a block of dQ."""
        return self.block_q * self.head_dim // 2

    @property
    def chunks(self) -> int:
        """Number of chunks of a q block's dQ, one for each warpgroup."""
        return 2

    @property
    def flags(self) -> int | None:
        """Return how many words are cleared for 64 rows of dQ; None if its sums are cleared."""
        if self.whole_heads:
            return 0  # a CTA waits for no other
        if self.arrivals:
            return self.chunks * ROWS // self.block_q  # a counter of each chunk
        if not self.first_writer:
            return None
        return 0 if self.sum_order else 2 * ROWS // self.block_q  # turns replace the flags

    @property
    def dq_parts(self) -> int:
        """Number of chunks in which a consumer sends its dQ of a q block."""
        return 1

    @property
    def bias_in_k(self) -> bool:
        """Whether the copied tiles of a bias are in the stage of K that is not in use."""
        return self.head_dim > ROWS

    @property
    def own_bias_bytes(self) -> int:
        """Bytes of shared memory for the copied tiles of a bias alone."""
        return 0 if self.bias_in_k else ROWS * self.block_kv * self.bias_bytes

    @property
    def words(self) -> tuple[int, int]:
        """Float32 words of (LSE, delta) per row."""
        return 4 if self.less_lse else 1, 1

    @property
    def rounded(self) -> bool:
        """Whether dS is computed from P rounded to `dtype`.

        With q blocks of 128 rows, no registers are left to keep P in float32.
        """
        return self.block_q > ROWS

    @property
    def smem_bytes(self) -> int:
        """Shared memory bytes per CTA: K twice, V, the rings of Q, dO and dS, dQ, small tables."""
        rings = self.stages * (self.head_dim + self.head_dim_v + self.block_kv)
        tiles = self.block_kv * (self.k_stages * self.head_dim + self.head_dim_v)
        tiles += self.block_q * rings
        rows = 4 * self.block_q * self.stages * sum(self.words)
        # barriers, words and the factors of LSE are below 512 bytes
        small = -(-(512 + rows) // 1024) * 1024
        return 2 * tiles + 8 * self.chunk + small + self.own_bias_bytes

    def problem(self) -> str | None:
        """Return the reason why the config is invalid, or None if it is valid."""
        if self.head_dim not in (64, 128) or self.head_dim_v not in (64, 128):
            return f"head dims of {self.head_dim} and {self.head_dim_v}: expected 64 or 128"
        if self.block_q not in (64, 128) or self.block_q * self.head_dim > 2 * UNIT:
            return (
                f"block_q={self.block_q} with head_dim={self.head_dim}: expected 64, or 128 with 64"
            )
        if self.with_entropy and self.rounded:
            return f"entropies with block_q={self.block_q}: expected {ROWS}"
        if self.weights and self.rounded:
            return f"weights without a softmax and block_q={self.block_q}: expected {ROWS}"
        if self.one_hot and (self.rounded or self.sum_order):
            return f"sums by class with block_q={self.block_q} and sum_order={self.sum_order!r}: expected {ROWS} and ''"
        if self.bias_first and (self.rounded or self.weights):
            return f"a bias first with block_q={self.block_q} and weights={self.weights}: expected {ROWS} and a softmax"
        if self.bias_bytes and (not self.bias_first or self.sum_order):
            return f"bias_bytes={self.bias_bytes} with bias_first={self.bias_first} and sum_order={self.sum_order!r}: expected True and ''"
        if self.leaders and (self.sum_order or self.first_writer or self.whole_heads):
            return "leaders with another order of sums"
        if self.with_entropy and self.with_dropout:
            return "with_entropy=True and with_dropout=True: expected one of them"
        if self.sum_order not in ("", "ascending", "descending"):
            return f"sum_order={self.sum_order!r}: expected '', 'ascending' or 'descending'"
        if self.writes_dq and self.chunk != UNIT:
            return f"whole heads or arrivals with chunks of {self.chunk} floats: expected {UNIT}"
        shared = self.accumulate or self.sum_order or self.first_writer or self.one_hot
        if self.whole_heads and (shared or self.arrivals):
            return "whole heads with arrivals, with sums that CTAs share, or with sums by class"
        if self.arrivals and (shared or self.leaders or self.bias_first):
            return "sums in the order of arrival with another order, sums by class or a full bias"
        if self.smem_bytes > SMEM_BYTES:
            return f"{self.smem_bytes} bytes of shared memory: a CTA has {SMEM_BYTES}"
        return None
