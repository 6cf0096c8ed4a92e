"""Check mbarriers, named barriers, clusters and deadlocks.

PTX ISA: mbarrier, "bar, barrier", barrier.cluster.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attnkit.emulator import KernelFault
from attnkit.emulator.faults import Trap
from attnkit.emulator.machine.barriers import MBarrier, NamedBarrier
from tests.emulator.ptx_kit import init_barriers, run, wait
from tests.emulator.sections import ours, section


@section("Phase Completion of the mbarrier object")
def test_mbarrier_phase_completes_when_nothing_is_pending() -> None:
    """An mbarrier phase completes when pending arrivals and tx-count are both zero."""
    b = MBarrier(0, 2, 1, "b")
    b.expect(128)
    b.arrive(1)
    b.arrive(1)
    assert (b.phase, b.pending, b.tx) == (0, 0, 128)
    b.expect(-128)
    assert (b.phase, b.pending, b.tx) == (1, 2, 0)
    with pytest.raises(Trap, match="more arrivals"):
        b.arrive(3)


@section("expect-tx operation", "complete-tx operation")
def test_transactions_may_complete_before_they_are_expected() -> None:
    b = MBarrier(0, 1, 1, "b")
    b.expect(-64)
    assert b.phase == 0
    b.expect(64)
    assert b.phase == 0  # one arrival is still pending
    b.arrive(1)
    assert b.phase == 1


@section("Contents of the mbarrier object", "bar, barrier")
def test_counts_out_of_range() -> None:
    with pytest.raises(Trap, match="count"):
        MBarrier(0, 0, 1, "b")
    with pytest.raises(Trap, match="multiple of 32"):
        NamedBarrier(1).arrive(32, 40, (0,))
    b = NamedBarrier(1)
    b.arrive(32, 64, (0,))
    with pytest.raises(Trap, match="disagree"):
        b.arrive(32, 96, (1,))


@section("mbarrier.test_wait / mbarrier.try_wait")
def test_a_fresh_mbarrier_lets_parity_one_pass() -> None:
    """A wait for parity 1 on a fresh mbarrier succeeds, as that is the phase before the first."""
    out = np.zeros(32, np.uint32)
    body = (
        init_barriers((0, 1))
        + """
    mbarrier.test_wait.parity.shared.b64 %p1, [dynamic], 1;
    mbarrier.test_wait.parity.shared.b64 %p2, [dynamic], 0;
    selp.b32 %r1, 1, 0, %p1; selp.b32 %r2, 2, 0, %p2; or.b32 %r3, %r1, %r2;
    ld.param.u64 %d1, [p0]; mov.u32 %r9, %tid.x; mul.wide.u32 %d2, %r9, 4; add.s64 %d3, %d1, %d2;
    st.global.b32 [%d3], %r3;
    """
    )
    run(body, out, shared=64)
    assert set(out.tolist()) == {1}


RING = """
    // warp 0 hands 12 values through a ring of 2 stages to warp 1
    mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; and.b32 %r3, %r1, 31;
    mov.b32 %r4, 0; mov.b32 %r5, 0; mov.b32 %r6, 0; mov.b32 %r20, dynamic;
    setp.ne.s32 %p1, %r2, 0;
    @%p1 bra $L_consumer;
$L_produce:
    shl.b32 %r7, %r5, 3; add.s32 %r8, %r20, %r7;
    xor.b32 %r9, %r6, 1;
    add.s32 %r10, %r8, 16;
{empty}
    shl.b32 %r11, %r5, 7; shl.b32 %r12, %r3, 2; add.s32 %r13, %r11, %r12; add.s32 %r14, %r20, %r13;
    mul.lo.s32 %r15, %r4, 100; add.s32 %r16, %r15, %r3;
    st.shared.b32 [%r14+128], %r16;
    {arrive}
    add.s32 %r5, %r5, 1; setp.eq.s32 %p2, %r5, 2; selp.b32 %r5, 0, %r5, %p2;
    selp.b32 %r17, 1, 0, %p2; xor.b32 %r6, %r6, %r17;
    add.s32 %r4, %r4, 1; setp.lt.s32 %p3, %r4, 12;
    @%p3 bra $L_produce;
    bra $L_end;
$L_consumer:
    ld.param.u64 %d1, [p0];
