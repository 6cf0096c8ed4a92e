"""Check the timeline: schedules of straight-line code, queues, waits, and the picture."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnkit import emulator
from attnkit.emulator.ptx.parser import parse
from attnkit.emulator.timing.cycles import rates_of
from attnkit.emulator.timing.instruction_schedule import SHARED, KernelFacts, Pace, Segment, segment
from attnkit.errors import ArgumentError, UnsupportedError
from tests.emulator.ptx_kit import init_barriers, kernel, pointers, wait

HOPPER = rates_of("sm_90a")


def scheduled(body: str, pace: Pace | None = None) -> Segment:
    """Return the Hopper schedule of straight-line code; %r90 differs between threads."""
    body = f"mov.u32 %r90, %tid.x;\n{body}"
    (made,) = parse(kernel(body, "")).values()
    code = made.blocks[0]
    return segment(code[1:-1], HOPPER, KernelFacts.of(made), pace or Pace())


def floats(op: str, n: int) -> str:
    return "".join(f"{op} %r{i + 1}, %r90;\n" for i in range(n))


def test_the_unit_with_the_lowest_rate_sets_the_time() -> None:
    """Ten exponentials of a warp take 8 clocks each, the rate of the special-function unit."""
    s = scheduled(floats("ex2.approx.f32", 10))
    assert s.clocks == 80
    assert s.units == {"issue": 10, "special": 80}


def test_units_work_side_by_side() -> None:
    body = floats("ex2.approx.f32", 10)
    body += "".join(f"add.f32 %r{i + 50}, %r90, %r90;\n" for i in range(30))
    assert scheduled(body).clocks == 80


def test_a_chain_waits_for_every_result() -> None:
    body = "add.f32 %r1, %r90, %r90;\n" + "add.f32 %r1, %r1, %r90;\n" * 9
    assert scheduled(body).clocks == 1 + 9 * 4


def test_a_product_with_one_sum_is_one_instruction() -> None:
    once = "mul.f32 %r1, %r90, %r90;\nsub.f32 %r2, %r1, %r90;\n"
    twice = once + "add.f32 %r3, %r1, %r90;\n"
    exact = once.replace("mul.f32", "mul.rn.f32").replace("sub.f32", "sub.rn.f32")
    assert [scheduled(b).units["float32"] for b in (once, twice, exact)] == [1, 3, 2]


def test_uniform_arithmetic_takes_only_its_turn() -> None:
    uniform = "mov.u32 %r1, %ctaid.x;\nadd.s32 %r2, %r1, 5;\nshl.b32 %r3, %r2, 3;\n"
    assert scheduled(uniform).units == {"issue": 2}
    assert scheduled(uniform.replace("%ctaid", "%tid")).units == {"issue": 2, "integer": 4}


def test_tensor_memory_answers_after_the_transfer() -> None:
    """tcgen05.ld and st take a clock per column; their wait takes shared memory's latency."""
    body = """
    mov.u32 %r90, %tid.x;
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r80];
    tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r3, %r4, %r5, %r6}, [%r80];
    tcgen05.wait::ld.sync.aligned;
    add.f32 %r7, %r1, %r1;
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%r80], {%r1, %r90};
    tcgen05.wait::st.sync.aligned;
    """
    (made,) = parse(kernel(body, "", arch="sm_100a")).values()
    rates, facts = rates_of("sm_100a"), KernelFacts.of(made)
    found = [segment(block, rates, facts, Pace()).clocks for block in made.blocks[:4]]
    assert found == [6, SHARED + 1, 3, SHARED + 1]


def test_the_pace_while_tensor_cores_are_busy() -> None:
    s = scheduled(floats("ex2.approx.f32", 10), Pace(step=3.0, hold=2.0))
    assert (s.clocks, s.contended) == (80, 160)
    s = scheduled("".join(f"add.f32 %r{i + 50}, %r90, %r90;\n" for i in range(30)), Pace(3.0, 2.0))
    assert s.contended == pytest.approx(29 * 3 + 2)


OPCODES = ("ex2.approx.f32 {d}, {a};", "add.f32 {d}, {a}, {b};", "max.f32 {d}, {a}, {b};")
OPCODES += ("shfl.sync.bfly.b32 {d}, {a}, 1, 31, -1;", "and.b32 {d}, {a}, {b};")
CODE = st.lists(
    st.tuples(st.sampled_from(OPCODES), *[st.integers(0, 12)] * 3), min_size=1, max_size=60
)


