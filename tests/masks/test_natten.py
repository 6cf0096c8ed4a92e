"""Check one-dimensional neighbourhoods for every small choice of parameters."""

from __future__ import annotations

import pytest
import torch

from attnkit import create_mask, masks
from tests.masks.cases_grid import neighbours


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", range(1, 11))
def test_every_window_on_a_short_line(length, causal):
    for dilation in range(1, length + 1):
        for kernel in range(1, length // dilation + 1):
            for stride in range(1, kernel + 1):
                mask = masks.natten(
                    (length,), kernel, stride=stride, dilation=dilation, causal=causal
                )
                want = torch.zeros(length, length, dtype=torch.bool)
                for q in range(length):
                    seen = neighbours(q, length, kernel, stride, dilation, causal)
                    want[q, list(seen)] = True
                    assert causal or len(seen) == kernel
                assert torch.equal(create_mask(mask, None, None, length, length)[0, 0], want)
