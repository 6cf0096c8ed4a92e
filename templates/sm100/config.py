"""Compile-time configuration of the Blackwell forward kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OPTIONS = "--opt-level=2"

SMEM_BYTES = 227 * 1024  # what one CTA may use
SMALL_BYTES = 3 * 1024  # barriers, records, two numbers a row, and alignment
TMEM_COLUMNS = 512  # tensor memory of an SM: 128 lanes of so many 32-bit words
MAX_STAGES = 8
# Instructions of a score from which on little code is worth a few clocks: with more, a kernel would take
# more than five seconds to compile.
HEAVIEST = 40
ROWS = 128  # of a query tile: the lanes of tensor memory
WARPGROUP_WARPS = 4
WARPGROUP_THREADS = 128
S_STAGES = 2  # places of S, and so of P, in tensor memory
WORK = ("counter", "clc")


def options_of(hooks: Any) -> str:
    """Options of `cute.compile` with which a forward with these hooks does not spill.

    For version 4.8.1: level 3 spills in the warps with few registers, level 2 where a mod loads.
    """
    return "--opt-level=1" if hooks.prefetches else OPTIONS


@dataclass(frozen=True)
class ForwardConfig:
    """Sizes and switches of the forward kernel.

    Attributes:
        dtype: "bfloat16" or "float16", of query, key, value and output.
        head_dim, head_dim_v: head dims as the kernel computes them: those of the tensors, padded to a
            multiple of 32, at most 256; TMA fills the padding with zeros.
        block_kv: kv columns of a block, 64 or 128.
        q_tiles: query tiles of 128 rows that a CTA works on, 1 or 2. Two are worked on in
            ping-pong; they share the loads of K and V, and all blocks of the work list. With one,
            Q K of a block is computed during the softmax of the block before.
        alias: the output tiles take the place of the query tiles in shared memory; they must not be
            wider. Otherwise there is one place for an output tile, and the second tile waits for the
            store of the first.
        halves: Q K of a block is computed in two halves of its columns, the first of which does not
            wait for P V of the block before: P takes the place of the other. The operands are read
            from shared memory one and a half times as often. For q_tiles=2 and block_kv=128.
        two_cta: two CTAs work on twice the rows, with products of both: each keeps half of K and V
            in its shared memory. For q_tiles=2, block_kv=128 and work="clc".
        poly: compute one of every `poly` pairs of exponentials on the FMA units; 0 for none.
        work: how a CTA, or a pair, fetches its next work tile. "counter": it counts in global
            memory, so that one that is ahead takes more. "clc": by cluster launch control: the grid
            has a CTA, or a pair, for each work tile, and one that is done takes the place of one that
            was not launched yet.
        need_max: also write the row maxima.
    """

    dtype: str = "bfloat16"
    head_dim: int = 128
    head_dim_v: int = 128
    block_kv: int = 128
    q_tiles: int = 2
    alias: bool = False
    halves: bool = False
    two_cta: bool = False
    poly: int = 0
    work: str = "counter"
    need_max: bool = False

    def __post_init__(self) -> None:
        for problem in self.problems():
            raise ValueError(problem)

    def problems(self) -> list[str]:
        """What keeps a kernel of this configuration from being built; empty if nothing does."""
        problems = []
        if self.dtype not in ("bfloat16", "float16"):
            problems.append(f"dtype={self.dtype!r}: expected 'bfloat16' or 'float16'")
        for name in ("head_dim", "head_dim_v"):
            size = getattr(self, name)
            if size % 32 or not 32 <= size <= 256:
                problems.append(f"{name}={size}: expected a multiple of 32, at most 256")
        if self.block_kv not in (64, 128):
            problems.append(f"block_kv={self.block_kv}: expected 64 or 128")
        if self.q_tiles not in (1, 2):
            problems.append(f"q_tiles={self.q_tiles}: expected 1 or 2")
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
        """CTAs that share their products."""
        return 2 if self.two_cta else 1

    @property
    def mma_rows(self) -> int:
        """M of a product: the rows of a query tile of each CTA that shares it."""
        return ROWS * self.ctas

    @property
    def block_q(self) -> int:
        """Query rows of a work tile."""
        return self.mma_rows * self.q_tiles

    @property
    def p_parts(self) -> tuple[int, ...]:
        """Ends of the columns of P that are announced together: P V of a part waits for no other."""
        return (32, 64) if self.block_kv == 64 else (64, 96, 128)

    @property
    def stage_elements(self) -> int:
        """Elements of a stage of the ring, which holds a CTA's part of a K or a V block."""
        return self.block_kv * max(self.head_dim, self.head_dim_v) // self.ctas

    @property
    def o_stages(self) -> int:
        """Output tiles in shared memory that do not take the place of query tiles."""
        return 0 if self.alias else 1

    @property
    def o_places(self) -> int:
        """Output tiles that there is room for."""
        return self.q_tiles if self.alias else self.o_stages

    @property
    def stages(self) -> int:
        """Stages of the ring that K and V blocks share in turns, as many as fit."""
        rest = SMEM_BYTES - SMALL_BYTES - 2 * self.q_tiles * ROWS * self.head_dim
        rest -= 2 * self.o_stages * ROWS * self.head_dim_v
        return min(MAX_STAGES, rest // (2 * self.stage_elements))

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA: tiles of Q, K, V and O."""
        out = self.o_stages * ROWS * self.head_dim_v
        return 2 * (self.q_tiles * ROWS * self.head_dim + out + self.stages * self.stage_elements)

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers a thread of a softmax, of the correction, and of the last warpgroup."""
        return (192, 80, 48) if self.q_tiles == 2 else (256, 128, 120)

    @property
    def roles(self) -> dict[str, tuple[range, int]]:
        """Warps of each role, and registers a thread."""
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
        """What tensor memory holds: names, first columns, columns. P takes half of S, the last."""
        tiles = range(self.q_tiles)
        return [
            *((f"S {t}", t * self.block_kv, self.block_kv) for t in range(S_STAGES)),
            *((f"O {t}", self.out_column(t), self.head_dim_v) for t in tiles),
        ]

    def out_column(self, t: int) -> int:
        """First column of the output of query tile t in tensor memory."""
        return S_STAGES * self.block_kv + t * self.head_dim_v

    @property
    def threads(self) -> int:
        """Threads of a CTA: a warpgroup for each query tile, the correction, and the last one."""
        return WARPGROUP_THREADS * (self.q_tiles + 2)

    @property
    def correction_warp(self) -> int:
        """First warp of the correction warpgroup."""
        return WARPGROUP_WARPS * self.q_tiles

    @property
    def mma_warp(self) -> int:
        """The warp that issues the products, the first of the last warpgroup."""
        return self.correction_warp + WARPGROUP_WARPS

    @property
    def load_warp(self) -> int:
        """The warp that loads."""
        return self.mma_warp + 1

    @property
    def store_warp(self) -> int:
        """The warp that stores."""
        return self.mma_warp + 2

    def s_column(self, stage: Any) -> Any:
        """First column of a place of S in tensor memory."""
        return stage * self.block_kv

    def p_column(self, stage: Any) -> Any:
        """First column of a place of P: the upper half of S, which has been read by then."""
        return self.s_column(stage) + self.block_kv // 2

    def s_stage(self, t: Any, kv_idx: Any) -> Any:
        """Which place of S, and so of P, the kv_idx-th block of query tile t takes."""
        return t if self.q_tiles == 2 else kv_idx & 1

    def s_phase(self, kv_idx: Any) -> Any:
        """Parity of the use of that place."""
        return kv_idx & 1 if self.q_tiles == 2 else (kv_idx >> 1) & 1
