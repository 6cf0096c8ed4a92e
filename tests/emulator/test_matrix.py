"""Compare mma and wgmma products with float64, with fragments built from the PTX ISA's tables.

Sections mma.sync ("Matrix Fragments for mma.m16n8k...") and wgmma ("Register Fragments", "Shared
Memory Matrix Layout").
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attnkit import emulator
from tests.emulator.matrix_kit import (
    ADDRESSES,
    COPY_IN,
    core_image,
    descriptor,
    mn_image,
    values,
    words,
)
from tests.emulator.ptx_kit import init_barriers, kernel, pointers, run, wait
from tests.emulator.sections import ours, section


def a_fragment(raw: Any, k: int) -> Any:
    """Return the registers of A, [32 lanes, registers], in the order of the ISA's tables."""
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
    """Return the registers of B [k, n]; a lane holds column lane >> 2."""
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
    """Return the elements of C [16, 8] by lane, [32, 4]."""
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
    """Return the elements of D [64, n] by thread of the warpgroup, [128, n / 2]."""
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
    """The products of a wgmma group run in order: one that overwrites discards earlier sums."""
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
    """wgmma rounds equally whether its four warps run together or one by one."""
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
    """Warps may diverge around a wgmma: warp 2 waits for an mbarrier that the others signal."""
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
