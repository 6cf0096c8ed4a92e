"""What is fixed when a Blackwell kernel is compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OPTIONS = "--opt-level=2"

SMEM_BYTES = 227 * 1024  # what one CTA may use
SMALL_BYTES = 3 * 1024  # barriers, records, one number a row, and alignment
TMEM_COLUMNS = 512  # tensor memory of an SM: 128 lanes of so many 32-bit words
MAX_STAGES = 8
# Instructions of a score from which on little code is worth a few clocks: with more, a kernel would take
# more than five seconds to compile.
HEAVIEST = 40
ROWS = 128  # of a query tile: the lanes of tensor memory
WORK = ("counter", "turns", "clc")


def options_of(hooks: Any) -> str:
    """Options of `cute.compile` for a forward with these hooks, with which it does not spill.

    Found for version 4.8.1: level 3 spills in the warps with few registers, level 2 where a mod loads.
    """
    return "--opt-level=1" if hooks.ahead else OPTIONS


@dataclass(frozen=True)
class ForwardConfig:
    """Sizes and switches of the forward kernel.

    Attributes:
        dtype: "bfloat16" or "float16", of query, key, value and output.
        width, value_width: head dims as computed, the tensors' own rounded up by zeros; multiples
            of 32, at most 256.
        block_kv: columns of a tile, 64 or 128.
        q_tiles: query tiles of 128 rows that a CTA works on, 1 or 2. Two are worked on in
            ping-pong; they share the loads of K and V, and all blocks of the work list. With one,
            Q K of a block is computed during the softmax of the block before.
        alias: output tiles take the place of query tiles in shared memory; they must not be wider.
        out_tiles: places for output tiles in shared memory, 1 or `q_tiles`; with one, the second tile
            waits for the store of the first. `alias` needs none.
        halves: Q K of a block is computed in two halves of its columns, the first of which does not
            wait for P V of the block before: P takes the place of the other. The operands are read
            from shared memory one and a half times as often. For q_tiles=2 and block_kv=128.
        pair: two CTAs work on twice the rows, with products of both: each keeps half of K and V in its
            shared memory. For q_tiles=2 and block_kv=128, and not with work="counter".
        poly: every how many pairs of exponentials one is computed on the FMA units; 0 for none.
        skip_masks: full tiles are computed without mask instructions.
        work: how a CTA, or a pair, finds its next piece of work. "turns": it takes every n-th of n
            that share the work. "counter": it counts in memory, so that one that is ahead takes
            more. "clc": so too, by cluster launch control: the grid has a CTA, or a pair, for each
            piece, and one that is done takes the place of one that was not launched yet.
        need_max: also write the row maxima.
    """

    dtype: str = "bfloat16"
    width: int = 128
    value_width: int = 128
    block_kv: int = 128
    q_tiles: int = 2
    alias: bool = False
    out_tiles: int = 1
    halves: bool = False
    pair: bool = False
    poly: int = 0
    skip_masks: bool = True
    work: str = "counter"
    need_max: bool = False

    def __post_init__(self) -> None:
        for problem in self.problems():
            raise ValueError(problem)

    def problems(self) -> list[str]:
        """What keeps a kernel of this configuration from being built; empty if nothing does."""
        found = []
        if self.dtype not in ("bfloat16", "float16"):
            found.append(f"dtype={self.dtype!r}: expected 'bfloat16' or 'float16'")
        for name in ("width", "value_width"):
            size = getattr(self, name)
            if size % 32 or not 32 <= size <= 256:
                found.append(f"{name}={size}: expected a multiple of 32, at most 256")
        if self.block_kv not in (64, 128):
            found.append(f"block_kv={self.block_kv}: expected 64 or 128")
        if self.q_tiles not in (1, 2):
            found.append(f"q_tiles={self.q_tiles}: expected 1 or 2")
        if self.out_tiles not in (1, self.q_tiles) or (self.alias and self.out_tiles > 1):
            found.append(
                f"out_tiles={self.out_tiles} with q_tiles={self.q_tiles} and alias={self.alias}: "
                "expected 1, or without alias q_tiles"
            )
        if self.halves and (self.q_tiles, self.block_kv) != (2, 128):
            found.append(
                f"halves=True with q_tiles={self.q_tiles} and block_kv={self.block_kv}: expected "
                "2 and 128"
            )
        if self.work not in WORK:
            found.append(f"work={self.work!r}: expected one of {', '.join(map(repr, WORK))}")
        if self.pair and ((self.q_tiles, self.block_kv) != (2, 128) or self.work == "counter"):
            found.append(
                f"pair=True with q_tiles={self.q_tiles}, block_kv={self.block_kv} and "
                f"work={self.work!r}: expected 2, 128 and 'turns' or 'clc'"
            )
        if self.alias and self.value_width > self.width:
            found.append(
                f"alias=True with value_width={self.value_width}: expected at most {self.width}, "
                "the width of the query tile"
            )
        columns = 2 * self.block_kv + self.q_tiles * self.value_width
        if columns > TMEM_COLUMNS:
            found.append(
                f"q_tiles={self.q_tiles}, block_kv={self.block_kv}, value_width={self.value_width} "
                f"take {columns} columns of tensor memory, there are {TMEM_COLUMNS}: take q_tiles=1"
            )
        if not found and self.stages < 2:
            found.append(
                f"{self.q_tiles} query tiles of width {self.width} leave no room for K and V in "
                f"{SMEM_BYTES} bytes of shared memory: take alias=True, q_tiles=1 or block_kv=64"
            )
        return found

    @property
    def ctas(self) -> int:
        """CTAs that share their products."""
        return 2 if self.pair else 1

    @property
    def rows(self) -> int:
        """Rows of a product: a query tile of each of them."""
        return ROWS * self.ctas

    @property
    def block_q(self) -> int:
        """Rows of a tile of the work list."""
        return self.rows * self.q_tiles

    @property
    def parts(self) -> tuple[int, ...]:
        """Ends of the columns of P that are announced together: their product waits for no others."""
        return (32, 64) if self.block_kv == 64 else (64, 96, 128)

    @property
    def slot(self) -> int:
        """Elements of a slot of the ring that holds a CTA's part of K and V tiles in turns."""
        return self.block_kv * max(self.width, self.value_width) // self.ctas

    @property
    def stages(self) -> int:
        """Slots of the ring, as many as fit."""
        rest = SMEM_BYTES - SMALL_BYTES - 2 * self.q_tiles * ROWS * self.width
        if not self.alias:
            rest -= 2 * self.out_tiles * ROWS * self.value_width
        return min(MAX_STAGES, rest // (2 * self.slot))

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA: tiles of Q, K, V and O."""
        out = 0 if self.alias else self.out_tiles * ROWS * self.value_width
        return 2 * (self.q_tiles * ROWS * self.width + out + self.stages * self.slot)

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers a thread of a softmax, of the correction, and of the last warpgroup."""
        return (192, 80, 48) if self.q_tiles == 2 else (256, 128, 120)

    @property
    def roles(self) -> dict[str, tuple[range, int]]:
        """Warps of each role, and registers a thread."""
        softmax, correction, rest = self.registers
        found = {f"softmax {t}": (range(4 * t, 4 * t + 4), softmax) for t in range(self.q_tiles)}
        last = 4 * self.q_tiles
        found["correction"] = range(last, last + 4), correction
        for i, name in enumerate(("products", "loads", "stores")):
            found[name] = range(last + 4 + i, last + 5 + i), rest
        return found

    @property
    def tmem(self) -> list[tuple[str, int, int]]:
        """What tensor memory holds: names, first columns, columns. P takes half of S, the last."""
        tiles = range(self.q_tiles)
        return [
            *((f"S {t}", t * self.block_kv, self.block_kv) for t in range(2)),
            *((f"O {t}", self.out_column(t), self.value_width) for t in tiles),
        ]

    def out_column(self, t: int) -> int:
        """Where the output of query tile t begins in tensor memory."""
        return 2 * self.block_kv + t * self.value_width

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 128 * (self.q_tiles + 2)
