"""Check TMA and bulk copies (PTX ISA: cp.async, cp.async.bulk, cp.async.bulk.tensor, st.async)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from attnkit import emulator
from attnkit.emulator import KernelFault
from attnkit.emulator.machine.tensor_maps import TensorMap, decode, encode
from tests.emulator.ptx_kit import init_barriers, kernel, run, wait
from tests.emulator.sections import ours, section

ELECT = """
    mov.u32 %r80, %tid.x; setp.ge.u32 %p20, %r80, 32;
    @%p20 bra $L_skip{0};
    elect.sync %r81|%p21, -1;
    @!%p21 bra $L_skip{0};
"""


def tensor_map(x: Any, box: tuple[int, ...], swizzle: int, kind: str) -> bytes:
    """Return the encoded tensor map of a torch tensor; `box` lists the innermost size first."""
    dims = tuple(x.shape[::-1])
    strides = tuple(s * x.element_size() for s in x.stride()[::-1])
    return encode(TensorMap(x.data_ptr(), kind, x.element_size(), swizzle, dims, strides, box))


@ours
def test_encode_and_decode_are_inverse() -> None:
    m = TensorMap(
        0x7F12345670, "bf16", 2, 7, (100, 7, 5, 3), (2, 208, 1 << 36, 4096), (64, 4, 1, 2)
    )
    assert decode(encode(m)) == m


LOAD = (
    init_barriers((0, 1))
    + ELECT.format("a")
    + """
    mov.b32 %r1, {bytes};
    mbarrier.arrive.expect_tx.shared.b64 %d9, [dynamic], %r1;
    mov.b64 %d1, pmap; cvta.param.u64 %d2, %d1; mov.b32 %r2, {x}; mov.b32 %r3, {y};
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
        [dynamic+1024], [%d2, {{%r2, %r3}}], [dynamic];
$L_skipa:
"""
    + wait("dynamic", "0", "t")
    + """
    mov.u32 %r5, %tid.x; shl.b32 %r6, %r5, 4; mov.b32 %r7, dynamic; add.s32 %r8, %r7, %r6;
    ld.param.u64 %d3, [p0]; mul.wide.u32 %d4, %r5, 16; add.s64 %d5, %d3, %d4;
    setp.ge.u32 %p3, %r6, {bytes};
    @%p3 bra $L_out;
    ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r8+1024];
    st.global.v4.b32 [%d5], {{%r10, %r11, %r12, %r13}};
$L_out:
"""
)
PARAMS = ".param .u64 p0, .param .align 64 .b8 pmap[128], .param .u64 p2"


def load_box(x: Any, box: tuple[int, int], at: tuple[int, int], swizzle: int, mode: str) -> Any:
    size = box[0] * box[1] * x.element_size()
    kind = {torch.bfloat16: "bf16", torch.float32: "f4", torch.float16: "f16"}[x.dtype]
    out = np.zeros(size, np.uint8)
    body = LOAD.format(bytes=size, x=at[0], y=at[1])
    target = emulator.Ptx(kernel(body, PARAMS), block=(256, 1, 1), shared=8192)
    report = emulator.run(target, out, tensor_map(x, box, swizzle, kind), x, mode=mode)
    assert report.findings == ()
    return out


def swizzled(dense: Any, mask: int) -> Any:
    """Return a box's bytes in shared memory: the 16-byte chunk c is at c ^ ((c >> 3) & mask)."""
    chunks = np.ascontiguousarray(dense).view(np.uint8).reshape(-1, 16)
    out = np.zeros_like(chunks)
    for i in range(len(chunks)):
        out[i ^ ((i >> 3) & mask)] = chunks[i]
    return out.ravel()


@pytest.mark.parametrize("mode", ["eager", "adversarial", "race"])
@pytest.mark.parametrize(
    ("dtype", "swizzle", "box"),
    [(torch.bfloat16, 7, (64, 8)), (torch.float16, 3, (32, 16)), (torch.float32, 0, (16, 8))],
)
@section("cp.async.bulk.tensor", "Swizzling Modes", "Out of Boundary Access")
def test_tma_load_swizzles_and_fills_with_zeros(
    dtype: torch.dtype, swizzle: int, box: tuple[int, int], mode: str
) -> None:
    """A TMA box that crosses an edge is filled with zeros, which count as transferred bytes."""
    x = torch.randn(20, 96).to(dtype)
    for at in ((0, 0), (64, 16), (-8, -3), (90, 2)):
        dense = torch.zeros(box[1], box[0], dtype=dtype)
        for r, c in itertools.product(range(box[1]), range(box[0])):
            if 0 <= at[1] + r < 20 and 0 <= at[0] + c < 96:
                dense[r, c] = x[at[1] + r, at[0] + c]
        got = load_box(x, box, at, swizzle, mode)
        raw = dense.view(torch.int16 if dtype.itemsize == 2 else torch.int32).numpy()
        np.testing.assert_array_equal(got, swizzled(raw, swizzle))


