"""Name the L2 cache policies that accesses to global memory pass as a hint."""

from __future__ import annotations

from enum import IntEnum


class CachePolicy(IntEnum):
    """Encodes policies of PTX's `.L2::cache_hint`, as `createpolicy` returns them for all addresses.

    The encodings are those of CUTLASS (`cute::TMA::CacheHintSm90`).
    """

    EVICT_NORMAL = 0x1000000000000000
    EVICT_FIRST = 0x12F0000000000000  # lines leave L2 before those of other accesses
