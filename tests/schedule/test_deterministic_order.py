"""Check deterministic sums: one order for any number of workers, and never a deadlock."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnkit.errors import OptionError, ShapeError
from attnkit.schedule.deterministic_order import DeterministicOrder, deterministic_order, merge_runs
from attnkit.schedule.scheduler import (
    MONOTONE,
    Schedule,
    Shape,
    schedule_backward,
    schedule_forward,
)
from attnkit.schedule.simulator import simulate
from attnkit.sparsity.block_runs import BlockRuns, Runs
from tests.schedule.schedule_cases import Case, cases, walked

Key = tuple[int, int, int]
deterministic = cases(orders=MONOTONE, backward=True, most=8)


def dq_tile(case: Case, b: int, h: int, q: int) -> int:
    return (b * case.shape.heads + h) * case.runs.q_blocks + q


def after(turn: DeterministicOrder, row: int, column: int) -> int:
    return int(turn.after(torch.tensor([row]), torch.tensor([column])))


@given(case=cases())
def test_joined_runs_are_the_kept_tiles(case: Case) -> None:
    kept = merge_runs(case.runs.full, case.runs.partial, case.runs.kv_blocks)
    states = case.runs.states().flatten(0, 2) > 0
    assert torch.equal(kept.expanded(case.runs.kv_blocks), states)
    ends = kept.start + kept.length
    for a, b in itertools.pairwise(kept.row_ptr.tolist()):
        assert (kept.start[a:b][1:] > ends[a:b][:-1]).all()


@given(case=deterministic)
def test_turns_pass_through_the_kept_tiles_and_back_to_the_first(case: Case) -> None:
    turn = deterministic_order(case.runs, case.schedule())
    states = case.runs.states().expand(case.shape.batch, case.shape.heads, -1, -1) > 0
    for row, kept in enumerate(states.flatten(0, 2)):
        columns = kept.nonzero().squeeze(1).tolist()[:: turn.step]
        if not columns:
            assert int(turn.first[row]) == int(turn.last[row]) == -1
            continue
        found, column = [], int(turn.first[row])
        for _ in columns:
            found.append(column)
            column = after(turn, row, column)
        assert found == columns
        assert column == columns[0]  # reset for the next launch
        assert int(turn.last[row]) == columns[-1]


@given(case=deterministic, workers=st.integers(1, 200))
def test_every_turn_comes_after_work_tiles_earlier_in_the_list(case: Case, workers: int) -> None:
    """List order is a topological order of all waits, for any number of workers."""
    schedule = case.schedule(workers=workers)
    turn = deterministic_order(case.runs, schedule)
    place: dict[tuple[Key, int], int] = {}  # (dQ tile, kv tile) -> work tile
    for work_tile, ((b, h, n), _, partial, full) in enumerate(walked(case, schedule)):
        for q in partial + full:
            assert ((b, h, q), n) not in place
            place[(b, h, q), n] = work_tile
    for ((b, h, q), n), work_tile in place.items():
        row = dq_tile(case, b, h, q)
        following = after(turn, row, n)
        if following != int(turn.first[row]):
            assert place[(b, h, q), following] > work_tile


@given(case=deterministic, workers=st.integers(1, 60))
def test_the_order_of_dq_does_not_depend_on_the_workers(case: Case, workers: int) -> None:
    mine, other = (
        deterministic_order(case.runs, case.schedule(workers=n)) for n in (case.workers, workers)
    )
    assert torch.equal(mine.first, other.first)
    assert torch.equal(mine.visited.row_ptr, other.visited.row_ptr)
    assert torch.equal(mine.visited.start, other.visited.start)
    assert mine.step == other.step


@given(case=deterministic)
def test_shared_heads_take_turns_in_list_order(case: Case) -> None:
    schedule = case.schedule()
    turn = deterministic_order(case.runs, schedule)
    size = case.shape.heads // (case.shape.kv_heads or case.shape.heads)
    seen: dict[Key, list[list[int]]] = {}
    for ((b, h, n), _, *kept), pair in zip(
        walked(case, schedule), turn.group.tolist(), strict=True
    ):
        if not any(kept):
            assert pair == [0, 0]  # it adds nothing
            continue
        owner = 0 if case.shape.kv_batch == 1 else b
        seen.setdefault((owner, h // size, n), []).append(pair)
    for pairs in seen.values():
        assert pairs == [[i, len(pairs)] for i in range(len(pairs))]


class Deadlock(Exception):
    pass


def execute(
    case: Case, turn: DeterministicOrder, work_tiles: list[tuple[Key, int, list[int], list[int]]],
    feeds: list[list[int]] | None, workers: int, pick: Callable[[int], int],
    resident: int | None = None,
) -> tuple[dict[Key, list[int]], dict[Key, int]]:  # fmt: skip
    """Run the protocol of `attnkit.schedule.deterministic_order` step by step.

    Each step moves one worker that can move, chosen by `pick`. At most `resident` workers have
    begun and not ended; None means no limit.

    Returns:
        The kv tiles that were added to each dQ tile, in order, and the semaphores at the end.
    """
    rows = case.runs.q_blocks
    semaphore = {
        (b, h, q): int(turn.first[dq_tile(case, b, h, q)])
        for b in range(case.shape.batch) for h in range(case.shape.heads) for q in range(rows)
    }  # fmt: skip
    added: dict[Key, list[int]] = {key: [] for key in semaphore}
    groups: dict[Key, int] = {}
    size = case.shape.heads // (case.shape.kv_heads or case.shape.heads)
    counter = iter(range(len(work_tiles)))
    own = [iter(feed) for feed in feeds] if feeds else [counter] * workers
    state: list[tuple[int, list[int]] | None] = [None] * len(own)
    done = [False] * len(own)

    def step(worker: int) -> bool:
        """Move a worker by one tile or one turn at dK and dV; return False if it must wait."""
        current = state[worker]
        if current is None:
            work_tile = next(own[worker], None)
            if work_tile is None:
                done[worker] = True
            else:
                state[worker] = (
                    work_tile,
                    sorted(work_tiles[work_tile][2] + work_tiles[work_tile][3]),
                )
            return True
        work_tile, left = current
        b, h, n = work_tiles[work_tile][0]
        if left:
            key = (b, h, left[0])
            if semaphore[key] != n:
                return False
            added[key].append(n)
            semaphore[key] = after(turn, dq_tile(case, *key), n)
            left.pop(0)
            return True
        if not work_tiles[work_tile][2] + work_tiles[work_tile][3]:
            state[worker] = None
            return True
        shared = (0 if case.shape.kv_batch == 1 else b, h // size, n)
        rank, count = turn.group[work_tile].tolist()
        if groups.get(shared, 0) != rank:
            return False
        groups[shared] = (rank + 1) % count
        state[worker] = None
        return True

    while not all(done):
        order = [w for w in range(len(own)) if not done[w]][:resident]
        start = pick(len(order))
        if not any(step(w) for w in order[start:] + order[:start]):
            raise Deadlock
    assert not any(groups.values())
    return added, semaphore


def check_list_order(
    case: Case, schedule: Schedule, turn: DeterministicOrder, workers: int,
    pick: Callable[[int], int],
) -> None:  # fmt: skip
    """Check that every dQ tile adds its kv tiles in list order, and that semaphores are reset."""
    work_tiles = walked(case, schedule)
    expected: dict[Key, list[int]] = {}
    for (b, h, n), _, partial, full in work_tiles:
        for q in partial + full:
            expected.setdefault((b, h, q), []).append(n)
    added, semaphore = execute(case, turn, work_tiles, None, workers, pick)
    for key, columns in added.items():
        assert columns == expected.get(key, [])
        assert semaphore[key] == int(turn.first[dq_tile(case, *key)])


@given(case=deterministic, workers=st.integers(1, 7), static=st.booleans(), data=st.data())
def test_any_workers_at_any_speed_end_with_one_order(
    case: Case, workers: int, static: bool, data: st.DataObject
) -> None:
    schedule = case.schedule()
    turn, work_tiles = deterministic_order(case.runs, schedule), walked(case, schedule)
    feeds = None
    if static:
        pointers, order = simulate(schedule, workers).feed()
        feeds = [order[a:b].tolist() for a, b in itertools.pairwise(pointers.tolist())]
    random = data.draw(st.randoms(use_true_random=False))
    added, semaphore = execute(case, turn, work_tiles, feeds, workers, random.randrange)
    states = (case.runs.states() > 0).expand(case.shape.batch, case.shape.heads, -1, -1)
    for (b, h, q), columns in added.items():
        assert columns == states[b, h, q].nonzero().squeeze(1).tolist()[:: turn.step]
        assert semaphore[b, h, q] == int(turn.first[dq_tile(case, b, h, q)])


@given(case=deterministic, workers=st.integers(1, 7), data=st.data())
def test_work_tiles_from_a_counter_need_no_resident_workers(
    case: Case, workers: int, data: st.DataObject
) -> None:
    """With a shared counter, sums are in order even if not all workers are resident.

    A GPU may hold fewer CTA pairs than were launched.
    """
    resident = data.draw(st.integers(1, workers))
    schedule = case.schedule()
    turn, work_tiles = deterministic_order(case.runs, schedule), walked(case, schedule)
    random = data.draw(st.randoms(use_true_random=False))
    added, _ = execute(case, turn, work_tiles, None, workers, random.randrange, resident)
    states = (case.runs.states() > 0).expand(case.shape.batch, case.shape.heads, -1, -1)
    for (b, h, q), columns in added.items():
        assert columns == states[b, h, q].nonzero().squeeze(1).tolist()[:: turn.step]


def test_fixed_feeds_do_deadlock_where_few_workers_are_resident() -> None:
    runs = BlockRuns.from_states(torch.ones(1, 1, 2, 4, dtype=torch.int8), 2, 4, (1, 1))
    shape = Shape(1, 1, 1)
    schedule = schedule_backward(runs, shape, workers=2, order="ascending", split=False)
    case = Case(runs, shape, 2, schedule.prices, 1, "ascending", False, True)
    turn, work_tiles = deterministic_order(runs, schedule), walked(case, schedule)
    with pytest.raises(Deadlock):
        execute(case, turn, work_tiles, [[0, 2], [1, 3]], 2, lambda n: 0, 1)
    execute(case, turn, work_tiles, None, 2, lambda n: 0, 1)


def test_the_protocol_does_deadlock_with_a_list_in_another_order() -> None:
    """The protocol deadlocks if the work list is reversed.

    So the tests above would detect a wrong order of the list.
    """
    runs = BlockRuns.from_states(torch.ones(1, 1, 2, 4, dtype=torch.int8), 2, 4, (1, 1))
    shape = Shape(1, 1, 1)
    schedule = schedule_backward(runs, shape, workers=2, order="ascending", split=False)
    case = Case(runs, shape, 2, schedule.prices, 1, "ascending", False, True)
    turn, work_tiles = deterministic_order(runs, schedule), walked(case, schedule)
    turn = replace(turn, group=turn.group.flip(0))
    with pytest.raises(Deadlock):
        execute(case, turn, work_tiles[::-1], None, 2, lambda n: 0)


def test_turns_of_a_million_tokens_need_no_tiles() -> None:
    """For causal attention over 2^20 tokens, the tables have entries per row, not per tile."""
    count = 1 << 13
    rows = torch.arange(count + 1, dtype=torch.int32)
    partial = Runs(rows, rows[:-1], torch.ones(count, dtype=torch.int32))
    full = Runs((rows - 1).clamp(min=0), torch.zeros(count - 1, dtype=torch.int32), rows[1:-1])
    # below the diagonal, by columns
    full_t = Runs(torch.cat([rows[:-1], rows[-2:-1]]), rows[1:-1], rows[1:-1].flip(0))
    runs = BlockRuns(1 << 20, 1 << 20, (128, 128), 1, 1, full, partial, full_t, partial)
    schedule = schedule_backward(runs, Shape(1, 4, 1 << 16), workers=132, order="descending")
    turn = deterministic_order(runs, schedule)
    assert turn.visited.start.numel() == count
    assert torch.equal(turn.first, rows[:-1].repeat(4))
    assert turn.after(torch.tensor([5, 5, 0]), torch.tensor([5, 0, 0])).tolist() == [4, 5, 0]


def test_other_schedules_are_refused() -> None:
    runs = BlockRuns.from_states(torch.ones(1, 1, 2, 3, dtype=torch.int8), 2, 3, (1, 1))
    shape = Shape(1, 1, 1)
    with pytest.raises(OptionError, match="got forward 'ascending'"):
        deterministic_order(runs, schedule_forward(runs, shape, workers=2, order="ascending"))
    with pytest.raises(OptionError, match="got backward 'longest'"):
        deterministic_order(runs, schedule_backward(runs, shape, workers=2))
    other = BlockRuns.from_states(torch.ones(1, 1, 2, 4, dtype=torch.int8), 2, 4, (1, 1))
    with pytest.raises(ShapeError, match="3 kv tiles a head, the runs have 4"):
        deterministic_order(other, schedule_backward(runs, shape, workers=2, order="ascending"))
