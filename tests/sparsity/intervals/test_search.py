"""Compare the searches of intervals with a look at every position."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnkit.sparsity.intervals.search import (
    AscendingPieces,
    Ends,
    TrueRuns,
    ValueIndex,
    compact,
    equal_in_order,
    search_in_passes,
)

Random = torch.Generator


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Draw values [b, h, points], and per row limits (first, stop) and an interval (low, high)."""
    random = Random().manual_seed(draw(st.integers(0, 9999)))
    b, h, points, rows = (draw(st.integers(1, n)) for n in (2, 3, 25, 6))
    spread = draw(st.sampled_from([1, 3, 30, 1 << 61]))
    values = torch.randint(-spread, spread + 1, (b, h, points), generator=random)
    if draw(st.booleans()):
        values = values.sort(-1, descending=draw(st.booleans())).values

    def of_rows(least: int, most: int) -> Tensor:
        shape = [draw(st.sampled_from([1, n])) for n in (b, h)]
        return torch.randint(least, most + 1, (*shape, rows, 1), generator=random)

    near = values.flatten()[torch.randint(values.numel(), (1, 1, rows, 1), generator=random)]
    first = of_rows(-spread - 2, spread + 2) if draw(st.booleans()) else near
    return values, first, first + of_rows(-1, spread), of_rows(0, points), of_rows(0, points)


def marked(ends: Ends, shape: tuple[int, ...]) -> Tensor:
    """Return the positions inside the intervals, bool [b, h, rows, points]; each at most once."""
    at = torch.arange(shape[-1])
    low, high = (e[..., None] for e in ends)
    times = ((at >= low) & (at < high)).sum(-2)
    assert bool((times <= 1).all())
    return (times > 0).expand(shape)


def counts(kept: Tensor) -> int:
    """Return the largest number of maximal runs of True in a row."""
    before = torch.nn.functional.pad(kept, (1, 0))[..., :-1]
    return int((kept & ~before).sum(-1).max())


def check(search: Callable[[int], Ends | None], kept: Tensor, most: int | None = None) -> None:
    """Check what a search finds, and that it needs a limit of `most` intervals."""
    most = counts(kept) if most is None else most
    found = search(most)
    assert found is not None
    assert torch.equal(marked(found, tuple(kept.shape)), kept)
    assert found[0].dtype == found[1].dtype == torch.int64
    assert most == 0 or search(most - 1) is None


def inside(low: Tensor, high: Tensor, points: int) -> Tensor:
    at = torch.arange(points)
    return (at >= low) & (at < high)


@given(problems())
def test_runs_of_true(problem: tuple[Tensor, ...]) -> None:
    values, _, _, low, high = problem
    mask = values > values.median()
    rows = torch.broadcast_shapes(mask[:, :, None].shape, low.shape, high.shape)
    kept = (mask[:, :, None] & inside(low, high, values.shape[-1])).expand(rows)
    check(lambda limit: TrueRuns(mask).within(low, high, limit), kept)


@given(problems())
def test_values_in_a_range(problem: tuple[Tensor, ...]) -> None:
    values, first, stop, low, high = problem
    there = inside(low, high, values.shape[-1])
    index = AscendingPieces(values)
    row = values[:, :, None]
    falls = torch.nn.functional.pad(row[..., 1:] < row[..., :-1], (1, 0))
    rows = torch.broadcast_shapes(row.shape, first.shape, stop.shape, there.shape)
    begins = there & ~torch.nn.functional.pad(there, (1, 0))[..., :-1]
    pieces = int((there & (falls | begins)).expand(rows).sum(-1).max())
    for a, z in ((first, stop), (first, None), (None, stop), (None, None)):
        kept = there.clone().expand(rows)
        kept = kept & (row >= a) if a is not None else kept
        kept = kept & (row < z) if z is not None else kept
        check(lambda limit, a=a, z=z: index.between(a, z, low, high, limit), kept, pieces)


