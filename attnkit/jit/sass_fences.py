"""Finds fences of the async proxy in Hopper device code whose end a branch comes before.

A warp that has written shared memory for products or bulk copies runs such a fence and arrives at a
barrier, which waits for the fence. Where a branch stands between the two, as at the end of a loop,
tensor cores of an H200 have been seen to read what was there before. With `bar.warp.sync` behind the
fence the assembler waits there, and they have not.

Encodings are those that nvdisasm 13.5 prints for sm_90a: 16 bytes each, the opcode in the lowest 9
bits; of the upper 8 bytes, bits 46 to 48 name the counter that an instruction releases when it is
done, bits 52 to 57 the counters that it waits for.
"""

from __future__ import annotations

import struct

_BYTES = 16
_OPCODE = 0x1FF
_FENCE, _BRA = 0x1C6, 0x147


def late_fences(code: bytes) -> list[int]:
    """Fences that are waited for only behind a branch.

    Args:
        code: a kernel's instructions, for sm_90a.

    Returns:
        Their addresses, in bytes.
    """
    words = list(struct.iter_unpack("<QQ", code[: len(code) // _BYTES * _BYTES]))
    found = []
    for i, (low, high) in enumerate(words):
        if low & _OPCODE != _FENCE:
            continue
        counter = high >> 46 & 7
        for below, above in words[i + 1 :]:
            if below & _OPCODE == _BRA:
                found.append(i * _BYTES)
                break
            if above >> 52 >> counter & 1:
                break
    return found
