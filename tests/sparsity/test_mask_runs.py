"""Check how runs for a GPU are found. The meta device stands in for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnkit import create_mask, masks
from attnkit.errors import DeviceError
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.sparsity.mask_runs import check_lengths, mask_runs
from attnkit.tracing.tracer import trace
from attnkit.util import caches
from tests.sparsity.mask_graphs import states_of
from tests.sparsity.test_hierarchical import check

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture(autouse=True)
def stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the runs where they were computed, and forget earlier ones."""
    monkeypatch.setattr(BlockRuns, "to", lambda self, device: self)
    caches.clear_all()


def runs_of(mask: Any, length: int, block: tuple[int, int], device: torch.device) -> BlockRuns:
    traced = trace(mask, "mask")
    found, checked = mask_runs(
        traced, q_len=length, kv_len=length, block=block, batch=2, heads=3, device=device
    )
    assert not checked
    return found


@pytest.mark.parametrize("mask", [masks.causal(), masks.sliding_window(40, 10), masks.prefix_lm(9)])
def test_intervals_give_the_tiles(monkeypatch: pytest.MonkeyPatch, mask: Any) -> None:
    """Tiles of a mask whose rows keep an interval are found without classification."""
    classified: list[bool] = []
    from attnkit.sparsity import classify

    original = classify.classify
    monkeypatch.setattr(
        classify, "classify", lambda *a, **o: (classified.append(True), original(*a, **o))[1]
    )
    expected = states_of(create_mask(mask, None, None, 150, 150), (24, 7))
    for device, others in ((META, []), (CPU, [True])):
        runs = runs_of(mask, 150, (24, 7), device)
        check(runs, expected)
        assert runs.batch == runs.heads == 1
        assert runs.full.start.device == CPU
        assert classified == others


def test_other_masks_are_classified() -> None:
    mask = masks.dilated(60, 3)
    expected = states_of(create_mask(mask, None, None, 150, 150), (16, 16))
    check(runs_of(mask, 150, (16, 16), META), expected)


def test_long_masks_are_computed_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnkit.sparsity.intervals import tiles

    devices: list[torch.device] = []
    monkeypatch.setattr(
        tiles, "tiles_of", lambda found, block, dtype, device: devices.append(device)
    )
    monkeypatch.setattr("attnkit.sparsity.mask_runs._HOST_LIMIT", 128)
    runs_of(masks.causal(), 64, (16, 16), META)
    runs_of(masks.causal(), 65, (16, 16), META)
    assert devices == [CPU, META]


def test_tensors_without_data_are_named() -> None:
    table = torch.zeros(8, device="meta")
    traced = trace(lambda s, b, h, q, kv: s + table[q], "score")
    message = "the score_mod reads the tensor 'table', which has no data .*on meta"
    with pytest.raises(DeviceError, match=message):
        check_lengths(traced, 8, 8, 1, 1)
