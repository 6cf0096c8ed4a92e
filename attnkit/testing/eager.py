"""The user's own function called by torch, without attnkit: what a trace must agree with.

`torch.vmap` calls the function once over all positions, with 0-d tensors as FlexAttention's eager
mode does. A function that vmap cannot run is called position by position, at some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

POINTS = 200  # positions that are called one by one where vmap fails


@dataclass(frozen=True)
class Eager:
    """What the function gave.

    Attributes:
        values: [B, H, Sq, Skv] if every position was called, else one per point.
        points: None, or the b, h, q, kv of the points, int64 each.
    """

    values: Tensor
    points: tuple[Tensor, ...] | None = None

    def pick(self, dense: Tensor) -> Tensor:
        """The same positions of a tensor that broadcasts to [B, H, Sq, Skv]."""
        if self.points is None:
            return dense.expand(self.values.shape)
        return dense[
            tuple(p.clamp(max=n - 1) for p, n in zip(self.points, dense.shape, strict=True))
        ]


class _IndexWithoutItem(TorchFunctionMode):
    """Indexing by 0-d tensors as an operator: Tensor.__getitem__ would ask vmap for numbers."""

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
    rest = source[basic]  # the mode is off while it handles a call
    tensors = [i if isinstance(i, Tensor) else None for i in items if not isinstance(i, int)]
    found: Tensor = torch.ops.aten.index.Tensor(rest, tensors)
    return found


@torch.no_grad()
def call(
    function: Callable[..., Any],
    shape: tuple[int, int, int, int],
    device: torch.device,
    score: Tensor | None = None,
) -> Eager:
    """Call a mask_mod, or a score_mod with its scores.

    Args:
        function: mask_mod(b, h, q, kv), or score_mod(score, b, h, q, kv) if score is given.
        shape: [B, H, Sq, Skv].
        device: of the indices.
        score: [B, H, Sq, Skv].
    """
    ranges = [torch.arange(n, dtype=torch.int32, device=device) for n in shape]
    lead = () if score is None else (score,)

    def tensor(*arguments: Tensor) -> Tensor:
        return torch.as_tensor(function(*arguments), device=device)

    called: Callable[..., Tensor] = tensor
    prefix = (0,) * len(lead)
    for axis in (3, 2, 1, 0):
        own = tuple(0 if i == axis else None for i in range(4))
        called = torch.vmap(called, in_dims=prefix + own)
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
