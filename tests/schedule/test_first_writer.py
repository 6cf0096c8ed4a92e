"""Check which work tile stores the first part of each dQ sum: the first in the list."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given

from attnkit import create_block_mask, masks
from attnkit.schedule import first_writer as module
from attnkit.schedule.first_writer import ARRIVAL, FirstWriters, choose_first_writers, first_writers
from attnkit.schedule.scheduler import Schedule, Shape, schedule_backward
from attnkit.schedule.simulator import simulate
from attnkit.schedule.split_kv import Cost
from attnkit.schedule.work_list import packed
from attnkit.sparsity.block_runs import BlockRuns
from tests.schedule.schedule_cases import Case, cases, walked

COST = Cost(full=3030, partial=3180, tile=9500, merge=6500)
WORKERS = 132
FOREVER = 1 << 62


@given(case=cases(orders=("falling",), backward=True, most=8))
def test_the_first_writer_is_first_in_the_list(case: Case) -> None:
    schedule = case.schedule()
    visits: dict[tuple[int, int, int], list[int]] = {}
    tiles = []
    for work_tile, ((b, h, _), _, partial, full) in enumerate(walked(case, schedule)):
        tiles.append(sorted(partial + full))
        for q in tiles[-1]:
            visits.setdefault((b, h, q), []).append(work_tile)
    every = case.shape.batch * case.shape.heads * case.runs.q_blocks
    found = first_writers(case.runs, schedule)
    first = {key: work_tiles[0] for key, work_tiles in visits.items()}
    where = list(zip(schedule.b.tolist(), schedule.h.tolist(), strict=True))
    stores = [[first[b, h, q] == p for q in tiles[p]] for p, (b, h) in enumerate(where)]
    together = all(a or not b for own in stores for a, b in pairwise(own))
    if len(visits) < every:
        assert found == "some q tiles meet no kv tile"
    elif not together:
        assert found == "a kv tile is first at q tiles that are not the first of its own"
    else:
        assert isinstance(found, FirstWriters)
        stop = found.stop.tolist()
        assert [[q < stop[p] for q in own] for p, own in enumerate(tiles)] == stores
        timed = first_writers(case.runs, schedule, (simulate(schedule).start, FOREVER))
        assert isinstance(timed, FirstWriters)
        assert timed.cycles == waited(schedule, tiles, stores) // schedule.workers


def waited(schedule: Schedule, tiles: list[list[int]], stores: list[list[bool]]) -> int:
    """Return the sum over work tiles of the longest time for which each waits for a flag.

    Args:
        schedule: the schedule.
        tiles: the q tiles of each work tile.
        stores: for each of them, whether the work tile stores instead of adding.
    """
    block, begin = schedule.prices.full, simulate(schedule).start.tolist()
    slower = max(0, ARRIVAL - block)
    heads = list(zip(schedule.b.tolist(), schedule.h.tolist(), strict=True))
    stored: dict[tuple[int, int, int], int] = {}
    found = 0
    for work_tile, (visited, own) in enumerate(
        zip(tiles, stores, strict=True)
    ):  # stores come first
        now, wait = begin[work_tile], max(0, sum(own) * slower - block)
        for q, first in zip(visited, own, strict=True):
            now += block + first * slower
            if first:
                stored[*heads[work_tile], q] = now
            wait = max(wait, stored[*heads[work_tile], q] + ARRIVAL - now) if not first else wait
        found += wait
    return found


def made(mask: masks.Mask | None, length: int) -> BlockRuns:
    keep = mask if mask is not None else lambda b, h, q, kv: q >= 0
    size = {"BLOCK_SIZE": (64, 128), "device": "cpu"}
    return create_block_mask(keep, None, None, length, length, **size).runs


def scheduled(runs: BlockRuns, heads: int) -> Schedule:
    return schedule_backward(runs, Shape(1, heads, 65536), workers=WORKERS, cost=COST)


IDS = torch.arange(4096) * 8 // 4096
BANDS = {
    "window": masks.causal() & masks.sliding_window(512),
    "both sides": masks.sliding_window(512),
    "documents": masks.document(IDS) & masks.causal(),
    "causal": masks.causal(),
}


@pytest.mark.parametrize("name", ["window", "both sides", "documents"])
def test_packed_heads_have_the_first_writers_of_one_head(name: str) -> None:
    """Each q tile of each head is stored by the first work tile in the list that visits it."""
    group, length = 4, 4096
    one = made(BANDS[name], length)
    runs = packed(one, group)
    found = choose_first_writers(runs, scheduled(runs, 8), 32 * length * 128, one)
    assert not isinstance(found, str), found
    schedule, writers = found
    visited = runs.states().ne(0)[0, 0]  # [packed q tiles, kv tiles]
    first: dict[tuple[int, int], int] = {}
    for work_tile, (h, kv) in enumerate(
        zip(schedule.h.tolist(), schedule.tile.tolist(), strict=True)
    ):
        for q in visited[:, kv].nonzero()[:, 0].tolist():
            owner = first.setdefault((h, q), work_tile)
            stores = q % one.q_blocks < int(writers.stop[work_tile])
            assert stores == (owner == work_tile)
    assert len(first) == 8 * group * one.q_blocks


@pytest.mark.parametrize("name", BANDS)
def test_bands_take_first_writers_and_hardly_wait(name: str) -> None:
    runs = made(BANDS[name], 4096)
    before = scheduled(runs, 32)
    found = choose_first_writers(runs, before, 32 * 4096 * 128)
    assert not isinstance(found, str), found
    schedule, owners = found
    assert owners.cycles * 95 < before.bound
    assert simulate(schedule).makespan * 100 < simulate(before).makespan * 102


@pytest.mark.parametrize("length", [2048, 4096])
def test_full_attention_would_wait(length: int) -> None:
    """First-writer dQ is rejected without a mask.

    All kv tiles begin at the first q tile then, and all but one would wait for its store.
    """
    runs = made(None, length)
    assert "cycles more" in choose_first_writers(runs, scheduled(runs, 32), 32 * length * 128)


def test_long_rows_are_not_looked_at() -> None:
    runs = made(None, 17000)
    assert (
        choose_first_writers(runs, scheduled(runs, 1), 17000 * 128)
        == "a q tile meets more than 128 kv tiles"
    )


def test_rows_that_keep_nothing_need_zeros() -> None:
    keep = lambda b, h, q, kv: (kv <= q) & (q - kv < 300) & ((q < 1024) | (q >= 1280))
    runs = create_block_mask(keep, None, None, 4096, 4096, BLOCK_SIZE=(64, 128), device="cpu").runs
    found = choose_first_writers(runs, scheduled(runs, 32), 32 * 4096 * 128)
    assert found == "some q tiles meet no kv tile"


def test_parts_of_a_kv_tile_are_refused() -> None:
    runs = made(masks.causal(), 1024)
    other = replace(COST, tile=1, merge=1)
    schedule = schedule_backward(runs, Shape(1, 1, 65536), workers=WORKERS, cost=other)
    assert schedule.split.numel()
    assert first_writers(runs, schedule) == "kv tiles are split"


@pytest.mark.parametrize("at_once", [1, 5000])
def test_heads_may_be_looked_at_one_after_another(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = lambda b, h, q, kv: (kv <= q) & (q - kv <= 256 * (h + 1))
    runs = create_block_mask(wide, 2, 6, 2048, 2048, BLOCK_SIZE=(64, 128), device="cpu").runs
    schedule = schedule_backward(
        runs, Shape(2, 6, 65536), workers=WORKERS, cost=COST, order="falling"
    )
    marks = simulate(schedule).start, FOREVER
    together = first_writers(runs, schedule, marks)
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    apart = first_writers(runs, schedule, marks)
    assert isinstance(together, FirstWriters)
    assert isinstance(apart, FirstWriters)
    assert torch.equal(together.stop, apart.stop)
    assert together.cycles == apart.cycles > 0


def test_a_schedule_is_made_and_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = made(masks.causal(), 2048)
    schedule = scheduled(runs, 16)
    calls: list[str] = []

    def counted(name: str) -> None:
        true = getattr(module, name)

        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return true(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    for name in ("simulate", "schedule_backward", "first_writers"):
        counted(name)
    choose_first_writers(runs, schedule, 16 * 2048 * 128)
    assert sorted(calls) == ["first_writers", "schedule_backward", "simulate", "simulate"]
