"""Define the compile-time configuration of the Blackwell backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from attnkit.templates.sm100.config import SMEM_BYTES, TMEM_COLUMNS

UNIT = 64 * 64  # floats per unit: the sums of each gradient begin at a multiple of it
SLICE = 32  # columns of a sum that one bulk reduction adds
CHUNK = 64  # columns of operands that are loaded at a time above head dim 256
CHUNK_STAGES = 4  # stages of the ring of these chunks


class Registers(NamedTuple):
    """Holds the registers per thread of each role.

    `others` is for the MMA warp and the producer.
    """

    compute: int
    reduce: int
    others: int


@dataclass(frozen=True)
class BackwardConfig:
    """Holds the sizes and switches of the Blackwell backward kernels.

    Attributes:
        dtype: dtype of all inputs and gradients, "bfloat16" or "float16".
        head_dim, head_dim_v: head dims as the kernel computes them: those of the tensors, padded
            with zeros to 64 or 128 each, to 192 and 128, or to 256, 384 or 512 both.
        block_q: rows of a q block, 128, or 64 with a head_dim above 128.
        accumulate: add dK and dV to float32 sums, because query heads share a kv head; otherwise
            store them in `dtype`.
        sum_order: order of kv tiles in which they add to the sums (deterministic mode), "ascending"
            or "descending", as in the schedule; "" for any order.
        two_cta: CTA pairs share a work tile, 128 kv positions per CTA, and compute joint MMAs. For
            head dims of 128.
        less_lse: subtract LSE / scale from S in the MMA, see `LseInMma`. Requires that the MMAs
            also subtract delta from dP, a mod that only adds terms to the score that do not depend
            on the score, and no captured tensors that need a gradient.
        weights: there is no softmax, P is the modified score.
        with_entropy: add the gradient of the rows' entropies.
        with_dropout: drop elements of the softmax, see `backward_dropout`.
    """

    dtype: str = "bfloat16"
    head_dim: int = 128
    head_dim_v: int = 128
    block_q: int = 128
    accumulate: bool = False
    sum_order: str = ""
    two_cta: bool = False
    less_lse: bool = False
    weights: bool = False
    with_entropy: bool = False
    with_dropout: bool = False

    rows_kv = 128  # kv positions per CTA

    @property
    def column_parts(self) -> int:
        """Return the number of work tiles that share a kv block.

        Each computes 128 of the columns of dQ, dK and dV. Tensor memory has no room for 256 columns
        of dK and of dV.
        """
        return self.head_dim // 128 if self.head_dim >= 256 else 1

    @property
    def streamed(self) -> bool:
        """Return whether operands are loaded in chunks of 64 columns, see `backward_streamed`."""
        return self.head_dim > 256

    @property
    def chunks(self) -> int:
        """Return the number of chunks of S, and of dP."""
        return self.head_dim // CHUNK

    @property
    def grad_dims(self) -> tuple[int, int]:
        """Return the columns of dQ and dK, and of dV, that a work tile computes."""
        return self.head_dim // self.column_parts, self.head_dim_v // self.column_parts

    @property
    def slices(self) -> int:
        """Return the number of buffers in shared memory for slices of sums."""
        return 1 if self.head_dim == 256 else 2

    @property
    def ctas(self) -> int:
        """Return the number of CTAs per work tile."""
        return 2 if self.two_cta else 1

    @property
    def extras(self) -> int:
        """Return the number of tensors that follow the captured ones: of entropies and dropout."""
        return self.with_entropy + self.with_dropout

    @property
    def block_kv(self) -> int:
        """Return the kv positions per block of the work list."""
        return self.ctas * self.rows_kv

    @property
    def rows_dq(self) -> int:
        """Return the rows of a tile of dQ's sums, which one CTA adds."""
        return self.block_q // self.ctas

    @property
    def q_stages(self) -> int:
        """Return the stages of Q.

        They are at least two, because dK reads Q one block after S. At head dim 256 shared memory
        has room for one, so the MMAs of a block precede S of the next. If operands are loaded in
        chunks, these are the stages of LSE and delta.
        """
        if self.head_dim == 256:
            return 1
        return 4 if self.head_dim == self.head_dim_v == 64 else 2

    @property
    def stages(self) -> int:
        """Return the stages of dO: a second one for prefetching if there is room."""
        return 2 if self.head_dim == self.head_dim_v == 64 else 1

    @property
    def less_delta(self) -> bool:
        """Return whether the MMAs subtract delta from dP.

        They do if shared memory has room for the extra columns. With dropout they do not, because
        of an element that is dropped dP is 0, and delta is not.
        """
        if self.with_dropout:
            return False
        square = self.head_dim == self.head_dim_v
        return self.two_cta or not (square and self.head_dim >= 128)

    @property
    def words(self) -> tuple[int, int]:
        """Return the float32 words of (LSE, delta) per row."""
        return 4 if self.less_lse else 1, 4 if self.less_delta else 1

    @property
    def smem_row_words(self) -> tuple[int, int]:
        """Return the float32 words of (LSE, delta) in shared memory.

        Each CTA of a pair has only half of the rows of a statistic that the MMAs subtract.
        """
        lse, delta = self.words
        q_rows = self.q_stages * self.block_q
        if self.two_cta:
            half = self.block_q // 2
            return (
                half * lse if self.less_lse else q_rows,
                half * delta if self.less_delta else q_rows,
            )
        return q_rows * lse, self.stages * self.block_q * delta if self.less_delta else q_rows

    @property
    def s_column(self) -> int:
        """Return the first column of S^T in tensor memory; P^T overwrites it."""
        return 0

    @property
    def dp_column(self) -> int:
        """Return the first column of dP^T in tensor memory; dS^T overwrites it."""
        return self.block_q

    @property
    def dv_column(self) -> int:
        """Return the first column of dV in tensor memory; dK follows it."""
        return 2 * self.block_q

    @property
    def dk_column(self) -> int:
        """Return the first column of dK in tensor memory."""
        return self.dv_column + self.grad_dims[1]

    @property
    def _free_columns(self) -> int:
        return TMEM_COLUMNS - self.dk_column - self.grad_dims[0]

    @property
    def dq_over_dp(self) -> bool:
        """Return whether dQ overwrites dP^T, because tensor memory has no free columns left."""
        return self._free_columns < 64

    @property
    def ds_in_tensor(self) -> bool:
        """Return whether dK reads dS^T from tensor memory.

        It does unless dQ overwrites dS^T there.
        """
        return self.two_cta or not self.dq_over_dp

    @property
    def dq_parts(self) -> int:
        """Return the number of parts in which dQ of a q block is computed and added."""
        return self.grad_dims[0] // self.dq_width // self.ctas

    @property
    def dq_width(self) -> int:
        """Return the number of columns of dQ that tensor memory has at a time."""
        if self.two_cta:  # 64 rows on 128 lanes: each half of the lanes has half of the columns
            return self.head_dim // 2
        width = self.grad_dims[0]
        return width if self.dq_over_dp else min(width, self._free_columns // 64 * 64)

    @property
    def dq_column(self) -> int:
        """Return the first column of dQ in tensor memory.

        In a CTA pair, dQ is between the halves of dS^T.
        """
        if self.two_cta:
            return self.dp_column + self.block_q // 4
        return self.dp_column if self.dq_over_dp else TMEM_COLUMNS - self._free_columns

    @property
    def registers(self) -> Registers:
        """Return the registers per thread of each role; 512 threads share 65536 registers."""
        if self.block_q == 64 and self.with_dropout:
            return Registers(compute=168, reduce=104, others=72)
        if self.block_q == 64:
            return Registers(compute=160, reduce=104, others=88)
        if self.two_cta and self.sum_order:
            return Registers(compute=160, reduce=112, others=80)
        if self.two_cta:
            return Registers(compute=184, reduce=80, others=64)
        return Registers(compute=184, reduce=88, others=56)

    @property
    def roles(self) -> dict[str, tuple[range, int]]:
        """Return the warps of each role and their registers per thread."""
        compute, reduce, others = self.registers
        return {
            "reduce": (range(4), reduce),
            "compute 0": (range(4, 8), compute),
            "compute 1": (range(8, 12), compute),
            "mma": (range(12, 13), others),
            "producer": (range(13, 14), others),
        }

    @property
    def tmem(self) -> list[tuple[str, int, int]]:
        """Return the contents of tensor memory as (name, first column, number of columns).

        P^T and dS^T overwrite half of the columns of S^T and dP^T.
        """
        return [
            ("S", self.s_column, self.block_q),
            ("dP", self.dp_column, self.block_q),
            ("dV", self.dv_column, self.grad_dims[1]),
            ("dK", self.dk_column, self.grad_dims[0]),
            ("dQ", self.dq_column, self.dq_width),
        ]

    @property
    def threads(self) -> int:
        """Return the threads per CTA: those of the roles, and two warps without a role."""
        return 512

    @property
    def smem_bytes(self) -> int:
        """Return the shared memory bytes per CTA: operands, dS, statistics, slices of sums."""
        if self.streamed:
            ring = CHUNK_STAGES * (self.rows_kv + self.block_q) * CHUNK
            parts = (self.rows_kv + 2 * self.block_q) * self.grad_dims[0]
            halves = ring + parts + self.rows_kv * self.block_q
            floats = self.slices * SLICE * self.rows_kv + sum(self.smem_row_words)
            return 2 * halves + 4 * floats + 1024
        q_stages = 1 if self.two_cta else self.q_stages
        q = q_stages * self.head_dim + self.stages * self.head_dim_v + self.rows_kv
        # a CTA of a pair loads K twice: its rows for S, its columns for dQ
        halves = self.rows_kv * (self.ctas * self.head_dim + self.head_dim_v) + self.block_q * q
        floats = self.slices * SLICE * self.rows_kv + sum(self.smem_row_words)
        return 2 * halves + 4 * floats + 1024

    def problem(self) -> str | None:
        """Return the reason why this configuration is not supported, or None if it is supported."""
        widths = (self.head_dim, self.head_dim_v)
        wide = (192, 128), (256, 256), (384, 384), (512, 512)
        if widths not in wide and not (set(widths) <= {64, 128}):
            return (
                f"head dims of {self.head_dim} and {self.head_dim_v}: "
                "expected 64 or 128 each, 192 and 128, or 256, 384 or 512 both"
            )
        if self.block_q != (64 if self.head_dim > 128 else 128):
            return (
                f"block_q={self.block_q} with head_dim={self.head_dim}: "
                "expected 128, or 64 above a head_dim of 128"
            )
        if self.two_cta and widths != (128, 128):
            return (
                f"two_cta=True with head dims of {self.head_dim} and {self.head_dim_v}: "
                "expected 128 and 128"
            )
        if self.less_lse and not self.less_delta:
            return (
                "less_lse=True with dropout, or with one CTA and equal head dims from 128 on: "
                "expected False"
            )
        if self.weights and (self.with_entropy or self.with_dropout):
            return "entropies or dropout without a softmax: expected neither"
        if self.dtype not in ("bfloat16", "float16"):
            return f"dtype={self.dtype!r}: expected 'bfloat16' or 'float16'"
        if self.sum_order not in ("", "ascending", "descending"):
            return f"sum_order={self.sum_order!r}: expected '', 'ascending' or 'descending'"
        if self.smem_bytes > SMEM_BYTES:
            return f"{self.smem_bytes} bytes of shared memory: a CTA has {SMEM_BYTES}"
        return None
