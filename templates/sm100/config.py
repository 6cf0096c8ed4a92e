"""Define the compile-time configuration of the Blackwell forward kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OPTIONS = "--opt-level=2"

SMEM_BYTES = 227 * 1024  # shared memory that one CTA can use
SMALL_BYTES = 3 * 1024  # reserved for barriers, records, two float32 per row, and alignment
TMEM_COLUMNS = 512  # 32-bit columns of an SM's tensor memory, on 128 lanes
MAX_STAGES = 8
# From this estimated number of instructions per score on, kernels prefer short code to a few saved
# clocks: longer code would take more than five seconds to compile.
HEAVIEST = 40
ROWS = 128  # rows of a query tile, one per lane of tensor memory
WARPGROUP_WARPS = 4
WARPGROUP_THREADS = 128
S_STAGES = 2  # buffers of S in tensor memory, which P overwrites
WORK = ("counter", "clc")


def options_of(hooks: Any) -> str:
    """Return the options of `cute.compile` with which a forward with these hooks does not spill.

    With DSL 4.8.1, level 3 spills in the warps with few registers, and level 2 spills if a mod
    loads.
    """
    return "--opt-level=1" if hooks.prefetches else OPTIONS


@dataclass(frozen=True)
class ForwardConfig:
    """Holds the sizes and switches of the Blackwell forward kernel.

    Attributes:
        dtype: dtype of query, key, value and output, "bfloat16" or "float16".
        head_dim: head dim of query and key as the kernel computes it: that of the tensors, padded
            to a multiple of 32, at most 576; TMA fills the padding with zeros.
        head_dim_v: columns of the value that a work tile computes, padded to a multiple of 32, at
            most 256.
        value_parts: number of work tiles that share a query tile, each with `head_dim_v` columns of
            the value: 1, or 2 for values wider than 256 columns, because tensor memory has no room
            for their output.
        block_kv: kv columns of a block, 64 or 128.
        q_tiles: query tiles of 128 rows per CTA, 1 or 2. Two tiles are processed in ping-pong; they
            share the loads of K and V, and all blocks of the work list. With one tile, Q K of a
            block is computed during the softmax of the previous block.
        alias: output tiles overwrite the query tiles in shared memory, and must not be wider.
            Otherwise there is one output buffer, and the second tile waits until the first one is
            stored.
        halves: compute Q K of a block in two halves of its columns. The first half does not wait
            for P V of the previous block, because P overwrites only the second half. Operands are
            read from shared memory 1.5 times as often. For q_tiles=2 and block_kv=128.
        two_cta: CTA pairs process twice the rows with joint MMAs; each CTA keeps half of K and V
            in its shared memory. For q_tiles=2, block_kv=128 and work="clc".
        poly: compute one of every `poly` pairs of exponentials on the FMA units; 0 for none.
        work: how a CTA, or a CTA pair, fetches its next work tile. "counter": from an atomic
            counter in global memory, so that faster CTAs process more work tiles. "clc": by cluster
            launch control. The grid then has a CTA, or a pair, for each work tile, and a running
            one takes over the work tile of one that was not launched yet.
        need_max: also write the row maxima.
        need_entropy: also write the entropies of the rows.
        weights: without a softmax, what P is where it is not masked: the modified score ("linear")
            or 1 / (1 + 2**-x) of the modified score x in log2 units ("sigmoid"); "" for a softmax.
    """

    dtype: str = "bfloat16"
    head_dim: int = 128
    head_dim_v: int = 128
    value_parts: int = 1
    block_kv: int = 128
    q_tiles: int = 2
    alias: bool = False
    halves: bool = False
    two_cta: bool = False
    poly: int = 0
    work: str = "counter"
    need_max: bool = False
    need_entropy: bool = False
    weights: str = ""

    def __post_init__(self) -> None:
        for problem in self.problems():
            raise ValueError(problem)

    def problems(self) -> list[str]:
        """Return the reasons why this configuration is not supported; empty if it is supported."""
        problems = []
        if self.dtype not in ("bfloat16", "float16"):
            problems.append(f"dtype={self.dtype!r}: expected 'bfloat16' or 'float16'")
        for name, most in (("head_dim", 576), ("head_dim_v", 256)):
            size = getattr(self, name)
            if size % 32 or not 32 <= size <= most:
                problems.append(f"{name}={size}: expected a multiple of 32, at most {most}")
        if self.head_dim % (32 * self.k_parts) and not problems:
            problems.append(
                f"head_dim={self.head_dim}: above 256 expected a multiple of {32 * self.k_parts}"
            )
        if self.value_parts not in (1, 2):
            problems.append(f"value_parts={self.value_parts}: expected 1 or 2")
        if self.value_parts > 1 and self.work != "counter":
            problems.append(
                f"value_parts={self.value_parts} with work={self.work!r}: expected 'counter'"
            )
        if self.block_kv not in (64, 128):
            problems.append(f"block_kv={self.block_kv}: expected 64 or 128")
        if self.q_tiles not in (1, 2):
            problems.append(f"q_tiles={self.q_tiles}: expected 1 or 2")
        if self.q_tiles == 2 and max(self.k_parts, self.value_parts) > 1:
            problems.append(
                f"q_tiles=2 with head_dim={self.head_dim} and value_parts={self.value_parts}: "
                "expected q_tiles=1"
            )
        if self.halves and (self.q_tiles, self.block_kv) != (2, 128):
            problems.append(
                f"halves=True with q_tiles={self.q_tiles} and block_kv={self.block_kv}: expected "
                "2 and 128"
            )
        if self.work not in WORK:
            problems.append(f"work={self.work!r}: expected one of {', '.join(map(repr, WORK))}")
        if self.two_cta and ((self.q_tiles, self.block_kv) != (2, 128) or self.work == "counter"):
            problems.append(
                f"two_cta=True with q_tiles={self.q_tiles}, block_kv={self.block_kv} and "
                f"work={self.work!r}: expected 2, 128 and 'clc'"
            )
        if self.alias and self.head_dim_v > self.head_dim:
            problems.append(
                f"alias=True with head_dim_v={self.head_dim_v}: expected at most {self.head_dim}, "
                "the head_dim of the query tile"
            )
        columns = S_STAGES * self.block_kv + self.q_tiles * self.head_dim_v
        if columns > TMEM_COLUMNS:
            problems.append(
                f"q_tiles={self.q_tiles}, block_kv={self.block_kv}, head_dim_v={self.head_dim_v} "
                f"take {columns} columns of tensor memory, there are {TMEM_COLUMNS}: take q_tiles=1"
            )
        if not problems and self.stages < 2:
            problems.append(
                f"{self.q_tiles} query tiles of head_dim={self.head_dim} leave no room for K and V in "
                f"{SMEM_BYTES} bytes of shared memory: take alias=True, q_tiles=1 or block_kv=64"
            )
        return problems

    @property
    def ctas(self) -> int:
        """Return the number of CTAs that compute an MMA together."""
        return 2 if self.two_cta else 1

    @property
    def mma_rows(self) -> int:
        """Return M of an MMA: the rows of one query tile in each of its CTAs."""
        return ROWS * self.ctas

    @property
    def block_q(self) -> int:
        """Return the query rows of a work tile."""
        return self.mma_rows * self.q_tiles

    @property
    def p_parts(self) -> tuple[int, ...]:
        """Return the end columns of the parts of P.

        P V of a part waits only for that part.
        """
        return (32, 64) if self.block_kv == 64 else (64, 96, 128)

    @property
    def k_parts(self) -> int:
        """Return the number of parts in which the columns of a K block are loaded."""
        return -(-self.head_dim // 256)

    @property
    def k_columns(self) -> int:
        """Return the columns of a part of K."""
        return self.head_dim // self.k_parts

    @property
    def v_late(self) -> bool:
        """Return whether V of a block follows K of the next block in the ring.

        The MMAs of one query tile read them in this order, so that two stages suffice.
        """
        return self.k_parts > 1

    @property
    def stage_elements(self) -> int:
        """Return the elements per stage of the K and V ring: a CTA's part of a block."""
        return self.block_kv * max(self.k_columns, self.head_dim_v) // self.ctas

    @property
    def o_stages(self) -> int:
        """Return the number of output buffers in shared memory, 0 if O overwrites Q."""
        return 0 if self.alias else 1

    @property
    def o_places(self) -> int:
        """Return the number of output tiles that fit in shared memory at once."""
        return self.q_tiles if self.alias else self.o_stages

    @property
    def stages(self) -> int:
        """Return the number of stages of the ring in which K and V blocks alternate."""
        rest = SMEM_BYTES - SMALL_BYTES - 2 * self.q_tiles * ROWS * self.head_dim
        rest -= 2 * self.o_stages * ROWS * self.head_dim_v
        return min(MAX_STAGES, rest // (2 * self.stage_elements))

    @property
    def smem_bytes(self) -> int:
        """Return the shared memory bytes of a CTA's tiles of Q, K, V and O."""
        out = self.o_stages * ROWS * self.head_dim_v
        return 2 * (self.q_tiles * ROWS * self.head_dim + out + self.stages * self.stage_elements)

    @property
    def registers(self) -> tuple[int, int, int]:
        """Return the registers per thread of the (softmax, correction, last) warpgroups."""
        return (192, 80, 48) if self.q_tiles == 2 else (256, 128, 120)

    @property
    def roles(self) -> dict[str, tuple[range, int]]:
        """Return the warps of each role and their registers per thread."""
        softmax, correction, rest = self.registers
        warps = WARPGROUP_WARPS
        roles = {
            f"softmax {t}": (range(warps * t, warps * (t + 1)), softmax)
            for t in range(self.q_tiles)
        }
        roles["correction"] = range(self.correction_warp, self.mma_warp), correction
        single = {"products": self.mma_warp, "loads": self.load_warp, "stores": self.store_warp}
        return roles | {name: (range(warp, warp + 1), rest) for name, warp in single.items()}

    @property
    def tmem(self) -> list[tuple[str, int, int]]:
        """Return the contents of tensor memory as (name, first column, number of columns).

        P overwrites the last half of the columns of S.
        """
        tiles = range(self.q_tiles)
        return [
            *((f"S {t}", t * self.block_kv, self.block_kv) for t in range(S_STAGES)),
            *((f"O {t}", self.out_column(t), self.head_dim_v) for t in tiles),
        ]

    def out_column(self, t: int) -> int:
        """Return the first column of O of query tile `t` in tensor memory."""
        return S_STAGES * self.block_kv + t * self.head_dim_v

    @property
    def threads(self) -> int:
        """Return the threads per CTA: softmax warpgroups, correction, and the last warpgroup."""
        return WARPGROUP_THREADS * (self.q_tiles + 2)

    @property
    def correction_warp(self) -> int:
        """Return the index of the first warp of the correction warpgroup."""
        return WARPGROUP_WARPS * self.q_tiles

    @property
    def mma_warp(self) -> int:
        """Return the index of the warp that issues the MMAs, first in the last warpgroup."""
        return self.correction_warp + WARPGROUP_WARPS

    @property
    def load_warp(self) -> int:
        """Return the index of the warp that loads."""
        return self.mma_warp + 1

    @property
    def store_warp(self) -> int:
        """Return the index of the warp that stores."""
        return self.mma_warp + 2

    def s_column(self, stage: Any) -> Any:
        """Return the first column of S buffer `stage` in tensor memory."""
        return stage * self.block_kv

    def p_column(self, stage: Any) -> Any:
        """Return the first column of P buffer `stage`, which overwrites the upper half of S."""
        return self.s_column(stage) + self.block_kv // 2

    def s_stage(self, t: Any, kv_idx: Any) -> Any:
        """Return the buffer of S and P for the `kv_idx`-th block of query tile `t`."""
        return t if self.q_tiles == 2 else kv_idx & 1

    def s_phase(self, kv_idx: Any) -> Any:
        """Return the parity of the buffer's barriers for the `kv_idx`-th block."""
        return kv_idx & 1 if self.q_tiles == 2 else (kv_idx >> 1) & 1
