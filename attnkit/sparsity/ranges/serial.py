"""Evaluate a graph on the calling thread, for the many small steps of classifying tiles.

torch distributes indexing over its threads from 3000 elements on, but never `index_select`. On a
busy machine indexing takes milliseconds, and `index_select` takes microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.eval_torch import evaluate
from attnkit.graph.ir import BOOL, F32, Node


def evaluate_serial(
    roots: Sequence[Node],
    env: Mapping[str, Tensor],
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    checked: frozenset[Node] = frozenset(),
    names: Sequence[str] = (),
) -> dict[Node, Tensor]:
    """Evaluate expressions like `eval_torch.evaluate`, and return the value of every node.

    Loads from contiguous CPU tensors are gathered on the calling thread.
    """
    memo: dict[Node, Tensor] = {}
    for n in ir.topo(*roots):
        if n.op != "load" or not n.args or n in checked:
            continue
        tensor = tensors[int(n.attr)]  # type: ignore[arg-type]
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            index = evaluate(n.args, env, tensors, dtype, memo=memo, checked=checked, names=names)
            kind = dtype if n.type == F32 else torch.bool if n.type == BOOL else torch.int32
            memo[n] = gather(tensor, index).to(kind)
    evaluate(roots, env, tensors, dtype, memo=memo, checked=checked, names=names)
    return memo


def gather(tensor: Tensor, index: Sequence[Tensor]) -> Tensor:
    """Return `tensor[index]` of a contiguous tensor, with one broadcastable index per dimension."""
    place: Tensor | None = None
    for i, size in zip(index, tensor.shape, strict=True):
        i = i.to(torch.int64)
        low, high = (int(end) for end in torch.aminmax(i))
        if low < -size or high >= size:
            raise IndexError(f"index from {low} to {high} into a dimension of {size}")
        if low < 0:
            i = torch.where(i < 0, i + size, i)
        place = i if place is None else place * size + i
    if place is None:
        raise AssertionError("a gather needs an index")
    return tensor.view(-1).index_select(0, place.reshape(-1)).view(place.shape)
