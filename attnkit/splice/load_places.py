"""Read the elements of a captured tensor that a load needs at fixed points, and sum gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnkit.graph.eval_torch import clamped
from attnkit.graph.ir import Node, arg

_HEADS = (arg("b"), arg("h"))


class Places(NamedTuple):
    """Says which element of a tensor a load reads at each point.

    Attributes:
        order: for a load at b and h alone, with all of their values: the tensor's axes in the order
            of b and h. No data is copied then. None for another load.
        names: for such a load, whether its index has b, and whether it has h.
        flat: flat indices into the tensor, which broadcast to the points; None for such a load.
    """

    order: tuple[int, ...] | None
    names: tuple[bool, bool]
    flat: Tensor | None

    def read(self, tensor: Tensor) -> Tensor:
        """Return the elements; the result broadcasts to the points."""
        if self.flat is not None:
            return torch.take(tensor, self.flat)
        assert self.order is not None
        sizes = iter([tensor.shape[axis] for axis in self.order])
        shape = [next(sizes) if own else 1 for own in self.names]
        return tensor.permute(self.order).reshape(*shape, 1)

    def sum(self, grad: Tensor, shape: Sequence[int], ordered: bool) -> Tensor:
        """Sum the gradients of the values that were read into a gradient of the tensor.

        Args:
            grad: gradient at every point.
            shape: shape of the tensor.
            ordered: whether the sums must have a fixed order.
        """
        if self.order is not None:
            others = [axis for axis, own in enumerate((*self.names, False)) if not own]
            total = grad.sum(others)
            back = sorted(range(len(self.order)), key=self.order.__getitem__)
            return total.permute(back)
        assert self.flat is not None
        missing = grad.ndim - self.flat.ndim
        aligned = (1,) * missing + tuple(self.flat.shape)
        axes = [i for i, n in enumerate(aligned) if n == 1 and grad.shape[i] != 1]
        if axes:
            grad = grad.sum(axes, keepdim=True)
        total = torch.zeros(math.prod(shape), dtype=grad.dtype, device=grad.device)
        index, values = self.flat.expand(grad.shape).reshape(-1), grad.reshape(-1)
        if ordered and grad.is_cuda:
            total.index_put_((index,), values, accumulate=True)  # sorts, unlike index_add_
        else:
            total.index_add_(0, index, values)
        return total.view(tuple(shape))


def places_of(
    load: Node, index: Sequence[Tensor], tensor: Tensor, points: tuple[int, ...]
) -> Places:
    """Return the places of a load.

    Args:
        load: the load.
        index: the values of its indices, which broadcast to the points.
        tensor: the tensor that it reads.
        points: shape of the points, [batch, heads, distances] or [n].
    """
    names = tuple(name in load.args for name in _HEADS)
    whole = len(points) == 3 and len(load.args) == sum(names)
    if whole and all(tensor.shape[i] == points[_HEADS.index(a)] for i, a in enumerate(load.args)):
        order = tuple(load.args.index(name) for name in _HEADS if name in load.args)
        return Places(order, (names[0], names[1]), None)
    at = clamped(load, index, tensor.shape)
    flat = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for i, size in zip(at, tensor.shape, strict=True):
        i = i.to(device=tensor.device, dtype=torch.int64)
        flat = flat * size + torch.where(i < 0, i + size, i)
    return Places(None, (False, False), flat)
