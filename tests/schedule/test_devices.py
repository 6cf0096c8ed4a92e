"""Check that schedules and what is computed from them are on the device of the runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import create_block_mask, masks
from attnkit.schedule.deterministic_order import deterministic_order
from attnkit.schedule.first_writer import first_writers
from attnkit.schedule.scheduler import ORDERS, Shape, schedule_backward, schedule_forward
from attnkit.schedule.simulator import report, simulate, simulate_turns, visits
from attnkit.schedule.work_list import full_runs, packed, refine, retile, work_list
from attnkit.sparsity.block_runs import BlockRuns, Runs, from_flex

LENGTH, BLOCK = 640, (64, 32)
SHAPE = Shape(2, 4, 4096, kv_heads=2)


def runs_of(mask: Any) -> BlockRuns:
    block_mask = create_block_mask(mask, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)
    return block_mask.runs


RUNS = {
    "causal": runs_of(masks.causal()),
    "documents": runs_of(masks.causal() & masks.document(torch.arange(LENGTH) // 150)),
    "full": full_runs(LENGTH, LENGTH, BLOCK, torch.device("cpu")),
}


def forward(runs: BlockRuns) -> Any:
    found = []
    for order in ORDERS:
        schedule = schedule_forward(runs, SHAPE, workers=5, order=order, l2_bytes=50_000)
        found.append((schedule, simulate(schedule), visits(schedule, runs), str(schedule)))
        found.append((report(schedule, runs, l2_bytes=50_000), work_list(runs, schedule)))
    return found


def backward(runs: BlockRuns) -> Any:
    found = []
    for order in ORDERS:
        schedule = schedule_backward(runs, SHAPE, workers=5, order=order)
        found.append((schedule, report(schedule, runs), first_writers(runs, schedule)))
        if order in ("ascending", "descending"):
            turns = deterministic_order(runs, schedule)
            found.append((turns, simulate_turns(schedule, runs)))
    return found


def tiles(runs: BlockRuns) -> Any:
    fine = refine(runs, (32, 32))
    return (
        fine, packed(runs, 2), retile(runs, (48, 80)), full_runs(99, 200, BLOCK, runs.device),
        runs.counts(), runs.states(), str(runs), from_flex(runs.to_flex()),
        BlockRuns.stack([runs, runs], 2, 1), BlockRuns.from_states(runs.states(), LENGTH, LENGTH, BLOCK),
    )  # fmt: skip


def same(a: Any, b: Any) -> bool:
    """Return whether two results have equal parts: tensors by their dtype, device and data."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "__dataclass_fields__"):
        return all(same(getattr(a, name), getattr(b, name)) for name in a.__dataclass_fields__)
    return bool(a == b)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("compute", [forward, backward, tiles])
def test_nothing_is_on_the_default_device(compute: Callable[[BlockRuns], Any], name: str) -> None:
    expected = compute(RUNS[name])
    with torch.device("meta"):  # on which nothing can be computed by mistake
        found = compute(RUNS[name])
    assert same(found, expected)


def test_copies_on_another_device() -> None:
    runs = RUNS["causal"]
    moved = runs.to("meta")
    for kind in ("full", "partial", "full_t", "partial_t"):
        for part in ("row_ptr", "start", "length"):
            own, other = getattr(getattr(runs, kind), part), getattr(getattr(moved, kind), part)
            assert (other.device.type, other.shape, other.dtype) == ("meta", own.shape, own.dtype)
    schedule = schedule_forward(runs, SHAPE, workers=5)
    work = work_list(runs, schedule).to(torch.device("meta"))
    assert all(not isinstance(t, Tensor) or t.device.type == "meta" for t in work)
    assert isinstance(moved.full, Runs)
