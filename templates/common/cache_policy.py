"""Name the L2 cache policies that accesses to global memory pass as a hint.

A kernel reads or writes some tensors once, and others in many work tiles. If lines of the first kind
leave L2 early, more lines of the second kind stay. In the backward K, V, dK and dV leave first, and in
the forward Q and the output. The sums of dQ leave last, because each kv tile adds to them, which reads
and writes their lines. A full bias also passes through L2; beside it they leave as others do.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from cutlass import Int64


class CachePolicy(IntEnum):
    """Names L2 cache policies; the values are the operands of PTX's `.L2::cache_hint`.

    They are the numbers that the instruction `createpolicy` returns for a policy of all addresses, as in
    CUTLASS (`cute::TMA::CacheHintSm90`).
    """

    EVICT_NORMAL = 0x1000000000000000
    EVICT_FIRST = 0x12F0000000000000  # lines leave L2 before those of other accesses
    EVICT_LAST = 0x14F0000000000000  # lines leave L2 after those of other accesses


def evict_first() -> Any:
    """Return the L2 policy that evicts what an access touches before other data."""
    return Int64(CachePolicy.EVICT_FIRST)


def evict_normal() -> Any:
    """Return the L2 policy of an access without a hint."""
    return Int64(CachePolicy.EVICT_NORMAL)


def evict_last() -> Any:
    """Return the L2 policy that evicts what an access touches after other data."""
    return Int64(CachePolicy.EVICT_LAST)
