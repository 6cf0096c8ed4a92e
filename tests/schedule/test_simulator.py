"""Compare the simulator with slow and simple simulations."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnkit.errors import OptionError
from attnkit.schedule.scheduler import MONOTONE, Shape, schedule_forward
from attnkit.schedule.simulator import l2_reuse, lru_hits, report, simulate, simulate_turns, visits
from attnkit.sparsity.block_runs import FULL, BlockRuns
from tests.schedule.schedule_cases import Case, cases, walked


@given(case=cases(), workers=st.integers(1, 9))
def test_work_tiles_go_to_the_first_free_worker(case: Case, workers: int) -> None:
    schedule = case.schedule()
    timeline = simulate(schedule, workers)
    free = [0] * workers
    for i, cost in enumerate(schedule.cost.tolist()):
        assert int(timeline.start[i]) == min(free)
        hand = int(timeline.worker[i])
        assert free[hand] == min(free)
        free[hand] += cost
        assert int(timeline.end[i]) == free[hand]
    assert timeline.makespan == max(free)
    total = workers * max(1, max(free))
    assert timeline.idle == pytest.approx(1 - int(schedule.cost.sum()) / total)
    pointers, order = timeline.feed()
    assert sorted(order.tolist()) == list(range(schedule.work_tile_count))
    for hand, (a, b) in enumerate(itertools.pairwise(pointers.tolist())):
        assert order[a:b].tolist() == [
            i for i, w in enumerate(timeline.worker.tolist()) if w == hand
        ]


@given(case=cases(), every=st.integers(1, 4))
def test_visits_are_what_the_cursors_pass(case: Case, every: int) -> None:
    schedule = case.schedule()
    expected = [
        (work_tile, tile, kind)
        for work_tile, (_, _, partial, full) in enumerate(walked(case, schedule))
        for tiles, kind in ((partial, True), (full, False))
        for tile in tiles
        if tile % every == 0
    ]
    found = visits(schedule, case.runs, every)
    assert list(zip(*(t.tolist() for t in found), strict=True)) == expected


def test_a_mask_that_keeps_nothing_has_no_visits() -> None:
    states = torch.zeros(1, 1, 2, 3, dtype=torch.int8)
    runs = BlockRuns.from_states(states, 2, 3, (1, 1))
    found = visits(schedule_forward(runs, Shape(1, 1, 1), workers=2), runs)
    assert [t.numel() for t in found] == [0, 0, 0]
    assert [t.dtype for t in found] == [torch.int64, torch.int64, torch.bool]


def test_visits_are_on_the_cpu() -> None:
    states = torch.tensor([[[[FULL, 1, FULL], [0, 1, 1]]]], dtype=torch.int8)
    runs = BlockRuns.from_states(states, 2, 3, (1, 1))
    schedule = schedule_forward(runs, Shape(1, 1, 1), workers=2, order="grid", split=False)
    with torch.device("meta"):  # on which nothing can be computed by mistake
        found = visits(schedule, runs)
    assert [t.tolist() for t in found] == [
        [0, 0, 0, 1, 1],
        [1, 0, 2, 1, 2],
        [True, False, False, True, True],
    ]


@given(items=st.lists(st.integers(0, 12), max_size=80), capacity=st.integers(0, 14))
def test_lru(items: list[int], capacity: int) -> None:
    cache: OrderedDict[int, None] = OrderedDict()
    expected = []
    for item in items:
        expected.append(item in cache)
        cache.pop(item, None)
        cache[item] = None
        if len(cache) > capacity:
            cache.popitem(last=False)
    assert lru_hits(torch.tensor(items, dtype=torch.int64), capacity).tolist() == expected


@given(case=cases())
def test_reuse_between_nothing_and_everything_shared(case: Case) -> None:
    schedule = case.schedule()
    timeline = simulate(schedule)
    reads = [
        (case.unit(b, h), tile)
        for (b, h, _), _, partial, full in walked(case, schedule)
        for tile in partial + full
    ]
    assert l2_reuse(schedule, case.runs, timeline, 0) == 0
    every = 1 - len(set(reads)) / len(reads) if reads else 0
    assert l2_reuse(schedule, case.runs, timeline, 1 << 40) == pytest.approx(every)
    sizes = [l2_reuse(schedule, case.runs, timeline, size) for size in (4, 16, 40, 100)]
    assert sizes == sorted(sizes)


def test_tiles_are_visited_at_equal_intervals() -> None:
    """Tiles of a short row fall between those of a long one that runs at the same time."""
    states = torch.zeros(1, 1, 2, 4, dtype=torch.int8)
    states[0, 0, 0] = FULL  # 0, 1, 2, 3 at 0.5, 1.5, 2.5 and 3.5
    states[0, 0, 1, 2] = FULL  # 2 at 2
    runs = BlockRuns.from_states(states, 2, 4, (1, 1))
    schedule = schedule_forward(runs, Shape(1, 1, 1), workers=2, order="grid", split=False)
    timeline = simulate(schedule, 2)
    timeline = replace(
        timeline, start=torch.zeros_like(timeline.start), end=torch.full_like(timeline.end, 4)
    )
    tile = schedule.shape.tile_bytes
    assert l2_reuse(schedule, runs, timeline, tile) == pytest.approx(1 / 5)


def test_sampled_reuse_is_near_the_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    states = torch.full((1, 1, 64, 512), FULL, dtype=torch.int8)
    states[0, 0, :, 256:] = torch.arange(64)[:, None].expand(64, 256) % 2 * FULL
    runs = BlockRuns.from_states(states, 64, 512, (1, 1))
    schedule = schedule_forward(runs, Shape(1, 2, 1), workers=7, split=False)
    timeline = simulate(schedule)
    exact = l2_reuse(schedule, runs, timeline, 640)
    monkeypatch.setattr("attnkit.schedule.simulator._VISITS", 4096)
    sampled = l2_reuse(schedule, runs, timeline, 640)
    assert 0.1 < exact < 0.9
    assert sampled == pytest.approx(exact, abs=0.05)


@given(case=cases(orders=MONOTONE, backward=True), workers=st.integers(1, 5))
def test_waiting_for_turns(case: Case, workers: int) -> None:
    """Turns take the time of a simulation in which every worker works or waits cycle by cycle."""
    schedule = case.schedule()
    timeline = simulate_turns(schedule, case.runs, workers)
    work_tiles = walked(case, schedule)
    shared: dict[tuple[int, int, int], list[int]] = {}
    for work_tile, ((b, h, _), _, partial, full) in enumerate(work_tiles):
        for q in partial + full:
            shared.setdefault((b, h, q), []).append(work_tile)
    ends: dict[tuple[int, int], int] = {}  # (work tile, q) -> when it added
    finish: list[int] = []
    free = [0] * workers
    for work_tile, ((b, h, _), _, partial, full) in enumerate(work_tiles):
        now = min(free)
        hand = free.index(now)
        assert int(timeline.start[work_tile]) == now
        rest = int(schedule.cost[work_tile])
        for q in sorted(partial + full):
            cost = case.cost.partial if q in partial else case.cost.full
            before = [p for p in shared[b, h, q] if p < work_tile]
            now = max([now + cost, *(ends[p, q] for p in before)])
            ends[work_tile, q] = now
            rest -= cost
        finish.append(now + rest)
        free[hand] = now + rest
    assert timeline.end.tolist() == finish
    assert timeline.makespan >= simulate(schedule, workers).makespan or workers > 1


def test_report_says_it_in_a_line() -> None:
    runs = BlockRuns.from_states(torch.full((1, 1, 4, 4), FULL, dtype=torch.int8), 4, 4, (1, 1))
    schedule = schedule_forward(runs, Shape(1, 2, 1), workers=4, split=False)
    found = report(schedule, runs)
    with pytest.raises(OptionError, match="workers must be positive, got 0"):
        simulate(schedule, 0)
    assert (found.makespan, found.bound, found.idle) == (25672, 25672.0, 0.0)
    assert found.reuse == pytest.approx(0.75)
    assert str(found) == (
        "4 workers, 8 work tiles (0 rows split): 25672 cycles, 1.000 x the lower bound, "
        "idle 0.0%, L2 reuse 75.0%"
    )
