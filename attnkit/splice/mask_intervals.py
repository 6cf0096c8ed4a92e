"""Convert a mask to intervals of positions, for kernels that compare positions with bounds."""

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
    """Find the intervals of kv that the mask keeps in every row q.

    Args:
        mask: the graph; None for no mask.
        tensors: tensors that it captures.
        query, key: read for their shapes and device alone.

    Returns:
        The intervals, or None if the mask is not a union of few intervals; and the tensors that
        intervals or mask read: first those of `tensors`, then tables of the intervals.
    """
    return _intervals(mask, tensors, query, (query.shape[2], key.shape[2]))


def column_intervals(
    mask: Node | None, tensors: Sequence[Tensor], query: Tensor, key: Tensor
) -> tuple[Bounds | None, Sequence[Tensor]]:
    """Find the intervals of q that the mask keeps in every column kv, as `row_intervals` does."""
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
