"""Sum the attention weights of each key over the queries, after a call that asks for it."""

from __future__ import annotations

import torch
from torch import Tensor

from attnkit.runtime import torch_ops
from attnkit.runtime.prepared_call import PreparedCall
from attnkit.splice import ForwardInputs


def column_sums(prepared: PreparedCall, inputs: ForwardInputs, lse: Tensor) -> Tensor:
    """Return the sums of the weights of each key over the queries, [B, Hq, Skv].

    Autograd can differentiate them in query, key and the score's captured tensors.

    Args:
        prepared: the prepared call.
        inputs: the inputs with which it has run.
        lse: the LSE that it returned, [B, Hq, Sq].
    """
    scores, masks = inputs.captured
    if prepared.column_sums is not None:
        return prepared.column_sums(inputs.query, inputs.key, inputs.captured, inputs.scale)
    from attnkit.runtime.compile import column_sums_op  # noqa: F401, which defines the operator

    runs, layout = torch_ops.unpack(prepared.kernel_call.runs)
    sums: Tensor = torch.ops.attnkit.column_sums(
        inputs.query,
        inputs.key,
        inputs.value,
        list(scores),
        [torch_ops.detached(t) for t in masks],
        runs,
        layout,
        [],
        [],
        torch_ops.request_of(prepared.kernel_call),
        inputs.scale,
        lse.detach(),
    )[0]
    return sums
