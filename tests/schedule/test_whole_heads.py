"""Check work lists in which one worker computes all kv tiles of a head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given

from attnkit import create_block_mask, masks
from attnkit.schedule import whole_heads as module
from attnkit.schedule.scheduler import Schedule, Shape, schedule_backward
from attnkit.schedule.split_kv import Cost
from attnkit.schedule.whole_heads import WholeHeads, choose_whole_heads
from attnkit.schedule.work_list import packed
from attnkit.sparsity.block_runs import BlockRuns
from tests.schedule.schedule_cases import Case, cases, walked

COST = Cost(full=3030, partial=3180, tile=9500, merge=6500)
APART = "the first or the last visits of a kv tile are not next to each other"


@given(case=cases(orders=("longest",), backward=True, most=8))
def test_the_flags_say_who_is_first_and_last(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BYTES_A_CLOCK", 1)
        patch.setattr(module, "MOST", 1 << 30)
        found = choose_whole_heads(case.runs, case.schedule(), "", 1 << 40)
    visits: dict[tuple[int, int, int], list[int]] = {}
    for (b, h, kv), (partial, full) in case.lists().items():
        for q in partial + full:
            visits.setdefault((b, h, q), []).append(kv)
    if len(visits) < case.shape.batch * case.shape.heads * case.runs.q_blocks:
        assert found == "some q tiles meet no kv tile"
        return
    assert isinstance(found, WholeHeads) == ascending(case, visits)
    if not isinstance(found, WholeHeads):
        assert found == APART
        return
    work_tiles = walked(case, found.schedule)
    assert sorted(tile for tile, *_ in work_tiles) == sorted(case.lists())
    limits = zip(found.store_begin.tolist(), found.finish_end.tolist(), strict=True)
    for ((b, h, kv), _, partial, full), (begin, end) in zip(work_tiles, limits, strict=True):
        for q in partial + full:
            assert (q >= begin) == (visits[b, h, q][0] == kv)
            assert (q < end) == (visits[b, h, q][-1] == kv)
    heads_are_together(case, found)


def ascending(case: Case, visits: dict[tuple[int, int, int], list[int]]) -> bool:
    """Return whether each kv tile's first visits follow all others, and its last precede them."""
    for (b, h, kv), (partial, full) in case.lists().items():
        own = sorted(partial + full)
        first = [visits[b, h, q][0] == kv for q in own]
        last = [visits[b, h, q][-1] == kv for q in own]
        if first != sorted(first) or last != sorted(last, reverse=True):
            return False
    return True


def heads_are_together(case: Case, found: WholeHeads) -> None:
    """Assert that each head's work tiles with q tiles are neighbours, in ascending order."""
    work_tiles, goes_on = walked(case, found.schedule), found.goes_on.tolist()
    some = [(b, h, kv) for (b, h, kv), _, partial, full in work_tiles if partial or full]
    assert [tile for tile, *_ in work_tiles[: len(some)]] == some
    starts = [i for i in range(len(some)) if i == 0 or some[i][:2] != some[i - 1][:2]]
    assert found.starts.tolist() == starts
    assert goes_on == [int(i + 1 < len(some) and i + 1 not in starts) for i in range(len(goes_on))]
    assert len({some[i][:2] for i in starts}) == len(starts)
    assert all(a < b for a, b, on in zip(some, some[1:], goes_on, strict=False) if on)


def chosen(
    heads: int, length: int, mask: Any = None, workers: int = 132, first: str = ""
) -> WholeHeads | str:
    runs = tiles(mask or masks.causal(), length)
    return choose_whole_heads(runs, scheduled(runs, heads, workers), first, heads * length * 128)


def tiles(mask: Any, length: int) -> BlockRuns:
    return create_block_mask(mask, None, None, length, length, BLOCK_SIZE=(64, 128)).runs


def scheduled(runs: BlockRuns, heads: int, workers: int = 132) -> Schedule:
    return schedule_backward(runs, Shape(1, heads, 65536), workers=workers, cost=COST)


def test_many_short_heads_are_computed_whole() -> None:
    found = chosen(512, 512)
    assert isinstance(found, WholeHeads)
    assert found.saved > 0


def test_few_heads_are_shared() -> None:
    assert "cycles more" in str(chosen(160, 512))


def test_long_heads_are_shared() -> None:
    assert chosen(132, 2048) == "a q tile meets more than 3 kv tiles"


def test_packed_heads_have_the_flags_of_one_head() -> None:
    one = tiles(masks.causal(), 512)
    runs = packed(one, 4)
    found = choose_whole_heads(runs, scheduled(runs, 132), "", 4 * 132 * 512 * 128, one)
    assert isinstance(found, WholeHeads)
    assert int(found.finish_end.max()) <= one.q_blocks


def test_the_table_has_the_flags() -> None:
    found = chosen(264, 512)
    assert isinstance(found, WholeHeads)
    table = found.schedule.table()
    found.fill(table)
    columns = torch.stack([found.finish_end, found.store_begin, found.goes_on], 1)
    assert torch.equal(table[:, [3, 10, 11]], columns)
