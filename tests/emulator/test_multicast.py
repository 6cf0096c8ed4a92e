"""Check two CTAs that share their loads: each loads half of every stage for both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.emulator.ptx_kit import init_barriers, run, wait
from tests.emulator.sections import section

MODES = [("eager", 0), *(("adversarial", seed) for seed in range(4)), ("race", 0)]
TILES = 7  # each of two stages is filled three times, and one a fourth time
SIZE = 256  # bytes of a tile

# Offsets of the mbarriers of stage 0; those of stage s are 8 s further. FULL: the tile has arrived.
# FREE: this CTA has read the stage. READY: the stage of the other CTA is free.
FULL, FREE, READY = 0, 16, 32
DATA = 1024

STAGE = """
    and.b32 %r5, %r4, 1; shl.b32 %r6, %r5, 3; mov.b32 %r7, dynamic; add.s32 %r8, %r7, %r6;
    shr.u32 %r9, %r4, 1; and.b32 %r9, %r9, 1; xor.b32 %r10, %r9, 1;
    shl.b32 %r11, %r5, 8; add.s32 %r12, %r7, %r11;
"""  # %r8: mbarriers of the stage, %r9: parity of the full phase, %r12: data
NEXT = "add.s32 %r4, %r4, 1; setp.lt.u32 %p5, %r4, {tiles}; @%p5 bra $L_{loop};"


def sharing(ready: str, announced: int = SIZE, mask: int = 3) -> str:
    """Return a kernel for two CTAs that share their loads.

    Warp 0 loads half of every tile of p0 into both CTAs. Warp 1 stores what arrives to p1.
    """
    load = (
        STAGE
        + wait(f"%r8+{FREE}", "%r10", "free")
        + f"""
    mov.b32 %r13, {announced};
    mbarrier.arrive.expect_tx.shared.b64 %d9, [%r8+{FULL}], %r13;
    add.s32 %r14, %r8, {READY};
    mapa.shared::cluster.u32 %r15, %r14, %r3;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r15];
"""
        + ready
        + f"""
    shl.b32 %r16, %r2, 7; add.s32 %r17, %r12, %r16;
    mad.lo.s32 %r18, %r4, {SIZE}, %r16; cvt.u64.u32 %d2, %r18; add.s64 %d3, %d1, %d2;
    mov.b32 %r19, {SIZE // 2}; mov.b16 %h1, {mask};
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%r17+{DATA}], [%d3], %r19, [%r8+{FULL}], %h1;
"""
        + NEXT.format(tiles=TILES, loop="load")
    )
    use = (
        STAGE
        + wait(f"%r8+{FULL}", "%r9", "full")
        + f"""
    shl.b32 %r13, %r20, 3; add.s32 %r14, %r12, %r13;
    ld.shared.v2.b32 {{%r15, %r16}}, [%r14+{DATA}];
    bar.warp.sync -1;
    setp.ne.s32 %p4, %r20, 0; @%p4 bra $L_kept;
    mbarrier.arrive.shared.b64 %d9, [%r8+{FREE}];
$L_kept:
    mad.lo.s32 %r17, %r2, {TILES}, %r4; mad.lo.s32 %r18, %r17, {SIZE}, %r13;
    cvt.u64.u32 %d2, %r18; add.s64 %d3, %d4, %d2; st.global.v2.b32 [%d3], {{%r15, %r16}};
"""
        + NEXT.format(tiles=TILES, loop="use")
    )
    barriers = [(at + 8 * s, 1) for at in (FULL, FREE, READY) for s in (0, 1)]
    return (
        init_barriers(*barriers)
        + f"""
    barrier.cluster.arrive.relaxed; barrier.cluster.wait;
    mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; xor.b32 %r3, %r2, 1;
    ld.param.u64 %d1, [p0]; ld.param.u64 %d4, [p1];
    mov.b32 %r4, 0; and.b32 %r20, %r1, 31;
    setp.ge.u32 %p1, %r1, 32;
    @%p1 bra $L_use;
    setp.ne.s32 %p2, %r1, 0;
    @%p2 bra $L_end;
$L_load:
{load}
    bra $L_end;
