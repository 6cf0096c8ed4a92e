"""Check that library masks are equal on a CUDA device and on the CPU."""

from __future__ import annotations

import pytest
import torch

import attnkit
from attnkit import ShapeError, create_block_mask, create_mask, explain, flex_attention, masks
from attnkit.cli import doctor
from attnkit.inspection import picture
from attnkit.inspection.summary import summarize

LENGTH = 200
HERE = masks.examples(LENGTH)
THERE = masks.examples(LENGTH, device="cuda") if torch.cuda.is_available() else HERE


@pytest.mark.parametrize("name", HERE)
def test_same_as_on_the_cpu(name: str) -> None:
    found = []
    for device, examples in (("cpu", HERE), ("cuda", THERE)):
        mask, q_len, kv_len, batch, heads = examples[name]
        sizes = (batch, heads, q_len, kv_len)
        blocks = create_block_mask(mask, *sizes, device, BLOCK_SIZE=(16, 24))
        dense = create_mask(mask, *sizes, device)
        assert blocks.device == dense.device == blocks.runs.device
        found.append((dense.cpu(), blocks.runs.states().cpu(), summarize(blocks)))
    (dense, states, summary), (dense_there, states_there, summary_there) = found
    assert torch.equal(dense, dense_there)
    assert torch.equal(states, states_there)
    assert summary == summary_there


def test_a_device_without_its_number_is_the_current_one() -> None:
    ids = torch.arange(LENGTH, device="cuda") // 70
    mask = masks.causal() & masks.document(ids)
    x = torch.randn(1, 2, LENGTH, 32, device="cuda")
    blocks = create_block_mask(mask, None, None, LENGTH, LENGTH, device="cuda")
    assert blocks.device == x.device
    assert blocks.to("cuda").device == x.device
    assert torch.equal(
        flex_attention(x, x, x, block_mask=blocks), flex_attention(x, x, x, block_mask=mask)
    )
    found = attnkit.intervals(mask, LENGTH, LENGTH, device="cuda")
    assert found is not None
    assert len(found) == 1


def test_pictures_and_reports_are_those_of_the_cpu() -> None:
    mask = THERE["document/causal"].mask
    blocks = create_block_mask(mask, None, None, LENGTH, LENGTH, device="cuda", BLOCK_SIZE=16)
    same = create_block_mask(
        HERE["document/causal"].mask, None, None, LENGTH, LENGTH, BLOCK_SIZE=16
    )
    assert picture.show(blocks) == picture.show(same)
    report = str(explain(None, mask, q_len=LENGTH, heads=4, device="cuda"))
    assert "schedule (predicted for 132 SMs, not measured)" in report
    lines = {finding.name: finding for finding in doctor.findings()}
    assert lines["CUDA device"].present
    assert torch.cuda.get_device_name(0) in lines["CUDA device"].state


def test_other_lengths_are_refused() -> None:
    x = torch.randn(1, 2, LENGTH, 32, device="cuda")
    with pytest.raises(ShapeError, match="was built for query length 196, got 200"):
        flex_attention(x, x, x, block_mask=masks.natten((14, 14), 3))