$L_consume:
    shl.b32 %r7, %r5, 3; add.s32 %r8, %r20, %r7;
    add.s32 %r10, %r8, 16;
{full}
    shl.b32 %r11, %r5, 7; shl.b32 %r12, %r3, 2; add.s32 %r13, %r11, %r12; add.s32 %r14, %r20, %r13;
    ld.shared.b32 %r16, [%r14+128];
    mbarrier.arrive.shared.b64 %d9, [%r10];
    shl.b32 %r18, %r4, 5; add.s32 %r18, %r18, %r3; mul.wide.u32 %d2, %r18, 4; add.s64 %d3, %d1, %d2;
    st.global.b32 [%d3], %r16;
    add.s32 %r5, %r5, 1; setp.eq.s32 %p2, %r5, 2; selp.b32 %r5, 0, %r5, %p2;
    selp.b32 %r17, 1, 0, %p2; xor.b32 %r6, %r6, %r17;
    add.s32 %r4, %r4, 1; setp.lt.s32 %p3, %r4, 12;
    @%p3 bra $L_consume;
$L_end:
"""
ARRIVE = "mbarrier.arrive.shared.b64 %d9, [%r8];"


def ring(arrive: str = ARRIVE, empty: str | None = None, full: str | None = None) -> str:
    head = init_barriers((0, 32), (8, 32), (16, 32), (24, 32))
    return head + RING.format(
        arrive=arrive,
        empty=wait("%r10", "%r9", "e") if empty is None else empty,
        full=wait("%r8", "%r6", "f") if full is None else full,
    )


WANT = (100 * np.arange(12)[:, None] + np.arange(32)).astype(np.uint32)


@pytest.mark.parametrize(("mode", "seed"), [("eager", 0), ("adversarial", 1), ("race", 0)])
@section("mbarrier.arrive", "mbarrier.test_wait / mbarrier.try_wait")
def test_a_ring_of_mbarriers(mode: str, seed: int) -> None:
    out = np.zeros((12, 32), np.uint32)
    report = run(ring(), out, block=(64, 1, 1), shared=1024, mode=mode, seed=seed)
    assert report.findings == ()
    np.testing.assert_array_equal(out, WANT)


@ours
def test_a_missing_arrive_is_a_deadlock_that_names_the_barrier() -> None:
    out = np.zeros((12, 32), np.uint32)
    with pytest.raises(KernelFault) as error:
        run(ring(arrive=""), out, block=(64, 1, 1), shared=1024)
    text = str(error.value)
    assert error.value.finding.kind == "deadlock"
    assert "smem+0x0" in text
    assert "pending 32 of 32" in text
    assert "warp 1" in text


@pytest.mark.parametrize("which", ["empty", "full"])
@section("Causality Order")
def test_a_missing_wait_is_caught(which: str) -> None:
    out = np.zeros((12, 32), np.uint32)
    body = ring(**{which: ""})
    report = run(body, out, block=(64, 1, 1), shared=1024, mode="race", raises=False)
    kinds = {f.kind for f in report.findings}
    # Without the wait for an empty stage, the consumer misses a phase and waits forever.
    assert kinds & ({"race", "uninitialised"} if which == "full" else {"deadlock"}), report


@section("bar, barrier")
def test_named_barriers_hand_over_between_warps() -> None:
    """bar.arrive does not wait, bar.sync does, and both count towards the same total."""
    body = """
    mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; and.b32 %r3, %r1, 31; shl.b32 %r4, %r3, 2;
    mov.b32 %r5, dynamic; add.s32 %r6, %r5, %r4;
    setp.ne.s32 %p1, %r2, 0;
    @%p1 bra $L_second;
    st.shared.b32 [%r6], %r3;
    bar.arrive 3, 64;
    bra $L_end;
$L_second:
    SYNC
    ld.shared.b32 %r7, [%r6];
    ld.param.u64 %d1, [p0]; mul.wide.u32 %d2, %r3, 4; add.s64 %d3, %d1, %d2;
    st.global.b32 [%d3], %r7;
