"""Check tensor memory: products of CTA pairs, A in tensor memory, copies, invalid use.

PTX ISA, "TensorCore 5th Generation Family Instructions": "CTA Pair", "Issue Granularity", "Data Path
Layout Organization", "Matrix Shape", tcgen05.alloc, tcgen05.cp, tcgen05.mma, tcgen05.commit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attnkit import emulator
from attnkit.emulator import Report, UnknownOpcode
from tests.emulator.matrix_kit import COPY_IN, TC_HIGH, core_image, descriptor, values, words
from tests.emulator.ptx_kit import init_barriers, kernel, pointers, wait
from tests.emulator.sections import ours, section

MODES = ["eager", "adversarial", "race"]
HIGH = descriptor(128, 256, TC_HIGH)  # two chunks of 16 bytes 128 apart, eight rows 256 apart
IDESC = {
    "bf16": ("f16", 1, 1),
    "f16": ("f16", 0, 1),
    "tf32": ("tf32", 2, 1),
    "e4m3": ("f8f6f4", 0, 1),
}
IDESC["s8"] = ("i8", 1, 2)

START = """
    mov.u32 %r80, %cluster_ctarank; and.b32 %r80, %r80, 1; mov.u32 %r81, %ctaid.x;
    mov.u32 %r90, %tid.x; shr.u32 %r91, %r90, 5; setp.ne.s32 %p5, %r91, 0;
    @%p5 bra $L_noalloc;
    mov.b32 %r92, {columns};
    tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [dynamic+16384], %r92;
$L_noalloc:
    fence.proxy.async.shared::cta;
    barrier.cluster.arrive; barrier.cluster.wait;
    ld.shared.b32 %r93, [dynamic+16384];
    shl.b32 %r96, %r91, 21; add.s32 %r97, %r93, %r96;
    shr.u32 %r9, %r2, 4; and.b32 %r9, %r9, 16383; cvt.u64.u32 %d10, %r9; add.s64 %d11, %d10, 512;
    or.b64 %d12, %d10, {high}; or.b64 %d13, %d11, {high};
"""
ISSUE = """
    setp.ne.s32 %p8, %r80, 0; or.pred %p9, %p8, %p5;
    @%p9 bra $L_nomma;
    elect.sync %r94|%p6, -1;
    @!%p6 bra $L_nomma;
    {work}
    mov.b16 %h1, 3;
    {commit}
$L_nomma:
"""
FINISH = """
    ld.param.u64 %d20, [p1]; mad.lo.s32 %r95, %r81, 128, %r90; mul.wide.u32 %d21, %r95, BYTES;
    add.s64 %d22, %d20, %d21;
    tcgen05.ld.sync.aligned.32x32b.xCOUNT.b32 {REGS}, [%r97+COLUMN];
    tcgen05.wait::ld.sync.aligned;
    STORE
    barrier.cluster.arrive; barrier.cluster.wait;
    @%p5 bra $L_nofree;
    tcgen05.dealloc.cta_group::GROUP.sync.aligned.b32 %r93, %r92;