STORE = (
    """
    mov.u32 %r5, %tid.x; shl.b32 %r6, %r5, 2; mov.b32 %r7, dynamic; add.s32 %r8, %r7, %r6;
    cvt.rn.f32.u32 %r9, %r5;
    st.shared.b32 [%r8], %r9;
    FENCE
    bar.sync 0;
"""
    + ELECT.format("b")
    + """
    mov.b64 %d1, pmap; cvta.param.u64 %d2, %d1; mov.b32 %r2, {x}; mov.b32 %r3, {y};
    {op} [%d2, {{%r2, %r3}}], [dynamic];
    cp.async.bulk.commit_group;
    WAIT
$L_skipb:
"""
)
PLAIN = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
REDUCE = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"


def store(op: str, out: Any, mode: str = "eager", fence: str = "fence.proxy.async.shared::cta;",
          done: str = "cp.async.bulk.wait_group 0;") -> Any:  # fmt: skip
    body = STORE.replace("FENCE", fence).replace("WAIT", done).format(op=op, x=4, y=6)
    target = emulator.Ptx(kernel(body, PARAMS), block=(64, 1, 1), shared=1024)
    return emulator.run(target, np.zeros(1), tensor_map(out, (8, 8), 0, "f4"), out, mode=mode)


@pytest.mark.parametrize("mode", ["eager", "adversarial", "race"])
@pytest.mark.parametrize("op", [PLAIN, REDUCE])
@section("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor", "Out of Boundary Access")
def test_tma_store_and_reduce_clip_at_the_edge(op: str, mode: str) -> None:
    out = torch.ones(10, 12)
    want = out.clone()
    tile = torch.arange(64.0).reshape(8, 8)
    want[6:, 4:12] = tile[:4] + (1 if op == REDUCE else 0)
    assert store(op, out, mode).findings == ()
    torch.testing.assert_close(out, want, rtol=0, atol=0)


@section("membar / fence", "Async Proxy")
def test_a_missing_proxy_fence_is_reported() -> None:
    report = store(PLAIN, torch.ones(16, 16), "race", fence="")
    assert [f.kind for f in report.findings] == ["fence"]
    assert "fence.proxy.async" in report.findings[0].text


@section("cp.async.bulk.wait_group")
def test_an_unfinished_bulk_store_is_reported() -> None:
    report = store(PLAIN, torch.ones(16, 16), done="")
    assert [(f.kind, f.severity) for f in report.findings] == [("unfinished", "error")]
    assert not report.ok


@section("Async-group mechanism", "cp.async.bulk.wait_group")
def test_adversarial_order_shows_a_store_that_is_not_waited_for() -> None:
    """Adversarial order exposes a store whose source is overwritten without a wait."""
    after = "{} mov.b32 %r9, 0; st.shared.b32 [dynamic], %r9; st.shared.b32 [dynamic+4], %r9;"
    good = torch.ones(16, 16)
    assert store(
        PLAIN, good, "adversarial", done=after.format("cp.async.bulk.wait_group.read 0;")
    ).ok
    assert good[6, 5] == 1
    bad = torch.ones(16, 16)
    store(PLAIN, bad, "adversarial", done=after.format("") + "cp.async.bulk.wait_group 0;")
    assert bad[6, 5] == 0


@section("cp.async.bulk.tensor")
def test_multicast_reaches_every_cta_of_the_mask() -> None:
    """A multicast load writes data and mbarrier at the same offsets in each CTA of the mask."""
    body = (
        init_barriers((0, 1))
        + """
    mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, %tid.x;
    mov.b32 %r3, 256;
    setp.ne.s32 %p1, %r2, 0;
    @%p1 bra $L_a;
    mbarrier.arrive.expect_tx.shared.b64 %d9, [dynamic], %r3;
$L_a:
    barrier.cluster.arrive; barrier.cluster.wait;
    setp.ne.s32 %p2, %r1, 0;
    or.pred %p3, %p1, %p2;
    @%p3 bra $L_b;
    mov.b64 %d1, pmap; cvta.param.u64 %d2, %d1; mov.b32 %r4, 0; mov.b16 %h1, 3;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
        [dynamic+1024], [%d2, {%r4, %r4}], [dynamic], %h1;
$L_b:
"""
        + wait("dynamic", "0", "m")
        + """
    mov.b32 %r7, dynamic; shl.b32 %r6, %r2, 3; add.s32 %r8, %r7, %r6;
    ld.shared.v2.b32 {%r10, %r11}, [%r8+1024];
    ld.param.u64 %d3, [p0]; mad.lo.s32 %r9, %r1, 32, %r2; mul.wide.u32 %d4, %r9, 8;
    add.s64 %d5, %d3, %d4; st.global.v2.b32 [%d5], {%r10, %r11};
    barrier.cluster.arrive; barrier.cluster.wait;
"""
    )
    x = torch.randn(8, 8)
    for mode in ("eager", "adversarial", "race"):
        out = np.zeros((2, 8, 8), np.float32)
        target = emulator.Ptx(kernel(body, PARAMS), grid=(2, 1, 1), cluster=(2, 1, 1), shared=2048)
        report = emulator.run(target, out, tensor_map(x, (8, 8), 0, "f4"), x, mode=mode)
        assert report.findings == ()
        np.testing.assert_array_equal(out, np.stack([x.numpy()] * 2))


