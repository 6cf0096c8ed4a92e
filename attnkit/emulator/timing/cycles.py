"""Estimate for how long a launch keeps each unit of an SM busy.

The longest of these times is a lower bound on the time that one SM needs for the launch. Waits,
latencies and the order of instructions are not modelled here. No rate is calibrated: the sources of
the rates are given below.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from attnkit.emulator.execution.grid import LaunchStats
from attnkit.emulator.numerics.formats import ELEMENT_BYTES
from attnkit.errors import OptionError


@dataclass(frozen=True)
class Rates:
    """Holds the rates of an SM per clock.

    Attributes:
        tensor: dense 16-bit FLOP of the tensor cores.
        special: special functions, such as exponentials.
        float32, integer: operations of the float32 and integer lanes.
        issue: warp instructions that issue.
        shared, bulk, tensor_memory: bytes of shared memory, bulk copies and tensor memory.
    """

    tensor: float
    special: float
    float32: float
    integer: float
    issue: float
    shared: float
    bulk: float
    tensor_memory: float


# Tensor, exponential and shared-memory rates of sm_100: FlashAttention-4 paper (8192 FLOP, 16
# exponentials, 128 bytes per clock and SM); sm_90: half the tensor rate. Lanes and issue: CUDA C++
# Programming Guide, "Arithmetic Instructions" (128 float32, 64 integer, 16 special function lanes,
# four schedulers). sm_80: 2048 FLOP (A100 whitepaper). Bulk copies: assumed as wide as shared
# memory. Tensor memory: assumed, as microbenchmarks of tcgen05 are not public: a column per clock,
# 4 bytes of each of 128 lanes.
RATES = {
    "sm_80": Rates(2048, 16, 64, 64, 4, 128, 128, 1),
    "sm_90": Rates(4096, 16, 128, 64, 4, 128, 128, 1),
    "sm_100": Rates(8192, 16, 128, 64, 4, 128, 128, 512),
}
_SPECIAL = ("ex2", "lg2", "tanh", "rcp", "sqrt", "rsqrt", "sin", "cos")
_FLOAT = ("add", "sub", "mul", "fma")
_INTEGER = set("add sub mul mad and or xor not shl shr setp selp cvt min max prmt lop3 neg".split())
_INTEGER |= set("abs shf bfe bfi popc clz copysign".split())
_FREE = ("mov", "bra", "ret", "cvta", "exit")


def rates_of(arch: str) -> Rates:
    """Return the rates of an architecture such as "sm_90a".

    Raises:
        OptionError: the architecture is not in the table.
    """
    name = arch.rstrip("af")
    if name not in RATES:
        raise OptionError(f"arch={arch!r}: rates are known for {', '.join(RATES)}")
    return RATES[name]


def unit_of(op: str) -> tuple[str, float]:
    """Return (unit, work per thread) of an opcode; unit "" if it only takes an issue slot.

    The work is a number of operations, or of bytes for shared memory.

    Comparison, minimum, maximum and conversion run on the integer lanes (CUDA C++ Programming
    Guide, "Arithmetic Instructions"). A shuffle uses the path to shared memory, 4 bytes a thread.
    """
    parts = op.split(".")
    if parts[0] in _SPECIAL:
        return "special", 2.0 if parts[-1].endswith("x2") else 1.0
    if parts[0] in _FLOAT and parts[-1] in ("f32", "f32x2"):
        return "float32", 2.0 if parts[-1] == "f32x2" else 1.0
    if parts[0] in ("ld", "st", "ldmatrix", "stmatrix") and any(
        p.split("::")[0] == "shared" for p in parts
    ):
        wide = re.search(r"\.[vx](\d+)", op)
        size = {"8": 1, "16": 2, "32": 4, "64": 8}[re.sub(r"\D", "", parts[-1])]
        size = 4 if parts[0].endswith("matrix") else size
        return "shared", float(size * (int(wide.group(1)) if wide else 1))
    if parts[0] == "shfl":
        return "shared", 4.0
    return ("integer", 1.0) if parts[0] in _INTEGER else ("", 0.0)


def busy(stats: LaunchStats | Iterable[LaunchStats], arch: str) -> dict[str, float]:
    """Return the clocks for which each unit is busy, summed over all CTAs of the launches."""
    rates = rates_of(arch)
    total: defaultdict[str, float] = defaultdict(float)
    for s in [stats] if isinstance(stats, LaunchStats) else stats:
        for op, n in s.opcodes.items():
            unit, lanes = unit_of(op)
            if unit:
                total[unit] += 32 * n * lanes
            if not op.startswith(_FREE):
                total["issue"] += n
        total["tensor"] += s.work["tensor"]
        total["bulk"] += s.work["tma"]
        total["shared"] += s.work["operands"]
        total["tensor_memory"] += s.work["tmem"]
    return {unit: amount / getattr(rates, unit) for unit, amount in total.items() if amount}


def limit(clocks: dict[str, float]) -> str:
    """Return the name of the unit that is busy longest."""
    return max(clocks, key=lambda unit: clocks[unit])


@dataclass(frozen=True)
class Product:
    """Describes one matrix product of a tile: [m, k] times [k, n].

    A is read from shared memory if `a_shared` is set, and else from tensor memory.
    """

    m: int
    n: int
    k: int
    a_shared: bool = True

    @property
    def flops(self) -> int:
        """Return the number of FLOP of the product."""
        return 2 * self.m * self.n * self.k

    def operand_bytes(self, kind: str, ctas: int) -> int:
        """Return the bytes of operands that one CTA reads from shared memory.

        Args:
            kind: element type, such as "bf16".
            ctas: number of CTAs that share the product; each reads its part of B.
        """
        item = ELEMENT_BYTES[kind]
        return (self.m * self.a_shared + self.n // ctas) * self.k * item


@dataclass(frozen=True)
class TileClocks:
    """Holds the clocks of a tile by unit, as the tables in the FlashAttention-4 paper do."""

    tensor: float
    shared: float
    exponential: float


def tile(
    products: Iterable[Product],
    exponentials: int,
    *,
    other_shared_bytes: int = 0,
    kind: str = "bf16",
    ctas: int = 1,
    arch: str = "sm_100",
) -> TileClocks:
    """Return the clocks that each unit needs for a tile.

    Args:
        products: matrix products of the tile.
        exponentials: number of exponentials of the tile.
        other_shared_bytes: bytes of shared memory that are not operands (stores, bulk copies).
        ctas: number of CTAs that share a product (cta_group).
    """
    r, all_ = rates_of(arch), list(products)
    shared = sum(p.operand_bytes(kind, ctas) for p in all_) + other_shared_bytes
    return TileClocks(
        sum(p.flops for p in all_) / r.tensor, shared / r.shared, exponentials / r.special
    )
