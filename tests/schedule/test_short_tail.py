"""Check short tails of deterministic lists: same sums for any workers, no deadlock, a better end."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from attnkit import masks
from attnkit.schedule.deterministic_order import deterministic_order
from attnkit.schedule.scheduler import BACKWARD, Schedule, Shape, schedule_backward
from attnkit.schedule.short_tail import with_short_tail
from attnkit.schedule.simulator import simulate, simulate_turns
from attnkit.schedule.split_kv import Cost
from attnkit.sparsity.block_mask import create_block_mask
from attnkit.sparsity.block_runs import EMPTY, FULL, PARTIAL, BlockRuns
from tests.schedule.schedule_cases import Case
from tests.schedule.test_deterministic_order import check_list_order

WORKERS = 132


def causal(length: int, heads: int) -> tuple[BlockRuns, Schedule]:
    """Return the tiles of a causal mask, and their schedule in descending order."""
    mask = create_block_mask(masks.causal(), None, None, length, length, BLOCK_SIZE=(64, 128))
    shape = Shape(1, heads, 1 << 16)
    schedule = schedule_backward(
        mask.runs, shape, workers=WORKERS, cost=BACKWARD, order="descending", split=False
    )
    return mask.runs, schedule


def test_a_causal_list_ends_evenly() -> None:
    """Without a tail, the longest work tiles come last; with it, workers end at about the same time."""
    runs, schedule = causal(8192, 32)
    short = with_short_tail(runs, schedule)
    assert simulate(short).makespan < 0.97 * simulate(schedule).makespan
    assert simulate_turns(short, runs).makespan < 1.02 * simulate(short).makespan
    assert simulate(short).makespan < 1.02 * short.bound


def test_the_tail_has_the_last_kv_tiles_of_complete_heads() -> None:
    runs, schedule = causal(8192, 32)
    short = with_short_tail(runs, schedule)
    begin = int((short.tile.diff() > 0).nonzero()[-1]) + 1
    tail = short.tile[begin:]
    assert bool((tail.diff() <= 0).all())
    assert int(tail.max()) == schedule.blocks - 1
    assert sorted(set(tail.tolist())) == list(range(int(tail.min()), schedule.blocks))
    assert not set(short.h[begin:].tolist()) & set(schedule.h[-WORKERS:].tolist())


def test_lists_that_end_evenly_are_kept() -> None:
    """All kv tiles of a full mask take the same time, and a head alone is never complete."""
    runs = BlockRuns.from_states(torch.full((1, 1, 64, 32), FULL, dtype=torch.int8), 64, 32, (1, 1))
    for heads in (32, 1):
        schedule = schedule_backward(
            runs, Shape(1, heads, 1 << 16), workers=WORKERS, order="descending", split=False
        )
        assert with_short_tail(runs, schedule) is schedule
    _, alone = causal(8192, 1)
    assert with_short_tail(runs, alone) is alone


def test_rows_of_several_runs_have_no_tail() -> None:
    """A dQ tile with a gap between its kv tiles takes them in descending order only."""
    states = torch.tril(torch.full((64, 64), FULL, dtype=torch.int8))
    states[40:, 10] = EMPTY
    runs = BlockRuns.from_states(states[None, None], 64, 64, (1, 1))
    schedule = schedule_backward(
        runs, Shape(1, 32, 1 << 16), workers=WORKERS, order="descending", split=False
    )
    assert with_short_tail(runs, schedule) is schedule


@st.composite
def lists_with_tails(draw: st.DrawFn) -> tuple[Case, Schedule]:
    """Draw masks with one run a row, and move the last kv tiles of some heads to the end."""
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    heads, batch = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    states = torch.zeros(1, 1, rows, columns, dtype=torch.int8)
    for row in range(rows):
        ends = sorted(draw(st.tuples(st.integers(0, columns), st.integers(0, columns))))
        states[0, 0, row, ends[0] : ends[1]] = draw(st.sampled_from([PARTIAL, FULL]))
    runs = BlockRuns.from_states(states, rows, columns, (1, 1))
    shape = Shape(batch, heads, 1)
    case = Case(runs, shape, 3, Cost(2, 3, 1, 1), 60, "descending", False, True)
    schedule = case.schedule()
    tails = torch.tensor([draw(st.integers(0, columns)) for _ in range(batch * heads)])
    head = schedule.b * heads + schedule.h
    tail = schedule.tile >= columns - tails[head]
    order = torch.argsort(torch.where(tail, columns - schedule.tile, 0), stable=True)
    return case, schedule.reordered(order)


@given(drawn=lists_with_tails(), workers=st.integers(1, 7), data=st.data())
def test_sums_follow_the_list_at_any_speed(
    drawn: tuple[Case, Schedule], workers: int, data: st.DataObject
) -> None:
    """Every dQ tile adds its kv tiles in list order, and the workers do not deadlock."""
    case, schedule = drawn
    turn = deterministic_order(case.runs, schedule)
    random = data.draw(st.randoms(use_true_random=False))
    check_list_order(case, schedule, turn, workers, random.randrange)
