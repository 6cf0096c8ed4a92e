"""Decode matrix descriptors of wgmma and tcgen05, and locate operands in shared memory.

See PTX ISA, "Matrix Descriptor Format" of wgmma, "Shared Memory Descriptor" of tcgen05, and the
sections "Canonical Layouts" and "Swizzling Modes".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from attnkit.emulator.faults import Trap
from attnkit.emulator.machine.address_spaces import SHARED_BASE
from attnkit.emulator.numerics.formats import Lanes

_WGMMA_SWIZZLE = {0: 0, 1: 7, 2: 3, 3: 1}
_TCGEN_SWIZZLE = {0: 0, 2: 7, 4: 3, 6: 1}
_WIDTH = {7: 128, 3: 64, 1: 32, 0: 16}


@dataclass(frozen=True)
class MatrixDescriptor:
    """Holds start address, leading and stride byte offsets, and the mask for `swizzled`."""

    start: int
    leading: int
    stride: int
    mask: int


def of_wgmma(d: int) -> MatrixDescriptor:
    """Decode a matrix descriptor of wgmma."""
    if (d >> 49) & 7:
        raise Trap("descriptor", f"wgmma descriptor {d:#x}: base offset {(d >> 49) & 7} is not 0")
    return _fields(d, _WGMMA_SWIZZLE[d >> 62])


def of_tcgen05(d: int) -> MatrixDescriptor:
    """Decode a shared memory descriptor of tcgen05."""
    if (d >> 46) & 7 != 1:
        raise Trap("descriptor", f"tcgen05 descriptor {d:#x}: bits 46-48 must be 0b001")
    if (d >> 49) & 7:
        raise Trap("descriptor", f"tcgen05 descriptor {d:#x}: base offset {(d >> 49) & 7} is not 0")
    if d >> 61 not in _TCGEN_SWIZZLE:
        raise Trap(
            "descriptor", f"tcgen05 descriptor {d:#x}: layout type {d >> 61} not implemented"
        )
    return _fields(d, _TCGEN_SWIZZLE[d >> 61])


def _fields(d: int, mask: int) -> MatrixDescriptor:
    """Decode the fields that both kinds of descriptors have, and add the swizzle mask."""
    return MatrixDescriptor(
        (d & 0x3FFF) << 4, ((d >> 16) & 0x3FFF) << 4, ((d >> 32) & 0x3FFF) << 4, mask
    )


def swizzled(address: Lanes, mask: int) -> Lanes:
    """Apply the swizzle: XOR address bits 4-6 with bits 7-9 that `mask` selects."""
    return address ^ (((address >> 7) & mask) << 4) if mask else address


@lru_cache(maxsize=4096)
def elements(
    m: MatrixDescriptor, rows: tuple[int, int], k: int, item: int, mn_major: bool
) -> Lanes:
    """Return byte offsets in shared memory of the elements of an operand, [rows, k].

    Args:
        m: the descriptor.
        rows: first row, and the row after the last. Rows are along M or N.
        k: number of elements along K.
        item: bytes of an element.
        mn_major: whether the operand is MN-major, else it is K-major.
    """
    r, c = np.arange(*rows)[:, None], np.arange(k)[None, :]
    width = _WIDTH[m.mask]
    per_row = width // item
    if mn_major:
        inner = (r % per_row) * item
        if m.mask:
            off = inner + (r // per_row) * m.leading + (c % 8) * width + (c // 8) * m.stride
        else:
            off = inner + (r // per_row) * m.stride + (c % 8) * 16 + (c // 8) * m.leading
    elif m.mask:
        off = (r % 8) * width + (r // 8) * m.stride + c * item
    else:
        byte = c * item
        off = (r % 8) * 16 + (r // 8) * m.stride + (byte // 16) * m.leading + byte % 16
    return swizzled(m.start + off, m.mask) - SHARED_BASE
