"""Check that classification finds the same tiles on the GPU as on the CPU."""

from __future__ import annotations

import pytest
import torch

from attnkit.sparsity.block_runs import from_flex
from attnkit.sparsity.classify import Statistics, classify
from attnkit.tracing.tracer import trace
from tests.sparsity.test_classify import MASKS, SHAPES, UNDECIDED


@pytest.mark.parametrize("name", MASKS)
def test_same_tiles_as_on_the_cpu(name: str) -> None:
    traced = trace(MASKS[name], "mask")
    for q_len, kv_len, block in SHAPES:
        found = []
        for device in (torch.device("cpu"), torch.device("cuda", torch.cuda.current_device())):
            statistics = Statistics()
            tensors = [t.to(device) for t in traced.tensors]
            runs = classify(traced.root, tensors, q_len=q_len, kv_len=kv_len, block=block, batch=2,
                            heads=3, device=device, statistics=statistics)  # fmt: skip
            assert runs.device == device
            assert statistics.dense == 0 or (name, block) in UNDECIDED
            found.append(runs.states().cpu())
        assert torch.equal(found[0], found[1])


def test_block_mask_round_trip() -> None:
    traced = trace(MASKS["causal document"], "mask")
    device = torch.device("cuda", torch.cuda.current_device())
    runs = classify(traced.root, [t.to(device) for t in traced.tensors], q_len=1000, kv_len=700,
                    block=(128, 64), batch=1, heads=1, device=device)  # fmt: skip
    block_mask = runs.to_flex()
    assert block_mask.kv_indices.device == device
    assert torch.equal(from_flex(block_mask).states(), runs.states())
