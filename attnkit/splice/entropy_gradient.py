"""Compute the parts of the gradient of rows' entropies that do not depend on single scores.

With the gradient g of a row's entropy E, the gradient of a score is -g P (log(P) + E). The main
kernel adds -g P log(P). The term -g E multiplies P as the gradient of the LSE does, so that it is
added to that one. The sink of a row is one more score.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnkit.splice.captured_arguments import TensorKind
from attnkit.splice.kernel_call import BackwardInputs

# Kind of the last captured tensor of a main kernel with entropies: their gradient [B, Hq, Sq].
ENTROPY_GRADS: tuple[TensorKind, ...] = (("float32", 3, True),)


def with_lse(inputs: BackwardInputs) -> Tensor | None:
    """Return the gradient of the LSE [B, Hq, Sq], with that of the entropies; None for zero."""
    if inputs.entropy is None or inputs.grad_entropy is None:
        return inputs.grad_lse
    own = inputs.entropy * inputs.grad_entropy
    return -own if inputs.grad_lse is None else inputs.grad_lse - own


def of_sink(inputs: BackwardInputs) -> Tensor:
    """Return the sum of -g p log(p) over the rows of each head, where p is the sink's weight."""
    assert inputs.grad_entropy is not None
    return -(inputs.grad_entropy * _sink_logs(inputs)).sum((0, 2))


def of_shifts(inputs: BackwardInputs) -> Tensor:
    """Return g (E + p log(p)) of each row, [B, Hq, Sq]; p is the sink's weight, 0 without a sink.

    It is the sum of the gradients of a row's scores, less what `with_lse` adds to that sum: a term
    that shifts the scores of a row, and not its sink, has this gradient.
    """
    assert inputs.entropy is not None
    assert inputs.grad_entropy is not None
    own = inputs.entropy if inputs.sink is None else inputs.entropy + _sink_logs(inputs)
    return (inputs.grad_entropy * own).contiguous()


def _sink_logs(inputs: BackwardInputs) -> Tensor:
    """Return p log(p) of each row, [B, Hq, Sq], where p is the sink's weight."""
    assert inputs.sink is not None
    p = torch.exp(inputs.sink[:, None] - inputs.lse).masked_fill_(inputs.lse == -math.inf, 0)
    return torch.xlogy(p, p)
