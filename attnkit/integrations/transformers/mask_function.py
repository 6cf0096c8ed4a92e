"""Define `attention_mask`, which transformers calls once for each type of layer in a forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnkit.integrations.transformers.forms import And, Geometry
from attnkit.integrations.transformers.layer_mask import LayerMask
from attnkit.integrations.transformers.read_mask import read_function, read_padding


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> LayerMask:
    """Make the mask of one type of layer, as transformers' `AttentionMaskInterface` asks for it.

    Offsets in a tensor are read now: a static cache adds to its tensor when the layers run.

    Args:
        batch_size, q_length, kv_length: sizes of the call.
        q_offset, kv_offset: positions of the first query and the first key, ints or tensors of one
            element.
        mask_function: `mask_function(b, h, q, kv) -> bool` of positions; None for a causal mask.
        attention_mask: [B, positions], True for tokens and False for padding, or None.
        device: device of the query.
        options: what other implementations need.

    Raises:
        TraceError: later, when the layers run: a mask_function of the user cannot be traced.
    """
    from transformers.masking_utils import causal_mask_function

    at = Geometry(
        int(batch_size),
        int(q_length),
        int(kv_length),
        int(q_offset),
        int(kv_offset),
        torch.device(device),
    )
    form = read_function(causal_mask_function if mask_function is None else mask_function)
    padding = read_padding(attention_mask, at.kv_start, at.kv_len)
    return LayerMask(And((form, padding)), at)
