"""What a backward kernel is given: the tensors of the work list, and the sizes of the problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, cute


@dataclass(frozen=True)
class Problem:
    """Sizes of a launch, all Int32 but the scale.

    Attributes:
        scale: softmax scale, Float32.
        group: query heads per kv head.
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
    """Tensors of the work list, see `Backward.__call__`."""

    lse: cute.Tensor
    delta: cute.Tensor
    items: cute.Tensor
    partial: cute.Tensor
    full: cute.Tensor
    counter: cute.Tensor
    order: Any  # tensors of the semaphores
