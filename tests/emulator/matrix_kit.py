"""Build operands of tensor-core products as bytes in the layouts of the PTX ISA."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

TORCH = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "tf32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "s8": torch.int8,
}


def values(kind: str, *shape: int) -> tuple[Any, Any]:
    """Return random values of `kind`: in float64, and as bytes [*shape, bytes of an element]."""
    if kind == "s8":
        x = torch.randint(-100, 100, shape, dtype=torch.int8)
    else:
        x = torch.randn(*shape).to(TORCH[kind])
    if kind == "tf32":
        x = (x.view(torch.int32) & -8192).view(torch.float32)
    raw = x.contiguous().view(torch.uint8).numpy().reshape(*shape, x.element_size())
    return x.to(torch.float64).numpy(), raw


def words(raw: Any) -> Any:
    """View bytes [..., n] as 32-bit words."""
    return np.ascontiguousarray(raw).view(np.uint32)


def core_image(raw: Any, leading: int, stride: int) -> Any:
    """Return the bytes of a K-major operand [rows, k, itemsize] in canonical layout, no swizzle.

    Args:
        leading: bytes from a core matrix to the next along k.
        stride: bytes from a core matrix to the next along the rows.
    """
    rows, k, item = raw.shape
    image = np.zeros(8192, np.uint8)
    flat = raw.reshape(rows, k * item)
    for r in range(rows):
        for b in range(k * item):
            image[r % 8 * 16 + r // 8 * stride + b // 16 * leading + b % 16] = flat[r, b]
    return image


def mn_image(raw: Any, leading: int, stride: int) -> Any:
    """Return the bytes of an MN-major 16-bit operand without swizzle.

    Core matrices are 8 k x 8 mn, with mn contiguous. `leading` and `stride` are as in `core_image`.
    """
    rows, k, item = raw.shape
    image = np.zeros(8192, np.uint8)
    for r in range(rows):
        for c in range(k):
            at = r % 8 * item + r // 8 * stride + c % 8 * 16 + c // 8 * leading
            image[at : at + item] = raw[r, c]
    return image


def descriptor(leading: int, stride: int, high: int = 0) -> int:
    return (leading >> 4) << 16 | (stride >> 4) << 32 | high


COPY_IN = """
    mov.u32 %r1, %tid.x; ld.param.u64 %d1, [p0]; mul.wide.u32 %d2, %r1, 128; add.s64 %d3, %d1, %d2;
    mov.b32 %r2, dynamic; shl.b32 %r3, %r1, 7; add.s32 %r4, %r2, %r3;
""" + "".join(
    f"ld.global.v4.b32 {{%r5, %r6, %r7, %r8}}, [%d3+{16 * i}];"
    f"st.shared.v4.b32 [%r4+{16 * i}], {{%r5, %r6, %r7, %r8}};\n"
    for i in range(8)
)
ADDRESSES = """
    fence.proxy.async.shared::cta;
    bar.sync 0;
    shr.u32 %r9, %r2, 4; cvt.u64.u32 %d10, %r9; add.s64 %d11, %d10, 512;
    or.b64 %d12, %d10, {a}; or.b64 %d13, %d11, {b};
"""
# bits that must be set in a tcgen05 descriptor
TC_HIGH = 1 << 46
