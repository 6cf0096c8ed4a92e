"""Convert a mask to intervals of positions, so that kernels compare positions with bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.ir import Node
from attnkit.sparsity.intervals.normal_form import Intervals, find_intervals
from attnkit.tracing.tracer import Traced

# (first position, position after the last) of each interval.
Bounds: TypeAlias = tuple[tuple[Node, Node], ...]


def row_intervals(
    mask: Node | None, tensors: Sequence[Tensor], query: Tensor, key: Tensor
) -> tuple[Bounds | None, Sequence[Tensor]]:
    """Return the intervals of kv that the mask keeps in each row q, as expressions of q.

    Args:
        mask: the mask graph; None for no mask.
        tensors: tensors that the mask captures.
        query, key: tensors of the call; only their shapes and device are read.

    Returns:
        The bounds of the intervals, or None if the mask is not a union of few intervals; and the
        tensors that the bounds or the mask read: first `tensors`, then tables of the intervals.
    """
    return _intervals(mask, tensors, query, (query.shape[2], key.shape[2]))


def column_intervals(
    mask: Node | None, tensors: Sequence[Tensor], query: Tensor, key: Tensor
) -> tuple[Bounds | None, Sequence[Tensor]]:
    """Return the intervals of q that the mask keeps in each column kv.

    The result is as in `row_intervals`, but the bounds are expressions in which the argument `q`
    stands for the kv position of the column.
    """
    if mask is not None:
        q, kv = ir.arg("q"), ir.arg("kv")
        mask = ir.substitute(mask, {q: kv, kv: q})
    return _intervals(mask, tensors, query, (key.shape[2], query.shape[2]))


def _intervals(
    mask: Node | None, tensors: Sequence[Tensor], query: Tensor, lengths: tuple[int, int]
) -> tuple[Bounds | None, Sequence[Tensor]]:
    if mask is None:
        return None, ()
    result = find_intervals(
        Traced("mask", mask, tuple(tensors), tuple(f"t{i}" for i in range(len(tensors)))),
        q_len=lengths[0],
        kv_len=lengths[1],
        batch=query.shape[0],
        heads=query.shape[1],
        device=query.device,
    )
    if isinstance(result, Intervals):
        return result.bounds, result.tensors
    return None, tensors
