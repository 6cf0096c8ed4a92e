"""Sum the attention weights of each key over the queries, in a second pass of torch operators.

No kernel sums weights along the queries. Whatever template ran the forward, the `cpu` template
computes the scores again in the tiles that the mask keeps, on the device of the query.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnkit.splice.cpu import CpuHooks
from attnkit.splice.kernel_call import ForwardInputs, KernelCall
from attnkit.splice.program import compute_dtype
from attnkit.templates import cpu


def column_sums(call: KernelCall, inputs: ForwardInputs, lse: Tensor) -> Tensor:
    """Return the sums of the weights of each key over the queries, [B, Hq, Skv].

    Args:
        call: the call whose forward has run.
        inputs: its tensors.
        lse: its LSE, [B, Hq, Sq]; any tensor without a softmax.
    """
    query, hooks = inputs.query, _hooks(call, inputs)
    with torch.autocast(query.device.type, enabled=False):
        return cpu.column_sums(query, inputs.key, lse, call.runs, hooks, inputs.scale)


def column_sums_backward(
    call: KernelCall, inputs: ForwardInputs, lse: Tensor, grad: Tensor, needs_grad: Sequence[bool]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the gradients of query and key, and of the score's captured tensors by slot.

    Args:
        call, inputs, lse: as for `column_sums`.
        grad: gradient of the sums, [B, Hq, Skv].
        needs_grad: for each tensor that the score captures, whether its gradient is needed.

    A gradient that is not needed is an empty tensor.
    """
    query, hooks = inputs.query, _hooks(call, inputs, needs_grad)
    with torch.autocast(query.device.type, enabled=False):
        dq, dk = cpu.column_sums_backward(
            grad, query, inputs.key, lse, call.runs, hooks, inputs.scale
        )
    scores = inputs.captured.scores
    found = [
        query.new_empty(0) if g is None else g.to(t.dtype)
        for g, t in zip(hooks.gradients, scores, strict=True)
    ]
    return dq, dk, found


def _hooks(call: KernelCall, inputs: ForwardInputs, needs_grad: Sequence[bool] = ()) -> CpuHooks:
    query = inputs.query
    dtype, heads = compute_dtype(query), query.shape[1]
    return CpuHooks(call.program, *inputs.captured, dtype, query.device, heads, needs_grad)
