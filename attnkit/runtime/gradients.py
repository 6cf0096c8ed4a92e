"""Compute the gradients of a call whose output and LSE the caller has kept.

`flex_attention` records its backward with autograd. Interfaces that have a forward and a backward
operator of their own, and autograd between them, call this function for the second.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnkit.errors import UnsupportedError
from attnkit.runtime import reuse, torch_ops
from attnkit.runtime.call import AttentionCall
from attnkit.runtime.prepare import prepare


def gradients(
    call: AttentionCall, out: Tensor, lse: Tensor, grad_out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value of a call that has run.

    Captured tensors get no gradient.

    Args:
        call: the arguments of the call.
        out: its output, [B, Hq, Sq, Dv].
        lse: its LSE, [B, Hq, Sq], float32 (float64 for float64 inputs).
        grad_out: gradient of the output.

    Raises:
        UnsupportedError: the backend is "eager", which has no backward of its own.
        The errors of `flex_attention`.
    """
    with torch.no_grad():
        key = reuse.key_of(call)
        prepared = reuse.lookup(key)
        if key is not None and prepared is not None:
            captured = key.captured
        else:
            preparation = prepare(call)
            prepared, captured = preparation.call, preparation.bound.captured
        if prepared.is_dense:
            raise UnsupportedError(
                'backend="eager" is differentiated by autograd and has no backward of its own; use '
                'backend="auto"'
            )
        inputs = call.inputs(captured)
        scores, masks = inputs.captured
        saved = call.query, call.key, call.value, out, lse, *scores, *masks
        found = torch_ops.differentiate(
            prepared, inputs.scale, [False] * len(scores), saved, grad_out, None
        )
    return found[:3]  # type: ignore[return-value]  # these three are never None
