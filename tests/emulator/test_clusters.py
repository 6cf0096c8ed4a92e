"""Check CTAs that cooperate: cluster launch control, barriers between warps, semaphores.

PTX ISA: clusterlaunchcontrol.try_cancel, clusterlaunchcontrol.query_cancel, "bar, barrier", mapa,
st.async, and "Memory Consistency Model" for the semaphores.
"""

from __future__ import annotations

import numpy as np
import pytest

from attnkit.emulator import KernelFault
from tests.emulator.ptx_kit import init_barriers, run, wait
from tests.emulator.sections import section

MODES = [("eager", 0), ("adversarial", 0), ("adversarial", 3), ("race", 0)]

PERSISTENT = """
    // each cluster does its own tile, then those that it takes over from the queue
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x; mov.u32 %r3, %cluster_ctarank; mov.b32 %r10, 0;
    mov.u32 %r5, %clusterid.x; ld.param.u64 %d1, [p0];
$L_tile:
    mul.wide.u32 %d2, %r1, 4; add.s64 %d3, %d1, %d2;
    setp.ne.s32 %p1, %r2, 0; @%p1 bra $L_stored;
    add.s32 %r6, %r5, 1; st.global.b32 [%d3], %r6;
    mbarrier.arrive.expect_tx.shared.b64 %d9, [dynamic], 16;
$L_stored:
    BEFORE
    @%p1 bra $L_asked;
    ASK
$L_asked:
"""
ANSWER = """
    ld.shared.b128 %q1, [dynamic+16];
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q1;
    clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r1, %r7, %r8, _}, %q1;
    clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r9, %q1;
    add.s32 %r1, %r1, %r3;
    xor.b32 %r10, %r10, 1;
    bar.sync 0;
    @%p2 bra $L_tile;
    ld.param.u64 %d4, [p1]; mov.u32 %r11, %ctaid.x; mul.wide.u32 %d5, %r11, 4; add.s64 %d6, %d4, %d5;
    st.global.b32 [%d6], %r9;
    AFTER
"""
TRY = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"


def persistent(ask: str, before: str = "", after: str = "") -> str:
    body = PERSISTENT.replace("ASK", ask).replace("BEFORE", before)
    return (
        init_barriers((0, 1)) + body + wait("dynamic", "%r10", "c") + ANSWER.replace("AFTER", after)
    )


@pytest.mark.parametrize(("mode", "seed"), MODES)
@section("clusterlaunchcontrol.try_cancel", "clusterlaunchcontrol.query_cancel")
def test_a_running_cta_takes_over_those_that_wait(mode: str, seed: int) -> None:
    """A running CTA cancels waiting clusters and takes over their work.

    The response holds the first CTA of the canceled cluster, which then never runs. When no cluster
    is left, the request fails.
    """
    owner, last = np.zeros(9, np.uint32), np.zeros(9, np.uint32)
    body = persistent(f"{TRY}.b128 [dynamic+16], [dynamic];")
    launch = {"grid": (9, 1, 1), "shared": 64, "mode": mode, "seed": seed, "arch": "sm_100a"}
    report = run(body, owner, last, **launch)
    assert report.findings == ()
    assert report.launches[0].ctas == np.count_nonzero(last)  # clusters that ran
    workers = set(owner.tolist())
    assert workers == set((np.flatnonzero(last) + 1).tolist())
    if mode == "eager":
        assert workers == {1}


@section("clusterlaunchcontrol.try_cancel")
def test_a_request_may_fail_although_clusters_wait() -> None:
    """If a cancel request fails while clusters wait, they are launched, and the grid completes."""
    body = persistent(f"{TRY}.b128 [dynamic+16], [dynamic];")
    launch = {"grid": (24, 1, 1), "shared": 64, "mode": "adversarial", "arch": "sm_100a"}
    ran = []
    for seed in range(8):
        owner, last = np.zeros(24, np.uint32), np.zeros(24, np.uint32)
        report = run(body, owner, last, seed=seed, **launch)
        assert report.findings == ()
        assert owner.all()
        ran.append(report.launches[0].ctas)
    assert max(ran) > 4 >= ran[0]  # more than run at a time: launched after a failed request