@section("cp.async.bulk", "cp.async.bulk.commit_group")
def test_bulk_copies_without_a_map() -> None:
    """cp.async.bulk copies from global to shared, to a neighbour's shared, and to global."""
    body = (
        init_barriers((0, 1), (8, 1))
        + """
    mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, %tid.x; ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1];
    setp.ne.s32 %p1, %r2, 0; mov.b32 %r3, 512;
    @%p1 bra $L_a;
    mbarrier.arrive.expect_tx.shared.b64 %d9, [dynamic], %r3;
    mbarrier.arrive.expect_tx.shared.b64 %d9, [dynamic+8], %r3;
    mul.wide.u32 %d3, %r1, 512; add.s64 %d4, %d1, %d3;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [dynamic+1024], [%d4], %r3, [dynamic];
$L_a:
    barrier.cluster.arrive; barrier.cluster.wait;
"""
        + wait("dynamic", "0", "x")
        + """
    @%p1 bra $L_b;
    xor.b32 %r4, %r1, 1; mov.b32 %r5, dynamic;
    mapa.shared::cluster.u32 %r6, %r5, %r4;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
        [%r6+2048], [dynamic+1024], %r3, [%r6+8];
$L_b:
"""
        + wait("dynamic+8", "0", "y")
        + """
    @%p1 bra $L_c;
    add.s64 %d5, %d2, %d3; mul.wide.u32 %d3, %r1, 512; add.s64 %d5, %d2, %d3;
    cp.async.bulk.global.shared::cta.bulk_group [%d5], [dynamic+2048], %r3;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
$L_c:
    barrier.cluster.arrive; barrier.cluster.wait;
"""
    )
    x = np.random.default_rng(0).normal(size=(2, 128)).astype(np.float32)
    launch = {"grid": (2, 1, 1), "cluster": (2, 1, 1), "shared": 4096}
    for mode in ("eager", "adversarial", "race"):
        out = np.zeros_like(x)
        assert run(body, x, out, mode=mode, **launch).findings == ()
        np.testing.assert_array_equal(out, x[::-1])


@pytest.mark.parametrize("hint", ["", ".L2::cache_hint"])
@section("cp.async", "cp.async.commit_group", "cp.async.wait_group / cp.async.wait_all")
def test_cp_async_fills_with_zeros_and_waits_by_group(hint: str) -> None:
    """cp.async fills with zeros if the source size is below the copy size."""
    body = """
    createpolicy.fractional.L2::evict_first.b64 %d9, 1.0;
    mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 4; mov.b32 %r3, dynamic; add.s32 %r4, %r3, %r2;
    ld.param.u64 %d1, [p0]; mul.wide.u32 %d2, %r1, 16; add.s64 %d3, %d1, %d2;
    ld.param.u64 %d4, [p1]; add.s64 %d5, %d4, %d2;
    and.b32 %r5, %r1, 1; mul.lo.s32 %r6, %r5, 8; add.s32 %r6, %r6, 8;
    cp.async.cg.shared.globalHINT [%r4], [%d3], 16, %r6POLICY;
    cp.async.commit_group;
    WAIT
    ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r4];
    st.global.v4.b32 [%d5], {%r10, %r11, %r12, %r13};
    """
    body = body.replace("HINT", hint).replace("POLICY", ", %d9" if hint else "")
    x = np.arange(1, 129, dtype=np.uint32).reshape(32, 4)
    want = x.copy()
    want[::2, 2:] = 0
    for mode in ("eager", "adversarial", "race"):
        out = np.zeros_like(x)
        done = body.replace("WAIT", "cp.async.wait_group 0;")
        assert run(done, x, out, mode=mode, shared=1024).findings == ()
        np.testing.assert_array_equal(out, want)
    out = np.zeros_like(x)
    run(body.replace("WAIT", "cp.async.wait_group 1;"), x, out, mode="adversarial", shared=1024)
    assert (out != want).any()
    report = run(body.replace("WAIT", ""), x, out, mode="race", shared=1024)
    assert {f.kind for f in report.findings} & {"race", "uninitialised"}


@section("cp.async.bulk", "cp.async.bulk.tensor")
def test_misaligned_copies_are_faults() -> None:
    body = (
        init_barriers((0, 1))
        + """
    ld.param.u64 %d1, [p0]; mov.b32 %r3, 16;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [dynamic+1028], [%d1], %r3, [dynamic];
    """
    )
    with pytest.raises(KernelFault, match="alignment"):
        run(body, np.zeros(16), shared=2048)
    x = torch.randn(16, 96).bfloat16()
    bad = LOAD.replace("[dynamic+1024], [%d2", "[dynamic+1040], [%d2").format(bytes=1024, x=0, y=0)
    target = emulator.Ptx(kernel(bad, PARAMS), block=(256, 1, 1), shared=8192)
    with pytest.raises(KernelFault, match="alignment"):
        emulator.run(target, np.zeros(1024, np.uint8), tensor_map(x, (64, 8), 7, "bf16"), x)
