"""Check which races on global memory are found: with every access that may race, not the last one.

PTX ISA, chapter "Memory Consistency Model".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnkit.emulator.machine.global_memory import GlobalMemory
from attnkit.emulator.machine.global_races import GENERIC, STRONG, Access, GlobalRaces
from attnkit.emulator.machine.knowledge import Clock
from attnkit.emulator.machine.race_detector import RaceDetector
from tests.emulator.ptx_kit import run
from tests.emulator.sections import ours, section

# Three warps; the first writes what the others read, and waits for the WAITS of them alone.
READERS = """
    ld.param.u64 %d1, [p0]; mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5;
    setp.eq.s32 %p1, %r2, 0;
    @%p1 bra $L_writer;
    ld.global.b32 %r3, [%d1];
    setp.eq.s32 %p2, %r2, WAITS;
    @%p2 bra $L_arrive;
    bra $L_end;
$L_arrive:
    bar.arrive 1, 64;
    bra $L_end;
$L_writer:
    bar.sync 1, 64;
    st.global.b32 [%d1], 7;
$L_end:
"""


def check_the_other_warp_races(body: str, waits: int) -> None:
    """Check that the only finding is a race with the warp, 1 or 2, that is not waited for."""
    text = body.replace("WAITS", str(waits))
    (finding,) = run(text, np.zeros(1, np.uint32), block=(96, 1, 1), mode="race").findings
    assert finding.kind == "race"
    assert f"against CTA (0, 0, 0) warp {3 - waits}" in finding.text


@pytest.mark.parametrize("waits", [1, 2])
@section("Causality Order")
def test_a_write_races_with_each_reader_that_it_did_not_wait_for(waits: int) -> None:
    check_the_other_warp_races(READERS, waits)


# Two warps add to a sum; the third waits for the WAITS of them alone, and reads the sum.
ADDERS = """
    ld.param.u64 %d1, [p0]; mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5;
    setp.eq.s32 %p1, %r2, 0;
    @%p1 bra $L_reader;
    red.relaxed.gpu.global.add.u32 [%d1], 1;
    setp.eq.s32 %p2, %r2, WAITS;
    @%p2 bra $L_arrive;
    bra $L_end;
$L_arrive:
    bar.arrive 1, 64;
    bra $L_end;
$L_reader:
    bar.sync 1, 64;
    ld.global.b32 %r3, [%d1];
$L_end:
"""


@pytest.mark.parametrize("waits", [1, 2])
@section("Causality Order")
def test_a_read_races_with_each_atomic_that_it_did_not_wait_for(waits: int) -> None:
    check_the_other_warp_races(ADDERS, waits)


@dataclass(eq=False)
class Thread:
    """Stands for a warp; `past` are the accesses that happened before its next one."""

    clock: Clock
    race: RaceDetector
    past: set[int] = field(default_factory=set)
    line: int = 0

    @property
    def cta(self) -> Thread:
        return self

    ctaid = (0, 0, 0)
    rank = 0


LANES = np.arange(32, dtype=np.int8)
STEP = st.one_of(
    st.tuples(
        st.just("access"), st.integers(0, 4), st.integers(0, 1), st.booleans(), st.booleans()
    ),
    st.tuples(st.just("wait"), st.integers(0, 4), st.integers(0, 4)),
)


def machine() -> tuple[GlobalRaces, list[Thread], Any]:
    """Return a detector, five warps of two clusters, and the buffer of an array of 8 bytes."""
    races, memory = GlobalRaces(), GlobalMemory()
    memory.add("x", np.zeros(2, np.uint32))
    races.begin_call(memory, 4)
    races.begin_kernel(False)
    threads = []
    for warps in (3, 2):
        race = RaceDetector(1, 64, 64, cluster=races.next_cluster)
        races.begin_cluster(race.names, [(0, 0, 0)])
        threads += [Thread(race.warp(f"warp 0.{w}"), race) for w in range(warps)]
    return races, threads, memory.buffers[0]


def access(races: GlobalRaces, t: Thread, b: Any, at: int, write: bool, kind: int) -> None:
    """Let a warp read or write one of the two words."""
    agent = t.race.agent_of(t.clock, LANES, write=write)
    place = races.index(b, np.array([4 * at]), 4)
    (races.write if write else races.read)(place, Access(t, t.clock, agent, kind))
    t.clock.tick()


@ours
@pytest.mark.parametrize("most", [1, 1 << 17])
@given(steps=st.lists(STEP, max_size=40))
def test_a_race_is_found_iff_two_conflicting_accesses_are_not_ordered(
    most: int, steps: list[Any]
) -> None:
    """The detector agrees with a comparison of every access with all earlier ones.

    It does so too if it drops sets of records, which no granule refers to, at every access.
    """
    races, threads, b = machine()
    races.most_sets = most
    earlier: list[tuple[int, bool, bool]] = []
    for step in steps:
        if step[0] == "wait":
            giver, taker = threads[step[1]], threads[step[2]]
            taker.clock.join(giver.clock.seen_by(None))
            giver.clock.tick()
            taker.past |= giver.past
            continue
        _, who, at, write, strong = step
        t = threads[who]
        access(races, t, b, at, write, GENERIC | STRONG * strong)
        want = any(
            n not in t.past and a == at and (w or write) and not (s and strong)
            for n, (a, w, s) in enumerate(earlier)
        )
        assert bool(races.conflicts) == want
        if want:
            return
        t.past.add(len(earlier))
        earlier.append((at, write, strong))


@ours
def test_a_release_by_one_lane_does_not_release_the_reads_of_others() -> None:
    """A lane releases its own read, not that of another lane of the warp before it."""
    races, threads, b = machine()
    reader, writer = threads[0], threads[1]
    place = races.index(b, np.array([0]), 4)
    for lane in (3, 5):
        agent = reader.race.agent_of(reader.clock, LANES[lane : lane + 1], write=False)
        races.read(place, Access(reader, reader.clock, agent, GENERIC))
    writer.clock.join(reader.clock.seen_by(5))
    access(races, writer, b, 0, True, GENERIC)
    assert [c.kind for c in races.conflicts.values()] == ["race"]


@section("Causality Order")
def test_a_copy_of_no_bytes_races_with_nothing() -> None:
    body = """
    ld.param.u64 %d1, [p0]; mov.b32 %r1, 0;
    st.global.b32 [%d1], %r1;
    cp.async.bulk.global.shared::cta.bulk_group [%d1], [dynamic], %r1;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    """
    out = np.zeros(8, np.uint32)
    out = out[-(out.ctypes.data % 16) // 4 % 4 :][:4]
    assert run(body, out, shared=64, block=(1, 1, 1), mode="race").findings == ()