$L_end:
    """
    out = np.zeros(32, np.uint32)
    for mode in ("eager", "adversarial", "race"):
        good = body.replace("SYNC", "bar.sync 3, 64;")
        assert not run(good, out, block=(64, 1, 1), shared=256, mode=mode).findings
        assert out.tolist() == list(range(32))
    report = run(body.replace("SYNC", ""), out, block=(64, 1, 1), shared=256, mode="race")
    assert {f.kind for f in report.findings} & {"race", "uninitialised"}


@section("bar, barrier", "mbarrier.init")
def test_barrier_misuse_is_a_fault() -> None:
    with pytest.raises(KernelFault, match="no init"):
        run("mbarrier.arrive.shared.b64 %d9, [dynamic+8];", shared=64)
    body = init_barriers((0, 1)) + "mbarrier.arrive.shared.b64 %d9, [dynamic];"
    with pytest.raises(KernelFault, match="more arrivals"):
        run(body, shared=64)


@section("barrier.cluster", "mapa", "Shared State Space")
def test_cluster_barrier_and_distributed_shared_memory() -> None:
    """After a cluster barrier, each CTA reads the word that its neighbour wrote."""
    body = """
    mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, %tid.x; shl.b32 %r3, %r2, 2;
    mov.b32 %r4, dynamic; add.s32 %r5, %r4, %r3;
    mad.lo.s32 %r6, %r1, 1000, %r2;
    st.shared.b32 [%r5], %r6;
    CLUSTER
    add.s32 %r7, %r1, 1; and.b32 %r8, %r7, 3;
    mapa.shared::cluster.u32 %r9, %r5, %r8;
    ld.shared::cluster.b32 %r10, [%r9];
    ld.param.u64 %d1, [p0]; mad.lo.s32 %r11, %r1, 32, %r2; mul.wide.u32 %d2, %r11, 4;
    add.s64 %d3, %d1, %d2;
    st.global.b32 [%d3], %r10;
    CLUSTER
    """
    meet = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    launch = {"grid": (4, 1, 1), "cluster": (4, 1, 1), "shared": 256}
    out = np.zeros((4, 32), np.uint32)
    for mode in ("eager", "adversarial", "race"):
        assert not run(body.replace("CLUSTER", meet), out, mode=mode, **launch).findings
        want = [[(r + 1) % 4 * 1000 + t for t in range(32)] for r in range(4)]
        assert out.tolist() == want
    report = run(body.replace("CLUSTER", ""), out, mode="race", raises=False, **launch)
    assert {f.kind for f in report.findings} & {"race", "uninitialised"}
    # A CTA whose shared memory others still read must not exit.
    last = body.rindex("CLUSTER")
    early = body[:last].replace("CLUSTER", meet) + body[last:].replace("CLUSTER", "")
    ends = []
    for seed in range(6):
        report = run(early, out, mode="adversarial", seed=seed, raises=False, **launch)
        ends += [f.kind for f in report.findings]
    assert "exited" in ends


@ours
def test_an_endless_loop_ends_in_a_fault() -> None:
    with pytest.raises(KernelFault, match="endless"):
        run("$L_a: add.s32 %r1, %r1, 1; bra $L_a;", limit=200_000)
    with pytest.raises(KernelFault, match="endless"):  # only some lanes loop
        run(
            "mov.u32 %r2, %tid.x; setp.eq.s32 %p1, %r2, 0; @%p1 bra $L_b;$L_a: bra $L_a; $L_b:",
            limit=200_000,
        )


@section("Release and Acquire Patterns")
def test_ctas_that_wait_for_each_other_run_together() -> None:
    """CTAs that wait for later CTAs of the grid by a global semaphore do not deadlock."""
    body = """
    ld.param.u64 %d1, [p0]; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %nctaid.x; mov.u32 %r3, %tid.x;
    sub.s32 %r4, %r2, 1; sub.s32 %r5, %r4, %r1;
$L_spin:
    ld.acquire.gpu.global.b32 %r6, [%d1];
    setp.ne.s32 %p1, %r6, %r5;
    @%p1 bra $L_spin;
    setp.ne.s32 %p2, %r3, 0;
    @%p2 bra $L_end;
    mul.wide.u32 %d2, %r5, 4; add.s64 %d3, %d1, %d2;
    st.global.b32 [%d3+4], %r1;
    add.s32 %r7, %r5, 1;
    st.global.b32 [%d1], %r7;
$L_end:
    """
    out = np.zeros(6, np.uint32)
    run(body, out, grid=(5, 1, 1))
    assert out.tolist() == [5, 4, 3, 2, 1, 0]
    never = body.replace("setp.ne.s32 %p1, %r6, %r5;", "setp.ne.s32 %p1, %r6, 99;")
    with pytest.raises(KernelFault, match="deadlock"):
        run(never, np.zeros(6, np.uint32), grid=(5, 1, 1))


@ours
def test_persistent_ctas_share_their_work() -> None:
    """Persistent CTAs that pause between work tiles share the tiles of an atomic counter."""
    body = """
    ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; mov.u32 %r2, %ctaid.x;
$L_next:
    atom.global.add.u32 %r1, [%d1], 1;
    setp.ge.u32 %p1, %r1, 12;
    @%p1 bra $L_end;
    mul.wide.u32 %d3, %r1, 4; add.s64 %d4, %d2, %d3;
    st.global.u32 [%d4], %r2;
    nanosleep.u32 20;
    bra $L_next;