@given(CODE, st.floats(1, 6), st.floats(1, 4))
def test_a_schedule_lies_between_its_bounds(
    code: list[tuple[str, int, int, int]], step: float, hold: float
) -> None:
    """A schedule takes at least its busiest unit's time and at most all instructions in series."""
    names = [f"%r{i}" for i in range(12)] + ["%r90"]
    body = "\n".join(o.format(d=names[d % 12], a=names[a], b=names[b]) for o, d, a, b in code)
    s = scheduled(body, Pace(step, hold))
    assert max(s.units.values()) <= s.clocks + 1e-9
    assert s.clocks <= sum(s.units.values()) + 24 * len(code)
    held = [hold * x for unit, x in s.units.items() if unit != "issue"]
    assert max(held, default=0.0) <= s.contended + 1e-9
    assert s.units["issue"] <= len(code)


def predict(body: str, *args: Any, **launch: Any) -> emulator.Timeline:
    options = {k: launch.pop(k) for k in ("constants", "cta", "launch") if k in launch}
    arch = launch.pop("arch", "sm_90a")
    target = emulator.Ptx(kernel(body, pointers(len(args)), arch=arch), **launch)
    return emulator.timeline(target, *args, **options)


EXPONENTIALS = "mov.u32 %r90, %tid.x;\n" + floats("ex2.approx.f32", 50)


@pytest.mark.parametrize(("warps", "clocks"), [(1, 400), (4, 400), (8, 800), (12, 1200)])
def test_warps_of_one_part_share_its_units(warps: int, clocks: int) -> None:
    t = predict(EXPONENTIALS, block=(32 * warps, 1, 1))
    assert t.clocks == pytest.approx(clocks, rel=0.02)
    assert t.limit == "special"
    assert t.units["special"] == pytest.approx(400 * warps / 4)


HAND_OVER = (
    init_barriers((0, 32))
    + """
    mov.u32 %r90, %tid.x;
    setp.ge.u32 %p1, %r90, 32;
    @%p1 bra $L_second;
"""
    + floats("ex2.approx.f32", 50)
    + """
    mbarrier.arrive.shared.b64 _, [dynamic];
    bra $L_end;
$L_second:
"""
    + wait("dynamic", "0", "a")
    + floats("ex2.approx.f32", 50)
    + "$L_end:\n"
)


def test_a_wait_ends_after_the_last_arrival() -> None:
    """A warp that waits for an mbarrier starts its 400 clocks after the other warp's arrival."""
    c = emulator.Constants()
    t = predict(HAND_OVER, block=(64, 1, 1), shared=1024)
    assert 800 + c.barrier < t.clocks < 900 + c.barrier
    (second,) = [r for r in t.warps if r.warps == (1,)]
    waits = [i for i in second.intervals if "mbarrier smem+0x0" in i.text]
    assert 400 < sum(i.clocks for i in waits) < 500
    slow = predict(
        HAND_OVER, block=(64, 1, 1), shared=1024, constants=emulator.Constants(barrier=530.0)
    )
    # The time counts twice: at the bar.sync after mbarrier.init, and at the wait.
    assert slow.clocks == pytest.approx(t.clocks + 2 * 500)


@pytest.mark.parametrize("first", ["lt", "ge"])
def test_a_waiting_warp_continues_while_the_arriving_one_works(first: str) -> None:
    body = HAND_OVER.replace("setp.ge.u32 %p1", f"setp.{first}.u32 %p1")
    arrive = "mbarrier.arrive.shared.b64 _, [dynamic];\n"
    more = "".join(f"ex2.approx.f32 %r{i + 100}, %r90;\n" for i in range(200))
    body = body.replace(arrive, arrive + more)
    t = predict(body, block=(64, 1, 1), shared=1024)
    (row,) = [r for r in t.warps if any("mbarrier" in i.text for i in r.intervals)]
    assert sum(i.clocks for i in row.intervals if "mbarrier" in i.text) < 500
    assert t.clocks == pytest.approx(2000, abs=100)


def product(n: int, k_steps: int, groups: int = 1) -> str:
    """Return code of `groups` groups of `k_steps` 64 x n x 16 wgmma products of zeros."""
    regs = ", ".join(f"%r{i + 1}" for i in range(n // 2))
    one = (
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{regs}}}, %d10, %d10, %p1, 1, 1, "
        "0, 0;\n"
    )
    start = """
    mov.u32 %r90, dynamic;
    shr.u32 %r91, %r90, 4;
    cvt.u64.u32 %d9, %r91;
    or.b64 %d10, %d9, 0x4000004000010000;
    setp.ne.u32 %p1, %r90, 0;
    wgmma.fence.sync.aligned;
"""
    group = one * k_steps + "wgmma.commit_group.sync.aligned;\n"
    return start + group * groups + "wgmma.wait_group.sync.aligned 0;\n"


@pytest.mark.parametrize(("n", "steps"), [(128, 16), (64, 40)])
def test_products_queue_for_the_tensor_cores(n: int, steps: int) -> None:
    """wgmma products queue and take n / 2 clocks each (64 x n x 16 at 4096 FLOP a clock)."""
    t = predict(product(n, steps), block=(128, 1, 1), shared=32768)
    assert t.units["tensor"] == steps * n / 2
    assert t.tensor.clocks("busy") == steps * n / 2
    c = emulator.Constants()
    assert steps * n / 2 + c.product_latency < t.clocks < steps * n / 2 + c.product_latency + 60
    assert t.bubbles == ()
    assert t.limit == "tensor"


