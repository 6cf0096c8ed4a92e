"""Check kv blocks of the Hopper backward that are split over several work tiles, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import masks

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.schedule.split_kv import Cost
from attnkit.splice import backward_call, sm90_backward
from attnkit.splice.backward_work import BackwardWork
from attnkit.templates.common.work_tile import WorkItem
from tests.sampling import diagonal, first_of
from tests.templates.backward_kit import (
    BF16,
    CAUSAL,
    FP16,
    check,
    draw,
    forget,
    gradients,
    observed,
    ordered,
    poisoned,  # noqa: F401
)

pytestmark = pytest.mark.usefixtures("poisoned")

CHEAP = Cost(full=1000, partial=1000, tile=1, merge=1)  # a split is worth it wherever it helps


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[BackwardWork]:
    """Return a list of the tables of backwards on six CTAs, with nearly free splits."""
    cheap = replace(sm90_backward.BACKWARD, cost=lambda settings: CHEAP)
    monkeypatch.setattr(sm90_backward, "BACKWARD", cheap)
    return observed(monkeypatch, 6)


@pytest.mark.parametrize(
    ("mask", "kind"),
    diagonal([None, CAUSAL], [((64, 64), BF16), ((128, 128), FP16)]),
    ids=str,
)
def test_parts_are_joined_in_any_order(
    works: list[BackwardWork], mask: Any, kind: tuple[tuple[int, int], torch.dtype]
) -> None:
    dims, dtype = kind
    check(draw(330, dims=dims, heads=(1, 1), dtype=dtype), mask=mask, mode="check")
    assert (works[-1].work_tiles[:, WorkItem.NUM_PARTS] > 1).any()


@pytest.mark.parametrize("dims", first_of((case,) for case in [(64, 128), (40, 72)]))
def test_head_dims_and_ragged_ends(works: list[BackwardWork], dims: tuple[int, int]) -> None:
    check(draw(270, 150, dims=dims, heads=(1, 1)), mask=masks.sliding_window(100))
    assert (works[-1].work_tiles[:, WorkItem.NUM_PARTS] > 1).any()


def test_one_tile_in_many_parts(works: list[BackwardWork]) -> None:
    check(draw(500, 60, dims=(128, 128), heads=(1, 1)))
    assert works[-1].work_tiles[:, WorkItem.NUM_PARTS].tolist() == [6] * 6


@pytest.mark.exhaustive
def test_shared_kv_heads(works: list[BackwardWork]) -> None:
    """Gradients are exact if query heads share a kv head and their kv blocks are split."""
    check(draw(500, 200, heads=(2, 1)), mode="check")
    assert (works[-1].work_tiles[:, WorkItem.NUM_PARTS] > 1).any()
    assert works[-1].units[3] == 0


def test_gradients_of_captured_tensors(works: list[BackwardWork]) -> None:
    mod = lambda w: lambda s, b, h, q, kv: s * w[h] + w[h] * (kv - q)
    check(draw(330), mod, CAUSAL, [torch.rand(2)])
    assert (works[-1].work_tiles[:, WorkItem.NUM_PARTS] > 1).any()


def test_whole_tiles_are_as_without_parts(
    works: list[BackwardWork], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = draw(400, 900, heads=(1, 1))
    parted = _gradients(drawn)
    pieces = works[-1].work_tiles
    forget(monkeypatch)
    unsplit = replace(sm90_backward.BACKWARD, splits=lambda settings: False)
    monkeypatch.setattr(sm90_backward, "BACKWARD", unsplit)
    whole = _gradients(drawn)
    assert (works[-1].work_tiles[:, WorkItem.SPLIT] < 0).all()
    tiles = set(pieces[pieces[:, WorkItem.SPLIT] < 0, 2].tolist())
    assert 0 < len(tiles) < 8
    for tile in tiles:
        at = slice(128 * tile, 128 * tile + 128)
        for one, other in zip(parted[1:], whole[1:], strict=True):
            assert torch.equal(one[:, :, at], other[:, :, at])


def test_counters_are_left_at_zero(
    works: list[BackwardWork], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call leaves its counters at zero for the next call on the stream."""
    counts = torch.zeros(200, dtype=torch.int32)
    monkeypatch.setattr(backward_call, "zero_counters", lambda device, capturing, count: counts)
    drawn = draw(330, heads=(1, 1))
    for _ in range(2):
        check(drawn)
        assert (works[-1].work_tiles[:, WorkItem.NUM_PARTS] > 1).any()
        assert not counts.any()


def test_a_fixed_order_splits_no_kv_block(works: list[BackwardWork]) -> None:
    ordered("emulate", "eager", 6)
    assert (works[-1].work_tiles[:, WorkItem.NUM_PARTS] == 1).all()


def _gradients(drawn: tuple[Sequence[Tensor], Sequence[Tensor]]) -> list[Tensor]:
    return gradients("emulate", *drawn, (), None, None, None)
