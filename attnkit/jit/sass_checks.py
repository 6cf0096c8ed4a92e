"""Find problems of compiled device code: spilled registers, serialised products, late fences.

The last two are found in the instructions of Hopper code (sm_90a):

- If the assembler cannot prove that no register is written while a warpgroup product reads it, it
  serialises the products, without an error: it waits after every single one. Only the instructions
  show that. `loops` counts products and waits.
- A warp that has written shared memory for products or bulk copies executes a fence of the async
  proxy and then arrives at a barrier, which waits for the fence. If there is a branch between the
  two, as at the end of a loop, tensor cores of an H200 sometimes read the old content. With
  `bar.warp.sync` behind the fence the assembler waits there, and no such read was seen.
  `late_fences` finds such fences.

Encodings are those that nvdisasm 13.5 prints for sm_90a. An instruction has 16 bytes, with the
opcode in the lowest 9 bits. In the upper 8 bytes, bits 46 to 48 name the counter that an
instruction releases when it is done, and bits 52 to 57 the counters that it waits for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from attnkit.jit.cubin import kernel_code, kernel_stats

_BYTES = 16
_OPCODE = 0x1FF
_HGMMA, _WARPGROUP, _FENCE, _BRA = 0x1F0, 0x1C5, 0x1C6, 0x147
_DEPBAR = 1 << 47  # tells WARPGROUP.DEPBAR, a wait, from WARPGROUP.ARRIVE
_FEW = 4  # products; a loop with fewer may wait for each one on purpose


def problems(cubin: bytes, arch: str) -> tuple[str, ...]:
    """Describe what is wrong with the code of a CUBIN, each problem with its kernel's name.

    Spilled registers and serialised products make a kernel slow; a late fence makes it wrong.

    Args:
        cubin: device code.
        arch: its architecture; loops and fences are checked for "sm_90a" only.

    Raises:
        ArgumentError: it is not a CUBIN.
    """
    texts = [
        f"{s.name}: a stack frame of {s.stack} bytes: registers are spilled"
        for s in kernel_stats(cubin)
        if s.stack
    ]
    for name, code in kernel_code(cubin).items() if arch == "sm_90a" else ():
        texts += [
            f"{name}: {loop}: products are serialised, a register that one reads or writes is "
            "touched before the wait for it"
            for loop in loops(code)
            if loop.serialised
        ]
        texts += [
            f"{name}: fence at {at:#x}: a branch stands between it and the wait for it, so that "
            "others may read what was there before; sync_warp behind the fence waits in time"
            for at in late_fences(code)
        ]
    return tuple(texts)


@dataclass(frozen=True)
class Loop:
    """Describes a loop: the instructions from the target of a backward branch to the branch.

    Attributes:
        start, end: their addresses in the kernel, in bytes.
        products: number of HGMMA instructions.
        waits: number of WARPGROUP.DEPBAR instructions.
        alone: number of products with a wait between them and the next one.
    """

    start: int
    end: int
    products: int
    waits: int
    alone: int

    @property
    def serialised(self) -> bool:
        """Return whether most products are waited for one by one."""
        return self.products >= _FEW and 2 * self.alone > self.products

    def __str__(self) -> str:
        count = (self.end - self.start) // _BYTES + 1
        return (
            f"loop {self.start:#x}..{self.end:#x}: {count} instructions, "
            f"{self.products} HGMMA, {self.waits} waits"
        )


def loops(code: bytes) -> list[Loop]:
    """Find the loops of a kernel that contain warpgroup products, inner before outer.

    Args:
        code: its instructions, for sm_90a.
    """
    marks = ""  # one character an instruction: p for a product, w for a wait, else a dot
    branches: list[tuple[int, int]] = []
    for i, (low, high) in enumerate(_words(code)):
        opcode = low & _OPCODE
        wait = opcode == _WARPGROUP and low & _DEPBAR
        marks += "p" if opcode == _HGMMA else "w" if wait else "."
        if opcode == _BRA:
            target = _target(i * _BYTES, low, high) // _BYTES
            if 0 <= target <= i:
                branches.append((target, i))
    result = []
    for start, end in sorted(set(branches), key=lambda b: b[1] - b[0]):
        inside = marks[start : end + 1].replace(".", "")
        if "p" in inside:
            # the wait that follows the last product may stand at the head of the loop
            alone = (inside + inside[0]).count("pw")
            loop = Loop(start * _BYTES, end * _BYTES, inside.count("p"), inside.count("w"), alone)
            result.append(loop)
    return result


def _words(code: bytes) -> Iterator[tuple[int, int]]:
    """Yield the lower and the upper 8 bytes of each instruction."""
    return struct.iter_unpack("<QQ", code[: len(code) // _BYTES * _BYTES])


def _target(address: int, low: int, high: int) -> int:
    """Return the address to which the branch at an address jumps."""
    # The offset counts words of 4 bytes from the next instruction. Its low 8 bits are bits 16 to
    # 23 of the instruction, the others bits 34 to 81.
    offset = (low >> 34) | ((high & 0x3FFFF) << 30)
    if offset >> 47:
        offset -= 1 << 48
    return address + _BYTES + 4 * ((offset << 8) | (low >> 16 & 0xFF))


def late_fences(code: bytes) -> list[int]:
    """Find fences of the async proxy with a branch between them and the wait for them.

    Args:
        code: a kernel's instructions, for sm_90a.

    Returns:
        Addresses of the fences in the kernel, in bytes.
    """
    words = list(_words(code))
    addresses = []
    for i, (low, high) in enumerate(words):
        if low & _OPCODE != _FENCE:
            continue
        counter = high >> 46 & 7
        for below, above in words[i + 1 :]:
            if below & _OPCODE == _BRA:
                addresses.append(i * _BYTES)
                break
            if above >> 52 >> counter & 1:
                break
    return addresses
