"""Check the order of the last work tiles of a list."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from attnkit import masks
from attnkit.runtime.variant import Variant
from attnkit.schedule.balanced_end import ROUNDS, balanced_end
from attnkit.schedule.scheduler import Shape, schedule_forward
from attnkit.schedule.simulator import simulate

COSTS = st.lists(st.integers(0, 50), min_size=1, max_size=200)


def makespan(costs: list[int], workers: int) -> int:
    """Return when the last worker ends if each free worker takes the next work tile."""
    loads = [0] * workers
    for cost in costs:
        loads[loads.index(min(loads))] += cost
    return max(loads)


@given(costs=COSTS, workers=st.integers(1, 9))
def test_the_beginning_stays_and_nothing_is_lost(costs: list[int], workers: int) -> None:
    order, _ = balanced_end(costs, workers)
    front = max(0, len(costs) - ROUNDS * workers)
    assert order[:front] == list(range(front))
    assert sorted(order) == list(range(len(costs)))


@given(costs=COSTS, workers=st.integers(1, 9))
def test_it_is_never_worse_than_longest_first(costs: list[int], workers: int) -> None:
    front = max(0, len(costs) - ROUNDS * workers)
    longest_first = costs[:front] + sorted(costs[front:], reverse=True)
    order, predicted = balanced_end(costs, workers)
    assert makespan([costs[i] for i in order], workers) == predicted
    assert predicted <= makespan(longest_first, workers)


def test_short_sequences_are_balanced() -> None:
    """512 causal heads of four tiles: longest first alone is 3 % above the bound."""
    query = torch.empty(32, 16, 512, 128, dtype=torch.bfloat16)
    runs = Variant(None, masks.causal()).bind(query, query, (128, 128)).runs
    assert runs is not None
    schedule = schedule_forward(runs, Shape(32, 16, 1 << 16), workers=132)
    assert simulate(schedule).makespan <= 1.005 * schedule.bound
