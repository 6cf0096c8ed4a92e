"""Check tiles computed from row intervals against brute force."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnkit import Mask, create_block_mask, create_mask, masks
from attnkit.sparsity.intervals.normal_form import Intervals, intervals_of
from attnkit.sparsity.intervals.search import (
    AscendingPieces,
    Ends,
    TrueRuns,
    ValueIndex,
    equal_in_order,
    search_in_passes,
)
from attnkit.sparsity.intervals.tiles import tiles_of
from tests.sparsity.test_hierarchical import check, states_of

LENGTH = 150
# masks whose rows keep one interval each, with sorted bounds
ORDERED = {
    "causal", "sliding_window", "sliding_window/both", "sliding_window/right", "prefix_lm",
    "block_diagonal", "prefix", "document", "document/causal", "document_from_lengths",
    "document_from_cu_seqlens", "causal/bottom-right", "causal/cached", "padding",
    "prefix_lm/batch",
}  # fmt: skip


def found_tiles(
    mask: Callable[..., Any], sizes: tuple[int, int, int, int], block: tuple[int, int]
) -> bool:
    """Return whether row intervals give the tiles; if so, compare them with brute force."""
    q_len, kv_len, batch, heads = sizes
    found = intervals_of(mask, q_len=q_len, kv_len=kv_len, batch=batch, heads=heads)
    tiles = tiles_of(found, block) if isinstance(found, Intervals) else None
    if tiles is None:
        return False
    expected = states_of(create_mask(mask, batch, heads, q_len, kv_len), block)
    check(tiles, expected)
    return True


@pytest.mark.parametrize("length", [96, 333])
@pytest.mark.parametrize("block", [(16, 16), (24, 7), (128, 128)])
def test_library(length: int, block: tuple[int, int]) -> None:
    found = {
        name
        for name, e in masks.examples(length).items()
        if found_tiles(e.mask, (e.q_len, e.kv_len, e.batch, e.heads), block)
    }
    assert found >= ORDERED


def test_as_many_runs_as_allowed_are_listed() -> None:
    runs = TrueRuns(torch.tensor([[[True, False, True, True, False, True]]]))
    low, high = torch.tensor([[[[0], [3]]]]), torch.tensor([[[[6], [6]]]])
    assert runs.within(low, high, 2) is None
    found = runs.within(low, high, 3)
    assert found is not None
    kept = [[(a, b) for a, b in zip(*ends, strict=True) if a < b]
            for ends in zip(*(end[0, 0].tolist() for end in found), strict=True)]  # fmt: skip
    assert kept == [[(0, 1), (2, 4), (5, 6)], [(3, 4), (5, 6)]]


@pytest.mark.parametrize("size", [1, 6, 9, 1000])
def test_a_search_in_passes_joins_the_rows(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Each pass gets its rows of every argument, and those that all rows share as they are."""
    monkeypatch.setattr("attnkit.sparsity.intervals.search._PASS_NUMBERS", size)
    first = torch.tensor([4, 1, 9, 0, 2, 7, 3]).view(1, 1, -1, 1)
    count = torch.tensor([1, 2, 0, 0, 1, 3, 1]).view(1, 1, -1, 1)
    steps = torch.tensor([0, 10, 20]).view(1, 1, 1, -1)
    passes = []

    def search(first: Tensor, count: Tensor, steps: Tensor, none: None) -> Ends:
        passes.append(first.shape[2])
        assert none is None
        low = first + steps
        return low, torch.where(steps < 10 * count, low + 1, low)

    low, high = search_in_passes(search, [first, count, steps, None], 30)
    found = [[(a, b) for a, b in zip(*ends, strict=True) if a < b]
             for ends in zip(low[0, 0].tolist(), high[0, 0].tolist(), strict=True)]  # fmt: skip
    assert found == [[(4, 5)], [(1, 2), (11, 12)], [], [], [(2, 3)],
                     [(7, 8), (17, 18), (27, 28)], [(3, 4)]]  # fmt: skip
    assert sum(passes) == 7
    assert max(passes) == {1: 1, 6: 2, 9: 3, 1000: 7}[size]


@st.composite
def rows(draw: st.DrawFn) -> Mask:
    """Draw a mask with one interval per row whose bounds are sorted or random."""
    ends = st.lists(st.integers(-5, LENGTH + 5), min_size=LENGTH, max_size=LENGTH)
    low, high = torch.tensor(draw(ends)), torch.tensor(draw(ends))
    if draw(st.booleans()):
        low, high = low.sort().values, high.sort().values
        low, high = torch.minimum(low, high), torch.maximum(low, high)
    if draw(st.booleans()):
        high = torch.maximum(high, low.roll(-1))
    return Mask(lambda b, h, q, kv: (low[q] <= kv) & (kv < high[q]), "rows()")


