"""Check schedules: complete, balanced, ordered for L2 reuse, with correctly split rows."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnkit.errors import OptionError, ShapeError
from attnkit.runtime.merge_states import merge_states
from attnkit.schedule.l2_sections import chunk_of, distinct, sections, unit_of_rows
from attnkit.schedule.scheduler import (
    FORWARD,
    ORDERS,
    Shape,
    schedule_backward,
    schedule_forward,
)
from attnkit.schedule.simulator import simulate
from attnkit.schedule.split_kv import (
    Cost,
    Rows,
    fill_shares,
    predict_makespan,
    split_evenly,
)
from attnkit.sparsity.block_runs import FULL, PARTIAL, BlockRuns, Runs
from tests.schedule.schedule_cases import Case, cases, walked

INF = float("inf")


def states_of(kind: str, blocks: int) -> Tensor:
    """Return tile states of a benchmark mask, int8 [1, heads, blocks, blocks]."""
    q, kv = torch.arange(blocks)[:, None], torch.arange(blocks)
    random = torch.Generator().manual_seed(0)
    if kind == "random":  # skewed: a few rows of each head keep nearly all
        share = torch.rand(16, blocks, 1, generator=random) ** 4
        kept = torch.rand(16, blocks, blocks, generator=random) < share
        return (kept * torch.randint(PARTIAL, FULL + 1, kept.shape, generator=random))[None].to(
            torch.int8
        )
    if kind == "documents":
        positions = blocks * 128
        ends = torch.randperm(positions - 1, generator=random)[:15].add(1).sort().values
        ids = torch.searchsorted(ends, torch.arange(positions), right=True).view(blocks, 128)
        first, last = ids[:, :1], ids[:, -1:]
        some = (first <= last.T) & (last >= first.T) & (q >= kv)
        full = (first == last) & (first == last.T) & (first.T == last) & (q > kv)
    else:
        width = {"causal": blocks + 1, "window": 8}[kind]  # window 1024
        some = (q >= kv) & (q - kv <= width)
        full = (q > kv) & (q - kv < width)
    grid = some.to(torch.int8) * PARTIAL + (full & some).to(torch.int8)
    return grid[None, None]


def made(kind: str, blocks: int) -> BlockRuns:
    length = blocks * 128
    return BlockRuns.from_states(states_of(kind, blocks), length, length, (128, 128))


@given(case=cases())
def test_every_tile_is_visited_exactly_once(case: Case) -> None:
    schedule = case.schedule()
    work_tiles: dict[tuple[int, int, int], list[tuple[int, list[int], list[int]]]] = {}
    for tile, slot, partial, full in walked(case, schedule):
        work_tiles.setdefault(tile, []).append((slot, partial, full))
    lists = case.lists()
    assert work_tiles.keys() == lists.keys()
    split = {}
    for tile, mine in work_tiles.items():
        mine.sort(key=lambda work_tile: work_tile[0])
        # in the order of their slots, work tiles are consecutive stretches: PARTIAL first, then FULL
        assert [t for _, partial, _ in mine for t in partial] == lists[tile][0]
        assert [t for _, _, full in mine for t in full] == lists[tile][1]
        if len(mine) == 1:
            assert mine[0][0] == -1
        else:
            assert all(partial or full for _, partial, full in mine)
            split[tile] = [slot for slot, _, _ in mine]
    pointers = schedule.split_ptr.tolist()
    expected = {
        tuple(tile): list(range(a, b))
        for tile, (a, b) in zip(schedule.split.tolist(), itertools.pairwise(pointers), strict=True)
    }
    assert split == expected
    assert [s for slots in expected.values() for s in slots] == list(range(pointers[-1]))
    if not case.split or case.order == "grid":
        assert not split


@given(case=cases())
def test_cursors_of_no_tiles_are_zero(case: Case) -> None:
    schedule = case.schedule()
    for cursors in (schedule.partial, schedule.full):
        assert not cursors[cursors[:, 2] == 0].any()


@pytest.mark.parametrize("order", ORDERS)
def test_schedules_are_on_the_device_of_the_runs(order: str) -> None:
    runs = made("documents", 16)
    expected = schedule_forward(runs, Shape(1, 2, 16), workers=4, order=order)
    with torch.device("meta"):  # on which nothing can be computed by mistake
        found = schedule_forward(runs, Shape(1, 2, 16), workers=4, order=order)
    assert torch.equal(found.table(), expected.table())


@given(case=cases())
def test_parts_name_the_row_that_they_share(case: Case) -> None:
    schedule = case.schedule()
    split = [tuple(tile) for tile in schedule.split.tolist()]
    counts = schedule.split_ptr.diff().tolist()
    for b, h, tile, slot, *_, row, parts in schedule.table().tolist():
        if slot < 0:
            assert (row, parts) == (-1, 1)
        else:
            assert split[row] == (b, h, tile)
            assert parts == counts[row] > 1


@given(case=cases())
def test_cost_is_linear_in_the_tiles(case: Case) -> None:
    schedule, cost = case.schedule(), case.cost
    for price, (_, slot, partial, full) in zip(
        schedule.cost.tolist(), walked(case, schedule), strict=True
    ):
        body = cost.partial * len(partial) + cost.full * len(full)
        assert price == cost.tile + body + (cost.merge if slot >= 0 else 0)
    whole = case.schedule(split=False)
    assert whole.unsplit == schedule.unsplit == int(whole.cost.sum())


@given(case=cases(orders=("longest",)))
def test_longest_first_with_ties_in_natural_order(case: Case) -> None:
    """A section is sorted by cost, then tile; heads that share K and V come next to each other."""
    schedule = case.schedule(l2_bytes=1 << 40)
    found = [
        (tile, slot, cost)
        for cost, (tile, slot, *_) in zip(
            schedule.cost.tolist(), walked(case, schedule), strict=True
        )
    ]
    keys, rank = [], dict.fromkeys((tile for tile, *_ in found), -1)
    for tile, slot, cost in sorted(found):
        b, h, row = tile
        rank[tile] += 1
        keys.append(((-cost, row, rank[tile], case.unit(b, h), b, h), (tile, slot, cost)))
    assert [work_tile for _, work_tile in sorted(keys)] == found


@given(case=cases(orders=("grid", "ascending", "descending")))
def test_fixed_orders(case: Case) -> None:
    found = [tile for tile, *_ in walked(case, case.schedule(l2_bytes=1 << 40))]
    if case.order == "grid":
        assert found == sorted(found)
    else:
        sign = 1 if case.order == "ascending" else -1
        tiles = [sign * tile for _, _, tile in found]
        assert tiles == sorted(tiles)
        # and in sections of any size still within each head
        cut = [tile for tile, *_ in walked(case, case.schedule())]
        for head in {tile[:2] for tile in cut}:
            mine = [sign * t for b, h, t in cut if (b, h) == head]
            assert mine == sorted(mine)


def best_makespan(costs: list[int], workers: int) -> int:
    """Compute the optimal makespan by trying every assignment."""
    loads = {(0,) * workers}
    for cost in costs:
        loads = {
            tuple(sorted((*load[:i], load[i] + cost, *load[i + 1 :])))
            for load in loads
            for i in range(workers)
        }
    return min(load[-1] for load in loads)


@given(
    tiles=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9),
    workers=st.integers(1, 4),
)
def test_longest_first_is_within_four_thirds_of_the_optimum(
    tiles: list[tuple[int, int]], workers: int
) -> None:
    """The makespan is at most (4/3 - 1/(3 m)) times the optimum (Graham 1969)."""
    states = torch.zeros(1, 1, len(tiles), 18, dtype=torch.int8)
    for row, (partial, full) in enumerate(tiles):
        states[0, 0, row, :partial] = PARTIAL
        states[0, 0, row, 9 : 9 + full] = FULL
    runs = BlockRuns.from_states(states, len(tiles), 18, (1, 1))
    schedule = schedule_forward(runs, Shape(1, 1, 1), workers=workers, split=False,
                                cost=Cost(full=2, partial=3, tile=1, merge=1))  # fmt: skip
    best = best_makespan(schedule.cost.tolist(), workers)
    assert 3 * workers * simulate(schedule).makespan <= (4 * workers - 1) * best


@given(case=cases())
def test_splitting_never_makes_it_longer(case: Case) -> None:
    split, whole = case.schedule(split=True), case.schedule(split=False)
    assert simulate(split).makespan <= simulate(whole).makespan
    assert simulate(split).makespan >= split.bound
    assert len(split.split) <= len(case.lists())


@pytest.mark.parametrize("workers", [132, 148])
@pytest.mark.parametrize("make", [schedule_forward, schedule_backward])
@pytest.mark.parametrize("kind", ["causal", "window", "documents", "random"])
def test_makespan_is_within_five_percent_of_the_bound(
    kind: str, make: object, workers: int
) -> None:
    runs = made(kind, 64)
    schedule = make(runs, Shape(2, 16, 1 << 16), workers=workers)  # type: ignore[operator]
    assert simulate(schedule).makespan <= 1.05 * schedule.bound


def test_long_rows_are_split_to_their_share() -> None:
    """Rows longer than a worker's share are split, and the makespan is near the bound.

    The cases are a decoding step of 8 heads over a million keys, and one global row among short
    ones.
    """
    states = torch.full((1, 1, 1, 8192), FULL, dtype=torch.int8)
    decode = BlockRuns.from_states(states, 1, 1 << 20, (128, 128))
    schedule = schedule_forward(decode, Shape(1, 8, 1 << 16), workers=132)
    assert len(schedule.split) == 8
    assert simulate(schedule).makespan <= 1.05 * schedule.unsplit / 132
    states = torch.eye(1024, dtype=torch.int8)[None, None].clone()
    states[0, 0, 7] = FULL
    sinks = BlockRuns.from_states(states, 1 << 17, 1 << 17, (128, 128))
    schedule = schedule_forward(sinks, Shape(1, 1, 1 << 16), workers=132)
    assert schedule.split.tolist() == [[0, 0, 7]]
    work = int(schedule.cost.sum())
    assert work <= 1.1 * schedule.unsplit
    assert simulate(schedule).makespan <= 1.05 * work / 132


@given(
    tiles=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99)), min_size=1, max_size=60),
    workers=st.integers(1, 9),
    cost=st.builds(Cost, *(st.integers(low, 9) for low in (1, 1, 0, 0))),
    seed=st.integers(0, 9),
)
def test_fill_shares_splits_only_rows_that_exceed_a_share(
    tiles: list[tuple[int, int]], workers: int, cost: Cost, seed: int
) -> None:
    """`fill_shares` splits at most once per worker and loses no tile, for any order of rows."""
    partial, full = torch.tensor(tiles).unbind(1)
    rows = Rows(partial, full, cost)
    order = torch.randperm(len(tiles), generator=torch.Generator().manual_seed(seed))
    work_tiles = fill_shares(rows, order, workers)
    assert work_tiles.row.numel() - len(tiles) < workers
    count = torch.zeros_like(full).index_add_(0, work_tiles.row, work_tiles.stop - work_tiles.first)
    assert torch.equal(count, rows.tiles)
    prices = rows.body + cost.tile
    loads, share = [0] * workers, int(prices.sum()) // workers
    for row in order.tolist():
        loads.sort()
        loads[0] += int(prices[row])
        if loads[0] > share:
            break
        assert work_tiles.parts[work_tiles.row == row].tolist() == [1]


def test_an_even_split_makes_no_work_tile_of_nothing() -> None:
    """A share may end inside an expensive last tile, nearest to the end of the row."""
    rows = Rows(torch.tensor([9]), torch.tensor([1]), Cost(full=1000, partial=10, tile=0, merge=0))
    for limit in (1, 109, 300, 600):
        work_tiles = split_evenly(rows, limit)
        assert bool((work_tiles.first < work_tiles.stop).all())
        assert int(work_tiles.stop[-1]) == 10
        assert work_tiles.parts.tolist() == [work_tiles.row.numel()] * work_tiles.row.numel()
    equal = Rows(torch.tensor([0]), torch.tensor([3]), Cost(full=10, partial=10, tile=0, merge=0))
    assert split_evenly(equal, 10).first.tolist() == [0, 1, 2]


def test_the_shortest_that_go_last_may_take_just_half_of_the_longest() -> None:
    """Work tiles at the end take at most half of what the workers do in the longest work tile."""

    def found(order: str, lengths: list[list[int]], cost: Cost, workers: int) -> list[int]:
        ends = torch.tensor(lengths)[None, :, :, None]
        states = (torch.arange(6) < ends).to(torch.int8) * FULL
        if order == "falling":
            states = states.transpose(2, 3).contiguous()
        runs = BlockRuns.from_states(states, *states.shape[2:], (1, 1))
        make = schedule_backward if order == "falling" else schedule_forward
        schedule = make(
            runs, Shape(1, len(lengths), 1),
            workers=workers, cost=cost, l2_bytes=12, order=order, split=False,
        )  # fmt: skip
        return schedule.cost.tolist()

    # 1 + 1 + 1 + 3 + 4 is half of 4 times 5
    assert found("falling", [[1, 5, 1, 3, 4, 1]], Cost(1, 1, 0, 0), 4) == [5, 4, 3, 1, 1, 1]


def test_the_last_wave_is_cut_where_it_pays() -> None:
    """The last wave is split if that balances the workers.

    1024 equal tiles are 7.76 for each of 132 workers, and take 8 without a split.
    """
    states = torch.full((1, 1, 64, 103), FULL, dtype=torch.int8)
    runs = BlockRuns.from_states(states, 8192, 8192, (128, 80))
    schedule = schedule_forward(runs, Shape(2, 8, 80 << 10), workers=132)
    assert schedule.work_tile_count < 1024 + 132
    assert simulate(schedule).makespan <= 1.01 * schedule.unsplit / 132


def test_a_cheap_last_wave_is_not_cut() -> None:
    """Balanced work is not split.

    Each work tile costs a prologue, and each split costs a merge.
    """
    runs = made("causal", 64)
    assert not len(schedule_forward(runs, Shape(2, 16, 1 << 16), workers=132).split)


@given(case=cases(orders=("longest",), backward=False))
def test_merged_parts_equal_the_unsplit_attention(case: Case) -> None:
    schedule, runs, shape = case.schedule(split=True), case.runs, case.shape
    random = torch.Generator().manual_seed(1)
    lead = (shape.batch, shape.heads)
    scores = torch.randn(*lead, runs.q_len, runs.kv_len, generator=random, dtype=torch.float64)
    value = torch.randn(*lead, runs.kv_len, 2, generator=random, dtype=torch.float64)

    def attend(tile: tuple[int, int, int], tiles: list[int]) -> tuple[Tensor, Tensor]:
        b, h, row = tile
        columns = [c for t in tiles for c in range(3 * t, 3 * t + 3)]
        part = scores[b, h, 2 * row : 2 * row + 2, columns]
        if not columns:
            return part.new_zeros(2, 2), part.new_full((2,), -INF)
        return part.softmax(-1) @ value[b, h, columns], part.logsumexp(-1)

    partials = {slot: attend(tile, partial + full)
                for tile, slot, partial, full in walked(case, schedule) if slot >= 0}  # fmt: skip
    lists = case.lists()
    pointers = schedule.split_ptr.tolist()
    for (b, h, row), (first, stop) in zip(
        schedule.split.tolist(), itertools.pairwise(pointers), strict=True
    ):
        out, lse = partials[first]
        for slot in range(first + 1, stop):
            out, lse = merge_states(out, lse, *partials[slot])
        expected = attend((b, h, row), [*lists[b, h, row][0], *lists[b, h, row][1]])
        torch.testing.assert_close(out, expected[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse, expected[1], rtol=1e-12, atol=1e-12)


@given(case=cases(), lengths=st.integers(0, 5))
def test_stretches_count_their_tiles(case: Case, lengths: int) -> None:
    runs, chunk = case.runs, 1 + lengths
    different, every = distinct((runs.full, runs.partial), runs.q_blocks, chunk, runs.kv_blocks)
    kept = (runs.states() > 0).flatten(0, 1)
    for part, (mine, total) in enumerate(zip(different.T, every.T, strict=True)):
        rows = kept[:, part * chunk : (part + 1) * chunk]
        assert mine.tolist() == rows.any(1).sum(1).tolist()
        assert total.tolist() == rows.sum((1, 2)).tolist()


def sections_of(case_runs: BlockRuns, shape: Shape, l2_bytes: int) -> list[set[tuple[int, int]]]:
    """Return the (unit, kv tile) pairs of each maximal stretch with non-increasing cost."""
    schedule = schedule_forward(case_runs, shape, workers=4, l2_bytes=l2_bytes, split=False)
    case = Case(case_runs, shape, 4, FORWARD, l2_bytes, "longest", False, False)
    found: list[set[tuple[int, int]]] = []
    last = -1
    for cost, (tile, _, partial, full) in zip(
        schedule.cost.tolist(), walked(case, schedule), strict=True
    ):
        if not found or cost > last:
            found.append(set())
        last = cost
        found[-1] |= {(case.unit(*tile[:2])[1], t) for t in partial + full}
    return found


def test_four_sections_of_heads_fit_l2() -> None:
    """A section holds as many kv heads as fit a quarter of L2.

    Each kv head has 16 kv tiles. With room for 128 in L2, a section has two kv heads, each with its
    3 query heads.
    """
    shape = Shape(1, 72, 1 << 16, kv_heads=24)
    found = sections_of(made("causal", 16), shape, 128 << 16)
    assert [len(tiles) for tiles in found] == [32] * 12


@pytest.mark.parametrize("kv_heads", [0, 2])
def test_batch_elements_run_together(kv_heads: int) -> None:
    """Work tiles that differ in the batch element alone are neighbours in the list."""
    shape = Shape(3, 4, 1 << 16, kv_heads=kv_heads, batch_together=True)
    schedule = schedule_forward(
        made("causal", 16), shape, workers=4, l2_bytes=128 << 16, split=False
    )
    tiles = schedule.table()[:, :3].tolist()
    for first in range(0, len(tiles), 3):
        assert [b for b, _, _ in tiles[first : first + 3]] == [0, 1, 2]
        assert len({tuple(place) for _, *place in tiles[first : first + 3]}) == 1


def section_counts(most_sections: int, large_end: bool) -> list[int]:
    """Return the number of units of each section: 24 units of 16 tiles, 128 of which fit L2."""
    runs = made("causal", 16)
    unit = unit_of_rows(1, 24, (1, 24), 16, torch.device("cpu"))
    section = sections(
        (runs.full, runs.partial), 24, unit, 16, 16, 128, 17, most_sections, large_end
    )
    return [int(n) // 16 for n in section.bincount()]


def test_the_last_section_may_be_large() -> None:
    assert section_counts(99, False) == [2] * 12
    assert section_counts(99, True) == [2] * 8 + [8]
    assert section_counts(6, False) == [4] * 6
    assert section_counts(6, True) == [4] * 4 + [8]
    assert section_counts(1, False) == section_counts(1, True) == [8] * 3  # more exceed L2


def test_documents_need_a_large_last_section() -> None:
    """Small sections alone end 7 % above the bound for this mask."""
    schedule = schedule_forward(made("documents", 64), Shape(2, 16, 1 << 16), workers=132)
    assert simulate(schedule).makespan * 100 <= schedule.bound * 102


def test_a_unit_too_large_is_cut_where_that_saves_traffic() -> None:
    runs = made("window", 512)
    lists = (runs.full, runs.partial)
    assert chunk_of(lists, 512, 512, capacity=64, least=8) == 32
    assert chunk_of(lists, 512, 512, capacity=64, least=100) == 512
    causal = made("causal", 512)  # every second row alone is too large
    lists = (causal.full, causal.partial)
    assert chunk_of(lists, 512, 512, capacity=64, least=8) == 512


@given(case=cases(orders=("longest",), backward=False))
def test_heads_that_share_keys_run_side_by_side(case: Case) -> None:
    """Heads that share K and V and have no masks of their own take the same tile consecutively."""
    if case.runs.heads > 1 or case.runs.batch > 1:
        return
    order = [tile for tile, *_ in walked(case, case.schedule(split=False))]
    seen = [(case.unit(b, h), t) for b, h, t in order]
    groups = [key for key, _ in itertools.groupby(seen)]
    assert len(groups) == len(set(groups))


@given(costs=st.lists(st.integers(0, 50), min_size=1, max_size=2000), workers=st.integers(1, 5))
def test_prediction_is_right_to_a_grain(costs: list[int], workers: int) -> None:
    loads = [0] * workers
    for cost in costs:
        loads[loads.index(min(loads))] += cost
    found = predict_makespan(torch.tensor(costs), workers)
    grain = 0 if len(costs) <= 32 * workers else sum(costs) / (32 * workers) + 50
    assert abs(found - max(loads)) <= grain


def test_a_million_tokens() -> None:
    """A causal schedule of 16 heads over 2^20 tokens is complete, ordered and balanced."""
    count = 1 << 13
    rows = torch.arange(count + 1, dtype=torch.int32)
    one = torch.ones(count, dtype=torch.int32)
    partial = Runs(rows, rows[:-1], one)
    full = Runs((rows - 1).clamp(min=0), torch.zeros_like(one[1:]), rows[1:-1])
    runs = BlockRuns(1 << 20, 1 << 20, (128, 128), 1, 1, full, partial, full, partial)
    schedule = schedule_forward(runs, Shape(1, 16, 1 << 16, kv_heads=4), workers=132)
    assert schedule.work_tile_count == 16 * count
    assert int(schedule.full[:, 2].sum()) == 16 * count * (count - 1) // 2
    assert schedule.tile[:16].tolist() == [count - 1] * 4 + [count - 2] * 4 + [
        count - 3] * 4 + [count - 4] * 4  # fmt: skip
    assert predict_makespan(schedule.cost, 132) <= 1.05 * schedule.bound


def test_bad_arguments_are_named() -> None:
    runs, shape = made("causal", 4), Shape(2, 4, 1024, kv_heads=2)
    with pytest.raises(OptionError, match="order='shortest' is not known"):
        schedule_forward(runs, shape, workers=4, order="shortest")
    with pytest.raises(OptionError, match="must be positive, got 0"):
        schedule_forward(runs, shape, workers=0)
    with pytest.raises(ShapeError, match="kv_heads must divide heads"):
        Shape(2, 4, 1024, kv_heads=3)
    with pytest.raises(ShapeError, match="kv_batch must be the batch or 1"):
        Shape(4, 4, 1024, kv_batch=2)
    with pytest.raises(ShapeError, match="at least 1"):
        Shape(2, 0, 1024)
    with pytest.raises(OptionError, match="integers"):
        Cost(full=1.5, partial=2, tile=0, merge=0)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="cannot be free"):
        Cost(full=1, partial=0, tile=0, merge=0)
    heads = BlockRuns.from_states(torch.zeros(1, 3, 4, 4, dtype=torch.int8), 512, 512, (128, 128))
    with pytest.raises(ShapeError, match="3 heads; the tensors have batch 2 and 4 heads"):
        schedule_backward(heads, shape, workers=4)


def test_it_reads_as_a_sentence() -> None:
    schedule = schedule_forward(made("causal", 4), Shape(2, 4, 1024), workers=4)
    assert str(schedule) == (
        "forward schedule, longest, for 4 workers: 32 work tiles of 2 x 4 x 4 tiles, 0 split; "
        f"bound {schedule.bound:.0f} cycles"
    )
    schedule = schedule_backward(made("causal", 4), Shape(2, 4, 1024), workers=3)
    assert str(schedule).startswith("backward schedule, ")
