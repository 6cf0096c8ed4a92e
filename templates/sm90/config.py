"""Define the compile-time configuration of the Hopper forward kernel."""

from __future__ import annotations

from dataclasses import dataclass

SMEM_BYTES = 227 * 1024  # shared memory capacity of a CTA
WARP_THREADS = 32
WARPGROUP_WARPS = 4
WARPGROUP_THREADS = WARP_THREADS * WARPGROUP_WARPS
WARPGROUP_ROWS = 64  # M of one wgmma: the query rows of a consumer warpgroup
TABLE_ROWS = TABLE_COLUMNS = 64  # capacity of a table of pairs in shared memory
# Rows of odd length: a warp reads entries of eight rows, which would otherwise be in the same bank.
TABLE_STRIDE = TABLE_COLUMNS + 1
# Estimated instructions per score from which blocks with and without the mask share their code. Two
# copies would save little beside so long a mod, and the second takes seconds to compile.
LONG_MOD = 40
SMEM_ALIGNMENT = 1024  # alignment of a tile in shared memory: the period of the 128-byte swizzle
# 32-bit words of operands in shared memory, see `columns_in_mma`
CORE_WORDS = 32  # a core matrix: eight rows of eight bfloat16 numbers
PARTS = 3  # bfloat16 numbers that represent a float32 number
TERM_WORDS = 4 * PARTS  # the parts of eight columns' terms


@dataclass(frozen=True)
class ForwardConfig:
    """Holds the sizes and switches of the Hopper forward kernel.

    Attributes:
        dtype: dtype of query, key, value and output, "bfloat16" or "float16".
        head_dim, head_dim_v: head dims as the kernel computes them: those of the tensors, padded to
            64, 96, 128, 192 or 256; TMA fills the padding with zeros.
        block_kv: kv columns of a block, a multiple of 16.
        warpgroups: consumer warpgroups, 1 to 3, with 64 query rows each.
        stages: stages of the K ring and of the V ring, a power of two.
        softmax: which maximum is subtracted from the scores to compute P. "delayed-max": the row
            maximum of the previous blocks; P is recomputed exactly where the maximum grew too much.
            "online": the row maximum including the current block. "no-max": none, for bounded
            scores. Without a softmax, P is 0 where masked and else the modified score ("none") or
            1 / (1 + 2**-x) of the modified score x in log2 units ("sigmoid").
        double_buffer_p: P has two register buffers, so that the next P is packed while P V still
            reads the first buffer; otherwise it is packed after P V. "delayed-max" needs it.
        exp_before_wait: compute the exponentials before the wait for P V.
        poly: compute one of every `poly` exponentials on the FMA units; 0 for none.
        store_from_registers: store the output from registers, because shared memory has no room for
            its tile.
        need_max: also write the row maxima.
        need_entropy: also write the entropies of the rows.
        checks_data: idle warps compare captured data with its fingerprints.
        edge_only: only the last kv block may need a mask, because of columns beyond the tensors, so
            that a work tile has at most one such block.
        pair_table: each warpgroup copies a head's part of a captured tensor, at most `TABLE_ROWS`
            by `TABLE_COLUMNS`, to shared memory, see the hook `pair_table`.
        slope_in_mma: the MMAs of Q K also add a slope times the column, see `slope_in_mma`. Needs
            `chained`.
        bias_first: the accumulator of S is initialised to the bias, see the hook `initial_scores`.
            Needs `chained`.
        bias_stages: stages of each consumer warpgroup's ring of tiles of the bias, to which warps
            that are idle otherwise copy them, see `bias_in_smem`; a power of two. If it is 0, the
            consumers load the bias themselves. Needs `bias_first`.
        bias_bytes: bytes of a number in these tiles, 2 or 4.
        columns_in_mma: the MMAs of Q K also add a term of each column, see `columns_in_mma`. Needs
            `chained`.
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
    need_entropy: bool = False
    checks_data: bool = False
    edge_only: bool = False
    pair_table: bool = False
    slope_in_mma: bool = False
    bias_first: bool = False
    bias_stages: int = 0
    bias_bytes: int = 4
    columns_in_mma: bool = False

    @property
    def weights(self) -> bool:
        """Whether there is no softmax."""
        return self.softmax in ("none", "sigmoid")

    @property
    def block_q(self) -> int:
        """Query rows of a work tile."""
        return WARPGROUP_ROWS * self.warpgroups

    @property
    def chained(self) -> bool:
        """Whether Q K of the next work tile is issued before the last P V of the current one.

        This needs a second Q stage, which does not fit in shared memory at head dims above 128.
        """
        return not self.store_from_registers

    @property
    def left_half_softmax(self) -> bool:
        """Whether warps that keep only the left half of a tile's first block compute only that half.

        At head dims up to 64 the exponentials limit the kernel. At 128 the branch costs what it
        saves.
        """
        return max(self.head_dim, self.head_dim_v) <= 64 and not self.weights

    @property
    def q_stages(self) -> int:
        """Number of query tiles in shared memory."""
        return 2 if self.chained else 1

    @property
    def threads(self) -> int:
        """Threads per CTA: the producer warpgroup and the consumer warpgroups."""
        return WARPGROUP_THREADS * (self.warpgroups + 1)

    @property
    def consumer_warps(self) -> int:
        """Number of warps in all consumer warpgroups."""
        return WARPGROUP_WARPS * self.warpgroups

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of a consumer warpgroup and of the producer warpgroup."""
        if self.warpgroups == 2 and not {self.head_dim, self.head_dim_v} <= {64, 128}:
            # these rows need more TMA boxes per load, and therefore more producer registers
            return 232, 40
        if self.bias_stages:  # copies need producer registers too
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
    def table_floats(self) -> int:
        """Float32 numbers in the tables of pairs of all warpgroups."""
        return self.warpgroups * TABLE_ROWS * TABLE_STRIDE if self.pair_table else 0

    @property
    def column_words(self) -> int:
        """32-bit words of the extra columns in shared memory.

        See `slope_in_mma` and `columns_in_mma`.
        """
        if self.columns_in_mma:
            return CORE_WORDS + self.stages * self.stage_words
        return 4 * self.block_kv if self.slope_in_mma else 0

    @property
    def bias_tile_bytes(self) -> int:
        """Bytes of the bias of a warpgroup's rows and a kv block."""
        return WARPGROUP_ROWS * self.block_kv * self.bias_bytes

    @property
    def bias_ring_bytes(self) -> int:
        """Bytes of the rings of the bias of all warpgroups."""
        return self.warpgroups * self.bias_stages * self.bias_tile_bytes

    @property
    def stage_words(self) -> int:
        """32-bit words that the terms of a K block occupy, see `columns_in_mma`."""
        return (self.block_kv // 8 - 1) * TERM_WORDS + CORE_WORDS

    @property
    def clearing_warps(self) -> int:
        """Warps of the producer warpgroup that write fully masked tiles."""
        return 1 if self.columns_in_mma else 2

    @property
    def smem_bytes(self) -> int:
        """Shared memory bytes per CTA: Q, the rings of K, V and bias, O, tables, barriers, records."""
        ring = self.stages * (self.k_bytes + self.v_bytes) + self.bias_ring_bytes
        tables = 4 * (self.table_floats + self.column_words)
        return self.q_stages * self.q_bytes + ring + self.o_bytes + tables + SMEM_ALIGNMENT
