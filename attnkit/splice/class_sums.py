"""Decide whether a backward sums the gradient of a table of pairs over classes in an MMA."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.eval_torch import evaluate
from attnkit.graph.ir import Node
from attnkit.graph.learned_loads import Loads
from attnkit.graph.staging import column_axis, reads_pair
from attnkit.splice.graph_capture import is_capturing

# Columns in a row with the same class, on average, from which on threads sum. An estimate: types at
# random, which have 1, are faster in the MMA, and sorted documents, which have hundreds, are not.
LONG_RUN = 32


def sums_by_class(
    loads: Loads, tensors: Sequence[Tensor], most: int, kv_len: int, device: torch.device
) -> bool:
    """Return whether an MMA sums the gradients of the only load of a learned tensor.

    The classes of the columns are looked at once, when a call is prepared. They decide about speed
    only, so that they may change afterwards. Sorted documents are left to the threads, which
    sum over neighbouring columns with the same class.

    Args:
        loads: the loads whose gradients are summed score by score.
        tensors: the tensors that the score captures.
        most: number of classes of columns that the kernel has room for; 0 if it has no such MMA.
        kv_len: number of columns.
        device: device of the kernel.
    """
    if len(loads) != 1 or not reads_pair(loads[0][0]):
        return False
    load, cotangent = loads[0]
    table = tensors[int(str(load.attr))]
    # offsets in the gradient have 32 bits
    small = table.shape[column_axis(load)] <= most and table.numel() < 2**31
    if cotangent is not ir.arg("grad") or not small or is_capturing(device):
        return False
    return mean_run(load.args[column_axis(load)], tensors, kv_len, device) < LONG_RUN


def mean_run(index: Node, tensors: Sequence[Tensor], kv_len: int, device: torch.device) -> float:
    """Return how many columns in a row have the same value of `index`, on average, in head 0."""
    used = ir.slots(index)
    own = [t.detach().to(device) if i in used else t for i, t in enumerate(tensors)]
    zero = torch.zeros((), dtype=torch.int32, device=device)
    columns = torch.arange(kv_len, dtype=torch.int32, device=device)
    env = {"b": zero, "h": zero, "kv": columns, "kv_last": zero + (kv_len - 1)}
    (classes,) = evaluate([index], env, own, clamps=True)
    return kv_len / (1 + int((classes[1:] != classes[:-1]).sum()))
