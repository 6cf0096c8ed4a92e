"""Measure errors and times, and draw a mask, for the examples in this folder."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import attnkit

NAMES = ("output", "d query", "d key", "d value", "d slopes")


def errors(
    attend: Callable[..., Tensor], oracle: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> dict[str, float]:
    """Return the largest differences of output and gradients from those of a float64 oracle.

    Each difference is relative to the oracle's largest entry. `inputs` are query, key, value and
    slopes.
    """

    def run(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = function(*leaves)
        weights = torch.arange(out.numel(), dtype=dtype).sin().view(out.shape)
        return [out, *torch.autograd.grad(out, leaves, weights)]

    pairs = zip(run(attend, torch.float32), run(oracle, torch.float64), strict=True)
    shares = [((found - exact).abs().max() / exact.abs().max()).item() for found, exact in pairs]
    return dict(zip(NAMES, shares, strict=True))


def milliseconds(loss: Callable[[], Tensor], repeats: int = 5) -> float:
    """Return the median time of `loss` and its backward, in milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        loss().backward()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def picture(
    path: Path, losses: Sequence[float], bound: float, mask: attnkit.Mask, size: int
) -> None:
    """Plot the losses, and the mask with kept scores dark and computed tiles light."""
    from matplotlib.figure import Figure

    tiles = attnkit.create_block_mask(mask, None, None, size, size)
    rows, columns = tiles.BLOCK_SIZE
    computed = tiles.to_dense()[0, 0].repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    kept = attnkit.create_mask(mask, None, None, size, size)[0, 0]
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(losses)
    left.axhline(bound, color="gray", linestyle="--", label=f"bound {bound:.2f}")
    left.set(title="next byte of packed source files", xlabel="step", ylabel="loss, nats per byte")
    left.legend()
    right.imshow(computed[:size, :size] + 2 * kept.int(), cmap="Blues")
    right.set(title=f"{tiles.sparsity():.0f}% of the tiles are never computed")
    right.set(xlabel="key", ylabel="query")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
