"""Check warp-wide instructions and control flow: elect.sync, shfl.sync, vote, redux, bra."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attnkit.emulator import KernelFault
from tests.emulator.ptx_kit import evaluate, per_thread, pointers, run
from tests.emulator.sections import ours, section

LANE = np.arange(64, dtype=np.uint32)
X = (LANE * 2654435761).astype(np.uint32)


@section("elect.sync")
def test_elect_picks_the_lowest_active_lane_of_each_warp() -> None:
    text = """
    mov.b32 {o}, 0;
    setp.lt.u32 %p1, {a0}, 5;
    @%p1 bra $L_skip;
    elect.sync %r5|%p2, -1;
    selp.b32 {o}, 1, 2, %p2;
$L_skip:
    """
    got = evaluate(text, [LANE], np.uint32).reshape(2, 32)
    assert got[0].tolist() == [0] * 5 + [1] + [2] * 26
    assert got[1].tolist() == [1] + [2] * 31


def shfl(mode: str, b: int, c: int) -> Any:
    """Compute shfl.sync for one warp by the pseudocode in the PTX ISA."""
    out = []
    for lane in range(32):
        segmask, cval, bval = (c >> 8) & 31, c & 31, b & 31
        maximum = (lane & segmask) | (cval & ~segmask)
        minimum = lane & segmask
        if mode == "up":
            j, ok = lane - bval, lane - bval >= maximum
        elif mode == "down":
            j, ok = lane + bval, lane + bval <= maximum
        elif mode == "bfly":
            j, ok = lane ^ bval, lane ^ bval <= maximum
        else:
            j = minimum | (bval & ~segmask)
            ok = j <= maximum
        out.append(j if ok else lane)
    return np.array(out)


@pytest.mark.parametrize(
    ("mode", "b", "c"),
    [
        ("idx", 0, 31), ("idx", 7, 0x1C1F), ("bfly", 1, 31), ("bfly", 16, 31), ("bfly", 2, 0x1C1F),
        ("down", 3, 31), ("down", 2, 0x181F), ("up", 1, 0), ("up", 4, 0x1800),
        ("up", 2, 0x1819), ("up", 1, 0x0F07),
    ],
)  # fmt: skip
@section("shfl.sync")
def test_shfl(mode: str, b: int, c: int) -> None:
    got = evaluate(f"shfl.sync.{mode}.b32 {{o}}, {{a0}}, {b}, {c}, -1;", [X], np.uint32)
    source = shfl(mode, b, c)
    np.testing.assert_array_equal(got.reshape(2, 32), X.reshape(2, 32)[:, source])


@section("vote.sync")
def test_votes() -> None:
    odd = "and.b32 %r1, {a0}, 1; setp.eq.s32 %p1, %r1, 1;"
    got = evaluate(odd + "vote.sync.ballot.b32 {o}, %p1, -1;", [X], np.uint32)
    rows = X.reshape(2, 32)
    want = [sum(1 << i for i in range(32) if row[i] & 1) for row in rows]
    assert got.reshape(2, 32)[:, 0].tolist() == want
    for kind, fn in (("any", any), ("all", all)):
        text = odd + f"vote.sync.{kind}.pred %p2, %p1, -1; selp.b32 {{o}}, 1, 0, %p2;"
        got = evaluate(text, [X], np.uint32)
        assert got.reshape(2, 32)[:, 9].tolist() == [int(fn(r & 1)) for r in rows]


@pytest.mark.parametrize("how", ["add", "min", "max", "and", "or", "xor"])
@section("redux.sync")
def test_redux(how: str) -> None:
    kind = "b32" if how in ("and", "or", "xor") else "u32"
    got = evaluate(f"redux.sync.{how}.{kind} {{o}}, {{a0}}, -1;", [X], np.uint32)
    fn = {"add": np.add, "min": np.minimum, "max": np.maximum}.get(how) or getattr(
        np, f"bitwise_{how}"
    )
    want = fn.reduce(X.reshape(2, 32), axis=1, dtype=np.uint32)
    np.testing.assert_array_equal(got.reshape(2, 32)[:, 0], want)


@section("match.sync")
def test_match_any() -> None:
    x = (LANE % 5).astype(np.uint32)
    got = evaluate("match.any.sync.b32 {o}, {a0}, -1;", [x], np.uint32)
    for lane in range(32):
        assert got[lane] == sum(1 << j for j in range(32) if x[j] == x[lane])


@section("Divergence of Threads in Control Constructs", "bra")
def test_divergent_loops_meet_again() -> None:
    """Lanes that loop different numbers of times reconverge before a shuffle."""
    text = """
    and.b32 %r1, {a0}, 7;
    mov.b32 %r2, 0;
