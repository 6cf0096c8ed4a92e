"""Counts tensor core instructions and the waits for them in the loops of Hopper device code.

The assembler serialises warpgroup products, without an error, where it cannot prove that registers
are not written while a product reads them: it then waits after every single one. That shows in the
instructions only. Encodings are those that nvdisasm 13.5 prints for sm_90a: 16 bytes each, the
opcode in the lowest 9 bits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from attnkit.jit.cubin import kernel_code, kernel_stats
from attnkit.jit.sass_fences import late_fences

_BYTES = 16
_OPCODE = 0x1FF
_HGMMA, _WARPGROUP, _BRA = 0x1F0, 0x1C5, 0x147
_DEPBAR = 1 << 47  # tells WARPGROUP.DEPBAR, a wait, from WARPGROUP.ARRIVE
_FEW = 4  # products of a loop; with fewer, a wait for each may be meant


@dataclass(frozen=True)
class Loop:
    """The instructions from the target of a backward branch to the branch.

    Attributes:
        start, end: their addresses in the kernel, in bytes.
        products: HGMMA instructions.
        waits: WARPGROUP.DEPBAR instructions.
        alone: products with a wait between them and the next one.
    """

    start: int
    end: int
    products: int
    waits: int
    alone: int

    @property
    def serialised(self) -> bool:
        """Most products are waited for one by one."""
        return self.products >= _FEW and 2 * self.alone > self.products

    def __str__(self) -> str:
        count = (self.end - self.start) // _BYTES + 1
        return (
            f"loop {self.start:#x}..{self.end:#x}: {count} instructions, "
            f"{self.products} HGMMA, {self.waits} waits"
        )


def _words(code: bytes) -> Iterator[tuple[int, int]]:
    return struct.iter_unpack("<QQ", code[: len(code) // _BYTES * _BYTES])


def _target(address: int, low: int, high: int) -> int:
    # The offset counts words of 4 bytes from the next instruction. Its low 8 bits are bits 16 to
    # 23 of the instruction, the others bits 34 to 81.
    offset = (low >> 34) | ((high & 0x3FFFF) << 30)
    if offset >> 47:
        offset -= 1 << 48
    return address + _BYTES + 4 * ((offset << 8) | (low >> 16 & 0xFF))


def loops(code: bytes) -> list[Loop]:
    """The loops of a kernel that hold warpgroup products, inner before outer.

    Args:
        code: its instructions, for sm_90a.
    """
    marks = ""  # by instruction: p for a product, w for a wait
    branches: list[tuple[int, int]] = []
    for i, (low, high) in enumerate(_words(code)):
        opcode = low & _OPCODE
        wait = opcode == _WARPGROUP and low & _DEPBAR
        marks += "p" if opcode == _HGMMA else "w" if wait else "."
        if opcode == _BRA:
            target = _target(i * _BYTES, low, high) // _BYTES
            if 0 <= target <= i:
                branches.append((target, i))
    found = []
    for start, end in sorted(set(branches), key=lambda b: b[1] - b[0]):
        inside = marks[start : end + 1].replace(".", "")
        if "p" in inside:
            # the wait that follows the last product may stand at the head of the loop
            alone = (inside + inside[0]).count("pw")
            loop = Loop(start * _BYTES, end * _BYTES, inside.count("p"), inside.count("w"), alone)
            found.append(loop)
    return found


def problems(cubin: bytes, arch: str) -> tuple[str, ...]:
    """What is wrong with the code of a CUBIN; each with the kernel's name.

    Spilled registers and, for sm_90a, serialised products, which make it slow, and fences that
    do not hold (see `cubin_fences`).

    Raises:
        ArgumentError: it is no CUBIN.
    """
    found = [
        f"{s.name}: a stack frame of {s.stack} bytes: registers are spilled"
        for s in kernel_stats(cubin)
        if s.stack
    ]
    for name, code in kernel_code(cubin).items() if arch == "sm_90a" else ():
        found += [
            f"{name}: {loop}: products are serialised, a register that one reads or writes is "
            "touched before the wait for it"
            for loop in loops(code)
            if loop.serialised
        ]
        found += [
            f"{name}: fence at {at:#x}: a branch stands between it and the wait for it, so that "
            "others may read what was there before; sync_warp behind the fence waits in time"
            for at in late_fences(code)
        ]
    return tuple(found)
