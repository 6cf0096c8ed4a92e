"""Check `Knowledge`, the happens-before state of the race detector.

The tests cover joins, single lanes of a warp, and fences with a scope.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attnkit.emulator.machine.knowledge import (
    CLUSTER,
    CTA,
    GPU,
    KNOWN,
    ROWS,
    TENSOR,
    Clock,
    Knowledge,
    joined,
)
from attnkit.emulator.machine.race_detector import RaceDetector

AGENTS = 3
tables = st.lists(st.integers(0, 9), min_size=ROWS * AGENTS, max_size=ROWS * AGENTS).map(
    lambda x: np.array(x, np.int32).reshape(ROWS, AGENTS)
)


@st.composite
def knowledge(draw: st.DrawFn, cluster: int = 0) -> Knowledge:
    foreign = draw(st.dictionaries(st.integers(1, 3), tables, max_size=2))
    return Knowledge(cluster, draw(tables), foreign, draw(st.booleans()))


def content(k: Knowledge | None) -> tuple[object, ...]:
    """Return the parts of a `Knowledge` that a barrier passes on, as comparable values."""
    assert k is not None
    foreign = {c: t[:TENSOR].tolist() for c, t in k.foreign.items()}
    return k.cluster, k.table[:TENSOR].tolist(), foreign, k.grids


@given(knowledge(), knowledge(), knowledge())
def test_joins_are_commutative_associative_and_idempotent(
    a: Knowledge, b: Knowledge, c: Knowledge
) -> None:
    assert content(joined(a, b)) == content(joined(b, a))
    assert content(joined(joined(a, b), c)) == content(joined(a, joined(b, c)))
    assert content(joined(a, a)) == content(a)
    assert content(joined(a, None)) == content(a)


@given(knowledge(), knowledge())
def test_a_join_changes_neither_of_the_two(a: Knowledge, b: Knowledge) -> None:
    before = content(a), content(b)
    joined(a, b)
    assert (content(a), content(b)) == before


@given(knowledge(), knowledge())
def test_a_barrier_does_not_order_tensor_memory(a: Knowledge, b: Knowledge) -> None:
    before = a.table[TENSOR].tolist()
    a.join(b)
    assert a.table[TENSOR].tolist() == before


def detector() -> tuple[RaceDetector, Clock]:
    race = RaceDetector(1, 64, 8)
    return race, race.warp("warp 0.0")


def test_a_single_lane_hands_on_other_lanes_only_after_they_met() -> None:
    race, clock = detector()
    race.write(slice(0, 2), clock, generic=True, line=1, lanes=np.array([4, 5], np.int8))
    time, agent = clock.now, clock.accessors[None, True]
    assert clock.seen_by(4).table[KNOWN, agent] < time
    assert clock.seen_by(None).table[KNOWN, agent] == time
    clock.sync_lanes()
    assert clock.seen_by(4).table[KNOWN, agent] >= time


def test_lanes_that_meet_elsewhere_know_reads_of_each_other_but_not_writes() -> None:
    race, clock = detector()
    lanes = np.array([4, 5], np.int8)
    race.write(slice(0, 2), clock, generic=True, line=1, lanes=lanes)
    race.read(slice(0, 2), clock, asynchronous=False, line=1, lanes=lanes)
    time = clock.now
    clock.meet_lanes()
    row = clock.seen_by(4).table[KNOWN]
    assert row[clock.accessors[None, False]] == time
    assert row[clock.accessors[None, True]] < time


def test_a_single_lane_hands_on_its_own_accesses() -> None:
    race, clock = detector()
    race.write(slice(0, 1), clock, generic=True, line=1, lanes=np.array([4], np.int8))
    own = clock.accessors[4, True]
    assert clock.seen_by(4).table[KNOWN, own] == clock.now
    assert clock.seen_by(5).table[KNOWN, own] == 0


def test_a_fence_publishes_to_its_scope_and_those_within() -> None:
    _, clock = detector()
    clock.fence(CLUSTER, None)
    assert clock.published[CTA] is not None
    assert clock.published[CLUSTER] is not None
    assert clock.published[GPU] is None


def test_a_relaxed_wait_counts_from_a_fence_of_its_scope() -> None:
    _, clock = detector()
    table = np.zeros((ROWS, 8), np.int32)
    table[KNOWN, 3] = 7
    clock.learn(Knowledge(0, table), relaxed=True, scope=GPU)
    clock.fence(CTA, None)
    assert clock.known[3] == 0
    clock.fence(GPU, None)
    assert clock.known[3] == 7


def test_many_single_lanes_share_an_agent_that_every_lane_hands_on() -> None:
    race = RaceDetector(1, 256, 32)
    clock = race.warp("warp 0.0")
    for lane in range(32):
        at = slice(lane, lane + 1)
        race.write(at, clock, generic=True, line=1, lanes=np.array([lane], np.int8))
        race.read(at, clock, asynchronous=False, line=1, lanes=np.array([lane], np.int8))
    assert not race.conflicts
    other = race.warp("warp 0.1")
    other.join(clock.seen_by(31))
    race.read(slice(31, 32), other, asynchronous=False, line=2, lanes=np.array([0], np.int8))
    assert not race.conflicts
    race.read(slice(0, 1), other, asynchronous=False, line=2, lanes=np.array([0], np.int8))
    assert [c.kind for c in race.conflicts.values()] == ["race"]
