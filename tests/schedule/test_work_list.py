"""Check work lists, walked in Python like a kernel: each kept block once, in the right order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnkit.errors import OptionError
from attnkit.schedule.scheduler import Schedule, Shape, schedule_forward
from attnkit.schedule.work_list import WorkList, full_runs, packed, refine, retile, work_list
from attnkit.sparsity.block_runs import EMPTY, FULL, PARTIAL, BlockRuns
from tests.schedule.schedule_cases import Case, Tile, cases


@dataclass(frozen=True)
class WorkTile:
    """Hold what a kernel does for one work tile."""

    tile: Tile
    slot: int
    masked: list[int]  # blocks computed with the mask, in order
    whole: list[int]  # blocks computed without it, in order


def walk(cursor: list[int], runs: list[list[int]]) -> list[int]:
    """Return the blocks that a cursor (run, take, count) visits, in a kernel's order."""
    run, take, left = cursor
    starts, lengths = runs
    found: list[int] = []
    while left > 0:
        steps = min(take, left)
        final = starts[run] + take - 1
        found += [final - j for j in range(steps)]
        left -= steps
        run -= 1
        if left > 0:
            take = lengths[run]
    return found


def work_tiles(work: WorkList) -> list[WorkTile]:
    partial, full = work.partial.tolist(), work.full.tolist()
    found = []
    for p in work.work_tiles.tolist():
        order = walk(p[4:7], partial) + walk(p[7:10], full)
        found.append(WorkTile((p[0], p[1], p[2]), p[3], order[: p[10]], order[p[10] :]))
    return found


@st.composite
def ragged_cases(draw: st.DrawFn) -> Case:
    """Draw forward schedules, some with lengths that do not fill the last tile."""
    case = draw(cases(backward=False))
    runs = case.runs
    cut = draw(st.integers(0, runs.block[1] - 1)), draw(st.integers(0, runs.block[0] - 1))
    return replace(case, runs=replace(runs, kv_len=runs.kv_len - cut[0], q_len=runs.q_len - cut[1]))


@given(ragged_cases())
def test_every_kept_block_is_visited_once_masked_ones_first(case: Case) -> None:
    work = work_list(case.runs, case.schedule())
    ragged = case.runs.kv_len % case.runs.block[1] != 0
    last, beyond = case.runs.kv_blocks - 1, case.runs.kv_blocks
    seen: dict[Tile, list[WorkTile]] = {}
    for work_tile in work_tiles(work):
        seen.setdefault(work_tile.tile, []).append(work_tile)
        # descending: the PARTIAL ones, and after them the FULL ones
        assert work_tile.whole == sorted(work_tile.whole, reverse=True)
    for tile, (partial, full) in case.lists().items():
        own = seen.pop(tile)
        if not partial and not full:
            assert [(p.masked, p.whole) for p in own] == [([beyond], [])]
            continue
        edge = [last] if ragged and last in full else []
        assert sorted(b for p in own for b in p.masked) == sorted(partial + edge)
        assert sorted(b for p in own for b in p.whole) == sorted(set(full) - set(edge))
        for p in own:
            inside = [b for b in p.masked if b in partial]
            assert p.masked == sorted(inside, reverse=True) + [b for b in p.masked if b in edge]
    assert not seen


@given(ragged_cases())
def test_work_tiles_keep_slots_and_order_but_empty_ones_come_last(case: Case) -> None:
    schedule = case.schedule()
    work = work_list(case.runs, schedule)
    assert work.work_tiles.dtype == work.partial.dtype == work.full.dtype == torch.int32
    assert work.work_tiles.shape == (schedule.work_tile_count, 12)
    assert work.work_tiles.is_contiguous()
    table = schedule.table()
    empty = table[:, 6] + table[:, 9] == 0
    assert torch.equal(work.work_tiles[:, :4], torch.cat([table[~empty], table[empty]])[:, :4])
    assert set(work.work_tiles[:, 11].tolist()) == {int((~empty).sum())}


def split_rows(states: Tensor, kv_len: int) -> tuple[BlockRuns, Schedule]:
    runs = BlockRuns.from_states(states, states.shape[2] * 2, kv_len, (2, 4))
    return runs, schedule_forward(runs, Shape(1, 1, 1), workers=8)


def test_a_split_row_is_joined_from_its_parts() -> None:
    states = torch.full((1, 1, 1, 64), FULL, dtype=torch.int8)
    states[..., 60] = PARTIAL
    runs, schedule = split_rows(states, 64 * 4 - 1)
    found = work_tiles(work_list(runs, schedule))
    assert len(found) > 1
    assert {p.slot for p in found} == set(range(len(found)))
    assert sorted(b for p in found for b in p.masked) == [60, 63]
    assert sorted(b for p in found for b in p.masked + p.whole) == list(range(64))


def test_a_row_that_keeps_nothing_visits_one_masked_block_beyond_the_end() -> None:
    states = torch.tensor([[[[EMPTY, EMPTY], [FULL, EMPTY]]]], dtype=torch.int8)
    runs, schedule = split_rows(states, 8)
    found = {p.tile[2]: (p.masked, p.whole) for p in work_tiles(work_list(runs, schedule))}
    assert found == {0: ([2], []), 1: ([], [0])}
    table = work_list(runs, schedule).work_tiles
    assert {p[2]: p[10] for p in table.tolist()} == {0: 1, 1: 0}


