"""Tensor-core products against float64, with fragments and layouts spelled out from the PTX ISA.

Sections mma.sync ("Matrix Fragments for mma.m16n8k..."), wgmma ("Register Fragments",
"Shared Memory Matrix Layout") and tcgen05 ("Data path layouts", tcgen05.ld).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from attnkit import emulator
from attnkit.emulator import KernelFault
from tests.emulator.ptx_kit import init_barriers, kernel, pointers, run, wait
from tests.emulator.sections import ours, section

TORCH = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "tf32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "s8": torch.int8,
}


def values(kind: str, *shape: int) -> tuple[Any, Any]:
    """(float64 values, their bytes as uint8 with a last axis of the item size)."""
    if kind == "s8":
        x = torch.randint(-100, 100, shape, dtype=torch.int8)
    else:
        x = torch.randn(*shape).to(TORCH[kind])
    if kind == "tf32":
        x = (x.view(torch.int32) & -8192).view(torch.float32)
    raw = x.contiguous().view(torch.uint8).numpy().reshape(*shape, x.element_size())
    return x.to(torch.float64).numpy(), raw


def words(raw: Any) -> Any:
    """[..., bytes] to 32-bit words."""
    return np.ascontiguousarray(raw).view(np.uint32)


def a_fragment(raw: Any, k: int) -> Any:
    """[32 lanes, registers]: bytes of A in the order of the ISA's tables."""
    item = raw.shape[-1]
    per = 4 // item  # elements of a register
    out = []
    for lane in range(32):
        group, thread = lane >> 2, lane % 4
        regs = []
        for j in range(k * item // 16 * 2):
            row = group + 8 * (j % 2)
            first = thread * per + (j // 2) * 16 // item
            regs.append(raw[row, first : first + per].reshape(-1))
        out.append(words(np.concatenate(regs)))
    return np.stack(out)


def b_fragment(raw: Any, k: int) -> Any:
    """B [k, n] by columns: lane holds column lane >> 2."""
    item = raw.shape[-1]
    per = 4 // item
    out = []
    for lane in range(32):
        regs = []
        for j in range(k * item // 16):
            first = (lane % 4) * per + j * 16 // item
            regs.append(raw[first : first + per, lane >> 2].reshape(-1))
        out.append(words(np.concatenate(regs)))
    return np.stack(out)


def c_fragment(c: Any) -> Any:
    """[16, 8] to [32, 4]."""
    lane = np.arange(32)
    row, col = lane >> 2, 2 * (lane % 4)
    return np.stack([c[row, col], c[row, col + 1], c[row + 8, col], c[row + 8, col + 1]], 1)


@pytest.mark.parametrize(
    ("k", "kind"),
    [(16, "bf16"), (16, "f16"), (8, "bf16"), (8, "tf32"), (4, "tf32"), (32, "s8"), (32, "e4m3")],
)
@section(
    "Matrix Fragments for mma.m16n8k16 with floating point type",
    "Matrix Fragments for mma.m16n8k8",
    "Matrix Fragments for mma.m16n8k4",
    "Matrix Fragments for mma.m16n8k32",
    "Multiply-and-Accumulate Instruction: mma",
)
def test_mma_sync(k: int, kind: str) -> None:
    a, ra = values(kind, 16, k)
    b, rb = values(kind, k, 8)
    whole = kind == "s8"
    c = np.random.default_rng(0).integers(-9, 9, (16, 8)).astype(np.int32 if whole else np.float32)
    fa, fb, fc = a_fragment(ra, k), b_fragment(rb, k), c_fragment(c)
    na, nb = fa.shape[1], fb.shape[1]
    acc = "s32" if whole else "f32"

    def load(p: int, n: int, base: int) -> str:
        regs = ", ".join(f"%r{base + i}" for i in range(n))
        vec = {1: ".b32", 2: ".v2.b32", 4: ".v4.b32"}[n]
        dest = regs if n == 1 else "{" + regs + "}"
        return (
            f"ld.param.u64 %d1, [p{p}]; mul.wide.u32 %d2, %r1, {4 * n}; add.s64 %d3, %d1, %d2;"
            f"ld.global{vec} {dest}, [%d3];"
        )

    def group(n: int, base: int) -> str:
        return "{" + ", ".join(f"%r{base + i}" for i in range(n)) + "}"

    body = f"""
    mov.u32 %r1, %tid.x;
    {load(0, na, 10)} {load(1, nb, 20)} {load(2, 4, 30)}
    mma.sync.aligned.m16n8k{k}.row.col.{acc}.{kind}.{kind}.{acc}
        {group(4, 40)}, {group(na, 10)}, {group(nb, 20)}, {group(4, 30)};
    ld.param.u64 %d1, [p3]; mul.wide.u32 %d2, %r1, 16; add.s64 %d3, %d1, %d2;
    st.global.v4.b32 [%d3], {group(4, 40)};
    """
    out = np.zeros((32, 4), c.dtype)
    run(body, fa, fb, fc, out)
    np.testing.assert_allclose(out, c_fragment(a @ b + c), rtol=2e-5, atol=2e-5)


def core_image(raw: Any, leading: int, stride: int) -> Any:
    """K-major operand [rows, k, item] in the canonical layout without swizzle."""
    rows, k, item = raw.shape
    image = np.zeros(8192, np.uint8)
    flat = raw.reshape(rows, k * item)
    for r in range(rows):
        for b in range(k * item):
            image[r % 8 * 16 + r // 8 * stride + b // 16 * leading + b % 16] = flat[r, b]
    return image


def mn_image(raw: Any, leading: int, stride: int) -> Any:
    """MN-major operand (16-bit) without swizzle: 8 k x 8 mn core matrices, mn contiguous."""
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


def wgmma_text(n: int, k: int, kind: str, acc: str, a: str, b: str, major: str) -> str:
    regs = ", ".join(f"%r{100 + i}" for i in range(n // 2))
    imm = "" if acc == "s32" else ", 1, 1"
    return f"""
    setp.ne.b32 %p1, 0, 0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n{n}k{k}.{acc}.{kind}.{kind} {{{regs}}}, {a}, {b}, %p1{imm}{major};
    setp.eq.b32 %p1, 0, 0;
    wgmma.mma_async.sync.aligned.m64n{n}k{k}.{acc}.{kind}.{kind} {{{regs}}}, {a}, {b}, %p1{imm}{major};
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    ld.param.u64 %d20, [p1]; mul.wide.u32 %d21, %r1, {2 * n}; add.s64 %d22, %d20, %d21;
    """ + "".join(f"st.global.b32 [%d22+{4 * i}], %r{100 + i};\n" for i in range(n // 2))


def d_fragment(d: Any) -> Any:
    """[64, n] to [128 lanes, n / 2]."""
    lanes = []
    for t in range(128):
        row = 16 * (t // 32) + (t % 32) // 4
        lane = []
        for i in range(d.shape[1] // 2):
            lane.append(d[row + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2])
        lanes.append(lane)
    return np.array(lanes)


@pytest.mark.parametrize("mode", ["eager", "adversarial", "race"])
@pytest.mark.parametrize("kind", ["bf16", "f16", "tf32", "e4m3", "s8"])
@section(
    "Register Fragments",
    "Canonical Layouts",
    "Matrix Descriptor Format",
    "Asynchronous Multiply-and-Accumulate Instruction: wgmma.mma_async",
)
def test_wgmma_from_shared_memory(kind: str, mode: str) -> None:
    item = 4 if kind == "tf32" else 2 if "f16" in kind else 1
    n, k = 16, 32 // item
    a, ra = values(kind, 64, k)
    b, rb = values(kind, n, k)
    image = np.concatenate([core_image(ra, 128, 256), core_image(rb, 128, 256)])
    acc = "s32" if kind == "s8" else "f32"
    high = descriptor(128, 256)
    major = ", 0, 0" if "f16" in kind else ""
    body = COPY_IN + ADDRESSES.format(a=high, b=high)
    body += wgmma_text(n, k, kind, acc, "%d12", "%d13", major)
    out = np.zeros((128, n // 2), np.int32 if acc == "s32" else np.float32)
    assert run(body, image, out, block=(128, 1, 1), shared=16384, mode=mode).findings == ()
    np.testing.assert_allclose(out, d_fragment(2 * a @ b.T), rtol=2e-5, atol=2e-5)


@section("Matrix Fragments for wgmma.mma_async.m64nNk16", "Major-ness supported by Strides")
def test_wgmma_with_a_in_registers_and_b_mn_major() -> None:
    a, ra = values("bf16", 64, 16)
    b, rb = values("bf16", 16, 16)
    frag = np.concatenate([a_fragment(ra[16 * w : 16 * w + 16], 16) for w in range(4)])
    image = np.concatenate([np.zeros(8192, np.uint8), mn_image(rb, 256, 128)])
    body = (
        COPY_IN
        + ADDRESSES.format(a=0, b=descriptor(256, 128))
        + """
    ld.param.u64 %d30, [p2]; mul.wide.u32 %d31, %r1, 16; add.s64 %d32, %d30, %d31;
    ld.global.v4.b32 {%r50, %r51, %r52, %r53}, [%d32];
    """
    )
    regs = "{%r50, %r51, %r52, %r53}"
    body += wgmma_text(16, 16, "bf16", "f32", regs, "%d13", ", 1")
    out = np.zeros((128, 8), np.float32)
    assert run(body, image, out, frag, block=(128, 1, 1), shared=16384).findings == ()
    np.testing.assert_allclose(out, d_fragment(2 * a @ b.T), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mode", ["eager", "adversarial", "race"])
@section("Asynchronous Multiply-and-Accumulate Instruction: wgmma.mma_async")
def test_a_group_of_wgmma_goes_in_order(mode: str) -> None:
    """A product that overwrites, among others that accumulate: what came before it is gone."""
    a, ra = values("bf16", 64, 16)
    b, rb = values("bf16", 32, 16)
    image = np.concatenate([core_image(ra, 128, 256), core_image(rb, 128, 256)])
    high = descriptor(128, 256)
    text = wgmma_text(16, 16, "bf16", "f32", "%d12", "%d13", ", 0, 0")
    one = next(x for x in text.split("\n") if "mma_async" in x) + "\n"
    fresh = one.replace("%p1", "%p2").replace("%d13", "%d14")
    other = one.replace("%d13", "%d15")
    at = text.index("wgmma.commit_group")
    start = "setp.ne.u32 %p2, 0, 0; add.s64 %d14, %d13, 16; add.s64 %d15, %d13, 32;\n"
    text = start + text[:at] + one + fresh + one + other + text[at:]
    out = np.zeros((128, 8), np.float32)
    body = COPY_IN + ADDRESSES.format(a=high, b=high) + text
    run(body, image, out, block=(128, 1, 1), shared=16384, mode=mode)
    want = a @ (b[8:24] + b[:16] + b[16:]).T  # B is 8 rows further for each 16 of the address
    np.testing.assert_allclose(out, d_fragment(want), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("n", [8, 64, 128, 248])
@ours
def test_wgmma_has_the_same_bits_in_every_mode(n: int) -> None:
    """Warps run four together or one by one: that must not show in how their products round."""
    _, ra = values("bf16", 64, 16)
    _, rb = values("bf16", n, 16)
    image = np.concatenate([core_image(ra, 128, 256), core_image(rb, 128, 256)])
    high = descriptor(128, 256)
    body = COPY_IN + ADDRESSES.format(a=high, b=high)
    body += wgmma_text(n, 16, "bf16", "f32", "%d12", "%d13", ", 0, 0")
    outs = []
    for mode in ("eager", "adversarial", "race"):
        outs.append(np.zeros((128, n // 2), np.float32))
        run(body, image, outs[-1], block=(128, 1, 1), shared=32768, mode=mode)
    assert all(np.array_equal(outs[0], o) for o in outs)
    assert outs[0].any()


@pytest.mark.parametrize("mode", ["eager", "adversarial", "race"])
@pytest.mark.parametrize(
    "before", ["wgmma.fence", "wgmma.mma_async", "wgmma.commit_group", "wgmma.wait_group"]
)
@ours
def test_warps_may_part_while_a_wgmma_is_under_way(mode: str, before: str) -> None:
    """Warp 2 waits for an mbarrier on which the others arrive; then all go on, apart."""
    a, ra = values("bf16", 64, 16)
    b, rb = values("bf16", 16, 16)
    image = np.concatenate([core_image(ra, 128, 256), core_image(rb, 128, 256)])
    high = descriptor(128, 256)
    text = wgmma_text(16, 16, "bf16", "f32", "%d12", "%d13", ", 0, 0")
    at = text.index(before)
    part = f"""
    shr.u32 %r90, %r1, 5; setp.eq.u32 %p3, %r90, 2; @%p3 bra $L_two;
    mbarrier.arrive.shared.b64 _, [dynamic+16384];
    bra $L_out;
$L_two:
{wait("dynamic+16384", "0", "w")}
$L_out:
"""
    start = init_barriers((16384, 96))
    out = np.zeros((128, 8), np.float32)
    body = start + COPY_IN + ADDRESSES.format(a=high, b=high) + text[:at] + part + text[at:]
    report = run(body, image, out, block=(128, 1, 1), shared=32768, mode=mode)
    np.testing.assert_allclose(out, d_fragment(2 * a @ b.T), rtol=2e-5, atol=2e-5)
    assert report.findings == ()


@pytest.mark.parametrize("mode", ["eager", "adversarial"])
@section("Warpgroup")
def test_a_warp_that_leaves_a_wgmma_out_is_found(mode: str) -> None:
    text = wgmma_text(16, 16, "bf16", "f32", "%d12", "%d13", ", 0, 0")
    one = next(x for x in text.split("\n") if "mma_async" in x) + "\n"
    at = text.index("wgmma.commit_group")
    branch = "shr.u32 %r90, %r1, 5; setp.eq.u32 %p3, %r90, 2; @%p3 bra $L_out;\n"
    text = text[:at] + branch + one + "$L_out:\n" + text[at:]
    image, out = np.zeros(16384, np.uint8), np.zeros((128, 8), np.float32)
    body = COPY_IN + ADDRESSES.format(a=descriptor(128, 256), b=descriptor(128, 256)) + text
    launch: dict[str, Any] = {"block": (128, 1, 1), "shared": 16384, "mode": mode}
    if mode == "eager":  # warps in lockstep: a product without one of them cannot be executed
        with pytest.raises(emulator.KernelFault, match="inactive lanes"):
            run(body, image, out, **launch)
        return
    (finding,) = run(body, image, out, **launch).findings
    assert finding.kind == "convergence"
    assert "[3, 3, 2, 3]" in finding.text


@section("Asynchronous Multiply-and-Accumulate Instruction: wgmma.wait_group")
def test_reading_a_wgmma_result_too_early_shows_in_adversarial_order() -> None:
    _, ra = values("bf16", 64, 16)
    _, rb = values("bf16", 16, 16)
    image = np.concatenate([core_image(ra, 128, 256), core_image(rb, 128, 256)])
    high = descriptor(128, 256)
    text = wgmma_text(16, 16, "bf16", "f32", "%d12", "%d13", ", 0, 0")
    early = text.replace("wait_group.sync.aligned 0", "wait_group.sync.aligned 1")
    outs = []
    for t in (text, early):
        out = np.zeros((128, 8), np.float32)
        body = COPY_IN + ADDRESSES.format(a=high, b=high) + t
        run(body, image, out, block=(128, 1, 1), shared=16384, mode="adversarial")
        outs.append(out)
    assert not np.array_equal(outs[0], outs[1], equal_nan=True)


@section("Asynchronous Multiply-and-Accumulate Instruction: wgmma.fence")
def test_a_missing_wgmma_fence_is_found_without_running() -> None:
    high = descriptor(128, 256)
    text = wgmma_text(16, 16, "bf16", "f32", "%d12", "%d13", ", 0, 0")
    body = COPY_IN + ADDRESSES.format(a=high, b=high)
    image, out = np.zeros(16384, np.uint8), np.zeros((128, 8), np.float32)
    for t, want in ((text, []), (text.replace("wgmma.fence.sync.aligned;", ""), ["fence"])):
        target = emulator.Ptx(kernel(body + t, pointers(2)), block=(128, 1, 1), shared=16384)
        report = emulator.check(target, image, out, seeds=1)
        assert [f.kind for f in report.static] == want
    # A register that the product reads is written between the fence and the product.
    late = text.replace("wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned; mov.b32 %r100, 0;")
    target = emulator.Ptx(kernel(body + late, pointers(2)), block=(128, 1, 1), shared=16384)
    static = emulator.check(target, image, out, seeds=0).static
    assert "%r100" in static[0].text


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
TC_HIGH = 1 << 46


def tcgen05(
    kind: str, m: int, n: int, shape: str = "32x32b", mode: str = "eager", commit: str = COMMIT
) -> tuple[Any, Any, Any]:
    """(report, registers [128, r], A B^T times 2)."""
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
    """M=128: row r of D is lane r, column c is column c."""
    report, out, want = tcgen05(kind, 128, 16, mode=mode)
    assert report.findings == ()
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)


@section("Layout F (M = 64 + non .ws mode)")
def test_tcgen05_of_64_rows() -> None:
    """M=64: row r is lane 32 (r / 16) + r % 16."""
    report, out, want = tcgen05("bf16", 64, 16)
    assert report.findings == ()
    np.testing.assert_allclose(
        out.reshape(4, 32, 16)[:, :16].reshape(64, 16), want, rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("shape", ["16x128b", "16x256b"])
@section("Matrix fragments for shape .16x128b", "Matrix fragments for shape .16x256b", "tcgen05.ld")
def test_tcgen05_ld_shapes(shape: str) -> None:
    """Lane t reads row t / 4 (and + 8); columns t % 4 of four, or 2 (t % 4) + {0, 1} of eight."""
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
