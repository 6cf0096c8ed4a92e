"""Define the arguments that every backward kernel takes: the work list tensors and the sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, cute


@dataclass(frozen=True)
class Problem:
    """Describes the sizes of a launch: Int32 fields, and the softmax scale as Float32.

    Attributes:
        scale: softmax scale, Float32.
        group: query heads per kv head.
        q_len, kv_len: sequence lengths.
        heads, kv_heads: heads of the query, and of key and value.
        batch: batch size of the query.
        kv_batch: batch size of key and value, 1 where all batch elements share them.
    """

    scale: Float32
    group: Int32
    q_len: Int32
    kv_len: Int32
    heads: Int32
    kv_heads: Int32
    batch: Int32
    kv_batch: Int32


@dataclass(frozen=True)
class Lists:
    """Holds the work list tensors of a backward; `Backward.__call__` gives their shapes."""

    lse: cute.Tensor
    delta: cute.Tensor
    items: cute.Tensor
    partial: cute.Tensor
    full: cute.Tensor
    counter: cute.Tensor
    order: Any  # flags or semaphores, see `semaphore.OrderTable`