def test_full_runs_keep_everything() -> None:
    runs = full_runs(5, 9, (2, 4), torch.device("cpu"))
    assert torch.equal(runs.states(), torch.full((1, 1, 3, 3), FULL, dtype=torch.int8))
    other = BlockRuns.from_states(runs.states(), 5, 9, (2, 4))
    for name in ("full", "partial", "full_t", "partial_t"):
        for part in ("row_ptr", "start", "length"):
            own, expected = (getattr(getattr(r, name), part) for r in (runs, other))
            assert torch.equal(own, expected), f"{name}.{part}"


def classified(keep: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the tile states of a dense mask [q, kv], int8 [1, 1, q blocks, kv blocks]."""
    rows = [
        [
            FULL if bool(tile.all()) else PARTIAL if bool(tile.any()) else EMPTY
            for tile in band.split(block[1], 1)
        ]
        for band in keep.split(block[0], 0)
    ]
    return torch.tensor(rows, dtype=torch.int8)[None, None]


@given(
    st.integers(1, 30),
    st.integers(1, 30),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.integers(0, 99),
)
def test_refined_tiles_keep_their_states(
    q_len: int, kv_len: int, small: tuple[int, int], times: tuple[int, int], seed: int
) -> None:
    """Refined parts of FULL and EMPTY tiles stay FULL and EMPTY; those of PARTIAL are rechecked."""
    random = torch.Generator().manual_seed(seed)
    cells = torch.rand(6, 6, generator=random) < 0.6
    keep = cells.repeat_interleave(5, 0).repeat_interleave(5, 1)[:q_len, :kv_len]
    large = small[0] * times[0], small[1] * times[1]
    coarse = BlockRuns.from_states(classified(keep, large), q_len, kv_len, large)
    fine = refine(coarse, small)
    assert fine.block == small
    assert (fine.q_len, fine.kv_len) == (q_len, kv_len)
    states, exact = fine.states(), classified(keep, small)
    assert bool((exact[states == FULL] == FULL).all())
    assert bool((exact[states == EMPTY] == EMPTY).all())
    for i, row in enumerate(states[0, 0].tolist()):
        for j, state in enumerate(row):
            at = i * small[0] // large[0], j * small[1] // large[1]
            assert state == int(coarse.states()[0, 0, at[0], at[1]])


def test_refined_to_the_same_tiles_is_the_same_object() -> None:
    runs = full_runs(8, 8, (4, 4), torch.device("cpu"))
    assert refine(runs, (4, 4)) is runs


@pytest.mark.parametrize("block", [(3, 4), (4, 3), (8, 4)])
def test_tiles_that_do_not_divide_are_refused(block: tuple[int, int]) -> None:
    runs = full_runs(8, 8, (4, 4), torch.device("cpu"))
    with pytest.raises(OptionError, match=r"tiles of \(4, 4\) cannot be cut into tiles of"):
        refine(runs, block)


@given(st.data())
def test_fitted_tiles_are_those_of_their_positions(data: st.DataObject) -> None:
    """Split and joined tiles have the states of their positions, by rows and by columns."""
    draw = lambda low, high: data.draw(st.integers(low, high))
    q_len, kv_len = draw(1, 60), draw(1, 60)
    block = data.draw(st.sampled_from([(4, 4), (8, 4), (4, 6)]))
    other = data.draw(st.sampled_from([(16, 4), (8, 8), (12, 12), (4, 20), (6, 8), (2, 2)]))
    generator = torch.Generator().manual_seed(draw(0, 2**32 - 1))
    shape = draw(1, 2), draw(1, 2), -(-q_len // block[0]), -(-kv_len // block[1])
    states = torch.randint(0, 3, shape, generator=generator).to(torch.int8)
    states[torch.rand(shape, generator=generator) < data.draw(st.sampled_from([0.0, 0.7]))] = FULL
    found = retile(BlockRuns.from_states(states, q_len, kv_len, block), other)
    assert found.block == other
    single = states.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)
    single = single[:, :, :q_len, :kv_len]
    rows = [part.split(other[1], 3) for part in single.split(other[0], 2)]
    kinds = [
        [torch.where((t == FULL).all(-1), FULL, PARTIAL * (t != EMPTY).any(-1)) for t in row]
        for row in ([part.flatten(2) for part in row] for row in rows)
    ]
    expected = torch.stack([torch.stack(row, -1) for row in kinds], -2).to(torch.int8)
    wanted = BlockRuns.from_states(expected, q_len, kv_len, other)
    for name in ("full", "partial", "full_t", "partial_t"):
        for part in ("row_ptr", "start", "length"):
            pair = (getattr(getattr(runs, name), part) for runs in (found, wanted))
            torch.testing.assert_close(*pair, rtol=0, atol=0)


@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 2**32 - 1),
)
def test_packed_heads_follow_each_other(rows: int, columns: int, heads: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randint(0, 3, (1, 1, rows, columns), generator=generator, dtype=torch.int8)
    runs = BlockRuns.from_states(states, rows * 16 - 3, columns * 16, (16, 16))
    found = packed(runs, heads)
    expected = states.repeat(1, 1, heads, 1)
    assert torch.equal(found.states(), expected)
    turned = replace(
        found, q_len=found.kv_len, kv_len=found.q_len,
        full=found.full_t, partial=found.partial_t,
    )  # fmt: skip
    assert torch.equal(turned.states(), expected.mT)
