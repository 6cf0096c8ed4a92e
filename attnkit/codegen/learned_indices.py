"""Emit the indices at which kernels add the gradients of captured tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from cutlass import Int32, select_

from attnkit.codegen.emit_cute import clamped, emit
from attnkit.codegen.load_indices import LoadIndices
from attnkit.codegen.staged_emitter import head_arguments
from attnkit.graph.ir import Node


def slots(loads: Sequence[Node], needs_grad: Sequence[bool]) -> tuple[int, ...]:
    """Return the number of each load's tensor among the tensors that need a gradient."""
    learned = [i for i, need in enumerate(needs_grad) if need]
    return tuple(learned.index(int(str(n.attr))) for n in loads)


class LearnedIndices(ABC):
    """Mixin that emits the index of each learned load.

    Attributes:
        indices: which loads wrap negative indices, and which are clamped.
    """

    indices: LoadIndices
    _loads: tuple[Node, ...]

    @abstractmethod
    def _tensors(self, site: Any) -> tuple[Any, Any]:
        """Return the captured tensors of the score, and those of the mask."""

    def gradient_index(
        self,
        i: int,
        site: Any,
        shape: Sequence[Any],
        q: Any,
        kv: Any,
        known: Sequence[Any] | None = None,
    ) -> tuple[Any, ...]:
        """Emit the index, one Int32 per axis, at which learned load `i` reads its tensor.

        The kernel adds the gradient of the load at the same index.

        Args:
            i: number of the load.
            site: see `templates.common.hooks`.
            shape: shape of the tensor. A negative index counts from the end of its axis.
            q, kv: positions; None if the index does not depend on them.
            known: the values of the index, from `dscore`; None to compute them.
        """
        load, values = self._loads[i], known
        if values is None:
            scores, _ = self._tensors(site)
            env = head_arguments(site, load.args)
            env |= {} if q is None else {"q": q}
            env |= {} if kv is None else {"kv": kv}
            values = emit(load.args, env, scores, fast=True, indices=self.indices)
        zero = Int32(0)
        if not values:
            return (zero,)  # a number: a tensor of shape (1,)
        places = [Int32(at) for at in values]
        if self.indices.wraps(load):
            places = [
                select_(at < zero, at + Int32(size), at)
                for at, size in zip(places, shape, strict=True)
            ]
        if load in self.indices.clamp:
            places = [clamped(*part) for part in zip(load.args, places, shape, strict=True)]
        return tuple(places)
