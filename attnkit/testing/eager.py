"""Call the user's function with torch tensors, without attnkit, to compare a trace with it.

`torch.vmap` calls the function once over all positions, with 0-d tensors as FlexAttention's eager
mode does. A function that vmap cannot run is called at some positions, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

POINTS = 200  # number of positions to call one by one if vmap fails


@dataclass(frozen=True)
class Eager:
    """Holds values that the function returned.

    Attributes:
        values: [B, H, Sq, Skv] if every position was called, else one value per point.
        points: b, h, q and kv of the points that were called, int64 each; None if every position
            was called.
    """

    values: Tensor
    points: tuple[Tensor, ...] | None = None

    def pick(self, dense: Tensor) -> Tensor:
        """Select these positions of a tensor that broadcasts to [B, H, Sq, Skv]."""
        if self.points is None:
            return dense.expand(self.values.shape)
        return dense[
            tuple(p.clamp(max=n - 1) for p, n in zip(self.points, dense.shape, strict=True))
        ]


class _IndexWithoutItem(TorchFunctionMode):
    """Turns indexing by 0-d tensors into an operator; __getitem__ would ask vmap for ints."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__getitem__:
            items = args[1] if isinstance(args[1], tuple) else (args[1],)
            indexed = any(isinstance(i, Tensor) for i in items)
            if indexed and all(isinstance(i, Tensor | int | slice) for i in items):
                return _index(args[0], items)
        return func(*args, **(kwargs or {}))


def _index(source: Tensor, items: tuple[Any, ...]) -> Tensor:
    basic = tuple(slice(None) if isinstance(i, Tensor) else i for i in items)
    sliced = source[basic]  # the mode is off while it handles a call
    tensors = [i if isinstance(i, Tensor) else None for i in items if not isinstance(i, int)]
    indexed: Tensor = torch.ops.aten.index.Tensor(sliced, tensors)
    return indexed


@torch.no_grad()
def call(
    function: Callable[..., Any],
    shape: tuple[int, int, int, int],
    device: torch.device,
    score: Tensor | None = None,
) -> Eager:
    """Call a mask_mod or a score_mod at every position; at some positions if vmap cannot run it.

    Args:
        function: mask_mod(b, h, q, kv), or score_mod(score, b, h, q, kv) if score is given.
        shape: [B, H, Sq, Skv].
        device: device of the indices.
        score: [B, H, Sq, Skv].
    """
    ranges = [torch.arange(n, dtype=torch.int32, device=device) for n in shape]
    lead = () if score is None else (score,)

    def tensor(*arguments: Tensor) -> Tensor:
        return torch.as_tensor(function(*arguments), device=device)

    called: Callable[..., Tensor] = tensor
    prefix = (0,) * len(lead)
    for axis in (3, 2, 1, 0):
        dims = tuple(0 if i == axis else None for i in range(4))
        called = torch.vmap(called, in_dims=prefix + dims)
    try:
        with _IndexWithoutItem():
            return Eager(called(*lead, *ranges))
    except RuntimeError:
        return _pointwise(tensor, shape, device, score)


def _pointwise(
    function: Callable[..., Tensor],
    shape: tuple[int, int, int, int],
    device: torch.device,
    score: Tensor | None,
) -> Eager:
    generator = torch.Generator().manual_seed(0)
    points = tuple(
        torch.cat([torch.tensor([0, n - 1]), torch.randint(n, (POINTS,), generator=generator)])
        for n in shape
    )
    values = []
    for place in zip(*(p.tolist() for p in points), strict=True):
        indices = [torch.tensor(i, dtype=torch.int32, device=device) for i in place]
        lead = () if score is None else (score[place],)
        values.append(function(*lead, *indices))
    return Eager(torch.stack(values), points)