$L_end:
"""
    counter, owner = np.zeros(1, np.uint32), np.full(12, 99, np.uint32)
    run(body, counter, owner, block=(1, 1, 1), grid=(3, 1, 1))
    assert np.bincount(owner).tolist() == [4, 4, 4]


def waited(body: str, mode: str = "eager") -> list[int]:
    """Return, for each lane, whether the predicate %p9 holds after `body`."""
    out = np.zeros(32, np.uint32)
    store = """
    selp.u32 %r90, 1, 0, %p9; mov.u32 %r91, %tid.x;
    ld.param.u64 %d1, [p0]; mul.wide.u32 %d2, %r91, 4; add.s64 %d3, %d1, %d2;
    st.global.b32 [%d3], %r90;
    """
    run(body + store, out, shared=64, mode=mode)
    return out.tolist()


@section("mbarrier.arrive")
def test_arrive_drop_drops_the_count_of_its_arrivals() -> None:
    """After 3 of 8 arrivals are dropped, phases need 5."""
    body = (
        init_barriers((0, 8))
        + """
    mov.u32 %r1, %tid.x; setp.ne.s32 %p1, %r1, 0; @%p1 bra $L_end;
    mov.b32 %r2, 3; mov.b32 %r3, 5; mov.b32 %r4, 4;
    mbarrier.arrive_drop.shared.b64 %d9, [dynamic], %r2;
    mbarrier.arrive.shared.b64 %d9, [dynamic], %r3;
    mbarrier.arrive.shared.b64 %d9, [dynamic], COUNT;
    mbarrier.test_wait.parity.shared.b64 %p9, [dynamic], 1;
$L_end:
    """
    )
    assert waited(body.replace("COUNT", "%r3"))[0] == 1
    assert waited(body.replace("COUNT", "%r4"))[0] == 0


@section("mbarrier.arrive")
def test_a_token_is_that_of_the_mbarrier_of_its_lane() -> None:
    """One mbarrier is a phase ahead; a wait with the other's token would not end."""
    body = (
        init_barriers((0, 16), (8, 16))
        + """
    mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 4; shl.b32 %r2, %r2, 3;
    mov.b32 %r3, dynamic; add.s32 %r3, %r3, %r2;
    setp.ne.s32 %p1, %r2, 0;
    @%p1 mbarrier.arrive.shared.b64 %d9, [%r3];
    mbarrier.arrive.shared.b64 %d9, [%r3];
    bar.warp.sync -1;
    mbarrier.test_wait.shared.b64 %p9, [%r3], %d9;
    """
    )
    assert waited(body) == [1] * 32


@section("mbarrier.init")
def test_an_mbarrier_is_removed_by_its_own_cta() -> None:
    body = (
        init_barriers((0, 1))
        + """
    mov.u32 %r1, %cluster_ctarank; setp.ne.s32 %p1, %r1, 0;
    mov.b32 %r2, dynamic; mapa.shared::cluster.u32 %r3, %r2, WHERE;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    @%p1 bra $L_end;
    mbarrier.inval.shared.b64 [%r3];
$L_end:
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """
    )
    launch: dict[str, Any] = {"grid": (2, 1, 1), "cluster": (2, 1, 1), "shared": 64}
    assert run(body.replace("WHERE", "0"), **launch).ok
    with pytest.raises(KernelFault, match="of another CTA"):
        run(body.replace("WHERE", "1"), **launch)


@section("mbarrier.init")
@pytest.mark.parametrize(("what", "uses"), [("complete_tx", 2), ("inval", 1)])
def test_an_mbarrier_is_used_only_after_its_init_is_visible(what: str, uses: int) -> None:
    body = """
    mov.u32 %r1, %tid.x; setp.eq.s32 %p1, %r1, 0; setp.eq.s32 %p2, %r1, 32;
    mov.b32 %r2, 1;
    @%p1 mbarrier.init.shared.b64 [dynamic], %r2;
    SYNC
    @%p2 mbarrier.WHAT;
    """
    forms = {
        "complete_tx": "expect_tx.relaxed.cta.shared::cta.b64 [dynamic], 16;\n"
        "@%p2 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [dynamic], 16",
        "inval": "inval.shared.b64 [dynamic]",
    }
    body = body.replace("WHAT", forms[what])
    launch: dict[str, Any] = {"block": (64, 1, 1), "shared": 64, "mode": "race"}
    assert run(body.replace("SYNC", "bar.sync 0;"), **launch).findings == ()
    found = run(body.replace("SYNC", ""), **launch).findings
    lines = {f.place.line for f in found if "mbarrier.init" in f.text}
    assert len(lines) == uses
