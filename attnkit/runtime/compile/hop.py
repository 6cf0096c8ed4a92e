"""Define the higher-order operator that represents a call while torch.compile traces it.

It takes score_mod and mask_mod as Python functions; `compile.dynamo` traces them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnkit.runtime.compile.op import request_of
from attnkit.tracing.guards import trace_cached
from attnkit.util.torch_private import HigherOrderOperator


class _Attend(HigherOrderOperator):
    """Represents a call as a higher-order operator, with functions among its arguments."""

    def __init__(self) -> None:
        super().__init__("attnkit_attention")  # type: ignore[no-untyped-call]

    def __call__(self, *arguments: Any) -> Any:
        """Run the call outside of a graph, after a graph break."""
        return torch.compiler.disable(attend_eagerly)(*arguments)


def attend_eagerly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    lists: Sequence[Tensor],
    sizes: Sequence[int],
    scale: float | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Trace the functions and call the operator that carries their graphs.

    Args:
        query, key, value, scale: as in `flex_attention`.
        score_mod, mask_mod: functions, or None.
        lists, sizes: block lists and sizes; `op.Request.kind` says which.
        options: the other fields of `op.Request`.
    """
    score = None if score_mod is None else trace_cached(score_mod, "score", query.device)
    mask = None if mask_mod is None else trace_cached(mask_mod, "mask", query.device)
    scores, masks = ([] if t is None else list(t.tensors) for t in (score, mask))
    request = request_of(score, mask, *options)
    result: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.attnkit.attention(
        query, key, value, scores, masks, list(lists), list(sizes), request.text, scale
    )
    return result


attend = _Attend()
