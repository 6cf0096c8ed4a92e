"""Compare tcgen05 products with float64, in the tensor memory layouts of the PTX ISA.

Section tcgen05 ("Data path layouts", tcgen05.ld).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attnkit import emulator
from attnkit.emulator import KernelFault
from tests.emulator.matrix_kit import (
    ADDRESSES,
    COPY_IN,
    TC_HIGH,
    core_image,
    descriptor,
    values,
)
from tests.emulator.ptx_kit import init_barriers, kernel, pointers, wait
from tests.emulator.sections import section

TC = """
    mov.u32 %r90, %tid.x; shr.u32 %r91, %r90, 5; setp.ne.s32 %p5, %r91, 0;
    @%p5 bra $L_noalloc;
    mov.b32 %r92, 64;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [dynamic+16384], %r92;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
$L_noalloc:
    bar.sync 0;
    ld.shared.b32 %r93, [dynamic+16384];
    @%p5 bra $L_nomma;
    elect.sync %r94|%p6, -1;
    @!%p6 bra $L_nomma;
    mov.b32 %r95, {idesc}; mov.pred %p7, 0;
    tcgen05.mma.cta_group::1.kind::{kind} [%r93], %d12, %d13, %r95, %p7;
    mov.pred %p7, 1;
    tcgen05.mma.cta_group::1.kind::{kind} [%r93], %d12, %d13, %r95, %p7;
    {commit}
$L_nomma:
"""
TC_END = """
    shl.b32 %r96, %r91, 21; add.s32 %r97, %r93, %r96;
    LOAD
    tcgen05.wait::ld.sync.aligned;
    ld.param.u64 %d20, [p1]; mul.wide.u32 %d21, %r90, BYTES; add.s64 %d22, %d20, %d21;
    STORE
    bar.sync 0;
    @%p5 bra $L_nofree;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r93, %r92;