$L_nofree:
"""
MULTICAST = """tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64
    [dynamic+16392], %h1;"""
SINGLE = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [dynamic+16392];"


def per_cta(text: str) -> str:
    """Return `text` with p0 replaced by the part of the operand for the executing CTA."""
    own = "mov.u32 %r82, %ctaid.x; mul.wide.u32 %d15, %r82, 16384; add.s64 %d1, %d1, %d15;"
    return text.replace("ld.param.u64 %d1, [p0];", f"ld.param.u64 %d1, [p0]; {own}")


def run_kernel(
    images: list[Any], work: str, columns: int, group: int, *, mode: str = "eager", before: str = "",
    at: int = 0, edit: tuple[str, str] = ("", ""), block: int = 128,
) -> tuple[Report, Any]:  # fmt: skip
    """Run `work` in one thread and read the accumulator back.

    Returns:
        The report, and tensor memory as bits, [CTA, lane, column].
    """
    regs = ", ".join(f"%r{100 + i}" for i in range(columns))
    store = "".join(f"st.global.b32 [%d22+{4 * i}], %r{100 + i};" for i in range(columns))
    finish = FINISH.replace("BYTES", str(4 * columns)).replace("COUNT", str(columns))
    finish = finish.replace("REGS", regs).replace("STORE", store).replace("GROUP", str(group))
    body = init_barriers((16392, 1)) + per_cta(COPY_IN)
    body += START.format(columns=64, group=group, high=HIGH) + before
    body += ISSUE.format(work=work, commit=MULTICAST if group == 2 else SINGLE)
    body += wait("dynamic+16392", "0", "mma") + "tcgen05.fence::after_thread_sync;"
    body += finish.replace("COLUMN", str(at))
    if edit[0]:
        assert edit[0] in body
        body = body.replace(*edit)
    ctas = len(images)
    out = np.zeros((ctas, 128, columns), np.uint32)
    target = emulator.Ptx(
        kernel(body, pointers(2), arch="sm_100a"),
        grid=(ctas, 1, 1),
        cluster=(ctas, 1, 1),
        block=(block, 1, 1),
        shared=16400,
    )
    report = emulator.run(target, np.stack(images), out, mode=mode, raises=False)
    return report, out


def product(m: int, n: int, kind: str, group: int, a: str = "%d12", lane: int = 0) -> str:
    """Return code of two products into one accumulator; the second one adds."""
    name, number, d = IDESC[kind]
    idesc = d << 4 | number << 7 | number << 10 | n // 8 << 17 | m // 16 << 24
    one = f"tcgen05.mma.cta_group::{group}.kind::{name} [%r83], {a}, %d13, %r95, %p7;"
    return (
        f"mov.b32 %r95, {idesc}; add.s32 %r83, %r93, {lane << 16}; mov.pred %p7, 0; {one}\n"
        f"mov.pred %p7, 1; {one}"
    )


def operands(m: int, n: int, kind: str, ctas: int) -> tuple[list[Any], Any, Any]:
    """Return (shared memory of each CTA: its rows of A and B; bytes of A; 2 A B^T)."""
    item = {"bf16": 2, "f16": 2, "tf32": 4}.get(kind, 1)
    a, ra = values(kind, m, 32 // item)
    b, rb = values(kind, n, 32 // item)
    images = [
        np.concatenate([core_image(x, 128, 256), core_image(y, 128, 256)])
        for x, y in zip(np.split(ra, ctas), np.split(rb, ctas), strict=True)
    ]
    return images, ra, 2 * a @ b.T


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("n", "kind"), [(32, "bf16"), (16, "f16"), (32, "tf32"), (32, "e4m3"), (32, "s8")]
)
@section("CTA Pair", "Layout A (M = 256)", "tcgen05.commit")
def test_a_pair_of_256_rows(n: int, kind: str, mode: str) -> None:
    """A CTA pair computes M=256 in layout A, and one commit signals both CTAs.

    Row r of a CTA's half is in lane r. Each CTA has half of the rows of A and of B, and the whole
    width of D.
    """
    images, _, want = operands(256, n, kind, 2)
    report, out = run_kernel(images, product(256, n, kind, 2), n, 2, mode=mode)
    assert report.findings == ()
    close(out.view(np.int32 if kind == "s8" else np.float32).reshape(256, n), want)


@pytest.mark.parametrize("mode", MODES)
@section("Layout B (M = 128 + cta-group::2 + Dense A matrix)")
def test_a_pair_of_128_rows(mode: str) -> None:
    """A CTA pair computes M=128 in layout B.

    Each CTA has 64 rows, and the second half of the columns is in lanes 64 to 127.
    """
    images, _, want = operands(128, 32, "bf16", 2)
    report, out = run_kernel(images, product(128, 32, "bf16", 2), 16, 2, mode=mode)
    assert report.findings == ()
    rows = want.reshape(2, 64, 32)
    close(out.view(np.float32), np.concatenate([rows[..., :16], rows[..., 16:]], axis=1))


STORE_A = """
    ld.param.u64 %d30, [p0]; mov.u32 %r84, %ctaid.x; mad.lo.s32 %r85, %r84, 16384, 0;
    cvt.u64.u32 %d31, %r85; add.s64 %d32, %d30, %d31; mul.wide.u32 %d33, %r90, 32;
    add.s64 %d34, %d32, %d33;
    ld.global.v4.b32 {%r60, %r61, %r62, %r63}, [%d34+4096];
    ld.global.v4.b32 {%r64, %r65, %r66, %r67}, [%d34+4112];
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r97+32], {%r60, %r61, %r62, %r63, %r64, %r65, %r66, %r67};
    tcgen05.wait::st.sync.aligned;
    tcgen05.fence::before_thread_sync;
    barrier.cluster.arrive; barrier.cluster.wait;
    tcgen05.fence::after_thread_sync;
    add.s32 %r86, %r93, AT;
