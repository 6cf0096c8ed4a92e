"""Check that block masks have the same tiles on GPU and CPU for every classification method."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnkit import create_block_mask, masks
from attnkit.masks import Example
from attnkit.sparsity.block_runs import BlockRuns

NAMES = sorted(masks.examples())


def runs_of(example: Example, block: tuple[int, int]) -> BlockRuns:
    return create_block_mask(
        example.mask, example.batch, example.heads, example.q_len, example.kv_len, BLOCK_SIZE=block
    ).runs


@pytest.mark.parametrize("name", NAMES)
def test_library(name: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for length, block in ((777, (128, 128)), (333, (24, 40))):
        here = runs_of(masks.examples(length)[name], block)
        there = runs_of(masks.examples(length, device=device)[name], block)
        for kind in ("full", "partial", "full_t", "partial_t"):
            for part in ("row_ptr", "start", "length"):
                found = getattr(getattr(there, kind), part)
                assert torch.equal(found.cpu(), getattr(getattr(here, kind), part)), (kind, part)


def test_runs_are_on_the_device_of_the_mask() -> None:
    """Block lists are on the given device, also for masks without captured tensors."""
    device = torch.device("cuda", torch.cuda.current_device())
    ids = torch.arange(1000, device=device) // 300
    kept: list[Any] = [
        masks.causal(),
        masks.document(ids),
        masks.document(ids) & masks.causal(),
        lambda b, h, q, kv: ids[q] * 2 <= kv % 7,
    ]
    for mask in kept:
        runs = create_block_mask(mask, None, None, 1000, 1000, device=device).runs
        assert runs.device == runs.partial_t.start.device == device
