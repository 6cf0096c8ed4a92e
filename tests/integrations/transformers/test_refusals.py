"""Arguments that attnkit does not take are refused with a reason, and others are followed."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnkit.integrations.transformers
from attnkit import ArgumentError, OptionError, ShapeError, UnsupportedError
from attnkit.integrations.transformers.attention import attention

MODULE = nn.Module()


def _tensors(q_len: int = 4, kv_len: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (4, q_len), (2, kv_len), (2, kv_len)
    query, key, value = (torch.randn(2, *size, 8, generator=generator) for size in sizes)
    return query, key, value


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dropout": 1.0}, OptionError, r"dropout_p must be in \[0, 1\), got 1.0"),
        ({"output_attentions": True}, OptionError, 'weights.*attn_implementation="eager"'),
        ({"head_mask": torch.ones(4)}, UnsupportedError, 'head masks .*head_mask=; use .*"eager"'),
        ({"cache": object()}, UnsupportedError, "paged cache of continuous batching"),
        ({"indices": torch.ones(4)}, UnsupportedError, "keys that the model selects at run time"),
        ({"sinks": torch.ones(2, 4, 4, 1)}, UnsupportedError, "differ from token to token"),
    ],
)
def test_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention(MODULE, *_tensors(), None, **options)


@pytest.mark.parametrize("shape", [(2, 4), (2, 1, 3, 4), (2, 3, 4, 4), (2, 1, 4, 3)])
def test_masks_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"attention_mask must be \[B or 1, 1 or Hq, Sq, Skv\]"):
        attention(MODULE, *_tensors(), torch.ones(shape, dtype=torch.bool))


def test_a_mask_of_another_length() -> None:
    pytest.importorskip(
        "transformers", "5", reason="needs transformers 5: pip install 'attnkit[transformers]'"
    )
    from attnkit.integrations.transformers.mask_function import attention_mask

    with pytest.raises(ShapeError, match="for 4 queries and 6 keys, and the layer has 4 and 4"):
        attention(MODULE, *_tensors(), attention_mask(2, 4, 6))


def test_without_a_mask_the_module_decides() -> None:
    tensors = _tensors()
    causal = torch.ones(4, 4, dtype=torch.bool).tril()[None, None]
    expected, _ = attention(MODULE, *tensors, causal)
    assert torch.equal(attention(MODULE, *tensors, None)[0], expected)
    full, _ = attention(MODULE, *tensors, None, is_causal=False)
    assert not torch.equal(full, expected)
    module = nn.Module()
    module.is_causal = False
    assert torch.equal(attention(module, *tensors, None)[0], full)
    one = _tensors(q_len=1)  # a new token reads the whole cache
    assert torch.equal(
        attention(MODULE, *one, None)[0], attention(MODULE, *one, None, is_causal=False)[0]
    )


def test_a_sink_beside_a_fully_masked_row() -> None:
    query, key, value = (t.requires_grad_() for t in _tensors())
    sink = torch.randn(4, requires_grad=True)
    kept = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    kept[0, :, 2] = False
    out, weights = attention(MODULE, query, key, value, kept, s_aux=sink)
    assert weights is None
    assert out.shape == (2, 4, 4, 8)
    assert out.is_contiguous()
    assert not out[0, 2].any()
    out.sum().backward()
    for t in (query, key, value, sink):
        assert t.grad is not None
        assert t.grad.isfinite().all()


def test_a_sink_is_inside_the_softmax() -> None:
    """An output that is rounded to bfloat16, then scaled by a sigmoid, would be rounded twice."""
    query, key, value = (t.bfloat16() for t in _tensors(64, 64))
    sink = torch.randn(4, generator=torch.Generator().manual_seed(1)).bfloat16()
    out, _ = attention(MODULE, query, key, value, None, s_aux=sink, is_causal=False)
    once = attnkit.flex_attention(query, key, value, enable_gqa=True, sink=sink.float())
    assert torch.equal(out, once.transpose(1, 2))


def test_register_checks_its_name() -> None:
    with pytest.raises(ArgumentError, match="name must be a string such as 'attnkit', got ''"):
        attnkit.integrations.transformers.register("")


def test_register_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'attnkit\[transformers\]'"):
        attnkit.integrations.transformers.register()


def test_register_with_an_old_version(monkeypatch: pytest.MonkeyPatch) -> None:
    old = type(sys)("transformers")
    old.__version__ = "4.57.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", old)
    with pytest.raises(UnsupportedError, match=r"needs transformers 5 or newer, found 4\.57"):
        attnkit.integrations.transformers.register()