"""


def with_lanes(images: list[Any], ra: Any, lanes: list[int]) -> list[Any]:
    """Return the images with row `lanes[i]` of A stored for lane i of tensor memory (-1: none)."""
    out = []
    for image, part in zip(images, np.split(ra, len(images)), strict=True):
        rows = words(part.reshape(len(part), -1)).view(np.uint8)
        image = image.copy()
        table = image[4096:8192].reshape(128, 32)
        for lane, row in enumerate(lanes):
            if row >= 0:
                table[lane] = rows[row]
        out.append(image)
    return out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("m", "group"), [(128, 1), (64, 1), (256, 2), (128, 2)])
@section("tcgen05.mma", "Data Path Layout Organization")
def test_a_in_tensor_memory(m: int, group: int, mode: str) -> None:
    """Products with A in tensor memory are correct; 32 bytes of a row are 8 columns of its lane.

    For M=64, A uses 16 lanes of every quarter. For M=128 of a pair, the upper 64 lanes hold A once
    more.
    """
    n = 32
    images, ra, want = operands(m, n, "bf16", group)
    rows, lane = m // group, np.arange(128)
    place = {128: lane, 64: lane % 64}[rows]
    if (rows, group) == (64, 1):
        place = np.where(lane % 32 < 16, lane // 32 * 16 + lane % 16, -1)
    images = with_lanes(images, ra, place.tolist())
    work = product(m, n, "bf16", group, a="[%r86]")
    columns = n // 2 if (rows, group) == (64, 2) else n
    before = STORE_A.replace("AT", "32")
    report, out = run_kernel(images, work, columns, group, mode=mode, before=before)
    assert report.findings == ()
    got = out.view(np.float32)
    if rows == 128:
        close(got.reshape(m, n), want)
    elif group == 1:
        close(got[0][place >= 0], want)
    else:
        both = want.reshape(2, 64, 32)
        close(got, np.concatenate([both[..., :16], both[..., 16:]], axis=1))


@section("Layout F (M = 64 + non .ws mode)", "Data Path Layout Organization")
def test_half_of_the_lanes_may_start_at_16() -> None:
    """Layout F (M=64) may start at lane 16; other layouts must start at lane 0."""
    images, _, want = operands(64, 16, "bf16", 1)
    report, out = run_kernel(images, product(64, 16, "bf16", 1, lane=16), 16, 1)
    assert report.findings == ()
    close(out.view(np.float32).reshape(4, 32, 16)[:, 16:].reshape(64, 16), want)
    report, _ = run_kernel(images, product(128, 16, "bf16", 1, lane=16), 16, 1)
    assert "lane 16" in report.findings[-1].text


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("shape", "group"), [("128x256b", 1), ("128x256b", 2), ("128x128b", 1), ("32x128b.warpx4", 2)]
)
@section("tcgen05.cp")
def test_copies_to_tensor_memory(shape: str, group: int, mode: str) -> None:
    """tcgen05.cp copies row r of shared memory to lane r of tensor memory.

    With .warpx4, 32 rows go to all four quarters. With cta_group::2, each CTA is filled from its
    own shared memory.
    """
    rows, bits = (int(x) for x in shape.split("b")[0].split("x"))
    images, ra, _ = operands(256 if group == 2 else 128, 32, "bf16", group)
    work = f"tcgen05.cp.cta_group::{group}.{shape} [%r93], %d12;"
    report, out = run_kernel(images, work, bits // 32, group, mode=mode)
    assert report.findings == ()
    want = words(ra.reshape(len(ra), -1)).reshape(group, 128, 8)[:, :rows, : bits // 32]
    np.testing.assert_array_equal(out, np.tile(want, (1, 128 // rows, 1)))


@section("tcgen05.commit")
def test_a_commit_that_only_one_cta_gets_leaves_the_other_waiting() -> None:
    images, _, _ = operands(256, 32, "bf16", 2)
    edit = ("mov.b16 %h1, 3;", "mov.b16 %h1, 1;")
    report, _ = run_kernel(images, product(256, 32, "bf16", 2), 32, 2, edit=edit)
    assert report.findings[-1].kind == "deadlock"
    assert "of rank 1" in report.findings[-1].text


@section("tcgen05.alloc, tcgen05.dealloc, tcgen05.relinquish_alloc_permit", "Issue Granularity")
def test_both_ctas_allocate_alike() -> None:
    """Both CTAs of a pair must allocate the same number of columns."""
    images, _, _ = operands(256, 32, "bf16", 2)
    edit = ("mov.b32 %r92, 64;", "shl.b32 %r92, 64, %r80;")
    report, _ = run_kernel(images, product(256, 32, "bf16", 2), 32, 2, edit=edit)
    assert [f.kind for f in report.findings] == ["tensor-memory", "tensor-memory"]
    assert "cta_group::2" in report.findings[0].text


@section("tcgen05.alloc, tcgen05.dealloc, tcgen05.relinquish_alloc_permit")
def test_one_kernel_has_one_cta_group() -> None:
    body = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
    target = emulator.Ptx(kernel(body, pointers(1), arch="sm_100a"))
    assert emulator.check(target, np.zeros(4), seeds=0).findings == ()
    both = body + body.replace("::1", "::2")
    target = emulator.Ptx(kernel(both, pointers(1), arch="sm_100a"))
    (finding,) = emulator.check(target, np.zeros(4), seeds=0).static
    assert "in a kernel with cta_group::1" in finding.text


@section("tcgen05.alloc, tcgen05.dealloc, tcgen05.relinquish_alloc_permit")
def test_allocations_must_not_grow() -> None:
    more = "mov.b32 %r70, 128; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [dynamic+16384], %r70;"
    images, _, _ = operands(128, 16, "bf16", 1)
    edit = ("$L_noalloc:\n", f"{more}\n$L_noalloc:\n")
    report, _ = run_kernel(images, product(128, 16, "bf16", 1), 16, 1, edit=edit)
    assert "must not increase" in report.findings[-1].text


@section("Issue Granularity")
def test_the_peer_must_not_have_exited() -> None:
    """A product of a CTA pair is an error if the peer CTA has exited."""
    images, _, _ = operands(256, 32, "bf16", 2)
    leave = "setp.ne.s32 %p8, %r80, 0; @%p8 exit;\n"
    edit = ("setp.ne.s32 %p8, %r80, 0;", leave + "nanosleep.u32 20; nanosleep.u32 20;")
    report, _ = run_kernel(images, product(256, 32, "bf16", 2), 32, 2, edit=edit)
    assert [f.kind for f in report.findings if f.severity == "error"][:1] == ["exited"]


@pytest.mark.parametrize(
    ("m", "n", "group"), [(128, 8, 1), (256, 32, 1), (64, 32, 2), (256, 8, 2), (128, 264, 1)]
)
@section("Matrix Shape")
def test_shapes_that_the_tensor_cores_do_not_have(m: int, n: int, group: int) -> None:
    images, _, _ = operands(128, 32, "bf16", 2 if group == 2 else 1)
    report, _ = run_kernel(images, product(m, n, "bf16", group), 32, group)
    assert report.findings[-1].kind == "encoding"
    assert f"M={m} N={n % 512}" in report.findings[-1].text


REFUSED = [
    "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r1], %d1, %d2, %r2, [%r3], [%r4], %p1;",
    "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.scale_vec::2X [%r1], %d1, %d2, %r2, [%r3], [%r4], %p1;",
    "tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %d1, %d2, [%r3], %r2, %p1;",
    "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %d1, %d2, %r2, %p1;",
    "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r1], %r2, [%r3];",
    "tcgen05.shift.cta_group::1.down [%r1];",
    "tcgen05.cp.cta_group::1.64x128b.warpx2::02_13 [%r1], %d1;",
    "tcgen05.cp.cta_group::1.128x256b.b8x16.b4x16_p64 [%r1], %d1;",
    "tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r2}, [%r1];",
    "tcgen05.ld.sync.aligned.32x32b.x2.pack::16b.b32 {%r2, %r3}, [%r1];",
    "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.f32.e4m3.e4m3.f32.ue8m0 "
    "{%r1,%r2,%r3,%r4}, {%r5,%r6,%r7,%r8}, {%r9,%r10}, {%r1,%r2,%r3,%r4}, %r11, {0,0}, %r12, {0,0};",
]


@pytest.mark.parametrize("text", REFUSED)
@ours
def test_what_is_not_implemented_is_refused_by_name(text: str) -> None:
    target = emulator.Ptx(kernel(text, pointers(1), arch="sm_100a"))
    with pytest.raises(UnknownOpcode, match=text.split(" ")[0].split(".")[0]) as error:
        emulator.run(target, np.zeros(4))
    assert text.split(" ")[0] in str(error.value)


@section("Instruction Descriptor")
def test_a_format_that_is_not_implemented_is_refused_when_it_runs() -> None:
    """An element format that is not implemented is refused at run time.

    The format is part of the instruction descriptor, which is a run-time value; 5 is e2m1.
    """
    images, _, _ = operands(128, 16, "e4m3", 1)
    first, rest = product(128, 16, "e4m3", 1).split(";", 1)
    report, _ = run_kernel(images, f"{first}; or.b32 %r95, %r95, {5 << 7};{rest}", 16, 1)
    assert "format not implemented" in report.findings[-1].text
