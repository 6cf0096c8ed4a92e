"""Define `attend`, the higher-order operator that torch.compile sees in place of a call.

It takes score_mod and mask_mod as Python functions, which `compile.dynamo` traces.
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
    """Higher-order operator of a call, whose arguments include score_mod and mask_mod."""

    def __init__(self) -> None:
        super().__init__("attnkit_attention")  # type: ignore[no-untyped-call]

    def __call__(self, *arguments: Any) -> Any:
        """Run the call eagerly, which happens outside of a graph, after a graph break."""
        return torch.compiler.disable(attend_eagerly)(*arguments)


def attend_eagerly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    lists: Sequence[Tensor],
    sizes: Sequence[int],
    sinks: Sequence[Tensor],
    rows: Sequence[Tensor],
    scale: float | None,
    *options: Any,
) -> tuple[Tensor, ...]:
    """Trace the functions and call an operator with their graphs.

    It is `torch.ops.attnkit.attention`; with `rows`, it is `torch.ops.attnkit.column_sums`.

    Args:
        query, key, value, scale: as in `flex_attention`.
        score_mod, mask_mod: functions, or None.
        lists, sizes: block lists and sizes of the mask, see `op.Request.kind`.
        sinks: the state of dropout and the attention sink, if there are any.
        rows: the LSE of the same call of attention, to compute its column sums; else ().
        options: the other fields of `op.Request`, from `kind` on.

    Returns:
        Output, LSE, row maxima, entropies of the rows and digest of the captured data; or column
        sums and that digest.
    """
    score = None if score_mod is None else trace_cached(score_mod, "score", query.device)
    mask = None if mask_mod is None else trace_cached(mask_mod, "mask", query.device)
    scores, masks = ([] if t is None else list(t.tensors) for t in (score, mask))
    request = request_of(score, mask, *options)
    result: tuple[Tensor, ...] = operator_for(rows)(
        query,
        key,
        value,
        [*scores, *sinks],
        masks,
        list(lists),
        list(sizes),
        [],  # numbers that a trace reads are constants of its graph
        [],
        request.text,
        scale,
        *rows,
    )
    return result


def operator_for(rows: Any) -> Any:
    """Return the operator that `attend` calls, see `attend_eagerly`."""
    if not rows:
        return torch.ops.attnkit.attention.default
    from attnkit.runtime.compile import column_sums_op  # noqa: F401, which defines the operator

    return torch.ops.attnkit.column_sums.default


attend = _Attend()
