"""Read the resource usage and the instructions of kernels from a CUBIN (an ELF file).

This needs no CUDA tools. Section and attribute numbers match the output of the CUDA binary
utilities.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from attnkit.errors import ArgumentError
from attnkit.jit.artifact import KernelStats

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOLS = 2  # type of a symbol table section
_SYMBOL_BYTES = 24
_SIZED = 4  # form of an attribute whose length and value follow it
_REGISTERS, _FRAME, _BLOCK = 0x2F, 0x11, 0x10


@dataclass(frozen=True)
class _Section:
    """Holds one section of the ELF file; `data` is empty for sections without bytes in the file."""

    name: str
    kind: int
    link: int
    data: bytes
    size: int


def _sections(cubin: bytes) -> list[_Section]:
    """Return the ELF sections of a CUBIN."""
    if cubin[:6] != b"\x7fELF\x02\x01" or len(cubin) < 64:
        raise ArgumentError("not a CUBIN: it does not begin as a 64-bit little-endian ELF file")
    try:
        (start,) = struct.unpack_from("<Q", cubin, 40)
        size, count, names = struct.unpack_from("<HHH", cubin, 58)
        raw = [_SECTION.unpack_from(cubin, start + i * size) for i in range(count)]
        text = raw[names][4]
        return [
            _Section(_string(cubin, text + s[0]), s[1], s[6], _data(cubin, s), s[5]) for s in raw
        ]
    except (struct.error, IndexError, ValueError) as error:
        raise ArgumentError(f"not a whole CUBIN: {error}") from None


def _data(cubin: bytes, section: tuple[int, ...]) -> bytes:
    no_bits = section[1] in (0, 8)  # types of sections that have no bytes in the file
    return b"" if no_bits else cubin[section[4] : section[4] + section[5]]


def _string(data: bytes, start: int) -> str:
    """Return the zero-terminated string that begins at offset `start`."""
    return data[start : data.index(b"\0", start)].decode()


def _symbols(sections: list[_Section]) -> list[str]:
    """Return the names of all symbols, in the order of the symbol table."""
    for s in sections:
        if s.kind == _SYMBOLS:
            names = sections[s.link].data
            starts = range(0, len(s.data), _SYMBOL_BYTES)
            return [_string(names, struct.unpack_from("<I", s.data, i)[0]) for i in starts]
    return []


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (number, value) of each attribute in a .nv.info section that stores a length."""
    i = 0
    while i + 4 <= len(info):
        form, name, length = struct.unpack_from("<BBH", info, i)
        i += 4
        if form == _SIZED:
            yield name, info[i : i + length]
            i += length


def kernel_stats(cubin: bytes) -> tuple[KernelStats, ...]:
    """Return the resource usage of each kernel of a CUBIN, in the order of the code sections.

    Raises:
        ArgumentError: `cubin` is not a CUBIN or is incomplete.
    """
    sections = _sections(cubin)
    try:
        values = _values(sections)
    except (struct.error, IndexError, ValueError) as error:
        raise ArgumentError(f"not a whole CUBIN: {error}") from None
    shared = {s.name: s.size for s in sections if s.name.startswith(".nv.shared.")}
    stats = []
    for s in sections:
        if s.name.startswith(".text."):
            name = s.name.removeprefix(".text.")
            registers, frame, block = (
                values.get((name, which), 0) for which in (_REGISTERS, _FRAME, _BLOCK)
            )
            static = shared.get(f".nv.shared.{name}", 0)
            stats.append(KernelStats(name, registers, frame, static, s.size, block))
    return tuple(stats)


def _values(sections: list[_Section]) -> dict[tuple[str, int], int]:
    """Return registers, stack bytes and CTA sizes, keyed by (kernel name, attribute number)."""
    symbols = _symbols(sections)
    values: dict[tuple[str, int], int] = {}
    for s in sections:
        if s.name == ".nv.info":  # (symbol, value) pairs of all functions
            for name, data in _attributes(s.data):
                if name in (_REGISTERS, _FRAME):
                    symbol, value = struct.unpack("<II", data)
                    values[symbols[symbol], name] = value
        elif s.name.startswith(".nv.info."):
            for name, data in _attributes(s.data):
                if name == _BLOCK:
                    x, y, z = struct.unpack("<III", data)
                    values[s.name.removeprefix(".nv.info."), name] = x * y * z
    return values


def kernel_code(cubin: bytes) -> dict[str, bytes]:
    """Return the machine code of each kernel of a CUBIN by name, 16 bytes per instruction.

    Raises:
        ArgumentError: `cubin` is not a CUBIN.
    """
    return {
        s.name.removeprefix(".text."): s.data
        for s in _sections(cubin)
        if s.name.startswith(".text.")
    }
