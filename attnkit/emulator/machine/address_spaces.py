"""Define where each address space begins in the emulator's generic address space."""

from __future__ import annotations

SHARED_BASE = 1024  # base of every CTA's shared memory; keeps the alignment of offsets up to 1024
PARAM_BASE = 0x7E00_0000_0000
LOCAL_BASE = 0x7D00_0000_0000
RANK_SHIFT = 24  # first bit of the CTA's rank in an address of shared::cluster
OFFSET_MASK = 0xFFFFFF