@section("clusterlaunchcontrol.try_cancel")
def test_asking_again_after_a_refusal_is_a_fault() -> None:
    again = f"{TRY}.b128 [dynamic+16], [dynamic];"
    body = persistent(f"{TRY}.b128 [dynamic+16], [dynamic];", after=again)
    owner, last = np.zeros(2, np.uint32), np.zeros(2, np.uint32)
    with pytest.raises(KernelFault, match="has seen a refusal asks for one more"):
        run(body, owner, last, grid=(2, 1, 1), shared=64, arch="sm_100a")


@pytest.mark.parametrize(("mode", "seed"), MODES)
@section("clusterlaunchcontrol.try_cancel")
def test_the_response_reaches_every_cta_of_the_cluster(mode: str, seed: int) -> None:
    """A multicast cancel writes response and mbarrier at the same offsets in each CTA."""
    meet = "barrier.cluster.arrive; barrier.cluster.wait;"
    ask = f"setp.ne.s32 %p3, %r3, 0; @%p3 bra $L_asked; {TRY}.multicast::cluster::all.b128"
    body = persistent(f"{ask} [dynamic+16], [dynamic];", before=meet, after=meet)
    owner, last = np.zeros(10, np.uint32), np.zeros(10, np.uint32)
    launch = {"grid": (10, 1, 1), "cluster": (2, 1, 1), "shared": 64, "arch": "sm_100a"}
    report = run(body, owner, last, mode=mode, seed=seed, **launch)
    assert report.findings == ()
    pairs = owner.reshape(5, 2)
    assert (pairs[:, 0] == pairs[:, 1]).all()
    assert owner.all()


ROLES = """
    // warps 0-3 hand a value each to warps 4-7, through barrier 1 + warp % 4
    mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; and.b32 %r3, %r2, 3; add.s32 %r4, %r3, 1;
    and.b32 %r5, %r1, 127; shl.b32 %r6, %r5, 2; mov.b32 %r7, dynamic; add.s32 %r8, %r7, %r6;
    setp.ge.u32 %p1, %r2, 4;
    @%p1 bra $L_reader;
    st.shared.b32 [%r8], %r1;
    bar.arrive {number}, 64;
    bra $L_end;
$L_reader:
    bar.sync {number}, 64;
    ld.shared.b32 %r9, [%r8];
    ld.param.u64 %d1, [p0]; mul.wide.u32 %d2, %r5, 4; add.s64 %d3, %d1, %d2;
    st.global.b32 [%d3], %r9;
$L_end:
"""


@pytest.mark.parametrize(("mode", "seed"), MODES)
@section("bar, barrier")
def test_warps_that_run_the_same_code_may_name_different_barriers(mode: str, seed: int) -> None:
    """Warps may execute one bar instruction with different barrier numbers in a register."""
    out = np.zeros(128, np.uint32)
    launch = {"block": (256, 1, 1), "shared": 1024, "mode": mode, "seed": seed}
    report = run(ROLES.format(number="%r4"), out, **launch)
    assert report.findings == ()
    np.testing.assert_array_equal(out, np.arange(128))


@section("bar, barrier")
def test_warps_may_name_different_thread_counts() -> None:
    """Warps may execute one bar instruction with different barriers and thread counts."""
    body = """
    mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; setp.ge.u32 %p1, %r2, 2;
    selp.b32 %r3, 2, 1, %p1; selp.b32 %r4, 96, 64, %p1;
    bar.sync %r3, %r4;
    ld.param.u64 %d1, [p0]; mul.wide.u32 %d2, %r1, 4; add.s64 %d3, %d1, %d2;
    st.global.b32 [%d3], %r4;
    """
    out = np.zeros(160, np.uint32)
    assert run(body, out, block=(160, 1, 1)).findings == ()
    np.testing.assert_array_equal(out, np.repeat([64, 96], [64, 96]))
    with pytest.raises(KernelFault, match="deadlock"):
        run(body.replace("selp.b32 %r4, 96, 64", "selp.b32 %r4, 128, 64"), out, block=(160, 1, 1))


@section("bar, barrier")
def test_lanes_of_one_warp_must_name_one_barrier() -> None:
    body = "mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 1; bar.sync %r2, 32;"
    with pytest.raises(KernelFault, match="lanes of one warp"):
        run(body, np.zeros(4))