@given(problems())
def test_equal_values(problem: tuple[Tensor, ...]) -> None:
    values, target, _, _, _ = problem
    kept = values[:, :, None] == target
    check(lambda limit: ValueIndex(values).equal(target, limit), kept)
    ordered = equal_in_order(values, target)
    if bool((values.diff() >= 0).all()):
        assert ordered is not None
        assert torch.equal(marked(ordered, tuple(kept.shape)), kept)
    else:
        assert ordered is None


@pytest.mark.parametrize("bits", [30, 58, 59, 60, 61, 62])
def test_values_far_apart_in_many_groups(bits: int) -> None:
    """Neither the distances of values nor their products with the number of groups overflow."""
    values = torch.tensor([0, 1, -3, 5, 5, 2, -1, 0]).repeat(4, 3, 5) * (1 << bits - 3)
    near = torch.tensor([-3, 0, 1, 5]).view(1, 1, -1, 1) * (1 << bits - 3)
    shape = (4, 3, near.numel(), values.shape[-1])
    low, high = (torch.full((1, 1, 1, 1), n) for n in (0, shape[-1]))
    row = values[:, :, None]
    for target in (near - 1, near, near + 1):
        assert_kept = lambda found, kept: torch.equal(marked(found, shape), kept.expand(shape))
        found = ValueIndex(values).equal(target, shape[-1])
        assert found is not None
        assert assert_kept(found, row == target)
        found = AscendingPieces(values).between(target, near + 7, low, high, shape[-1])
        assert found is not None
        assert assert_kept(found, (row >= target) & (row < near + 7))


def test_values_at_the_ends_of_int64() -> None:
    limits = torch.iinfo(torch.int64)
    steps = torch.tensor([0, 2, 1, 1, 3]).repeat(2, 1, 2)
    for values in (limits.min + steps, limits.max - steps):
        target = values[:, :, None].transpose(2, 3)
        found = ValueIndex(values).equal(target, 8)
        assert found is not None
        kept = values[:, :, None] == target
        assert torch.equal(marked(found, tuple(kept.shape)), kept)


@given(st.integers(0, 9999), st.integers(1, 5), st.integers(1, 12))
def test_compacted_intervals_are_sorted_and_apart(seed: int, width: int, points: int) -> None:
    random = Random().manual_seed(seed)
    low, high = torch.randint(0, points + 1, (2, 1, 2, 6, width), generator=random)
    found = compact(low, high, points)
    at = torch.arange(points)
    expected = ((at >= low[..., None]) & (at < high[..., None])).any(-2)
    assert torch.equal(marked(found, tuple(expected.shape)), expected)
    assert found[0].shape[-1] == counts(expected)
    for starts, stops in zip(*(x.flatten(0, 2).tolist() for x in found), strict=True):
        used = [(a, z) for a, z in zip(starts, stops, strict=True) if a < z]
        assert used == sorted(used)
        assert all(z < a for (_, z), (a, _) in itertools.pairwise(used))
        rest = list(zip(starts, stops, strict=True))[len(used) :]
        assert rest == [(0, 0)] * len(rest)


@pytest.mark.parametrize("size", [1, 7, 1 << 18])
def test_passes_hold_no_more_rows_than_memory_for_them(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("attnkit.sparsity.intervals.search._PASS_NUMBERS", size)
    low = torch.arange(10).view(1, 1, 10, 1)
    high = torch.full((2, 1, 1, 1), 8)
    passes = []

    def search(low: Tensor, nothing: None, high: Tensor) -> Ends:
        assert nothing is None
        assert high.shape == (2, 1, 1, 1)
        passes.append(low.shape[2])
        return low.expand(2, -1, -1, -1), high.expand(-1, -1, low.shape[2], -1)

    found = search_in_passes(search, [low, None, high], 8)
    assert found is not None
    assert passes == {1: [1] * 10, 7: [3, 3, 3, 1], 1 << 18: [10]}[size]
    assert found[0][0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 0]
    assert found[1][1, 0, :, 0].tolist() == [8] * 8 + [0, 0]
    assert search_in_passes(lambda *x: None, [low, None, high], 8) is None