def test_two_warpgroups_share_the_tensor_cores() -> None:
    one, two = (predict(product(128, 16), block=(b, 1, 1), shared=32768) for b in (128, 256))
    assert two.units["tensor"] == 2 * one.units["tensor"]
    assert two.clocks > 1.9 * (one.clocks - 100)


def test_code_is_slower_while_tensor_cores_are_busy() -> None:
    """Other instructions are slower by the factor `hold` while tensor cores are busy."""
    body = product(128, 40).replace("wgmma.wait_group.sync.aligned 0;\n", "")
    code = "".join(f"ex2.approx.f32 %r{i + 100}, %r92;\n" for i in range(50))
    body = "mov.u32 %r92, %tid.x;\n" + body + code + "wgmma.wait_group.sync.aligned 0;\n"
    t = predict(body, block=(128, 1, 1), shared=32768)
    (row,) = t.warps
    c = emulator.Constants()
    assert row.clocks("code") == pytest.approx(400 * c.hold, rel=0.05)


def test_copies_queue_for_the_memory_system() -> None:
    """Eight 8 KB bulk copies of one thread queue for memory bandwidth."""
    copies = "".join(
        f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [dynamic+{1024 + 8192 * i}],"
        " [%d1], 8192, [dynamic];\n"
        for i in range(8)
    )
    body = f"""
    {init_barriers((0, 1))}
    ld.param.u64 %d1, [p0];
    mbarrier.arrive.expect_tx.shared.b64 _, [dynamic], 65536;
    {copies}
    {wait("dynamic", "0", "a")}
"""
    x = np.zeros(8192, np.uint8)
    t = predict(body, x, block=(1, 1, 1), shared=1024 + 65536)
    c = emulator.Constants()
    assert t.copies.clocks("busy") == pytest.approx(65536 / c.copy_bytes)
    assert t.clocks > 65536 / c.copy_bytes + c.copy_latency
    assert sum(i.clocks for r in t.warps for i in r.intervals if "mbarrier" in i.text) > 2000


def test_tensor_memory_products_end_at_their_commit() -> None:
    """tcgen05 products take 64 clocks each (128 x 128 x 16 at 8192 FLOP a clock), until commit."""
    mma = "tcgen05.mma.cta_group::1.kind::f16 [%r1], %d10, %d10, %r2, %p1;\n"
    body = f"""
    {init_barriers((0, 1))}
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [dynamic+64], 128;
    ld.shared.b32 %r1, [dynamic+64];
    mov.b32 %r2, {1 << 4 | 1 << 7 | 1 << 10 | (128 >> 3) << 17 | (128 >> 4) << 24};
    mov.u32 %r90, dynamic;
    shr.u32 %r91, %r90, 4;
    cvt.u64.u32 %d9, %r91;
    or.b64 %d10, %d9, {1 << 46 | 8 << 32 | 8 << 16};
    mov.u32 %r95, %tid.x;
    setp.ne.u32 %p1, %r90, 0;
    setp.ne.u32 %p2, %r95, 0;
    @%p2 bra $L_rest;
    {mma * 20}
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [dynamic];
$L_rest:
    {wait("dynamic", "0", "a")}
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 128;
"""
    t = predict(body, arch="sm_100a", block=(32, 1, 1), shared=32768)
    assert t.units["tensor"] == 20 * 64
    assert 20 * 64 < t.clocks < 20 * 64 + 400


def test_the_picture_is_a_document_with_every_row() -> None:
    t = predict(HAND_OVER, block=(64, 1, 1), shared=1024)
    root = ET.fromstring(emulator.picture(t))
    texts = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any("clocks" in x for x in texts)
    for row in t.warps:
        assert row.name in texts
    bars = list(root.iter("{http://www.w3.org/2000/svg}title"))
    assert len(bars) == sum(len(r.intervals) for r in t.warps)
    part = ET.fromstring(emulator.picture(t, (0.0, 50.0)))
    assert len(list(part.iter("{http://www.w3.org/2000/svg}title"))) < len(bars)


def test_what_cannot_be_predicted_is_said() -> None:
    with pytest.raises(ArgumentError, match=r"cta=\(5, 0, 0\)"):
        predict(EXPONENTIALS, cta=(5, 0, 0))
    with pytest.raises(ArgumentError, match="launch=2: the call makes 1"):
        predict(EXPONENTIALS, launch=2)
    with pytest.raises(UnsupportedError, match="sm_80"):
        predict(EXPONENTIALS, arch="sm_80")