$L_use:
{use}
$L_end:
"""
    )


READY_WAIT = wait(f"%r8+{READY}", "%r9", "ready")


def shared(body: str, mode: str, seed: int = 0) -> tuple[Any, bool]:
    """Run a kernel; return its report, and whether both CTAs stored all tiles correctly."""
    x = np.random.default_rng(0).integers(1, 1 << 30, (TILES, SIZE // 4), dtype=np.uint32)
    out = np.zeros((2, *x.shape), np.uint32)
    launch = {"grid": (2, 1, 1), "cluster": (2, 1, 1), "block": (64, 1, 1), "shared": 2048}
    report = run(body, x, out, mode=mode, seed=seed, raises=False, **launch)
    return report, bool((out == x).all())


def faults(body: str) -> set[str]:
    """Return the kinds of findings over all modes; "results" stands for wrong results."""
    found = set()
    for mode, seed in MODES:
        report, right = shared(body, mode, seed)
        found |= {f.kind for f in report.findings}
        if report.ok and not right:
            found.add("results")
    return found


@pytest.mark.parametrize(("mode", "seed"), MODES)
@section("cp.async.bulk", "mapa", "barrier.cluster")
def test_each_cta_loads_half_of_every_tile_for_both(mode: str, seed: int) -> None:
    report, right = shared(sharing(READY_WAIT), mode, seed)
    assert report.findings == ()
    assert right


@section("cp.async.bulk", "mbarrier.test_wait / mbarrier.try_wait")
def test_a_load_into_a_stage_that_the_other_cta_still_reads_is_found() -> None:
    assert faults(sharing("")) & {"race", "results"}


@section("cp.async.bulk", "expect-tx operation")
def test_bytes_that_the_other_cta_sends_must_be_expected() -> None:
    assert faults(sharing(READY_WAIT, announced=SIZE // 2))


@section("cp.async.bulk")
def test_a_mask_that_leaves_out_the_other_cta_lets_it_wait_forever() -> None:
    assert "deadlock" in faults(sharing(READY_WAIT, mask=1))


# CTA 0 stores a word for CTA 1 and arrives there; CTA 1 waits and reads it.
TOLD = """
    barrier.cluster.arrive.relaxed; barrier.cluster.wait;
    mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; mov.b32 %r7, dynamic;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra $L_end;
    setp.ne.s32 %p2, %r2, 0;
    @%p2 bra $L_reader;
    mov.b32 %r3, 1; mov.b32 %r4, 4711; mapa.shared::cluster.u32 %r5, %r7, %r3;
    st.shared::cluster.b32 [%r5+64], %r4;
    {fence}
    mbarrier.arrive.{order}.cluster.shared::cluster.b64 _, [%r5];
    bra $L_end;
$L_reader:
$L_again:
    mbarrier.try_wait.parity.{wait}.cluster.shared::cta.b64 %p8, [%r7], 0;
    @!%p8 bra $L_again;
    {then}
    ld.shared.b32 %r6, [%r7+64]; ld.param.u64 %d1, [p0]; st.global.b32 [%d1], %r6;
$L_end:
"""
FENCE = "fence.acq_rel.cluster;"


@pytest.mark.parametrize(
    ("order", "fence", "wait", "then", "ordered"),
    [
        ("release", "", "acquire", "", True),
        ("relaxed", "", "acquire", "", False),
        ("relaxed", FENCE, "acquire", "", True),
        ("release", "", "relaxed", "", False),
        ("release", "", "relaxed", FENCE, True),
        ("relaxed", FENCE, "relaxed", FENCE, True),
        ("relaxed", "membar.gl;", "relaxed", "membar.gl;", True),
        ("relaxed", "fence.proxy.async;", "acquire", "", False),
    ],
)
@section("Release and Acquire Patterns", "mbarrier.arrive", "membar / fence")
def test_a_relaxed_arrival_or_wait_orders_nothing_without_a_fence(
    order: str, fence: str, wait: str, then: str, ordered: bool
) -> None:
    body = init_barriers((0, 1)) + TOLD.format(order=order, fence=fence, wait=wait, then=then)
    out = np.zeros(1, np.uint32)
    launch = {"grid": (2, 1, 1), "cluster": (2, 1, 1), "block": (32, 1, 1), "shared": 128}
    report = run(body, out, mode="race", **launch)
    assert out[0] == 4711
    assert report.ok == ordered
    assert {f.kind for f in report.findings} == (set() if ordered else {"race"})


MEET = """
    mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; mov.b32 %r7, dynamic;
    setp.ne.s32 %p1, %r1, 0;
    xor.b32 %r3, %r2, 1; mapa.shared::cluster.u32 %r5, %r7, %r3;
    @!%p1 st.shared::cluster.b32 [%r5+64], %r2;
    barrier.cluster.arrive{order}; barrier.cluster.wait;
    @%p1 bra $L_end;
    ld.shared.b32 %r6, [%r7+64]; ld.param.u64 %d1, [p0]; mul.wide.u32 %d2, %r2, 4;
    add.s64 %d3, %d1, %d2; st.global.b32 [%d3], %r6;
$L_end:
"""


@pytest.mark.parametrize(
    ("order", "ordered"), [("", True), (".release", True), (".relaxed", False)]
)
@section("barrier.cluster")
def test_a_relaxed_arrival_at_the_cluster_barrier_orders_nothing(order: str, ordered: bool) -> None:
    out = np.zeros(2, np.uint32)
    launch = {"grid": (2, 1, 1), "cluster": (2, 1, 1), "block": (32, 1, 1), "shared": 128}
    report = run(MEET.format(order=order), out, mode="race", **launch)
    assert out.tolist() == [1, 0]
    assert {f.kind for f in report.findings} == (set() if ordered else {"race"})
