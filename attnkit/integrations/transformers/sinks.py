"""Apply attention sinks: one more score for each head, whose key has no value.

`flex_attention` has no sinks, so they are applied to its output and its LSE.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnkit import flex_attention


def attend(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, **options: Any
) -> Tensor:
    """Compute attention with a sink that takes a share of the softmax of every row.

    The share of the keys is exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink).

    Args:
        query, key, value: see `attnkit.flex_attention`.
        sink: float, one score for each query head; None for no sink.
        options: further arguments of `attnkit.flex_attention`.

    Returns:
        [B, Hq, Sq, Dv] in the query's dtype.
    """
    if sink is None:
        out: Tensor = flex_attention(query, key, value, **options)
        return out
    out, lse = flex_attention(query, key, value, return_lse=True, **options)
    share = (lse - sink.to(lse.dtype).reshape(1, -1, 1)).sigmoid()
    scaled: Tensor = out * share[..., None]
    return scaled.to(out.dtype)
