"""Says where the address spaces lie in the emulator's generic space."""

from __future__ import annotations

SHARED_BASE = 1024  # of every CTA's shared memory: 1024-byte alignment holds for real addresses
PARAM_BASE = 0x7E00_0000_0000
LOCAL_BASE = 0x7D00_0000_0000
RANK_SHIFT = 24  # the rank of a CTA in its cluster, in an address of shared::cluster
OFFSET_MASK = 0xFFFFFF