TURNS = """
    // clusters add to one place in the order of their tickets, whatever order they run in
    ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x;
    mov.u32 %r3, %nctaid.x; sub.s32 %r4, %r3, 1; sub.s32 %r5, %r4, %r1;
    setp.ne.s32 %p1, %r2, 0; @%p1 bra $L_mine;
$L_spin:
    ld.acquire.gpu.global.b32 %r6, [%d1];
    setp.ne.s32 %p2, %r6, %r5; @%p2 bra $L_spin;
$L_mine:
    bar.sync 0;
    mul.wide.u32 %d3, %r2, 4; add.s64 %d4, %d2, %d3;
    ld.global.b32 %r7, [%d4]; mad.lo.s32 %r8, %r7, 3, %r1; st.global.b32 [%d4], %r8;
    bar.sync 0;
    @%p1 bra $L_end;
    fence.acq_rel.gpu;
    red.release.gpu.global.add.u32 [%d1], 1;
$L_end:
"""


@pytest.mark.parametrize(("mode", "seed"), MODES)
@section("Release and Acquire Patterns")
def test_turns_between_ctas_keep_their_order(mode: str, seed: int) -> None:
    """Twenty CTAs, more than run at once, take turns in reverse order of the grid."""
    turn, total = np.zeros(1, np.uint32), np.zeros(64, np.uint32)
    run(TURNS, turn, total, grid=(20, 1, 1), block=(64, 1, 1), mode=mode, seed=seed)
    want = 0
    for cta in reversed(range(20)):
        want = (want * 3 + cta) % 2**32
    assert turn[0] == 20
    assert (total == want).all()


REMOTE = """
    mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, %tid.x; xor.b32 %r3, %r1, 1;
    mov.b32 %r4, dynamic; mapa.shared::cluster.u32 %r5, %r4, %r3; shl.b32 %r6, %r2, 2;
    setp.ne.s32 %p1, %r2, 0; @%p1 bra $L_told;
    mbarrier.arrive.expect_tx.shared.b64 %d9, [dynamic], {bytes};
$L_told:
    add.s32 %r7, %r4, %r6; st.shared.b32 [%r7+64], {start};
    barrier.cluster.arrive; barrier.cluster.wait;
    add.s32 %r8, %r5, %r6; mad.lo.s32 %r9, %r1, 1000, %r2;
    {send}
"""


@pytest.mark.parametrize(("mode", "seed"), MODES)
@pytest.mark.parametrize("how", ["st.async", "atom"])
@section("st.async", "mbarrier.arrive", "mbarrier support with shared memory")
def test_writes_to_the_shared_memory_of_the_peer(how: str, mode: str, seed: int) -> None:
    """A CTA can write to its peer's shared memory and signal the peer's mbarrier.

    st.async completes transactions on that mbarrier. An atomic is followed by a remote
    mbarrier.arrive with .shared::cluster.
    """
    tail = "mbarrier::complete_tx::bytes"
    send = {
        "st.async": f"st.async.shared::cluster.{tail}.u32 [%r8+64], %r9, [%r5];",
        "atom": "atom.shared::cluster.add.u32 %r10, [%r8+64], %r9;"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5];",
    }[how]
    count, size = (33, 0) if how == "atom" else (1, 128)
    body = init_barriers((0, count)) + REMOTE.format(bytes=size, start=7, send=send)
    body += (
        wait("dynamic", "0", "w")
        + """
    ld.shared.b32 %r11, [%r7+64]; ld.param.u64 %d1, [p0]; mad.lo.s32 %r12, %r1, 32, %r2;
    mul.wide.u32 %d2, %r12, 4; add.s64 %d3, %d1, %d2; st.global.b32 [%d3], %r11;
    barrier.cluster.arrive; barrier.cluster.wait;
    """
    )
    out = np.zeros((2, 32), np.uint32)
    launch = {"grid": (2, 1, 1), "cluster": (2, 1, 1), "shared": 256, "mode": mode, "seed": seed}
    assert run(body, out, **launch).findings == ()
    base = 0 if how == "st.async" else 7
    want = [[base + (1 - r) * 1000 + t for t in range(32)] for r in range(2)]
    assert out.tolist() == want
