"""Decode the 128-byte tensor maps of the CuTe DSL's host code, and clip boxes to the tensor."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnkit.emulator.faults import Trap
from attnkit.emulator.numerics.formats import Lanes

# Element types by code: (bytes, numpy type of the arithmetic of reductions).
ELEMENTS: dict[int, tuple[int, str]] = {
    0: (1, "u1"),
    1: (2, "u2"),
    2: (4, "u4"),
    3: (4, "i4"),
    4: (8, "u8"),
    5: (8, "i8"),
    6: (2, "f16"),
    7: (4, "f4"),
    8: (4, "f4"),
    9: (8, "f8"),
    10: (2, "bf16"),
}
SWIZZLE_MASK = (0, 1, 3, 7)
_ALWAYS = 1 << 1 | 1 << 18  # bits that the DSL always sets


@dataclass(frozen=True)
class TensorMap:
    """Holds a decoded tensor map.

    Tuples have the innermost dimension first; strides are in bytes.

    Attributes:
        base: address of the tensor in global memory.
        kind: numpy type of the arithmetic of reductions; "f16" or "bf16" for 16-bit floats.
        item: bytes of an element.
        swizzle: mask of the bits of the chunk address that the swizzle changes; 0 if there is none.
        dims, strides, box: shape and strides of the tensor, shape of a box.
    """

    base: int
    kind: str
    item: int
    swizzle: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]

    @cached_property
    def box_bytes(self) -> int:
        """Return the size of a box in bytes."""
        return int(np.prod(self.box)) * self.item

    @cached_property
    def chunks(self) -> Lanes:
        """Return the indices of the 16-byte chunks of a box, in order and without the swizzle."""
        return np.arange(self.box_bytes // 16)


def decode(raw: bytes) -> TensorMap:
    """Decode a tensor map. The layout, that of the DSL's host code, was found by experiment."""
    w = struct.unpack("<16Q", raw)
    rank = ((w[1] >> 4) & 7) + 1
    code, interleave, swizzle = (w[1] >> 7) & 15, (w[1] >> 11) & 3, (w[1] >> 13) & 3
    if code not in ELEMENTS or interleave or rank > 5:
        raise Trap(
            "descriptor", f"tensor map with type {code}, interleave {interleave}, rank {rank}"
        )
    item, kind = ELEMENTS[code]
    low = [w[1] >> 32, w[2] & 0xFFFFFFFF, w[2] >> 32, w[3] & 0xFFFFFFFF]
    strides = [(s | ((w[3] >> (32 + 4 * i)) & 15) << 32) << 4 for i, s in enumerate(low)]
    dims = [w[4] & 0xFFFFFFFF, w[4] >> 32, w[5] & 0xFFFFFFFF, w[5] >> 32, w[6] & 0xFFFFFFFF]
    box = [w[6] >> 56] + [(w[7] >> (8 * i)) & 255 for i in range(4)]
    out = TensorMap(
        w[0],
        kind,
        item,
        SWIZZLE_MASK[swizzle],
        tuple(d + 1 for d in dims[:rank]),
        (item, *strides[: rank - 1]),
        tuple(b + 1 for b in box[:rank]),
    )
    _check(out)
    return out


def encode(m: TensorMap) -> bytes:
    """Encode a tensor map, for tests and for launches without the DSL's host code."""
    w = [0] * 16
    rank = len(m.dims)
    code = next(c for c, (n, k) in ELEMENTS.items() if (n, k) == (m.item, m.kind))
    w[0] = m.base
    w[1] = _ALWAYS | (rank - 1) << 4 | code << 7 | SWIZZLE_MASK.index(m.swizzle) << 13
    steps = [s >> 4 for s in m.strides[1:]] + [0] * (5 - rank)
    dims = [d - 1 for d in m.dims] + [0] * (5 - rank)
    box = [b - 1 for b in m.box] + [0] * (5 - rank)
    w[1] |= (steps[0] & 0xFFFFFFFF) << 32
    w[2] = (steps[1] & 0xFFFFFFFF) | (steps[2] & 0xFFFFFFFF) << 32
    w[3] = steps[3] & 0xFFFFFFFF
    for i, s in enumerate(steps):
        w[3] |= (s >> 32) << (32 + 4 * i)
    w[4], w[5] = dims[0] | dims[1] << 32, dims[2] | dims[3] << 32
    w[6] = dims[4] | box[0] << 56
    w[7] = box[1] | box[2] << 8 | box[3] << 16 | box[4] << 24
    return struct.pack("<16Q", *w)


def _check(m: TensorMap) -> None:
    """Fault if a tensor map violates a restriction (CUDA driver API, cuTensorMapEncodeTiled)."""
    if m.base % 16:
        raise Trap("descriptor", f"tensor map base {m.base:#x} is not 16-byte aligned")
    inner = m.box[0] * m.item
    width = 16 * (m.swizzle + 1)
    if inner % 16:
        raise Trap("descriptor", f"tensor map box of {inner} bytes inside is no multiple of 16")
    if m.swizzle and inner > width:
        raise Trap("descriptor", f"tensor map box of {inner} bytes exceeds the swizzle of {width}")
    if any(s % 16 for s in m.strides[1:]):
        raise Trap("descriptor", f"tensor map strides {m.strides[1:]} are not multiples of 16")


@dataclass(frozen=True)
class Box:
    """Describes the part of a box that is inside the tensor.

    Tuples have the outermost dimension first.

    Attributes:
        address: address of the first element of the part in global memory.
        shape, strides: shape of the part, and strides of the tensor in bytes.
        slices: position of the part in the dense box.
        size: bytes from the first byte of the part to the end of its last element.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    slices: tuple[slice, ...]
    size: int


def select(m: TensorMap, at: list[int]) -> Box | None:
    """Return the part inside the tensor of the box at coordinates `at`; None if there is none.

    Coordinates are signed, the innermost dimension first.
    """
    lo, slices, shape = [], [], []
    for x, n, b in zip(at, m.dims, m.box, strict=True):
        first, last = max(0, x), min(n, x + b)
        if last <= first:
            return None
        lo.append(first)
        slices.append(slice(first - x, last - x))
        shape.append(last - first)
    address = m.base + sum(a * s for a, s in zip(lo, m.strides, strict=True))
    size = sum((n - 1) * s for n, s in zip(shape, m.strides, strict=True)) + m.item
    return Box(address, tuple(shape[::-1]), m.strides[::-1], tuple(slices[::-1]), size)