$L_nofree:
"""
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [dynamic+16392];"


def tcgen05(
    kind: str, m: int, n: int, shape: str = "32x32b", mode: str = "eager", commit: str = COMMIT
) -> tuple[Any, Any, Any]:
    """Run two accumulating products; return (report, registers [128, r], 2 A B^T)."""
    fmt = {"bf16": 1, "f16": 0, "tf32": 2, "e4m3": 0, "e5m2": 1, "s8": 1}[kind]
    group = {"bf16": "f16", "f16": "f16", "tf32": "tf32", "s8": "i8"}.get(kind, "f8f6f4")
    item = 4 if kind == "tf32" else 2 if "f16" in kind else 1
    a, ra = values(kind, m, 32 // item)
    b, rb = values(kind, n, 32 // item)
    image = np.concatenate([core_image(ra, 128, 256), core_image(rb, 128, 256)])
    idesc = (2 if kind == "s8" else 1) << 4 | fmt << 7 | fmt << 10 | n // 8 << 17 | m // 16 << 24
    high = descriptor(128, 256, TC_HIGH)
    registers = {"32x32b": n, "16x128b": n // 2, "16x256b": n // 2}[shape]
    count = {"32x32b": n, "16x128b": n // 4, "16x256b": n // 8}[shape]
    regs = ", ".join(f"%r{100 + i}" for i in range(registers))
    body = init_barriers((16392, 1)) + COPY_IN + ADDRESSES.format(a=high, b=high)
    body += TC.format(kind=group, idesc=idesc, commit=commit)
    body += wait("dynamic+16392", "0", "mma") if commit else ""
    store = "".join(f"st.global.b32 [%d22+{4 * i}], %r{100 + i};" for i in range(registers))
    load = f"tcgen05.ld.sync.aligned.{shape}.x{count}.b32 {{{regs}}}, [%r97];"
    body += (
        TC_END.replace("LOAD", load).replace("STORE", store).replace("BYTES", str(4 * registers))
    )
    out = np.zeros((128, registers), np.int32 if kind == "s8" else np.float32)
    text = kernel(body, pointers(2), arch="sm_100a")
    target = emulator.Ptx(text, block=(128, 1, 1), shared=16400)
    report = emulator.run(target, image, out, mode=mode, raises=False)
    return report, out, 2 * a @ b.T


@pytest.mark.parametrize("mode", ["eager", "adversarial", "race"])
@pytest.mark.parametrize("kind", ["bf16", "f16", "tf32", "e4m3", "e5m2", "s8"])
@section(
    "Instruction Descriptor",
    "Shared Memory Descriptor",
    "Layout D (M = 128 + cta-group::1)",
    "tcgen05.mma",
)
def test_tcgen05_products(kind: str, mode: str) -> None:
    """For M=128, row r of D is in lane r and column c in column c of tensor memory."""
    report, out, want = tcgen05(kind, 128, 16, mode=mode)
    assert report.findings == ()
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)


@section("Layout F (M = 64 + non .ws mode)")
def test_tcgen05_of_64_rows() -> None:
    """For M=64, row r of D is in lane 32 (r / 16) + r % 16 of tensor memory."""
    report, out, want = tcgen05("bf16", 64, 16)
    assert report.findings == ()
    np.testing.assert_allclose(
        out.reshape(4, 32, 16)[:, :16].reshape(64, 16), want, rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("shape", ["16x128b", "16x256b"])
@section("Matrix fragments for shape .16x128b", "Matrix fragments for shape .16x256b", "tcgen05.ld")
def test_tcgen05_ld_shapes(shape: str) -> None:
    """The 16x128b and 16x256b shapes of tcgen05.ld give each lane the documented elements.

    Lane t reads rows t / 4 (and + 8), and columns t % 4 of four, or 2 (t % 4) + {0, 1} of eight.
    """
    report, out, want = tcgen05("bf16", 128, 16, shape)
    assert report.findings == ()
    for w in range(4):
        for t in range(32):
            row = 32 * w + t // 4
            for r in range(8):
                if shape == "16x128b":
                    place = row + 8 * (r % 2), 4 * (r // 2) + t % 4
                else:
                    place = row + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * (t % 4) + r % 2
                assert abs(out[32 * w + t, r] - want[place]) < 1e-4


@section("mbarrier based completion mechanism", "tcgen05.commit")
def test_tcgen05_result_read_without_waiting() -> None:
    report, _, _ = tcgen05("bf16", 128, 16, mode="race", commit="")
    assert {f.kind for f in report.findings} & {"race", "uninitialised"}


@section("Tensor Memory Allocation", "Tensor Memory Addressing", "tcgen05.ld")
def test_tensor_memory_misuse() -> None:
    high = descriptor(128, 256, TC_HIGH)
    head = COPY_IN + ADDRESSES.format(a=high, b=high)
    text = TC.format(kind="f16", idesc=0x8100490, commit="") + TC_END.replace("STORE", "")
    image, out = np.zeros(16384, np.uint8), np.zeros(128)
    load = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r100}}, [{}];"

    def result(body: str) -> Any:
        target = emulator.Ptx(
            kernel(body.replace("BYTES", "4"), pointers(2), arch="sm_100a"),
            block=(128, 1, 1),
            shared=16400,
        )
        return emulator.run(target, image, out)

    beyond = head + text.replace("LOAD", "add.s32 %r97, %r97, 64;" + load.format("%r97"))
    with pytest.raises(KernelFault, match="not allocated"):
        result(beyond)
    with pytest.raises(KernelFault, match="reaches lanes"):
        result(head + text.replace("LOAD", load.format("%r93")))
    good = head + text.replace("LOAD", load.format("%r97"))
    kept = result(good.replace("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r93, %r92;", ""))
    assert [f.kind for f in kept.findings] == ["tensor-memory"]
    with pytest.raises(KernelFault, match="0b001"):
        result(good.replace(f"or.b64 %d12, %d10, {high}", f"or.b64 %d12, %d10, {high - TC_HIGH}"))
