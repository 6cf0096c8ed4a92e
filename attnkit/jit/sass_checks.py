"""Find problems in compiled device code: spilled registers, serialised WGMMAs, late fences.

The last two problems are found in the instructions of Hopper code (sm_90a):

- If the assembler cannot prove that no register is written while a WGMMA reads it, it serialises
  the WGMMAs without an error: it inserts a wait after every WGMMA. Only the instructions show this.
  `loops` counts WGMMAs and waits.
- A warp that has written shared memory for WGMMAs or bulk copies executes a fence of the async
  proxy and then arrives at a barrier, which waits for the fence. If there is a branch between the
  fence and the barrier, as at the end of a loop, tensor cores of an H200 sometimes read the old
  content. With `bar.warp.sync` after the fence the assembler waits there, and no such read was
  observed. `late_fences` finds such fences.

Encodings are those that nvdisasm 13.5 prints for sm_90a. An instruction has 16 bytes, with the
opcode in the lowest 9 bits. In the upper 8 bytes, bits 46 to 48 hold the index of the counter that
an instruction releases when it completes, and bits 52 to 57 the set of counters that it waits for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from attnkit.jit.cubin import kernel_code, kernel_stats

_BYTES = 16
_OPCODE = 0x1FF
_HGMMA, _WARPGROUP, _FENCE, _BRA = 0x1F0, 0x1C5, 0x1C6, 0x147
_DEPBAR = 1 << 47  # distinguishes WARPGROUP.DEPBAR (a wait) from WARPGROUP.ARRIVE
_FEW = 4  # a loop with fewer WGMMAs may wait for each one on purpose


def problems(cubin: bytes, arch: str) -> tuple[str, ...]:
    """Return a text for each problem in the machine code of a CUBIN, with the kernel's name.

    Spilled registers and serialised WGMMAs make a kernel slow. A late fence makes it wrong.

    Args:
        cubin: device code.
        arch: architecture of the code; WGMMAs and fences are checked for "sm_90a" only.

    Raises:
        ArgumentError: `cubin` is not a CUBIN.
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
    """Describes a loop in machine code: the instructions from a backward branch's target to it.

    Attributes:
        start, end: byte addresses in the kernel of the first instruction and of the branch.
        products: number of HGMMA instructions.
        waits: number of WARPGROUP.DEPBAR instructions.
        alone: number of HGMMA instructions that a wait follows before the next HGMMA.
    """

    start: int
    end: int
    products: int
    waits: int
    alone: int

    @property
    def serialised(self) -> bool:
        """Return whether a wait follows directly after most of the HGMMA instructions."""
        return self.products >= _FEW and 2 * self.alone > self.products

    def __str__(self) -> str:
        count = (self.end - self.start) // _BYTES + 1
        return (
            f"loop {self.start:#x}..{self.end:#x}: {count} instructions, "
            f"{self.products} HGMMA, {self.waits} waits"
        )


def loops(code: bytes) -> list[Loop]:
    """Return the loops of a kernel that contain HGMMA instructions, shortest first.

    Args:
        code: the kernel's instructions, for sm_90a.
    """
    marks = ""  # one character per instruction: p for an HGMMA, w for a wait, else a dot
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
            # the wait after the last HGMMA may be at the start of the loop
            alone = (inside + inside[0]).count("pw")
            loop = Loop(start * _BYTES, end * _BYTES, inside.count("p"), inside.count("w"), alone)
            result.append(loop)
    return result


def _words(code: bytes) -> Iterator[tuple[int, int]]:
    """Yield (lower 8 bytes, upper 8 bytes) of each instruction."""
    return struct.iter_unpack("<QQ", code[: len(code) // _BYTES * _BYTES])


def _target(address: int, low: int, high: int) -> int:
    """Return the target address of the branch instruction at `address`."""
    # The offset is in 4-byte words from the next instruction. Its low 8 bits are bits 16 to 23 of
    # the instruction, its other bits are bits 34 to 81.
    offset = (low >> 34) | ((high & 0x3FFFF) << 30)
    if offset >> 47:
        offset -= 1 << 48
    return address + _BYTES + 4 * ((offset << 8) | (low >> 16 & 0xFF))


def late_fences(code: bytes) -> list[int]:
    """Return the addresses of async-proxy fences with a branch between the fence and its wait.

    Args:
        code: the kernel's instructions, for sm_90a.

    Returns:
        Addresses of the fences relative to the start of the kernel, in bytes.
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
