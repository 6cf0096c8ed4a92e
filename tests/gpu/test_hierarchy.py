"""Check that classification by nodes finds the same tiles on the GPU as on the CPU."""

from __future__ import annotations

import pytest
import torch

from attnkit import masks
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.sparsity.classify import classify
from attnkit.tracing.tracer import trace


def classified(name: str, length: int, device: torch.device) -> BlockRuns:
    example = masks.examples(length, device=device)[name]
    traced = trace(example.mask, "mask")
    return classify(traced.root, traced.tensors, q_len=example.q_len, kv_len=example.kv_len,
                    block=(32, 24), batch=example.batch, heads=example.heads,
                    device=device)  # fmt: skip


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", sorted(masks.examples()))
def test_library_as_on_the_cpu(name: str, flat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnkit.sparsity.classify._DENSE_TILES", 1 << 40 if flat else 0)
    monkeypatch.setattr("attnkit.sparsity.hierarchical._MAX_DENSE_TILES", 0)
    device = torch.device("cuda", torch.cuda.current_device())
    here, there = (classified(name, 2000, d) for d in (torch.device("cpu"), device))
    for kind in ("full", "partial", "full_t", "partial_t"):
        for part in ("row_ptr", "start", "length"):
            found = getattr(getattr(there, kind), part)
            assert found.device == device
            assert torch.equal(found.cpu(), getattr(getattr(here, kind), part)), (kind, part)