$L_top:
    add.s32 %r2, %r2, %r1;
    sub.s32 %r1, %r1, 1;
    setp.gt.s32 %p1, %r1, 0;
    @%p1 bra $L_top;
    shfl.sync.bfly.b32 {o}, %r2, 1, 31, -1;
    """
    got = evaluate(text, [X], np.uint32)
    want = [sum(range(1, (x & 7) + 1)) for x in X.tolist()]
    assert got.tolist() == [want[i ^ 1] for i in range(64)]


@section("Special Register State Space")
def test_special_registers() -> None:
    body = """
    mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %laneid; mov.u32 %r6, %cluster_ctarank; mov.u32 %r7, %clusterid.x;
    mad.lo.s32 %r8, %r2, %r4, %r1;
    mad.lo.s32 %r9, %r3, 64, %r8;
    ld.param.u64 %d1, [p0];
    mul.wide.u32 %d2, %r9, 32;
    add.s64 %d3, %d1, %d2;
    st.global.v4.b32 [%d3], {%r1, %r2, %r3, %r5};
    st.global.v2.b32 [%d3+16], {%r6, %r7};
    """
    out = np.zeros((4, 64, 8), np.uint32)
    run(body, out, grid=(4, 1, 1), block=(16, 4, 1), cluster=(2, 1, 1))
    for cta in range(4):
        for t in range(64):
            want = [t % 16, t // 16, cta, t % 32, cta % 2, cta // 2]
            assert out[cta, t, :6].tolist() == want


@ours
def test_a_block_need_not_be_full_warps() -> None:
    out = np.zeros(40, np.uint32)
    from attnkit import emulator

    text = per_thread("add.u32 {o}, {a0}, 1;", [out[:40]], out)
    emulator.run(emulator.Ptx(text, block=(40, 1, 1)), np.arange(40, dtype=np.uint32), out)
    assert out.tolist() == list(range(1, 41))
    assert pointers(1)


@pytest.mark.parametrize("mode", ["eager", "adversarial", "race"])
@section("bar.warp.sync")
def test_lanes_meet_at_bar_warp_sync(mode: str) -> None:
    """Lanes on both sides of a branch synchronize at different bar.warp.sync instructions."""
    body = """
    mov.u32 %r1, %tid.x; and.b32 %r3, %r1, 31; mov.b32 %r20, dynamic;
    and.b32 %r2, %r1, 96; shl.b32 %r4, %r1, 2; add.s32 %r5, %r20, %r4;
    xor.b32 %r6, %r4, 124; add.s32 %r7, %r20, %r6;
    setp.ge.u32 %p1, %r3, 16;
    @%p1 bra $L_upper;
    st.shared.b32 [%r5], %r1;
    bar.warp.sync -1;
    ld.shared.b32 %r8, [%r7];
    bra $L_end;
$L_upper:
    add.s32 %r9, %r1, 1000; st.shared.b32 [%r5], %r9;
    bar.warp.sync 0xffffffff;
    ld.shared.b32 %r8, [%r7];
$L_end:
    ld.param.u64 %d1, [p0]; mul.wide.u32 %d2, %r1, 4; add.s64 %d3, %d1, %d2;
    st.global.b32 [%d3], %r8;
    """
    out = np.zeros(64, np.uint32)
    report = run(body, out, block=(64, 1, 1), shared=256, mode=mode)
    assert report.findings == ()
    mine = np.arange(64) ^ 31
    assert out.tolist() == (mine + 1000 * (mine % 32 >= 16)).tolist()


@ours
def test_a_lane_that_never_comes_to_bar_warp_sync_is_a_deadlock() -> None:
    body = """
    mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 3;
    @%p1 bra $L_other;
    bar.warp.sync -1;
    bra $L_end;
$L_other:
    bar.sync 1, 64;
$L_end:
    """
    with pytest.raises(KernelFault, match="deadlock"):
        run(body, block=(32, 1, 1))