@st.composite
def simple(draw: st.DrawFn) -> Mask:
    size = lambda: draw(st.integers(0, LENGTH))
    ids = torch.tensor(draw(st.lists(st.integers(0, 9), min_size=LENGTH, max_size=LENGTH)))
    own = torch.tensor([[size(), size(), size()], [size(), size(), size()]])
    return draw(
        st.sampled_from(
            [
                lambda: masks.causal(),
                lambda: masks.sliding_window(size(), size()),
                lambda: masks.prefix_lm(size()),
                lambda: masks.padding(own[0, :2]),
                lambda: masks.document(ids.sort().values),
                lambda: masks.block_diagonal(1 + size(), 1 + size()),
                lambda: Mask(lambda b, h, q, kv: kv < q + own[b, h], "own()"),
                lambda: masks.causal().shift(q=size() - LENGTH // 2),
            ]
        )
    )()


BLOCKS = st.tuples(st.integers(1, 40), st.integers(1, 40))
SIZES = st.tuples(st.integers(1, LENGTH), st.integers(1, LENGTH))


@given(st.one_of(rows(), simple(), st.tuples(simple(), simple()).map(lambda p: p[0] & p[1])),
       SIZES, BLOCKS)  # fmt: skip
def test_any_rows(mask: Mask, sizes: tuple[int, int], block: tuple[int, int]) -> None:
    found_tiles(mask, (*sizes, 2, 3), block)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ([0, 0, 5, 5], [2, 2, 7, 7]),  # a gap
        ([3, 2, 1, 0], [8, 8, 8, 8]),  # falling
        ([0, 1, 2, 3], [4, 1, 5, 6]),  # an empty row
    ],
)
def test_unsorted_ends_fall_back_to_other_engines(low: list[int], high: list[int]) -> None:
    a, b = torch.tensor(low), torch.tensor(high)
    mask = Mask(lambda _, h, q, kv: (a[q] <= kv) & (kv < b[q]), "rows()")
    found = intervals_of(mask, q_len=4, kv_len=8)
    assert isinstance(found, Intervals)
    assert tiles_of(found, (2, 2)) is None
    runs = create_block_mask(mask, None, None, 4, 8, BLOCK_SIZE=2).runs
    check(runs, states_of(create_mask(mask, 1, 1, 4, 8), (2, 2)))


@given(st.lists(st.integers(-3, 9), min_size=1, max_size=30),
       st.lists(st.integers(-4, 10), min_size=1, max_size=9), st.booleans())  # fmt: skip
def test_two_searches_find_equal_values(ids: list[int], targets: list[int], ordered: bool) -> None:
    values = torch.tensor([[sorted(ids) if ordered else ids]])
    rows = torch.tensor(targets)[None, None, :, None]
    found = equal_in_order(values, rows)
    assert (found is not None) == (sorted(ids) == values.flatten().tolist())
    if found is None:
        return
    known = ValueIndex(values).equal(rows, 1)
    assert known is not None
    for (low, high), (first, stop) in zip(
        torch.cat(found, -1).view(-1, 2).tolist(), torch.cat(known, -1).view(-1, 2).tolist(),
        strict=True,
    ):  # fmt: skip
        assert range(low, high) == range(first, stop)


INT64 = st.one_of(
    st.integers(-3, 9), st.integers(-(2**63), 2**63 - 1), st.sampled_from([-(2**63), 2**63 - 1])
)


def kept(ends: Ends | None, row: int, points: int) -> list[bool]:
    """Return which positions a row's intervals contain."""
    assert ends is not None
    low, high = (x.expand(1, 1, x.shape[2], -1)[0, 0, row].tolist() for x in ends)
    return [any(a <= i < b for a, b in zip(low, high, strict=True)) for i in range(points)]


@given(st.lists(INT64, min_size=1, max_size=30),
       st.lists(st.tuples(INT64, INT64), min_size=1, max_size=9), st.booleans(),
       st.sampled_from([(False, False), (True, False), (False, True)]))  # fmt: skip
def test_searches_take_values_that_are_far_apart(
    numbers: list[int], targets: list[tuple[int, int]], ordered: bool, without: tuple[bool, bool]
) -> None:
    """Values and limits use all of int64, so that a key of distance and group would overflow."""
    numbers = sorted(numbers) if ordered else numbers
    points, values = len(numbers), torch.tensor([[numbers]])
    # the numbers themselves are wanted too
    targets += [(n, n + 1) for n in numbers if n < 2**63 - 1]
    low, high = torch.tensor(targets)[None, None].split(1, -1)
    ends = torch.tensor([[[[0]]]]), torch.tensor([[[[points]]]])
    first, stop = (None if no else x for no, x in zip(without, (low, high), strict=True))
    between = AscendingPieces(values).between(first, stop, *ends, points)
    equal = ValueIndex(values).equal(low, points)
    for row, (a, b) in enumerate(targets):
        inside = [(without[0] or a <= n) and (without[1] or n < b) for n in numbers]
        assert kept(between, row, points) == inside
        assert kept(equal, row, points) == [n == a for n in numbers]


def test_searches_keep_batch_entries_apart() -> None:
    values = torch.tensor([[[-(2**62), 2**62, 5]], [[5, 5, -(2**62)]]])
    target = torch.tensor([5, 6]).view(1, 1, 2, 1)
    equal = ValueIndex(values).equal(target, 2)
    assert equal is not None
    assert torch.cat(equal, -1).tolist() == [[[[2, 3], [0, 0]]], [[[0, 2], [0, 0]]]]
