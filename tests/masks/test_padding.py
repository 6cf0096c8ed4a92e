"""Check the effect of NaN and infinity in padding, and that `zero_padding` removes it."""

from __future__ import annotations

import math

import pytest
import torch

from attnkit import flex_attention, masks

LENGTHS = torch.tensor([20, 33])
S = 40


def inputs(padding, requires_grad=False):
    """Draw query, key and value [2, 2, 40, 8] whose rows beyond `LENGTHS` are `padding`."""
    torch.manual_seed(0)
    tensors = [torch.randn(2, 2, S, 8) for _ in range(3)]
    for t in tensors:
        for b, length in enumerate(LENGTHS):
            t[b, :, length:] = padding
    return [t.requires_grad_(requires_grad) for t in tensors]


MASKS = {
    "padding": masks.padding(LENGTHS, LENGTHS),
    "document": masks.document(
        torch.where(torch.arange(S) < LENGTHS[:, None], 0, -1).int(), padding=-1
    ),
}


@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", MASKS)
def test_nan_in_a_masked_value_reaches_rows_of_its_tile(name, bad, backend):
    query, key, value = inputs(0.0)
    value[0, :, -1] = bad
    out = flex_attention(query, key, value, block_mask=MASKS[name], backend=backend)
    assert out[0, :, : LENGTHS[0]].isnan().all()  # 0 * NaN; the class documents it
    assert out[1].isfinite().all()


@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", MASKS)
def test_zero_padding_keeps_them_out(name, bad, backend):
    def attend(tensors):
        zeroed = [masks.zero_padding(t, LENGTHS) for t in tensors]
        out = flex_attention(*zeroed, block_mask=MASKS[name], backend=backend)
        return out, *torch.autograd.grad(out.square().sum(), tensors)

    for own, clean in zip(attend(inputs(bad, True)), attend(inputs(0.0, True)), strict=True):
        assert torch.equal(own, clean)
        assert own.isfinite().all()


def test_zero_padding_on_the_left():
    value = torch.ones(2, 1, S, 3)
    zeroed = masks.zero_padding(value, LENGTHS, side="left")
    for b, length in enumerate(LENGTHS):
        assert (zeroed[b, :, : S - length] == 0).all()
        assert (zeroed[b, :, S - length :] == 1).all()
    assert (value == 1).all()
