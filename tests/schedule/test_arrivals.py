"""Check the numbers of kv tiles that visit each q tile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from attnkit import create_block_mask
from attnkit.schedule import arrivals
from attnkit.schedule.arrivals import few_visits
from attnkit.sparsity.block_runs import BlockRuns
from tests.schedule.schedule_cases import Case, cases


@given(case=cases(orders=("longest",), backward=True, most=8))
def test_numbers_equal_the_lists(case: Case) -> None:
    sizes = case.shape.batch, case.shape.heads
    expected = torch.zeros(*sizes, case.runs.q_blocks, dtype=torch.int32)
    for (b, h, _), (partial, full) in case.lists().items():
        for q in partial + full:
            expected[b, h, q] += 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrivals, "MOST", 1 << 30)
        patch.setattr(arrivals, "MOST_AT_ONE", int(expected.max()))
        found = few_visits(case.runs, *sizes)
        patch.setattr(arrivals, "MOST_AT_ONE", int(expected.max()) - 1)
        assert few_visits(case.runs, *sizes) is None
    assert found is not None
    assert found.dtype == torch.int32
    assert torch.equal(found, expected.view(-1))


def band(width: int) -> BlockRuns:
    """Return the tiles of a mask in which each q tile of 16 meets `width` kv tiles."""
    keep = lambda b, h, q, kv: (q // 128 + kv // 128) % 16 < width
    return create_block_mask(keep, None, None, 2048, 2048, device="cpu").runs


def test_masks_with_many_kv_tiles_are_not_counted() -> None:
    found = few_visits(band(arrivals.MOST), 2, 3)
    assert found is not None
    assert found.tolist() == [arrivals.MOST] * (2 * 3 * 16)
    assert few_visits(band(arrivals.MOST + 1), 2, 3) is None
